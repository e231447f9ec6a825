"""A process that calls `os._exit` leaves word of it: no exception and no signal would tell what has ended it."""

from __future__ import annotations

import os
import sys
from typing import IO, NoReturn

from ..trace.lines import of_frame, owner, standing

EXIT = "ends with exit code"


def tell_exits(words: IO[str]) -> None:
    """From now on, an `os._exit` of code other than this plumbing's is written to `words`, with its lines."""
    leave, pid = os._exit, os.getpid()
    if hasattr(leave, "telling"):
        return

    def exit_and_tell(status: int) -> NoReturn:
        frame = sys._getframe(1)
        if os.getpid() == pid and owner(frame.f_code.co_filename) != "ours":  # nor a forked worker's
            print(f"{EXIT} {status} by os._exit at {standing(of_frame(frame))[1]}", file=words, flush=True)
        leave(status)

    exit_and_tell.telling = True  # type: ignore[attr-defined]
    os._exit = exit_and_tell
