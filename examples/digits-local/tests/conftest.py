"""Start real runs: torchrun with several processes on CPU, in a directory of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matrix.config import write_config

PROJECT = Path(__file__).parents[1]
# Read when torch is imported, which is later. Threads that wait for each other by spinning slow down the ranks beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A slow model, or a machine with other work, needs longer than these tests allow: TEST_PATIENCE=3 pytest waits three
# times as long, for runs, tests and the clocks of a run, and for nothing else.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
RUN_S = 100 * PATIENCE  # the longest run of a test
CLOCKS = {"init": 40, "loader": 3, "stall": 6, "collective": 30, "guard": 31, "silent": 3}  # seconds

_directory = tempfile.TemporaryDirectory()  # until the tests have ended
# Short runs with short clocks: a test must not wait minutes for a deadline.
QUICK = [
    *("--config", str(write_config(Path(_directory.name) / "train.yaml"))),
    *("--run.device", "cpu", "--log.tracker", "none", "--log.every_steps", "5", "--train.steps", "20"),
    *(word for name, limit in CLOCKS.items() for word in (f"--clocks.{name}_s", f"{PATIENCE * limit:g}")),
    *("--clocks.beat_s", "0.5", "--preempt.poll_s", "0.1"),
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each test take longer, too."""
    if config.pluginmanager.hasplugin("timeout"):
        limit = PATIENCE * float(config.getini("timeout") or 0)
        for item in items:
            if PATIENCE != 1 and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(limit))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what tests of an example that is gone are."""
    failed = [each for outcome in ("failed", "error") for each in terminalreporter.stats.get(outcome, [])]
    if any("tests/example/" in getattr(each, "nodeid", "") for each in failed):
        terminalreporter.write_line(
            "tests/example/ is about the example that this project began with: delete it if you have replaced that",
            yellow=True,
        )


@dataclass(frozen=True)
class Result:
    """A finished run: the launcher's exit code, everything printed, and the run directory."""

    code: int
    output: str
    run_dir: Path

    @property
    def outcome(self) -> dict[str, Any]:
        """outcome.json; fails the test with the run's output if there is none."""
        path = self.run_dir / "outcome.json"
        assert path.exists(), self.output
        return dict(json.loads(path.read_text()))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


Launch = Callable[..., Result]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run to the end: 0 ranks stand for plain python, `faults` for DDP_FAULTS. The same `run_id` is the same run."""
    tmp_path = tmp_path_factory.mktemp("runs")

    def run(
        *arguments: str,
        ranks: int = 2,
        faults: str = "",
        attempt: int = 0,
        run_id: str = "",
        module: str = "digits.train",
    ) -> Result:
        run_id = run_id or f"run{len(list(tmp_path.iterdir()))}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(PROJECT / "src"), str(PROJECT / "tests")]),
            "OMP_NUM_THREADS": "1",  # the ranks share the cores; equal thread counts keep sums equal to the bit
            "DDP_ATTEMPT": str(attempt),
            "DDP_RUN__DIR": str(tmp_path),
            "DDP_RUN__ID": run_id,
        }
        if faults:
            environment["DDP_FAULTS"] = faults
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        command = [sys.executable, *(torchrun if ranks else []), "-m", module, *arguments]
        try:
            ended = subprocess.run(
                command,
                cwd=PROJECT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=RUN_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            advice = "if it is only slow, set TEST_PATIENCE=3, or lower the size of the model in configs/train.yaml"
            pytest.fail(f"{output}\nthe run was not over after {RUN_S:g} s\n  -> {advice}", pytrace=False)
        return Result(ended.returncode, ended.stdout, tmp_path / run_id)

    return run
