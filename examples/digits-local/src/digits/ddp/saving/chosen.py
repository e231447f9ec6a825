"""One checkpoint of a run, chosen by a person, and only read: the run may be going on."""

from __future__ import annotations

import logging
import pickle
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..best import best_of, checkpoints
from ..errors import ConfigError
from ..storable import not_loadable
from .directory import Damaged, Note, read

log = logging.getLogger("ddp")
CHOICES = "best, last or a step"
TRIES = 5  # a run that is going on may remove one while it is read; then another one has come
GONE_S = 0.5  # after which what was about to be removed is gone


def read_chosen(run_dir: Path, which: str, note: Note) -> tuple[str, dict[str, Any]]:
    """Name and content of a checkpoint, compared with its checksums: see `directory.read`.

    Args:
        which: `last`, the newest that is whole; `best`, by the metric that was evaluated; or a step.

    Raises:
        ConfigError: there is no such checkpoint, or it is not whole.
    """
    root = run_dir / "checkpoints"
    for _ in range(TRIES):
        all_there = checkpoints(root)
        problems = []
        for path in _candidates(run_dir, which, all_there):
            try:
                return path.name, read(path, note)
            except pickle.UnpicklingError as error:
                raise not_loadable(path, error) from error
            except (OSError, Damaged) as error:
                if not path.is_dir():
                    break
                problems.append(f"{path.name}: {error}")
                log.warning("skipping broken checkpoint %s: %s", path, error)
        else:
            time.sleep(GONE_S)
            if checkpoints(root) != all_there:
                continue
            others = "" if which == "last" else f"; --checkpoint last takes the newest one that is whole ({root})"
            raise ConfigError(
                f"no checkpoint ({which}) of {run_dir} is whole: {'; '.join(problems)}", f"choose another{others}"
            )
    raise ConfigError(f"checkpoints of {run_dir} are removed faster than they are read", "raise checkpoint.keep")


def _candidates(run_dir: Path, which: str, all_there: Sequence[Path]) -> list[Path]:
    """What to try, in this order."""
    if not all_there:
        raise ConfigError(f"{run_dir} has no complete checkpoint", "give the directory of a run: runs/<id>")
    steps = ", ".join(dict.fromkeys(str(step_of(path)) for path in all_there))
    which = re.sub(r"^step_0*(?=\d)", "", which)  # as --json prints it
    if which == "last":
        return list(reversed(all_there))
    if which == "best":
        if best := best_of(all_there):
            return [best[0]]
        problem = f"{run_dir} has kept no best checkpoint"
        remedy = "it takes checkpoint.keep_best, and a finite METRIC from an evaluation"
        raise ConfigError(problem, f"{remedy}; there is --checkpoint last, or a step: {steps}")
    if not (which.isascii() and which.isdecimal()):
        raise ConfigError(f"--checkpoint {which} is none of {CHOICES}", f"there are steps {steps}")
    if found := [path for path in reversed(all_there) if step_of(path) == int(which)]:
        return found
    raise ConfigError(f"{run_dir} has no checkpoint of step {which}", f"there are steps {steps}")


def step_of(checkpoint: Path) -> int:
    """The step in its name."""
    return int(checkpoint.name.removeprefix("step_").partition(".")[0])
