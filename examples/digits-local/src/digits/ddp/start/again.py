"""The command that goes on with a run, where no launch script has started it: those say it themselves."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import STALLED, STOPPED
from .launcher import Place
from .shortened import FOLDER

BY_SCRIPT = ("LAUNCHED_BY", "LAUNCH_NODES")  # one of these is set by each of them
OF_ONE_START = {"DDP_ATTEMPT", "DDP_FAULTS", "DDP_WALLTIME_END", "DDP_RUN__RESUME"}
ALSO = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_here = os.getcwd()  # user code may go elsewhere


def how_to_go_on(place: Place, run_dir: Path, code: int) -> list[str]:
    """Lines, the last of them to be copied to a shell. None where a launch script says it, or with other exit codes."""
    own = _environ(os.getpid())
    if code not in (STALLED, STOPPED) or any(name in own for name in BY_SCRIPT) or run_dir.parent.name == FOLDER:
        return []
    there = any(run_dir.glob("checkpoints/step_*"))
    what = "go on from the newest checkpoint" if there else "start it again"
    command, environ = _command(place, own)
    if not command:
        return [f"to {what}: start it as before, with DDP_RUN__ID={run_dir.name}"]
    return [f"to {what}:", line(command, run_dir.name, environ, _here)]


def line(command: Sequence[str], run_id: str, environ: Mapping[str, str], where: str) -> str:
    """The command with the variables that it was given. The run is named, and resumed."""
    ours = {name: value for name, value in environ.items() if name.startswith("DDP_") or name in ALSO}
    ours = {name: value for name, value in ours.items() if name not in OF_ONE_START} | {"DDP_RUN__ID": run_id}
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(ours.items())]
    return f"cd {shlex.quote(where)} && {' '.join([*variables, shlex.join(_resuming(command))])}"


def _environ(pid: int) -> dict[str, str]:
    """With what a process was started: code may have changed it since, each rank's GPU for example.

    Without /proc, that of this process as it is now.
    """
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return dict(os.environ)


def _command(place: Place, own: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """Of this process, or of the torchrun that has started it on its only node, and what it was started with.

    Empty where it cannot be told. `python` may be another one in the next shell, so it gets its path.
    """
    if place.launcher == "none":
        return [sys.executable, *sys.orig_argv[1:]], own
    if place.launcher == "torchrun" and place.world_size == place.local_world_size:
        with suppress(OSError):  # there is no /proc, or torchrun has ended
            above = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if any("torchrun" in word or "torch.distributed" in word for word in above):
                same = "/" not in above[0] and above[0].startswith("python") and "PYTHON_EXEC" not in own
                return [sys.executable if same else above[0], *above[1:]], _environ(os.getppid())
    return [], own


def _resuming(command: Iterable[str]) -> list[str]:
    """Without what asks for a start from nothing, on the command line of a project that has the setting."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word == "--run.resume":
            next(words, "")
        elif not word.startswith("--run.resume="):
            kept.append(word)
    return kept
