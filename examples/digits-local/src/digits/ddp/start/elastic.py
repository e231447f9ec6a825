"""What torchrun says at its end, below all that we print: its table of failed ranks, made from a file of each rank.

torchrun (torch 2.6 to 2.13, torch/distributed/elastic/multiprocessing/errors/__init__.py and api.py) reads the file
when it finds that a process has ended. The root cause is the failure with the smallest timestamp, in whole seconds, and
the first to be found of equal ones; of a process without a file the time is when torchrun looked. What is shown is
`py_callstack`, and `message` only without one. A file that is cut short ends torchrun with a traceback of its own.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ..kinds import Verdict
from .launcher import Place

LATER_S = 2  # seconds by which the others come after a rank that torchrun has seen die: it looks every 0.1 s


def tell_torchrun(verdict: Verdict, place: Place | None = None, stack: str = "", began: float | None = None) -> None:
    """Leave `verdict` for torchrun's table, such that its root cause is a rank that the verdict names.

    Args:
        place: this rank; without it, or where nobody is to blame, all ranks say the same and torchrun takes any.
        stack: of this rank, kept in the file.
        began: when it began, if this rank is where it did.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or path == os.devnull:
        return
    now, blamed = time.time(), verdict.first_ranks or []
    if place and blamed and place.rank not in blamed:
        now += LATER_S
        for rank in blamed:  # a rank that was killed, or will be, leaves none of its own
            local_rank = rank - place.rank + place.local_rank  # torchrun numbers the ranks of a node one after another
            if 0 <= local_rank < place.local_world_size:
                other = Path(path).parents[1] / str(local_rank) / Path(path).name
                if other.parent.is_dir() and not other.exists():
                    _write(other, verdict, "", time.time() - LATER_S)
    elif began is not None:
        now = min(now, began)
    _write(Path(path), verdict, stack, now)


def _write(path: Path, verdict: Verdict, stack: str, when: float) -> None:
    advice = f"\n-> {verdict.advice}" if verdict.advice else ""
    shown = f"{verdict.kind}: {verdict.reason}{advice}"
    details = {"py_callstack": shown, "timestamp": str(int(when)), "stack": stack}
    content = {"message": {"message": verdict.reason, "errorCode": verdict.exit_code, "extraInfo": details}}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # the reason is in our own log as well
        aside.write_text(json.dumps(content))
        os.replace(aside, path)
