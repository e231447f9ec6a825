"""What a report says of runs with hostile names, and of runs that nobody could report."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from family_runs import train
from markdown_it import MarkdownIt
from markdown_it.token import Token

pytest.importorskip("torch")

HOSTILE = [
    "a|b",
    "`code`",
    "<b>bold</b>",
    "<script>alert(1)</script>",
    "two\nlines",
    "_under_ __init__ a_b",
    "*star* **stars**",
    "[link](https://example.invalid)",
    "![picture](x.png)",
    "&lt; & &#35;",
    "~~gone~~",
    "back\\slash\\",
    "# heading",
    "> quote",
    "- item",
    "1. item",
    "---",
]


@pytest.fixture(scope="module")
def part(render: Callable[..., Path]) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of a rendered project's plumbing."""
    source = str(render({"package": "told", "model": "custom"}, name="told") / "src")
    sys.path.insert(0, source)
    yield lambda name: importlib.import_module(f"told.ddp.{name}")
    sys.path.remove(source)


def lines_of(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def shown(tokens: list[Token]) -> str:
    """What a reader sees of one paragraph, cell or heading."""
    return "".join("\n" if each.type == "softbreak" else each.content for each in tokens)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_report_shows_names_as_they_are(part: Callable[[str], ModuleType], tmp_path: Path, name: str) -> None:
    """Those of metrics, phases and hosts, and messages: in tables, lists, sentences and the picture's description."""
    state = part("rank_state").RankState(rank=0, host=name, phase=name, phase_seconds={name: 5.0})
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats/rank0.json").write_text(state.to_json())
    lines_of(tmp_path / "metrics.jsonl", {"step": 1, name: 0.5})
    lines_of(tmp_path / "slow.jsonl", {"step": 1, "text": name})
    (tmp_path / "settings.txt").write_text(f"  a.b  ```{name}```  (default)\n")
    end = {"event": "end", "outcome": "failed", "kind": "rank_exception", "reason": f"{name}\n{name}", "advice": ""}
    end |= {"first_ranks": [0], "stacks": {"0": f"```\n{name}"}, "time": time.time(), "attempt": 0}
    lines_of(tmp_path / "attempts.jsonl", {"event": "start", "attempt": 0, "world_size": 1, "time": time.time()}, end)
    lines_of(
        tmp_path / "timeline.jsonl",
        {"version": 1, "start": 1, "hosts": ["n1"], "author": 0, "now": 9_000_000, "rang": None, "time": time.time()},
        {"rank": 0, "host": "n1", "clock": "n1", "changes": [[1_000_000, name, 3]], "until": 9_000_000},
    )
    part("report.report").write(tmp_path)
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse((tmp_path / "report.md").read_text())
    line = " ".join(name.split("\n"))
    inline = [shown(each.children or []) for each in tokens if each.type == "inline"]
    assert inline.count(line) >= 4, "metric, host, phase, and the head of the phase's column"
    assert f"step 1: {line}" in inline
    assert f"rank_exception: {name}\n{name}" in inline
    assert name.splitlines()[0] in inline, "the reason, in the table of attempts"
    assert f"Rank 0 was in {line} for 8 s." in inline
    kinds = {inner.type for each in tokens for inner in each.children or []}
    assert kinds <= {"text", "image", "softbreak", "strong_open", "strong_close", "text_special"}
    pictures = [inner for each in tokens for inner in each.children or [] if inner.type == "image"]
    assert shown(pictures[0].children or []) == f"Rank 0 was in {line} for 8 s"
    assert [each.attrs["src"] for each in pictures] == ["timeline.svg", "loss.svg"]
    assert [each.tag for each in tokens if each.type == "heading_open"].count("h1") == 1
    assert [each.content for each in tokens if each.type == "html_block"] == [
        "<details><summary>Effective settings, and who set each</summary>\n",
        "</details>\n",
    ]
    fences = [each.content for each in tokens if each.type == "fence"]
    assert fences == [f"```\n{name}\n", f"  a.b  ```{name}```  (default)\n"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_launch_script_says_when_all_ranks_were_killed_and_starts_again(render: Callable[..., Path]) -> None:
    project = render({"package": "killed", "model": "custom"}, name="killed")
    words = ["--run.device", "cpu", "--log.tracker", "none", "--train.steps", "6"]
    ended = train(project, *words, MAX_RESTARTS="1", DDP_FAULTS="kill@rank=all,step=3")
    assert ended.code == 0, ended.output
    said = "attempt 0 ended, stalled: Both ranks went silent after "
    assert said in ended.output, ended.output
    assert "last heard of in forward, step 3; restarting, 1 of 1" in ended.output
    report = (ended.dir / "report.md").read_text()
    assert "Start 1:\n\n![Both ranks went silent after " in report
    assert "| 1 | 2 |" in report
