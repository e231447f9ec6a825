"""Every family: clean code, equal to one process, exact resume, the metric it promises, all pairs of options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import FAMILIES, PAIRS, ROOT, Row, options, train

pytest.importorskip("torch")
Family = Callable[..., Path]
TABLE = re.compile(r"^\| `([a-z-]+)` \|.*\| `(\w+)` \| (above|below) ([\d.]+) \|", re.MULTILINE)
PROMISED = {name: found for name, *found in TABLE.findall((ROOT / "docs" / "models.md").read_text())}


def test_every_family_stands_in_the_table_of_the_documentation() -> None:
    assert sorted(PROMISED) == FAMILIES


@pytest.mark.parametrize("model", FAMILIES)
def test_linters_and_the_type_checker_have_nothing_to_say(
    model: str, family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.getbasetemp() / "mypy-families"  # torch is read once
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "--cache-dir", str(cache)]):
        found = subprocess.run(
            [sys.executable, "-m", *command], cwd=family(model), capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("model", FAMILIES)
def test_files_stay_short(model: str, family: Family) -> None:
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in (family(model) / "src" / "digits").glob("*.py")
    }
    assert lengths.pop("train.py") <= 250
    assert max(lengths.values()) <= 200, lengths


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "model", [model for model in FAMILIES if model != "diffusion"]
)  # whose tests all run elsewhere
def test_its_own_tests_pass(model: str, family: Family) -> None:
    """Its model; several ranks equal to one process; a resumed run equal to the bit."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/test_model.py",
        "tests/test_parity.py",
        "tests/test_train.py",
    ]
    command += ["-k", "not longer_than_a_collective and not wrong_setting"]  # the same in all families
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, cwd=family(model), env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", FAMILIES)
def test_it_reaches_what_the_documentation_promises(model: str, family: Family) -> None:
    metric, side, limit = PROMISED[model]
    run = train(family(model), "--run.device", "cpu", "--log.tracker", "none")
    assert run.code == 0, run.output
    reached = [row[metric] for row in run.metrics if metric in row][-1]
    assert reached > float(limit) if side == "above" else reached < float(limit), reached
    assert list((run.dir / "samples").iterdir()), "something to look at"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "row", [row for row in PAIRS if row["launcher"] != "srun"], ids=lambda row: "-".join(map(str, row.values()))
)
def test_each_pair_of_options_trains(row: Row, family: Family) -> None:
    run = train(family(row["model"], row["preset"]), *options(row), launcher=row["launcher"])
    assert run.code == 0, run.output
    assert run.outcome["outcome"] == "done"
    losses = [metrics["loss"] for metrics in run.metrics if "loss" in metrics]
    assert len(losses) == 6
    assert None not in losses, "a loss that is no number"
