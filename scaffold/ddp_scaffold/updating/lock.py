"""One update at a time: a lock in the git directory of the work tree, from the first look to the last word.

The kernel gives it back when its holder ends, however that ends. On NFS the server keeps it for all hosts, and after
a crash of the holder's host until the lease is over; where a file system is mounted without locks that reach other
hosts (Lustre with localflock, NFS with local_lock), two hosts can still update one project at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import _output
from .recorded import Refused

LOCK = "ddp-scaffold-update.lock"
PATIENCE_S = 2.0  # a dry run holds it for less
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def only_update(folder: Path) -> Iterator[int | None]:
    """Hold the lock of a git directory; yield its descriptor, or None where none can be had. Raises Refused."""
    path = folder / LOCK
    try:
        descriptor = _acquire(path)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS or path.exists():
            _output.note(f"no lock can be taken in {folder}: do not run two updates of this project at once")
        yield None  # a directory that cannot be written: git will say so, should anything be written
        return
    try:
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a full disk: it only says who holds it
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # else its holder has just removed it
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 300, 0).decode(errors="replace")
                os.close(descriptor)
                raise Refused(
                    f"another update of this project is at work: {holder or 'nobody knows whose'}",
                    "Wait for it, then run it again.",
                ) from error
            time.sleep(0.05)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
