"""`explain` on what the fault matrix prints: without the run directory it says what the ranks themselves found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_scaffold.explain import run_directory
from ddp_scaffold.explain.explain import explain
from ddp_scaffold.explain.kinds import KINDS

pytest.importorskip("torch")
pytestmark = [
    # trains on two ranks, fifteen times, until clocks of some seconds ring: five minutes on two busy CPUs
    pytest.mark.slow,  # `make test-more` and `make test-all` run it
    pytest.mark.timeout(240),
    pytest.mark.flaky(reruns=1, reason="clocks of a few seconds, on a machine that may have other work"),
]
ROWS = (
    *("exception in forward", "SIGKILL of rank 1", "SIGSTOP of rank 1", "rank 1 sleeps in forward"),
    *("rank 0 sleeps in sampling", "another shape", "a skipped identical collective", "a worker is killed"),
    *("lengths differ between ranks", "NaN at every step", "CUDA out of memory on one rank", "port in use"),
    *("SIGTERM of one rank in forward", "a rank never starts", "no fault"),
)


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"})


@pytest.mark.parametrize("row", ROWS)
def test_the_log_alone_says_what_the_run_directory_says(row: str, project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "tests/matrix/run.py", "--only", row, "--runs", str(tmp_path)]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (log,) = tmp_path.glob("*.log")
    found = explain([str(log)])[0].verdict
    outcome = json.loads(next(tmp_path.glob("*/outcome.json")).read_text())
    if outcome["outcome"] == "done":
        assert found.first_ranks is None
        assert found.kind in {"benign", "unknown"}
        return
    assert found.kind == KINDS.get(outcome["kind"], outcome["kind"]), found
    ranks = tuple(outcome["first_ranks"]) if outcome["first_ranks"] else None
    # the sentence about another shape names the rank that gloo aborted; only the run directory has the other one
    assert found.first_ranks == (None if row == "another shape" else ranks), found
    repeated = run_directory.explain(next(tmp_path.glob("*/outcome.json")).parent).verdict
    assert (repeated.kind, repeated.first_ranks) == (found.kind, ranks)
    for report in tmp_path.glob("*/report.md"):  # none where the run did not get so far as to have a directory
        assert f"**{outcome['kind']}**: {repeated.summary}" in report.read_text().replace("\\", "")
