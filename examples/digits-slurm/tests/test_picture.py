"""The picture of a failure: who is marked, from what is left of a run, and what is drawn when little is left.

That it is drawn at a bad end of training, test_faults.py tests.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from conftest import PROJECT, QUICK, Launch

from digits.ddp.clocks import Clocks
from digits.ddp.errors import DataFailed
from digits.ddp.kinds import Verdict
from digits.ddp.processes import began, space
from digits.ddp.rank_state import RankState
from digits.ddp.report import outcome, picture, report, silence, timeline
from digits.ddp.report.sentence import sentence
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import Place
from digits.ddp.trace import phases as ring
from digits.ddp.watch.records import clock_that_rang, publish, write

SVG = "{http://www.w3.org/2000/svg}"
SECOND = 1_000_000
PARTS = {"data": 0.02, "forward": 0.1, "backward": 0.16, "optim": 0.02}  # of a step, in seconds
End = dict[str, Any]


def made_up(
    run_dir: Path,
    ranks: int,
    culprit: int,
    *,
    hang_s: float = 31.0,
    steps: int = 40,
    a_node: int = 8,
    ahead_s: float = 0.0,
    hang_in: str = "forward",
) -> End:
    """Leave what a run leaves in which `culprit` hangs after some steps, and return its end.

    `ahead_s`: by which the clock of each host is ahead of that of the host before.
    """
    now, lines = 10_000 * SECOND, []
    hosts = [f"node{rank // a_node:02d}" for rank in range(ranks)]
    waits = f"wait:{hang_in.removeprefix('guard:')}" if hang_in.startswith("guard:") else "backward"
    for rank in range(ranks):
        ahead = int(ahead_s * SECOND) * (rank // a_node)
        at, changes = now + ahead - int((hang_s + 0.3 * steps + 5) * SECOND), []
        changes.append([at, "init", 0])
        at += 5 * SECOND
        for step in range(steps):
            for name, took in PARTS.items():
                changes.append([at + 137 * rank, name, step])
                at += int(took * SECOND)
        record: dict[str, Any] = {"rank": rank, "host": hosts[rank], "clock": hosts[rank], "changes": changes}
        if hang_in.startswith("guard:"):
            changes.append([at, hang_in if rank == culprit else waits, steps])
        else:
            changes.append([at, "data", steps])
            changes.append([at + 20_000, "forward", steps])
            changes.extend([] if rank == culprit else [[at + 120_000, "backward", steps]])
        heard = {"3": (now + ahead + 2000 * (rank % a_node)) * 1000}
        waiting = {"waiting": rank != culprit, "call": "backward" if waits == "backward" else "", "group": ""}
        lines.append({**record, **waiting, "until": now + ahead, "moved": at, "line": "train.py:88", "heard": heard})
    rang = {"clock": "stall_s", "limit_s": hang_s, "at": now - SECOND // 10}
    head = {"version": 1, "start": 1, "world_size": ranks, "hosts": hosts, "author": 0, "now": now, "rang": rang}
    head["time"] = time.time()
    run_dir.mkdir(exist_ok=True)
    (run_dir / timeline.FILE).write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    end: End = {"event": "end", "outcome": "stalled", "kind": "missing_rank", "reason": f"rank {culprit} stands still"}
    end |= {"first_ranks": [culprit], "phase": hang_in, "step": steps, "advice": "", "attempt": 0, "stacks": {}}
    start = {"event": "start", "attempt": 0, "world_size": ranks, "time": time.time() - 60}
    events = [start, {**end, "time": time.time()}]
    (run_dir / "attempts.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return end


def texts(svg: str, kind: str = "text") -> list[str]:
    """What stands in the picture; fails if it is no XML."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(SVG + kind)]


def marked(svg: str) -> list[str]:
    """The labels of the rows that are to blame: those within the coloured boxes."""
    root = ElementTree.fromstring(svg)
    boxes = [each for each in root.iter(SVG + "rect") if each.get("class") == "blamed"]
    spans = [(float(each.get("y", 0)), float(each.get("y", 0)) + float(each.get("height", 0))) for each in boxes]
    labels = [each for each in root.iter(SVG + "text") if (each.text or "").lstrip("▶ ").startswith("rank")]
    return [each.text or "" for each in labels if any(low < float(each.get("y", 0)) < high for low, high in spans)]


def test_a_killed_rank_was_where_it_was_found_not_where_its_last_heartbeat_was(tmp_path: Path) -> None:
    end = made_up(tmp_path, 4, 1)
    told = {**end, "kind": "rank_killed", "phase": "init", "step": 0}
    rows = timeline.load(tmp_path)
    assert rows is not None
    last = rows.rows[1].last
    assert last is not None
    assert f"Rank 1 fell silent in {last.phase}" in sentence(rows, told)
    assert f"rank_killed, step {last.step};" in picture.draw(rows, told)


def two_hang(run_dir: Path) -> End:
    """Rank 1 in data, and rank 3 in forward from a little later on, while ranks 0 and 2 wait for both."""
    end = made_up(run_dir, 4, 1)
    head, *lines = [json.loads(line) for line in (run_dir / timeline.FILE).read_text().splitlines()]
    lines[1]["changes"].pop()
    lines[3]["changes"].pop()
    lines[3]["waiting"] = False
    (run_dir / timeline.FILE).write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    return end | {"phase": "data"}


WHILE = "while ranks 0, 2 waited in DDP's all_reduce; the 31 s stall clock rang at"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"first_ranks": [1, 3]}, f"Rank 1 was in data for 31 s and rank 3 was in forward for 31 s, {WHILE}"),
        ({"first_ranks": [1]}, f"Rank 1 was in data for 31 s and rank 3 was in forward for 31 s, {WHILE}"),
        (
            {"first_ranks": [3], "phase": "forward"},
            f"Rank 3 was in forward for 31 s and rank 1 was in data for 31 s, {WHILE}",
        ),
        (
            {"first_ranks": [1, 3], "kind": "straggler"},
            "Rank 1 was slow, not stuck, in data for 31 s and rank 3 was slow, not stuck, in forward for 31 s, while",
        ),
        (
            {"first_ranks": [1], "kind": "dataloader_stalled", "reason": "rank 1 (node00) raised DataFailed: no batch"},
            "Rank 1 raised DataFailed in data at",
        ),
        (
            {"first_ranks": [1, 3], "kind": "rank_killed"},
            f"Ranks 1, 3 fell silent in data (rank 1) and forward (rank 3) {WHILE}",
        ),
    ],
)
def test_all_that_waited_for_nobody_are_told_with_their_phase(tmp_path: Path, found: End, says: str) -> None:
    """Those that are blamed first; of others that stood still only where they were, which blames nobody."""
    end = two_hang(tmp_path) | found
    rows = timeline.load(tmp_path)
    assert rows is not None
    said = sentence(rows, end)
    assert said.startswith(says)
    assert "rank 3" in said.lower() or len(end["first_ranks"]) == 2
    assert len(marked(picture.draw(rows, end))) == len(end["first_ranks"])


def left_behind(run_dir: Path, ranks: int = 4, owner: End | None = None) -> None:
    """What a start leaves whose ranks are all killed between two heartbeats."""
    now = time.time()
    for name in ("heartbeats", "logs"):
        (run_dir / name).mkdir()
    for rank in range(ranks):
        (run_dir / f"logs/rank{rank}.log").write_text("")
        os.utime(run_dir / f"logs/rank{rank}.log", (now - 3, now - 3))
        phase = "forward" if rank == 1 else "backward"
        state = RankState(rank, "n1", phase, step=40, in_phase_s=0.2, waits_in="" if rank == 1 else "backward")
        (run_dir / f"heartbeats/rank{rank}.json").write_text(state.to_json())
        os.utime(run_dir / f"heartbeats/rank{rank}.json", (now - 20, now - 20))
    (run_dir / "environment.txt").write_text("".join(f"rank {rank} host n1\n" for rank in range(ranks)))
    start = {"event": "start", "attempt": 0, "world_size": ranks, "time": now - 60}
    (run_dir / "attempts.jsonl").write_text(json.dumps(start) + "\n")
    os.utime(run_dir / "attempts.jsonl", (now - 60, now - 60))
    if owner:
        (run_dir / "owner.json").write_text(json.dumps({"token": "", "job": "", "quiet_s": 90, **owner}))


SILENT = "All 4 ranks went silent after "
HEARD = ", last heard of in backward (ranks 0, 2-3) and forward (rank 1), step 40"
ELSEWHERE = {"host": "elsewhere", "space": "1", "pid": 1, "began": "1"}
HERE = {"host": socket.gethostname(), "space": space()}


@pytest.mark.parametrize(
    ("owner", "over"),
    [
        (None, True),
        ({**HERE, "pid": os.getpid(), "began": began(os.getpid())}, False),
        ({**HERE, "pid": os.getpid(), "began": "another process of that number"}, True),
        (ELSEWHERE, False),
        ({**ELSEWHERE, "quiet_s": 10}, True),
    ],
    ids=["given back", "alive", "gone", "perhaps alive elsewhere", "silent elsewhere"],
)
def test_of_a_start_that_no_rank_survived_the_report_has_what_the_files_tell(
    tmp_path: Path, owner: End | None, over: bool
) -> None:
    """With a picture, and only if it is not going on. Nothing is left that a start would take for an outcome."""
    left_behind(tmp_path, owner=owner)
    before = {path.name for path in tmp_path.iterdir()}
    ended = command(str(tmp_path), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "report.md").read_text()
    assert (SILENT in text) == over
    assert {path.name for path in tmp_path.iterdir()} - before - {"timeline.svg"} == {"report.md", "loss.svg"}
    if not over:
        assert text.startswith(f"# Run {tmp_path.name}: going on\n")
        assert re.search(r"\| 1 \| 4 \| [^|]+ \|  \| going on \|  \|", text)
        assert "killed from outside" not in text
        return
    said = text.partition("![")[2].partition("]")[0]
    assert said.startswith(SILENT)
    assert said.endswith(HEARD)
    svg = (tmp_path / "timeline.svg").read_text()
    assert texts(svg, "title") == [said]
    assert "no word, 17 s" in texts(svg)
    assert any(text.startswith("the last sign of life, ") for text in texts(svg))
    assert not marked(svg)
    assert f"| stalled | {said} |" in text


def test_the_head_is_about_the_last_start_and_not_about_the_end_of_an_earlier_one(tmp_path: Path) -> None:
    left_behind(tmp_path, owner={**HERE, "pid": os.getpid(), "began": began(os.getpid())})
    path = tmp_path / "attempts.jsonl"
    verdict = Verdict(78, "bad_settings", "settings: train.steps\n  -> correct it")
    end = {"event": "end", **verdict.as_dict(), "attempt": 0, "time": time.time() - 70}
    first = {"event": "start", "attempt": 0, "world_size": 2, "time": time.time() - 90}
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, end)) + path.read_text())
    for running in (True, False):
        assert report.write(tmp_path, running)
        text = (tmp_path / "report.md").read_text()
        assert text.startswith(f"# Run {tmp_path.name}: going on\n\n## Attempts\n")
        assert re.search(r"\| 1 \| 2 \| [^|]+ \| 20 s \| config \| settings: train\.steps \|", text)
        assert re.search(r"\| 2 \| 4 \| [^|]+ \|  \| going on \|  \|", text)


@pytest.mark.parametrize("attempts", ["", '{"event": "sta'], ids=["empty", "cut short"])
def test_without_a_whole_line_of_attempts_there_is_a_report(tmp_path: Path, attempts: str) -> None:
    (tmp_path / "attempts.jsonl").write_text(attempts)
    ended = command(str(tmp_path), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{tmp_path / 'report.md'}\n", "")
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(f"# Run {tmp_path.name}: no outcome yet\n\n## Attempts\n\nNo start is on record.\n")


def a_run(run_dir: Path) -> None:
    """Leave what a run leaves that has ended well after two starts."""
    events = []
    for number in range(2):
        events += [{"event": "start", "attempt": 0, "world_size": 2, "time": 1000.0 + 100 * number}]
        events += [{"event": "end", **Verdict(0, "benign", "training is done").as_dict(), "attempt": 0}]
        events[-1]["time"] = 1050.0 + 100 * number
    lines = [{"step": step, "loss": 1 / step, "step_seconds": 0.1, "time": 1000.0 + step} for step in range(1, 200)]
    slow = [{"step": 7, "text": "rank 1 took longer"}]
    for name, rows in (("attempts", events), ("metrics", lines), ("slow", slow)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "heartbeats").mkdir()
    for rank in range(2):
        state = RankState(rank, "n1", phase="shutdown", step=199, phase_seconds={"data": 1.0})
        (run_dir / f"heartbeats/rank{rank}.json").write_text(state.to_json())


@pytest.mark.parametrize(
    "spoilt",
    [
        b'{"step": 3, "te{"step": 5, "text": "glued", "event": "start"}\n',
        b'{"step": 30, "lo',
        b"\0" * 100,
        b"\xff\xfe\n",
        b'{"event": "start", "step": "7", "text": 7}\n',
        b'{"event": "end", "step": null, "loss": 0.1}\n',
        b'{"step": 1e999, "loss": [1]}\n{"step": 400, "loss": "x", "step_seconds": {}, "time": "y"}\n',
        b"[" * 100_000 + b"\n",
        b'[1]\n7\n"x"\n{}\n',
    ],
    ids=["glued", "cut", "zeros", "no text", "types", "null", "infinite", "deep", "no objects"],
)
@pytest.mark.parametrize("name", ["attempts.jsonl", "metrics.jsonl", "slow.jsonl", "heartbeats/rank1.json"])
def test_what_is_spoilt_costs_itself_and_no_report(tmp_path: Path, name: str, spoilt: bytes) -> None:
    """By a kill, a full disk, or a power failure, after which files end in zeros or are empty."""
    a_run(tmp_path)
    path = tmp_path / name
    path.write_bytes(spoilt if name.startswith("heartbeats") else path.read_bytes() + spoilt)
    assert report.write(tmp_path, running=False)
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| 2 \| 2 \| [^|]+ \| 50 s \| done \| training is done \|", text)
    assert "| loss | 0.0050251 | 199 |" in text
    assert "rank 1 took longer" in text
    assert "| 0 | n1 | 199 | shutdown |" in text


def test_a_line_that_follows_one_that_was_cut_short_can_be_read(tmp_path: Path) -> None:
    """Joined to what a kill or a full disk has left of a line, a start would be in no report."""
    a_run(tmp_path)
    for name in ("attempts.jsonl", "slow.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"event": "e')
    outcome.begin(tmp_path, 0, 3)
    report.note_slow(tmp_path, 8, ["rank 2 took longer"])
    assert [event.get("world_size") for event in outcome.attempts(tmp_path)] == [2, None, 2, None, 3]
    assert "rank 2 took longer" in (tmp_path / "report.md").read_text()
    assert len((tmp_path / "slow.jsonl").read_text().splitlines()) == 3, "no empty lines"


def test_an_end_that_only_outcome_json_has_is_told(tmp_path: Path) -> None:
    """The disk was full, or a kill came, between the two files."""
    left_behind(tmp_path)
    verdict = Verdict(1, "rank_exception", "rank 1 (n1) raised ValueError: 7", [1], advice="look at it")
    (tmp_path / "outcome.json").write_text(json.dumps({**verdict.as_dict(), "attempt": 0, "time": time.time()}))
    assert report.write(tmp_path, running=False)
    text = (tmp_path / "report.md").read_text()
    assert "failed\n\n**rank_exception**: rank 1 (n1) raised ValueError: 7\n\nWhat to do: look at it." in text
    assert "| failed | rank 1 (n1) raised ValueError: 7 |" in text


def test_a_report_that_could_not_be_written_is_not_announced(tmp_path: Path) -> None:
    left_behind(tmp_path)
    (tmp_path / "report.md").mkdir()
    ended = command(str(tmp_path), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("report.md not written: IsADirectoryError")


def test_heartbeats_of_an_earlier_start_are_not_taken_for_its_own(tmp_path: Path) -> None:
    left_behind(tmp_path)
    path = tmp_path / "heartbeats/rank1.json"
    os.utime(path, (time.time() - 600, time.time() - 600))
    report.write(tmp_path, running=False)
    assert "last heard of in backward (ranks 0, 2-3), step 40" in (tmp_path / "report.md").read_text()
    for path in (tmp_path / "heartbeats").iterdir():
        path.unlink()
    report.write(tmp_path, running=False)
    assert ", and left no word of where they were" in (tmp_path / "report.md").read_text()


def test_what_interpreters_have_written_of_their_end_is_told(tmp_path: Path) -> None:
    left_behind(tmp_path)
    (tmp_path / "stacks").mkdir()
    for rank, words in enumerate(["", "Timeout (0:00:15)!", "Timeout (0:00:15)!", "Fatal Python error: Aborted"]):
        (tmp_path / f"stacks/rank{rank}.txt").write_text(f"=== attempt 0, pid 7\n{words}\n")
    assert silence.record(tmp_path)
    end = json.loads((tmp_path / "outcome.json").read_text())
    assert end["first_ranks"] == [1, 2, 3]
    assert "; ranks 1-2 could run no Python code for clocks.silent_s" in end["reason"]
    assert "; rank 3 crashed" in end["reason"]
    assert (end["exit_code"], end["restart"], end["attempt"]) == (70, True, 0)
    assert not silence.record(tmp_path), "once"


@pytest.mark.slow
def test_when_all_ranks_are_killed_at_once_the_next_start_says_so(launch: Launch) -> None:
    killed = launch(*QUICK, faults="kill@rank=all,step=5", run_id="silent")
    assert killed.code == 1
    assert not (killed.run_dir / "outcome.json").exists()
    ended = command("--trace", str(killed.run_dir / "trace.json"), str(killed.run_dir), cwd=killed.run_dir)
    assert "last heard of in forward, step 5" in (killed.run_dir / "trace.json").read_text(), ended.stderr
    result = launch(*QUICK, "--train.steps", "6", run_id="silent")
    assert result.code == 0, result.output
    said = "Both ranks went silent after "
    assert f"warning: the last start of this run left no outcome: rank_killed: {said}" in result.output
    text = (result.run_dir / "report.md").read_text()
    assert f"Start 1:\n\n![{said}" in text
    assert "last heard of in forward, step 5](timeline.svg)" in text


def test_who_has_only_just_begun_is_not_told_to_stand_still(tmp_path: Path) -> None:
    end = two_hang(tmp_path)
    path = tmp_path / timeline.FILE
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["changes"].append([lines[3]["until"] - SECOND, "eval", 40])
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    rows = timeline.load(tmp_path)
    assert rows is not None
    assert "rank 3" not in sentence(rows, end)


@pytest.mark.slow
def test_two_ranks_that_hang_in_different_phases_are_both_named(launch: Launch) -> None:
    faults = "sleep@rank=0,step=5,phase=data;sleep@rank=2,step=5,phase=forward"
    result = launch(*QUICK, ranks=3, faults=faults)
    assert result.outcome["first_ranks"] == [0, 2], result.output
    assert "phase forward, step 5, at " in result.outcome["reason"]
    said = (result.run_dir / "report.md").read_text().partition("![")[2].partition("]")[0]
    assert said.startswith("Rank 0 was in data for "), said
    assert " and rank 2 was in forward for " in said, said
    assert " s, while rank 1 waited in DDP's all_reduce; " in said, said


@pytest.mark.parametrize(("ranks", "culprit"), [(8, 0), (64, 19), (512, 317)])
def test_hundreds_of_ranks_are_a_few_rows_and_the_one_to_blame_has_its_own(
    tmp_path: Path, ranks: int, culprit: int
) -> None:
    end = made_up(tmp_path, ranks, culprit)
    found = timeline.load(tmp_path)
    assert found is not None
    svg = picture.draw(found, end)
    assert len(marked(svg)) == 1
    assert marked(svg)[0].startswith(f"▶ rank {culprit} (")
    labels = [text for text in texts(svg) if text.lstrip("▶ ").startswith("rank")]
    assert len(labels) == 8 if ranks == 8 else 3 <= len(labels) <= 24
    assert len(svg) < 200_000
    assert any(text.startswith("waits in DDP's all_reduce, 31 s") for text in texts(svg))


@pytest.mark.parametrize(
    "other",
    [[(0.5, "eval")], [(25, "eval"), (3, "backward")]],
    ids=["in another place at the end", "elsewhere for long"],
)
def test_a_rank_that_is_not_like_its_node_keeps_its_row(tmp_path: Path, other: list[tuple[float, str]]) -> None:
    end = made_up(tmp_path, 32, 3)
    path = tmp_path / timeline.FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    odd = lines[1 + 20]
    odd["changes"] += [[int(odd["until"] - before_s * SECOND), phase, 40] for before_s, phase in other]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = timeline.load(tmp_path)
    assert found is not None
    labels = texts(picture.draw(found, end))
    assert "rank 20 (node02)" in labels
    assert "ranks 24-31 (node03)" in labels


@pytest.mark.parametrize("ahead_s", [0.0, 3.0, -86400.0])
def test_hosts_whose_clocks_differ_stand_on_one_axis(tmp_path: Path, ahead_s: float) -> None:
    """By a message that all hear at once: here the ranks of a host do so up to 14 ms apart."""
    made_up(tmp_path, 32, 3, ahead_s=ahead_s)
    found = timeline.load(tmp_path)
    assert found is not None
    begins = [row.spans[0].begin for row in found.rows]
    assert max(begins) - min(begins) < 0.02
    assert found.spread_s == pytest.approx(0.014)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: "", "does not begin with"),
        (lambda text: text[:40], "no JSON"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "version 1"),
        (lambda text: text.splitlines()[0] + "\n", "the phases of no rank"),
        (lambda text: text.replace('"now": ', '"then": '), "KeyError"),
        (lambda text: text.replace('"hosts": [', '"hosts": [["a"], '), ""),
        (lambda text: text.replace('"data"', "null"), ""),
        (lambda text: text + "[1, 2]\n", ""),
        (lambda text: text.replace('"forward"', '"<&\\u0000>"'), ""),
    ],
)
def test_what_is_left_of_a_spoilt_file_costs_no_report(tmp_path: Path, spoil: Any, says: str) -> None:
    made_up(tmp_path, 8, 0)
    path = tmp_path / timeline.FILE
    path.write_text(spoil(path.read_text()))
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "## Attempts" in text
    if says:
        (line,) = [line for line in text.splitlines() if line.startswith("There is no picture of the ranks: ")]
        assert says in line
    else:
        assert texts((tmp_path / "timeline.svg").read_text())


def test_a_file_that_is_cut_short_is_drawn_without_the_ranks_that_it_lacks(tmp_path: Path) -> None:
    made_up(tmp_path, 8, 0)
    path = tmp_path / timeline.FILE
    path.write_text(path.read_text()[:-2000])
    report.write(tmp_path)
    svg = (tmp_path / "timeline.svg").read_text()
    assert texts(svg).count("left no word of what it did") == 1
    assert len(marked(svg)) == 1


def test_where_no_picture_can_be_written_the_report_says_why(tmp_path: Path) -> None:
    made_up(tmp_path, 2, 0)
    (tmp_path / "timeline.svg").mkdir()
    report.write(tmp_path)
    assert "There is no picture of the ranks: IsADirectoryError" in (tmp_path / "report.md").read_text()


def test_a_later_start_keeps_the_picture_of_the_one_before(tmp_path: Path) -> None:
    made_up(tmp_path, 2, 1)
    start = {"event": "start", "attempt": 1, "world_size": 2, "time": time.time()}
    end = {"event": "end", "outcome": "done", "reason": "training is done", "kind": "benign", "time": time.time()}
    with open(tmp_path / "attempts.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in (start, end))
    report.write(tmp_path)
    head, _, rest = (tmp_path / "report.md").read_text().partition("## Attempts")
    assert "timeline.svg" not in head
    assert "Start 1:\n\n![Rank 1 was in forward" in rest


@pytest.mark.parametrize(
    ("error", "clock"),
    [
        (RuntimeError("Timed out waiting 30000ms for recv operation to complete"), "collective_s"),
        (RuntimeError("[Rank 1]: Ranks 0 failed to pass monitoredBarrier in 60000 ms"), "guard_s"),
        (RuntimeError("WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=30000) ran for 30012 ms"), "collective_s"),
        (DataFailed("rank 1 could not read a batch", "dataloader_stalled"), "loader_s"),
        (RuntimeError("Connection closed by peer"), None),
        (ValueError("wrong"), None),
    ],
)
def test_the_clock_that_an_error_tells_of_is_known_by_its_name(error: Exception, clock: str | None) -> None:
    found = clock_that_rang(error, Clocks(loader_s=5, stall_s=10, collective_s=30, guard_s=60))
    assert (found and found.clock) == clock


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "src")}
    line = [sys.executable, "-m", "digits.ddp.report", *arguments]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_the_same_is_written_as_a_trace(tmp_path: Path) -> None:
    """In Chrome's Trace Event Format: what Perfetto wants of each kind of event."""
    (tmp_path / "runs").mkdir()
    made_up(tmp_path / "runs/one", 16, 3)
    ended = command("--trace", "trace.json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all({"name", "cat", "ts", "dur", "pid", "tid"} <= set(event) for event in spans)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert {event["tid"] for event in spans} == set(range(16))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[3] == "rank 3 (to blame)"
    hosts = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert hosts == {"node00", "node01"}
    longest = max((event for event in spans if event["tid"] == 3), key=lambda event: event["dur"])
    assert longest["name"] == "forward"
    assert longest["dur"] == pytest.approx(31 * SECOND, rel=0.02)
    (clock,) = [event for event in events if event["ph"] == "i"]
    assert clock["name"] == "the 31 s stall clock rang"
    assert (clock["tid"], clock["s"]) == (3, "t"), "in the row of the rank to blame"
    assert max(event["ts"] for event in spans) < clock["ts"]


WRONG = Verdict(78, "bad_settings", "settings: train.steps = abc\n  -> give a number")


@pytest.mark.parametrize(
    ("owner", "end", "attempts", "says"),
    [
        (None, Verdict(0, "benign", "training is done"), None, "it has ended well (training is done)\n  -> name"),
        (None, WRONG, None, "it ended with 78 (bad_settings: settings: train.steps = abc), and no rank"),
        (None, WRONG, "", "it ended with 78 (bad_settings: settings: train.steps = abc), and no rank"),
        (ELSEWHERE, None, None, "it is going on, and no start has left one so far\n  -> wait"),
        (None, None, '{"event": "sta', "attempts.jsonl holds no whole line, so no start is on record\n  -> name"),
    ],
    ids=["ended well", "wrong settings", "wrong settings before a start", "going on", "half a line"],
)
def test_of_a_run_without_a_trace_it_is_said_why(
    tmp_path: Path, owner: End | None, end: Verdict | None, attempts: str | None, says: str
) -> None:
    left_behind(tmp_path, owner=owner)
    if attempts is not None:
        (tmp_path / "attempts.jsonl").write_text(attempts)
    if end:
        (tmp_path / "outcome.json").write_text(json.dumps({**end.as_dict(), "attempt": 0, "time": time.time()}))
    ended = command(str(tmp_path), "--trace", "trace.json", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {tmp_path} has no timeline.jsonl: {says}")
    assert not (tmp_path / "trace.json").exists()


def test_without_runs_there_is_nothing_to_make_a_trace_of(tmp_path: Path) -> None:
    ended = command("--trace", "trace.json", cwd=tmp_path)
    assert "there is none in runs/" in ended.stderr


def test_only_the_last_changes_are_kept_and_others_can_read_them() -> None:
    mine = ring.Phases()
    mine.begin()
    for step in range(ring.KEPT):
        mine.add("forward", step)
        mine.add("backward", step)
    changes = mine.changes()
    assert len(changes) == ring.KEPT
    assert changes[-1][1:] == ("backward", ring.KEPT - 1)
    assert [when for when, _, _ in changes] == sorted(when for when, _, _ in changes)
    for number in range(2 * ring.NAMES):
        mine.add(f"phase {number}", 0)
    assert {name for _, name, _ in mine.changes()[-8:]} == {"others"}
    mine.add("forward", 1)
    assert mine.changes()[-1][1] == "forward"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")
def test_what_a_killed_process_did_can_be_read_and_a_forked_worker_does_not_write_to_it() -> None:
    program = (
        "import os, sys\n"
        "from digits.ddp.trace.phases import phases\n"
        "phases.begin(); phases.add('forward', 3)\n"
        "if os.fork() == 0: phases.add('worker', 4); os._exit(0)\n"
        "os.wait(); print('here', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    descriptor = ring.open_of(process.pid)
    process.kill()
    process.communicate()
    assert descriptor is not None
    assert [change[1:] for change in ring.read_from(descriptor)] == [("forward", 3)]
    os.close(descriptor)
    assert ring.open_of(process.pid) is None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")
def test_without_the_store_a_rank_speaks_for_all_of_its_host(tmp_path: Path) -> None:
    place = Place("torchrun", 0, 0, 2, 2, "n1", "", 0, 0, False)
    job = Job(place, Clocks(), dist.HashStore(), ("n1", "n1"))
    ring.phases.begin()
    ring.phases.add("forward", 3)
    descriptor = ring.open_of(os.getpid())
    assert descriptor is not None
    siblings: Any = SimpleNamespace(phases=lambda: {1: descriptor}, endings=dict, gone_at=lambda rank: None)
    outcome.begin(tmp_path, 0, 2)
    verdict = Verdict(70, "store_lost", "the store no longer answers")
    publish(job, job.store, siblings, verdict)
    write(job, job.store, tmp_path, verdict, None, 1)
    os.close(descriptor)
    found = timeline.load(tmp_path)
    assert found is not None
    assert [row.last and row.last.phase for row in found.rows] == ["forward", "forward"]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")
@pytest.mark.parametrize("endings", [{}, {1: "by SIGKILL"}], ids=["silent", "killed"])
def test_a_word_for_a_rank_that_is_gone_does_not_stand_for_one_that_has_yet_to_speak(
    tmp_path: Path, endings: dict[int, str]
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    place = Place("torchrun", 0, 0, 3, 3, "n1", "", 0, 0, False)
    job = Job(place, Clocks(), store, ("n1", "n1", "n1"))
    ring.phases.begin()
    ring.phases.add("forward", 3)
    descriptor = ring.open_of(os.getpid())
    assert descriptor is not None
    siblings: Any = SimpleNamespace(phases=lambda: {1: descriptor}, endings=lambda: endings, gone_at=lambda rank: None)
    none: Any = SimpleNamespace(phases=dict, endings=dict, gone_at=lambda rank: None)
    verdict = Verdict(70, "rank_killed", "rank 1 is gone", [1])
    publish(job, store, siblings, verdict)
    late = threading.Timer(0.3, publish, (replace(job, place=replace(place, rank=2)), store, none, verdict))
    late.start()
    outcome.begin(tmp_path, 0, 3)
    write(job, store, tmp_path, verdict, None, 1)
    late.join()
    os.close(descriptor)
    found = timeline.load(tmp_path)
    assert found is not None
    assert [bool(row.spans) for row in found.rows] == [True, True, True]


@pytest.mark.parametrize("memory", [b"", b"\0" * ring.SIZE, ring.MAGIC + b"\0" * 100])
def test_memory_that_is_no_ring_is_refused(memory: bytes) -> None:
    with pytest.raises(ValueError, match="no changes of phase"):
        ring.read(memory)
