"""The page of an explanation: whole in itself, safe with any text, and readable for many ranks."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ddp_scaffold.explain import picture
from ddp_scaffold.explain.explanation import Evidence, Explanation, RankRow, Span, Verdict
from ddp_scaffold.explain.html import render
from ddp_scaffold.explain.picture import bands, ranges


def test_a_phase_has_the_colour_that_the_picture_of_a_project_gives_it() -> None:
    (project,) = (Path(__file__).parents[2] / "templates/project").glob("*/*/ddp/report/picture.py")
    colours = dict(re.findall(r'^    "?(\w+)"?: "(#[0-9a-f]{6})",$', project.read_text(), re.MULTILINE))
    colours["no word"] = colours.pop("NO_WORD")
    assert colours.items() <= picture.COLOURS.items()
    assert len(colours) > 10
    assert f'GUARD, WAIT, OTHER = "{picture.GUARD}", "{picture.WAIT}", "{picture.OTHER}"' in project.read_text()


def explanation(ranks: int, hostile: str = "") -> Explanation:
    """Rank 5 sleeps in forward; the others wait for it."""
    rows = tuple(
        RankRow(
            rank, "culprit" if rank == 5 else "victim", f"n{rank // 8}{hostile}", hostile or "train", hostile, hostile
        )
        for rank in range(ranks)
    )
    spans = []
    for rank in range(ranks):
        spans += [Span(rank, step, step + 0.5, "data") for step in range(10)]
        spans += [Span(rank, step + 0.5, step + 1, "forward") for step in range(10)]
        spans.append(Span(rank, 10, 30, hostile or "forward", rank != 5, hostile or "all_reduce"))
    verdict = Verdict(
        "missing_rank",
        (5,),
        hostile or "forward",
        "certain",
        f"Rank 5 sleeps.{hostile}",
        (Evidence(f"a.log{hostile}", 3, f"time.sleep{hostile}"),),
        (f"look there{hostile}",),
        (f"the log of rank 5{hostile}",),
    )
    return Explanation(verdict, rows, tuple(spans), (f"a.log{hostile}",))


class Tags(HTMLParser):
    """The tags and their attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_loads_nothing_and_says_so() -> None:
    page = render(explanation(8))
    tags = Tags(page)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in tags.found}
    assert not [name for _, attributes in tags.found for name in attributes if name in ("src", "href", "style")]
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    policy = next(each["content"] for _, each in tags.found if each.get("http-equiv") == "Content-Security-Policy")
    for tag in ("style", "script"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in (policy or "")
    assert "default-src 'none'" in (policy or "")


def test_the_verdict_stands_there() -> None:
    text = Tags(render(explanation(8))).text
    for said in ("missing_rank", "Rank 5 sleeps.", "First: rank 5", "certain", "time.sleep", "a.log:3", "look there"):
        assert said in text


def test_no_text_of_the_input_acts() -> None:
    hostile = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J\u202e"
    plain, page = Tags(render(explanation(8))), render(explanation(8, hostile))
    tags = Tags(page)
    assert {tag for tag, _ in tags.found} == {tag for tag, _ in plain.found}
    assert sum(tag == "script" for tag, _ in tags.found) == 1
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on")]
    assert "\x1b" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize(("ranks", "rows"), [(8, 8), (16, 16), (512, 3)])
def test_nodes_that_behave_alike_are_one_row(ranks: int, rows: int) -> None:
    drawn = bands(explanation(ranks))
    assert len(drawn) == rows
    assert [band[0].row.rank for band in drawn if band[0].blamed] == [5]
    assert [lane.row.rank for band in drawn for lane in band] == list(range(ranks))


def test_a_rank_that_differs_keeps_its_row() -> None:
    whole = explanation(512)
    spans = tuple(
        Span(300, span.start, span.end, "eval") if span.rank == 300 and span.end == 30 else span
        for span in whole.timeline
    )
    drawn = bands(Explanation(whole.verdict, whole.ranks, spans))
    assert [ranges(lane.row.rank for lane in band) for band in drawn] == ["0-4", "5", "6-299", "300", "301-511"]


def test_ranks_to_blame_stay_apart_even_if_they_are_alike() -> None:
    whole = explanation(64)
    rows = tuple(replace(row, role="culprit") if row.rank in (20, 21) else row for row in whole.ranks)
    drawn = bands(Explanation(whole.verdict, rows, whole.timeline))
    assert [[lane.row.rank for lane in band] for band in drawn if band[0].blamed] == [[5], [20], [21]]


def test_an_unknown_verdict_without_a_timeline_is_a_page() -> None:
    text = Tags(render(Explanation(Verdict("unknown", None, "", "unknown", "Nothing is known.")))).text
    assert "First: not known" in text
    assert "Who did what" not in text
