"""Rendered projects whose training is the stand-in, and waiting for what it writes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STANDIN = Path(__file__).with_name("launch") / "standin_train.py"


def with_standin(project: Path, destination: Path) -> Path:
    """Copy a rendered project, with the stand-in as its training."""
    shutil.copytree(project, destination)
    package = next((destination / "src").iterdir())
    (package / "__init__.py").touch()
    shutil.copy(STANDIN, package / "train.py")
    return destination


def environment(**extra: str) -> dict[str, str]:
    """This environment, with the Python that runs the tests first on the PATH and none of the launch variables.

    PREFLIGHT is 0: it has tests of its own, and takes seconds.
    """
    ours = ("DDP_", "SLURM_", "TORCH", "NCCL_", "GLOO_", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    for name in ("LAUNCHER", "NPROC", "NNODES", "NODE_RANK", "MAX_RESTARTS", "VENV", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PREFLIGHT": "0", **extra}


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Wait for a true value and return it; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def ready(run_dir: Path, attempt: int, ranks: int) -> list[dict[str, Any]]:
    """Wait until all ranks of an attempt run, and return what they left."""
    files = [run_dir / f"ready-{attempt}-{rank}.json" for rank in range(ranks)]
    until(lambda: all(file.exists() for file in files), f"{ranks} ranks of attempt {attempt} in {run_dir}")
    return [json.loads(file.read_text()) for file in files]


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def parent(pid: int) -> int:
    """The process that started this one, or 1 if that has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
