"""Every model family under srun on two real nodes: the rows of the pairs of options that use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from family_runs import PAIRS, Row, every_nth_at_once, options
from training_helpers import ANSWERS, everything

pytest.importorskip("torch")
flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky, pytest.mark.timeout(300)]
ROWS = [row for row in PAIRS if row["launcher"] == "srun"]


@pytest.mark.parametrize("row", every_nth_at_once(4, ROWS))
def test_each_family_trains_over_two_nodes(row: Row, render: Callable[..., Path], submit: Callable[..., Any]) -> None:
    project = render({**ANSWERS, "model": row["model"]})
    result = submit(project, options(row)).wait(250)
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), everything(result)
    assert json.loads((result.run_dir / "outcome.json").read_text())["outcome"] == "done", everything(result)
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert None not in [row["loss"] for row in rows if "loss" in row], everything(result)
