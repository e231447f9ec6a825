"""A generated project's run directory: `explain` says what the project's own report says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lookalikes import beat

from ddp_scaffold._errors import UsageError
from ddp_scaffold.explain import run_directory
from ddp_scaffold.explain.kinds import ADVICE

ROOT = Path(__file__).parents[2]
READ = """
import json, sys
from pathlib import Path
from digits.ddp.report.timeline import load
rows = load(Path(sys.argv[1])).rows
first = min(row.spans[0].begin for row in rows if row.spans)
print(json.dumps([[row.rank, row.host, row.last.phase, row.last.waits, row.last.end - first] for row in rows]))
"""


@pytest.mark.slow  # trains on two ranks until clocks of some seconds ring
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["SIGKILL of rank 1", "rank 1 sleeps in forward"])
def test_it_agrees_with_the_report_of_the_project(fault: str, render: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    project = render({"package": "digits"})
    command = [sys.executable, "tests/matrix/run.py", "--only", fault, "--runs", str(tmp_path)]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = next(tmp_path.rglob("outcome.json")).parent
    answer = run_directory.explain(folder)
    outcome = json.loads((folder / "outcome.json").read_text())
    verdict = answer.verdict
    assert (verdict.kind, verdict.first_ranks, verdict.summary) == (outcome["kind"], (1,), outcome["reason"])
    assert verdict.confidence == "certain"
    assert verdict.advice == (outcome["advice"],)

    surroundings = {**os.environ, "PYTHONPATH": str(project / "src")}
    read = subprocess.run(
        [sys.executable, "-c", READ, str(folder)], env=surroundings, capture_output=True, text=True, check=True
    )
    last = {rank: max((s for s in answer.timeline if s.rank == rank), key=lambda s: s.end) for rank in (0, 1)}
    for rank, host, phase, waits, end in json.loads(read.stdout):
        assert (answer.ranks[rank].host, last[rank].phase, last[rank].waiting) == (host, phase, waits)
        assert last[rank].end == pytest.approx(end, abs=0.5)
    # A kill is seen at once, whatever rank 0 does at that moment; the sleep, only when it has waited for a clock.
    waited = last[0].waiting or fault != "SIGKILL of rank 1"
    assert [row.role for row in answer.ranks] == ["victim" if waited else "no sign", "culprit"]


def test_every_kind_of_an_outcome_is_one_of_explain() -> None:
    text = (ROOT / "docs" / "run-directory.md").read_text()
    kinds = re.findall(r"^\| `(\w+)` \| (?:done|stopped|failed|stalled|config)", text, re.MULTILINE)
    assert len(kinds) > 20
    assert {run_directory.KINDS.get(kind, kind) for kind in kinds} <= set(ADVICE)


def record(rank: int, clock: str, ahead: int) -> dict[str, object]:
    """Rank 0 waits in an all_reduce from second 2 on; its clock is `ahead` microseconds of the first one."""
    return {
        "rank": rank,
        "host": f"n{rank}",
        "clock": clock,
        "changes": [[ahead, "data", 0], [ahead + 1_000_000, "eval" if rank else "optim", 1]],
        "until": ahead + 5_000_000,
        "moved": ahead + 2_000_000,
        "waiting": rank == 0,
        "call": "all_reduce",
        "heard": {"1": 1000 * (ahead + 4_000_000)},
    }


def test_hosts_with_other_clocks_stand_on_one(tmp_path: Path) -> None:
    head = {"version": 1, "world_size": 2, "hosts": ["n0", "n1"], "author": 0, "now": 5_000_000, "time": 100.0}
    lines = [head, record(0, "a", 0), record(1, "b", 77_000_000)]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"rank": 2, "cha')
    (tmp_path / "outcome.json").write_text('{"version": 1, "kind": "ranks_differ", "first_ranks": [1], "time": 100.0}')
    answer = run_directory.explain(tmp_path)
    spans = [(span.rank, span.start, span.end, span.phase, span.waiting) for span in answer.timeline]
    assert spans == [
        (0, 0, 1, "data", False),
        (0, 1, 2, "optim", False),
        (0, 2, 5, "optim", True),
        (1, 0, 1, "data", False),
        (1, 1, 5, "eval", False),
    ]
    assert answer.verdict.kind == "divergent_control_flow"


def test_without_an_end_it_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"event": "start", "attempt": 0, "world_size": 2}\n')
    answer = run_directory.explain(tmp_path)
    assert (answer.verdict.kind, answer.verdict.first_ranks, len(answer.ranks)) == ("unknown", None, 2)
    assert "outcome.json" in answer.verdict.needs[0]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1, "stacks": 3, "first_ranks": {}}', "[" * 100_000])
def test_what_is_damaged_is_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "attempts.jsonl").write_text("{}\n")
    for name in ("outcome.json", "timeline.jsonl"):
        (tmp_path / name).write_text(text)
    assert run_directory.explain(tmp_path).verdict.kind == "unknown"


def test_the_line_of_the_end_counts_those_that_were_cut_short(tmp_path: Path) -> None:
    lines = [
        '{"event": "start", "world_size": 2}',
        '{"event": "end", "attem',
        "",
        '{"event": "end", "kind": "rank_killed"',
    ]
    end = '{"event": "end", "kind": "cuda_oom", "reason": "rank 1 ran out of memory"}'
    (tmp_path / "attempts.jsonl").write_text("\n".join([*lines, end, ""]))
    verdict = run_directory.explain(tmp_path).verdict
    assert (verdict.kind, verdict.evidence[0].line) == ("cuda_oom", 5)


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"version": 2}')
    with pytest.raises(UsageError, match="version other than 1"):
        run_directory.explain(tmp_path)


def test_without_an_outcome_the_rank_whose_heartbeats_stopped_is_named(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"event": "start", "world_size": 3}\n')
    (tmp_path / "logs").mkdir()
    for rank in range(3):
        beats = "".join(beat(rank, second) for second in range(0, 40, 5) if rank != 2 or second < 15)
        (tmp_path / "logs" / f"rank{rank}.log").write_text(beats)
    answer = run_directory.explain(tmp_path)
    assert (answer.verdict.kind, answer.verdict.first_ranks) == ("rank_killed", (2,))
    assert answer.verdict.confidence == "likely"
    assert [row.role for row in answer.ranks] == ["no sign", "no sign", "culprit"]
    for path in (tmp_path / "logs").iterdir():
        path.write_text("step 7 loss 2\n")
    assert run_directory.explain(tmp_path).verdict.kind == "unknown"
