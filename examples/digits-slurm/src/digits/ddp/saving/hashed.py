"""Files whose SHA-256 is made in the same pass in which they are written or read.

Hashing and reading or writing need no GIL, so each large piece is hashed in a thread of its own meanwhile.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import SEEK_SET
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

CHUNK = 1 << 22  # bytes that are read or written, and hashed, at a time
SMALL = 1 << 16  # bytes below which another thread costs more than it gains
GAP = 1 << 20  # bytes between two pieces that a reader has not asked for, and that are read for their hash only

Moved = Callable[[int], None]  # called with the bytes that are through so far


def unmoved(_bytes: int) -> None:
    """For those who do not want to know how far it is."""


class _Hash:
    """SHA-256 of pieces in the order in which they come."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "checksum")
        self._pending: Future[None] | None = None

    def over(self, view: memoryview, carry: Callable[[memoryview], None]) -> None:
        """Let `carry` read or write `view` piece by piece, and hash it. The view is not used after this call.

        A piece is hashed after `carry` has had it, since only then a reader's is there.
        """
        if len(view) < SMALL:
            self.wait()
            carry(view)
            self._sha.update(view)
            return
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            carry(piece)
            self.later(piece)
        self.wait()

    def later(self, piece: memoryview | bytes) -> None:
        """Hash `piece` when its turn comes: it must stay as it is until `wait`."""
        self._pending = self._thread.submit(self._sha.update, piece)

    def wait(self) -> None:
        """Until all is hashed."""
        if self._pending is not None:  # one thread, so all before it are done, too
            self._pending.result()
            self._pending = None

    def hexdigest(self) -> str:
        self.wait()
        return self._sha.hexdigest()

    def close(self) -> None:
        self._thread.shutdown()


class HashedWriter:
    """A new file for `torch.save`, which writes from its beginning to its end.

    Args:
        kept: whether a piece stays as it is until `sync`. If so, writing does not wait for its hash: on a host that is
            busy, each change from one thread to another takes milliseconds.

    Raises:
        OSError: by `write`, at the first piece for which there is no room, and at each after it.
    """

    def __init__(
        self, path: Path, moved: Moved = unmoved, kept: Callable[[memoryview], bool] = lambda _piece: False
    ) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._hash, self._moved, self._kept = _Hash(), moved, kept
        self.bytes = 0
        self.error: OSError | None = None  # torch.save raises another one in its place

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hash.close()
        try:
            self._file.close()
        except OSError:  # what is left in the buffer, after a failure that is on its way already
            if error is None:
                raise

    def write(self, data: memoryview | bytes) -> int:
        """Append `data`. torch.save hands over each tensor in one piece."""
        view = memoryview(data).cast("B")
        if len(view) < SMALL:
            self._carry(view)
            self._hash.later(bytes(view))
        elif self._kept(view):
            for start in range(0, len(view), CHUNK):
                self._carry(view[start : start + CHUNK])
                self._hash.later(view[start : start + CHUNK])
        else:
            self._hash.over(view, self._carry)
        return len(view)

    def _carry(self, piece: memoryview) -> None:
        if self.error is not None:
            raise self.error
        try:
            self._file.write(piece)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(piece)
        self._moved(self.bytes)

    def flush(self) -> None:
        """For torch.save."""
        self._file.flush()

    def sync(self) -> str:
        """Wait until all is on the disk; returns the SHA-256 of all that was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()


class HashedReader:
    """A file for `torch.load`, which reads most of it in order: each byte is read once, and hashed on the way.

    What is read ahead (the directory at a zip file's end), or twice (its headers), is hashed when its turn comes.
    """

    def __init__(self, path: Path, moved: Moved = unmoved) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._hash, self._moved = _Hash(), moved
        self._hashed = 0  # bytes from the beginning

    def __enter__(self) -> HashedReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._hash.close()
        self._file.close()

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """As any file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As any file."""
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        """As any file. Only a few bytes are read so."""
        return self._file.read(size)

    def readline(self) -> bytes:
        """Which torch.load asks a file to have."""
        return self._file.readline()

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`, from where the file stands; returns how many bytes there were."""
        start = self._file.tell()
        if not self._hashed <= start <= self._hashed + GAP:
            return self._fill(memoryview(buffer).cast("B"))
        if start > self._hashed:
            self._pass_by(start)
        self._file.seek(start)
        self._hash.over(memoryview(buffer).cast("B"), self._advance)
        return self._hashed - start

    def digest(self) -> str:
        """SHA-256 of the whole file, whatever has been read of it."""
        self._pass_by(os.fstat(self._file.fileno()).st_size)
        return self._hash.hexdigest()

    def _pass_by(self, end: int) -> None:
        """Read up to `end` for the hash only."""
        self._file.seek(self._hashed)
        buffer = memoryview(bytearray(max(0, min(CHUNK, end - self._hashed))))
        while self._hashed < end:
            before = self._hashed
            self._hash.over(buffer[: end - self._hashed], self._advance)
            if self._hashed == before:  # it has become shorter
                return

    def _advance(self, piece: memoryview) -> None:
        self._hashed += self._fill(piece)
        self._moved(self._hashed)

    def _fill(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view) and (count := self._file.readinto(view[filled:])):
            filled += count
        return filled
