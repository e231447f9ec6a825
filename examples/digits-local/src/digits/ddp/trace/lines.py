"""Where a thread stands: PyTorch's call in the words of whoever wrote it, and the user's lines that led there."""

from __future__ import annotations

import dis
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import torch

Line = tuple[str, int, str]  # file, line, function

HERE = str(Path(__file__).parents[1])
TORCH, STDLIB = (str(Path(file).parent) for file in (torch.__file__, os.__file__))
MOST = 4  # lines of a chain
TERMINAL = "<terminal>"  # the innermost "file" of a thread that waits for an answer there
ASKS = "waits for input from the terminal"
# Frames of PyTorch that stand between a call and the one who made it: c10d_logger.py wraps every collective.
BETWEEN = ("wrapper", "decorate_context", "_fn", "inner", "apply", "forward", "_call_impl", "_wrapped_call_impl")


@cache
def owner(file: str) -> str:
    """Whose code `file` is: torch, ours (this plumbing), python, or the user's."""
    if file.startswith(TORCH):
        return "torch"
    if file.startswith(HERE):
        return "ours"
    return "python" if file.startswith("<") or (file.startswith(STDLIB) and "site-packages" not in file) else "user's"


def standing(lines: Iterable[Line], last: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """What is called there, and the chain of lines that called it: ("all_gather_object", "utils.py:12 < train.py:88").

    Args:
        lines: of a stack, innermost first.
        last: file and function whose caller is of no interest: where the session was opened.

    Returns: the outermost of the innermost frames in PyTorch, "" if it does not stand in PyTorch; up to four lines
    outside PyTorch and this plumbing, or the plumbing's own if all of it is.
    """
    call, own, chain, inside, asks = "", "", list[str](), True, ""
    for file, number, function in lines:
        asks = asks or (f", {ASKS}" if file == TERMINAL else "")
        whose = owner(file)
        inside = inside and whose == "torch"
        if inside and function not in BETWEEN:
            call = "DDP's forward" if file.endswith("/nn/parallel/distributed.py") else function
        if whose == "ours":
            own = own or f"{os.path.basename(file)}:{number}"
        if whose == "user's" and not (chain and function == "<module>"):
            chain.append(f"{os.path.basename(file)}:{number}")
            if len(chain) == MOST or (file, function) == last:
                break
    return call, (" < ".join(chain) or own or "an unknown line") + asks


def of_frame(frame: FrameType | None) -> Iterator[Line]:
    """The lines of a live stack, from `frame` outwards."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def of_thread(frame: FrameType | None) -> Iterator[Line]:
    """The same of a whole thread, and whether it waits at the terminal: slower, for a look once a second."""
    if frame is not None and _asks(frame):
        yield TERMINAL, 0, "input"
    yield from of_frame(frame)


def _asks(frame: FrameType) -> bool:
    """Whether it stands in input(), getpass() or sys.stdin.readline(), which are C and so have no frame of their own.

    From the code object and not from the source, since the file system may be what hangs.
    """
    code = frame.f_code
    if os.path.basename(code.co_filename) == "getpass.py":
        return True
    if not {"input", "stdin"}.intersection(code.co_names):
        return False
    line = max((start for start, _ in dis.findlinestarts(code) if start <= frame.f_lasti), default=0)
    done = [each for each in dis.get_instructions(code) if line <= each.offset <= frame.f_lasti]
    loaded = [each.argval for each in done if each.opname.startswith("LOAD_")]
    built_in = any(each.argval == "input" and each.opname in ("LOAD_GLOBAL", "LOAD_NAME") for each in done)
    calls = bool(done) and "CALL" in done[-1].opname
    return calls and (built_in or ("stdin" in loaded and "readline" in loaded))


def users(error: BaseException) -> str:
    """'helper.py:14 < train.py:147', where user code led to `error`; "" if none did."""
    lines = of_error(error)
    return standing(lines)[1] if any(owner(file) == "user's" for file, _, _ in lines) else ""


def of_error(error: BaseException) -> list[Line]:
    """The lines at which `error` was raised, innermost first."""
    walked = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked][::-1]


def of_dump(text: str) -> list[Line]:
    """The main thread's lines in what `faulthandler` has written: it comes last there."""
    found = re.findall(r'File "(.+)", line (\d+) in (\S+)', re.split("[Tt]hread 0x", text)[-1])
    return [(file, int(number), function) for file, number, function in found]
