"""Dumps that NCCL's watchdog wrote: two H200, torch 2.11.0, NCCL 2.28.9, a timeout of 12 s.

Only paths were changed, for others as long.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddp_scaffold.explain.explain import explain

DUMPS = sorted(path.parent for path in (Path(__file__).parent / "nccl_dumps").glob("*/answer.yaml"))


def test_all_five_are_there() -> None:
    assert len(DUMPS) == 5


@pytest.mark.parametrize("dumps", DUMPS, ids=lambda dumps: dumps.name)
def test_what_the_recorder_saw_is_told(dumps: Path) -> None:
    answer = yaml.safe_load((dumps / "answer.yaml").read_text())
    verdict = explain([str(path) for path in sorted(dumps.iterdir()) if path.name != "answer.yaml"])[0].verdict
    assert (verdict.kind, list(verdict.first_ranks or ())) == (answer["kind"], answer["first_ranks"]), verdict
    assert verdict.confidence == answer.get("confidence", "certain"), verdict


@pytest.mark.parametrize("fault", ["sleep", "early"])
def test_the_dump_of_the_waiting_rank_alone_names_nobody_for_certain(fault: str) -> None:
    """What rank 1 did is in its own dump."""
    verdict = explain([str(Path(__file__).parent / "nccl_dumps" / fault / "nccl_trace_rank_0")])[0].verdict
    assert verdict.confidence != "certain", verdict
    assert 0 not in (verdict.first_ranks or ()), verdict
