"""Each pair of family, precision, accumulation, compilation, launcher and preset trains; see family_runs.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import PAIRS, Row, every_nth_at_once, options, train

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Family = Callable[..., Path]


ROWS = [row for row in PAIRS if row["launcher"] != "srun"]


@pytest.mark.parametrize("row", every_nth_at_once(2, ROWS))
def test_each_pair_of_options_trains(row: Row, family: Family) -> None:
    run = train(family(row["model"], row["preset"]), *options(row), launcher=row["launcher"])
    assert run.code == 0, run.output
    assert run.outcome["outcome"] == "done"
    losses = [metrics["loss"] for metrics in run.metrics if "loss" in metrics]
    assert len(losses) == 6
    assert None not in losses, "a loss that is no number"
