"""Files whose SHA-256 is made in the same pass in which they are written or read.

A file has two: of its bytes, as `sha256sum` prints it, and of the SHA-256 of each of its pieces. Pieces can be hashed
at the same time, so reading need not wait for it; what older releases have written has the first one only. Hashing,
reading and writing need no GIL.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import SEEK_SET
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

PIECE = 1 << 22  # bytes that are read or written, and hashed, at a time
SMALL = 1 << 16  # bytes below which a copy costs less than waiting for another thread
GAP = 1 << 20  # bytes between two parts that a reader has not asked for, and that are read for their hash only
READERS = 8  # threads that read, hash and copy: one hashes 0.5 to 2 GB/s, and torch.load takes 2 to 3

Moved = Callable[[int], None]  # called with the bytes that are through so far


def unmoved(_bytes: int) -> None:
    """For those who do not want to know how far it is."""


@dataclass(frozen=True)
class Checksums:
    """Of a file, in hexadecimal."""

    sha256: str
    piece: int = 0  # bytes of each piece but the last; 0 if the pieces are not known
    pieces: str = ""  # SHA-256 of the SHA-256 (32 bytes each) of the pieces


class _Sha(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _PiecesSha:
    """What `Checksums.pieces` is, of bytes that come in order."""

    def __init__(self, piece: int = PIECE) -> None:
        self._of_pieces, self._open, self._room, self._piece = hashlib.sha256(), hashlib.sha256(), piece, piece

    def update(self, data: memoryview | bytes, /) -> None:
        view = memoryview(data)
        while len(view):
            part = view[: self._room]
            self._open.update(part)
            self._room -= len(part)
            if not self._room:
                self._of_pieces.update(self._open.digest())
                self._open, self._room = hashlib.sha256(), self._piece
            view = view[len(part) :]

    def hexdigest(self) -> str:
        """At the end: the last piece is as long as it is."""
        if self._room < self._piece:
            self._of_pieces.update(self._open.digest())
        return self._of_pieces.hexdigest()


class _InThread:
    """A hash that is made in a thread of its own, of what is handed over, in that order."""

    def __init__(self, sha: _Sha) -> None:
        self._sha = sha
        self._thread = ThreadPoolExecutor(1, "checksum")
        self._pending: Future[None] | None = None

    def later(self, data: memoryview | bytes) -> None:
        """Hash `data` when its turn comes: it must stay as it is until `wait`."""
        self._pending = self._thread.submit(self._sha.update, data)

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
        kept: whether a part stays as it is until `sync`. If so, writing does not wait for its hash: on a host that is
            busy, each change from one thread to another takes milliseconds.

    Raises:
        OSError: by `write`, at the first piece for which there is no room, and at each after it.
    """

    def __init__(
        self, path: Path, moved: Moved = unmoved, kept: Callable[[memoryview], bool] = lambda _part: False
    ) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._whole, self._pieces = _InThread(hashlib.sha256()), _InThread(_PiecesSha())
        self._moved, self._kept = moved, kept
        self.bytes = 0
        self.error: OSError | None = None  # torch.save raises another one in its place

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.close()
        self._pieces.close()
        try:
            self._file.close()
        except OSError:  # what is left in the buffer, after a failure that is on its way already
            if error is None:
                raise

    def write(self, data: memoryview | bytes) -> int:
        """Append `data`. torch.save hands over each tensor in one part."""
        view = memoryview(data).cast("B")
        small = len(view) < SMALL
        kept = memoryview(bytes(view)) if small else view
        for start in range(0, len(kept), PIECE):
            piece = kept[start : start + PIECE]
            self._carry(piece)
            self._whole.later(piece)
            self._pieces.later(piece)
        if not small and not self._kept(view):
            self._whole.wait()
            self._pieces.wait()
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

    def sync(self) -> Checksums:
        """Wait until all is on the disk; returns the checksums of all that was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return Checksums(self._whole.hexdigest(), PIECE, self._pieces.hexdigest())


class HashedReader:
    """A file for `torch.load`, which reads most of it in order: each byte is read once, and hashed on the way.

    Threads read and hash pieces ahead. What is wanted earlier (the directory at a zip file's end), or twice (its
    headers), is read once more, and hashed when its turn comes.

    Args:
        piece: bytes of each piece, if it is compared with `Checksums.pieces`, else 0.

    Raises:
        OSError: by `readinto` and `digest`, where the file cannot be read.
    """

    def __init__(self, path: Path, moved: Moved = unmoved, piece: int = 0) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._moved, self._piece = moved, piece or PIECE
        self._of_pieces = hashlib.sha256() if piece else None
        self._whole = None if piece else _InThread(hashlib.sha256())
        self._threads = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "read")
        self._ahead: deque[Future[tuple[memoryview, bytes]]] = deque()  # the pieces from `_next` on
        self._asked = 0  # pieces that a thread reads, or has read
        self._begin, self._open = 0, memoryview(b"")  # the piece that torch.load is at: its place in the file, and it
        self._copies: list[Future[None]] = []  # of parts of this piece, by the threads
        self._at = 0  # bytes from the beginning that were passed on, or passed by
        self._size = os.fstat(self._file.fileno()).st_size
        for _ in range(2 * READERS):
            self._ask()

    def __enter__(self) -> HashedReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._whole:
            self._whole.close()
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
        view, start = memoryview(buffer).cast("B"), self._file.tell()
        if not self._at <= start <= self._at + GAP:
            return _fill(self._file.fileno(), view, start)
        self._pass_by(start)
        copies: list[Future[None]] = []
        while len(view) and self._more():
            part = self._open[self._at - self._begin :][: len(view)]
            if len(part) < SMALL:
                view[: len(part)] = part
            else:
                copies.append(self._threads.submit(_copy, part, view[: len(part)]))
                self._copies.append(copies[-1])
            view = view[len(part) :]
            self._at += len(part)
        for copy in copies:
            copy.result()
        self._file.seek(self._at)
        return self._at - start

    def digest(self) -> str:
        """The file's checksum, whatever has been read of it: of its pieces, if it was opened so."""
        self._pass_by(self._size)
        if self._of_pieces:
            return self._of_pieces.hexdigest()
        assert self._whole
        return self._whole.hexdigest()

    def _pass_by(self, end: int) -> None:
        """Go to `end`; what lies before it is read for its hash only."""
        while self._at < end and self._more():
            self._at = min(end, self._begin + len(self._open))

    def _more(self) -> bool:
        """Whether the open piece has a byte at `_at`; if not, the next one is opened. False at the end of the file."""
        if self._at < self._begin + len(self._open):
            return True
        if not self._ahead:
            return False
        piece, digest = self._ahead[0].result()  # an error is raised again by the next call
        self._ahead.popleft()
        if self._whole:
            self._whole.wait()  # the piece before goes to another thread now
            self._whole.later(piece)
        if self._of_pieces:
            self._of_pieces.update(digest)
        used, self._begin, self._open = self._open, self._begin + len(self._open), piece
        self._moved(self._begin)
        copies, self._copies = self._copies, []
        if len(used) == self._piece:
            self._ask(used, copies)
        return len(piece) > 0

    def _ask(self, memory: memoryview | None = None, copies: Sequence[Future[None]] = ()) -> None:
        """Let a thread read and hash the next piece, if there is one, into `memory`, once its `copies` are made."""
        start = self._asked * self._piece
        if start >= self._size:
            return
        self._asked += 1
        buffer = memory or memoryview(bytearray(min(self._piece, self._size)))

        def read() -> tuple[memoryview, bytes]:
            wait(copies)  # which stand before this in the queue of the threads
            piece = buffer[: _fill(self._file.fileno(), buffer, start)]
            return piece, b"" if self._whole else hashlib.sha256(piece).digest()

        self._ahead.append(self._threads.submit(read))


def _copy(part: memoryview, view: memoryview) -> None:
    """Copy `part` to `view`, which is as long, without the GIL."""
    memory = ctypes.c_char * len(part)
    ctypes.memmove(memory.from_buffer(view), memory.from_buffer(part), len(part))


def _fill(file: int, view: memoryview, start: int) -> int:
    """Fill `view` with what an open file has from `start` on, and return how many bytes that was."""
    filled = 0
    while filled < len(view) and (count := os.preadv(file, [view[filled:]], start + filled)):
        filled += count
    return filled
