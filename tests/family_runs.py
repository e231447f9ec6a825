"""The model families, and runs of them for the tests."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment
from pairs import Row, pairwise

ROOT = Path(__file__).parents[1]
FAMILIES = sorted(path.name for path in (ROOT / "templates/models").iterdir() if path.name != "common")

# What the documentation promises of each: metric, above or below, and the limit.
_ROW = re.compile(r"^\| `([a-z-]+)` \|.*\| `(\w+)` \| (above|below) ([\d.]+) \|", re.MULTILINE)
PROMISED = {name: found for name, *found in _ROW.findall((ROOT / "docs" / "models.md").read_text())}

# Each pair of two of these is run once; a compiled run takes the longest, so there are no more than needed.
PAIRS = pairwise(
    {
        "model": FAMILIES,
        "precision": ["fp32", "bf16", "fp16"],
        "accumulate": [1, 2],
        "compile": [False, True],
        "launcher": ["python", "torchrun", "srun"],
        "preset": ["local", "generic-slurm"],
    },
    allowed=lambda row: row["preset"] == "generic-slurm" or row["launcher"] != "srun",
    dear=lambda row: 6.0 * row["compile"],
)

# What makes a network shallow, and compiling it quick.
SHALLOW = {
    "diffusion": ["--model.levels", "1"],
    "retrieval": ["--model.levels", "1"],
    "classifier": ["--model.stages", "1", "--model.blocks", "1"],
    "rectified-flow": ["--model.depth", "1"],
    "causal-lm": ["--model.layers", "1"],
    "masked-lm": ["--model.layers", "1"],
}

SHORT = [
    *("--run.device", "cpu", "--log.tracker", "none", "--train.steps", "6", "--log.every_steps", "1"),
    *("--eval.every_steps", "3", "--sample.every_steps", "6", "--checkpoint.every_steps", "6"),
]


def every_nth_at_once(nth: int, rows: list[Row]) -> list[Any]:
    """Parameters of a test: every nth row in each run of all tests, the others in `make test-long`."""
    return [
        pytest.param(row, marks=[pytest.mark.long] if number % nth else [], id="-".join(map(str, row.values())))
        for number, row in enumerate(rows)
    ]


def options(row: Row) -> list[str]:
    """The command line of a row of PAIRS."""
    arguments = ["--train.precision", row["precision"], "--train.accumulate", str(row["accumulate"])]
    if row["compile"]:
        arguments += ["--train.compile", "true", *SHALLOW.get(row["model"], [])]
    return [*SHORT, *arguments]


@dataclass(frozen=True)
class Run:
    """A run that has ended: the launcher's exit code, its output, and the run directory."""

    code: int
    output: str
    dir: Path

    @property
    def outcome(self) -> dict[str, Any]:
        return dict(json.loads((self.dir / "outcome.json").read_text()))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]


def train(
    project: Path, *arguments: str, launcher: str = "torchrun", ranks: int = 2, run_id: str = "", **variables: str
) -> Run:
    """Train to the end on CPU: plain python, or launch/torchrun.sh with `ranks` processes. An old `run_id` goes on."""
    package = next((project / "src").iterdir()).name
    command = ["bash", "launch/torchrun.sh"] if launcher == "torchrun" else ["python", "-m", f"{package}.train"]
    run_id = run_id or f"run{len(list((project / 'runs').glob('*')))}"
    surroundings = environment(
        PYTHONPATH=str(project / "src"),
        NPROC=str(ranks),
        OMP_NUM_THREADS="1",
        DDP_RUN__ID=run_id,
        **{"MAX_RESTARTS": "0", **variables},
    )
    ended = subprocess.run(
        [*command, *arguments],
        cwd=project,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Run(ended.returncode, ended.stdout, project / "runs" / run_id)
