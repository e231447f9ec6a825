"""A checkpoint outlives updates: what a project of a release has written is read after it, and the other way round."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from update_helpers import make

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import sys
from pathlib import Path
import torch
from digits.config import Settings
from digits.ddp import checkpoint
from digits.ddp.session import session
try:
    from digits.ddp.settings import load
except ImportError:
    from digits.ddp import load
what, directory = sys.argv[1], Path(sys.argv[2])
settings, _ = load(Settings, ["--run.device", "cpu", "--log.tracker", "none", "--run.dir", str(directory.parent)])
with session(settings.run, settings.clocks, settings.log, settings.preempt) as run:
    network = torch.nn.Linear(300, 300)
    network.tied = network.weight
    optimizer = torch.optim.AdamW(network.parameters())
    objects = {"model": network, "optimizer": optimizer}
    if what == "write":
        network(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        job = getattr(run, "job", None) or run.dist
        assert checkpoint.load(job, directory, objects) is None
        assert checkpoint.save(job, directory, {"step": 7, "epoch": 1, "used": 3, "begun": 2}, objects, keep=1)
    else:
        assert checkpoint.load(getattr(run, "job", None) or run.dist, directory, objects)["used"] == 3
    sums = [network.weight, network.bias, *(value for state in optimizer.state.values() for value in state.values())]
    print("sums", [value.double().sum().item() for value in sums], torch.rand(3).tolist())
"""


def say(project: Path, what: str, directory: Path) -> str:
    """Run the program in a project; returns its line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    environment |= {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, what, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("sums"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.3.1", "0.4.0"])
def test_releases_read_each_other(
    history_of_now: Path, render: Callable[..., Path], tmp_path: Path, version: str
) -> None:
    old = make(history_of_now, version, tmp_path / "old", {"package": "digits", "model": "custom"})
    new = render({"package": "digits", "model": "custom"})
    for writer, reader, name in ((old, new, "older"), (new, old, "newer")):
        assert say(writer, "write", tmp_path / name) == say(reader, "read", tmp_path / name)
