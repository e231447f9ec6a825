"""Processes that are children of a rank and would take its place: loader workers that run the script, and mp.spawn.

They inherit the launcher's variables, and with them the rank.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from .launcher import Place

_BY_MULTIPROCESSING = ", started by Python's multiprocessing"


def started_by() -> str:
    """What to add to the description of this process, if it is a child of the kind that inherits a rank."""
    return _BY_MULTIPROCESSING if multiprocessing.parent_process() else ""


def refuse_import(rank: str) -> None:
    """Refuse to begin a run while multiprocessing imports the main script into a child of `rank`.

    Its methods spawn and forkserver do so before the child does what it was started for; `_inheriting` is set meanwhile
    (multiprocessing/spawn.py and forkserver.py, Python 3.10 to 3.14).

    Raises:
        ConfigError: with the line that must not run then.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    frame, line, script = sys._getframe(), "", ""
    while frame.f_back:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "__mp_main__":
            line, script = f"{frame.f_code.co_filename}:{frame.f_lineno}", Path(frame.f_code.co_filename).name
            if frame.f_code.co_name == "<module>":
                break
    problem = (
        f"this process is a worker of {rank} (a DataLoader's, or another that multiprocessing starts), and it would "
        f"train as well: workers import the main script, and {line or 'that'} calls the training on import"
    )
    raise ConfigError(problem, f'put the call under `if __name__ == "__main__":` in {script or "the script"}')


def claimed_twice(place: Place, first: str, second: str) -> ConfigError:
    """Two processes, described by `first` and `second`, take themselves for the rank of `place`."""
    problem = f"two processes claim rank {place.rank}: one on {first}, one on {second}"
    remedy = "check NODE_RANK, or that no older job still uses this MASTER_ADDR and MASTER_PORT"
    if _BY_MULTIPROCESSING in first + second:
        problem += f"; {place.launcher} has set the rank already, and mp.spawn's children inherit it"
        remedy = f"start the ranks by {place.launcher} or by mp.spawn, not by both: call the training function directly"
    elif any(f"{place.host}, process {pid}" == first for pid in _ancestors()):
        problem += "; the first has started the second, which inherits its variables"
        remedy = "start such processes without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment"
    return ConfigError(problem, remedy)


def _ancestors() -> list[int]:
    """Parent, grandparent and so on of this process; empty without /proc."""
    found, pid = list[int](), os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            found.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found
