"""torchrun, whose own words go to a file: they would stand below what the ranks say, and call a victim the root cause.

    python agent.py LOG [arguments of torchrun]

Arguments, signals, children and exit code are those of `python -m torch.distributed.run`. Only what this process itself
prints from Python goes to LOG. Ranks inherit the descriptors 1 and 2 (torch 2.6 to 2.13, subprocess_handler.py in
torch/distributed/elastic/multiprocessing: Popen without stdout and stderr), so a progress bar still finds a terminal.

Where torchrun itself fails, its words are printed as well. Where ranks have failed they are not: the ranks have said
more, and if none could, the launch script prints them at its end (outcome.py).
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from typing import TextIO

PRINTED = "=== printed\n"  # the end of what the terminal has had already


def main(path: str, arguments: Sequence[str]) -> int:
    """Run torchrun, and return its exit code."""
    terminal, sys.stderr = sys.stderr, _open(path)
    began = sys.stderr.tell()
    sys.argv = ["torchrun", *arguments]
    sys.path[0] = os.getcwd()  # as with python -m
    words, code = "", 1
    try:
        from torch.distributed.run import main as torchrun

        torchrun(arguments)
        code = 0
    except SystemExit as end:  # of argparse, above all
        words = "" if end.code is None or isinstance(end.code, int) else f"{end.code}\n"
        code = 1 if words else int(end.code or 0)
        failed = code != 0
    except BaseException as error:
        failed = type(error).__name__ not in ("ChildFailedError", "SignalException", "KeyboardInterrupt")
        # The traceback of a failed rank is among that rank's words; here it would be torchrun's, which says nothing.
        words = "".join(traceback.format_exception(error) if failed else traceback.format_exception_only(error))
    else:
        failed = False
    log, sys.stderr = sys.stderr, terminal
    with suppress(OSError):
        log.write(words)
        log.seek(began)
        words = log.read()
    with suppress(OSError):
        if failed or isinstance(log, StringIO):
            print(words, end="", file=terminal, flush=True)
            log.write(PRINTED)
        log.close()
    return code


def _open(path: str) -> TextIO:
    """LOG, or memory where it cannot be written: a full disk must not end what it tells of."""
    head = f"=== attempt {os.environ.get('DDP_ATTEMPT', '0')}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open(path, "a+", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        file.write(head)
        return file
    except OSError:
        return StringIO()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
