"""Work in a second process, for many files: a forked one has them already, and starts in milliseconds."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence

from .files import SourceFile
from .findings import Finding

Work = Callable[[], list[Finding]]
MANY = 400_000  # characters, of which reading takes longer than starting a process


def beside(work: Work, files: Sequence[SourceFile]) -> Work:
    """Start work in a process of its own, and return what waits for its findings.

    Where there is no second CPU, no `fork`, little to do or another thread (which a fork would leave behind in the
    middle of something), the work is done when it is waited for. So it is if the process dies, for example of memory.
    """
    if not _worthwhile(files):
        return work
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        _child(work, reading, writing)
    os.close(writing)

    def wait() -> list[Finding]:
        with os.fdopen(reading, "rb") as pipe:
            sent = pipe.read()
        _, status = os.waitpid(process, 0)
        if status != 0 or not sent:
            return work()
        return [Finding(*row) for row in pickle.loads(sent)]  # from our own process

    return wait


def _child(work: Work, reading: int, writing: int) -> None:
    """Send what the work finds, and end without what the parent would do at its end."""
    code = 1
    try:
        os.close(reading)
        rows = [tuple(getattr(one, name) for name in Finding.__dataclass_fields__) for one in work()]
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(rows))
        code = 0
    finally:
        os._exit(code)


def _worthwhile(files: Sequence[SourceFile]) -> bool:
    several = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) > 1
    alone = threading.active_count() == 1
    return several and alone and hasattr(os, "fork") and sum(len(file.text) for file in files) > MANY
