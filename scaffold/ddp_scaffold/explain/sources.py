"""Which files `explain` reads: paths, folders, globs, standard input, and what is compressed.

Nothing but regular files is opened. A FIFO or a device would make the command wait for ever; in a folder they are
passed over, and one that was named on the command line is refused.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import os
import re
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedIOBase
from typing import IO, Literal, cast

from .._errors import ScaffoldError, UsageError, one_line

Format = Literal["text", "gzip", "zstd", "dump", "stdin"]
MOST_FILES = 100_000
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# What compresses better than this is no log: real ones reach 5 to 60, one line repeated without end about 1,000.
BOMB_RATIO, BOMB_BYTES = 200, 1 << 30
# Archives, of which nothing here reads the files within.
ARCHIVES = {b"PK\x03\x04": "a zip archive", b"BZh": "compressed with bzip2", b"\xfd7zXZ": "compressed with xz"}
# What stands beside logs and is none.
OTHER = frozenset(
    {".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npy", ".npz", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"}
    | {".so", ".a", ".o", ".pyc", ".py", ".whl", ".zip", ".tar", ".h5", ".parquet", ".arrow", ".onnx", ".html"}
    | {".css", ".js", ".lock", ".sqlite", ".db", ".tfevents", ".distcp", ".metadata"}
)


LEAD = 1 << 16  # bytes before a part that are read with it
LONGEST_PART = 1 << 20  # bytes in which a line must end for a file to be parted there
DUMP_NAME = re.compile(r"\d\.json$")


@dataclass(frozen=True)
class Source:
    """One file to read. `name` is what evidence lines call it.

    Of a part of a large file, `begin` and `end` are the bytes where it begins and where the next one does. Reading
    starts `lead` bytes earlier, which are `lead_lines` lines, so that a traceback which goes on in this part is seen.
    """

    name: str
    path: str
    format: Format
    size: int
    begin: int = 0
    end: int | None = None
    lead: int = 0
    lead_lines: int = 0


def parts(source: Source, count: int, smallest: int) -> list[Source]:
    """Return a text file in up to so many parts, none smaller than `smallest` bytes; others as they are."""
    count = min(count, source.size // smallest)
    if source.format != "text" or count < 2:
        return [source]
    marks = [0]
    leads = [(0, 0)]
    with open(source.path, "rb") as file:
        for part in range(1, count):
            mark = _line_after(file, part * source.size // count)
            if mark is not None and marks[-1] < mark < source.size:
                start = _line_after(file, max(0, mark - LEAD)) or 0
                start = start if start < mark else mark
                file.seek(start)
                leads.append((mark - start, file.read(mark - start).count(b"\n")))
                marks.append(mark)
    ends = [*marks[1:], None]
    return [
        replace(source, begin=begin, end=end, lead=lead, lead_lines=lines)
        for begin, end, (lead, lines) in zip(marks, ends, leads, strict=True)
    ]


def _line_after(file: IO[bytes], place: int) -> int | None:
    """Return where the next line begins; None where none does within a megabyte."""
    file.seek(place)
    return file.tell() if len(file.readline(LONGEST_PART)) < LONGEST_PART else None


@dataclass(frozen=True)
class Sources:
    """All that was found below the paths given; `notes` say what was passed over, and why."""

    files: tuple[Source, ...]
    notes: tuple[str, ...] = ()


def find(paths: Sequence[str]) -> Sources:
    """Return the files below `paths`, each once.

    Raises:
        UsageError: a path does not exist, is neither file nor folder, or nothing below it can be read.
    """
    files: dict[str, Source] = {}
    notes: list[str] = []
    for given in paths:
        if given == "-":
            files["-"] = Source("stdin", "-", "stdin", 0)
            continue
        for path in _expanded(given):
            found = _folder(path, notes) if os.path.isdir(path) else [_named_file(path)]
            for source in found:
                if len(files) >= MOST_FILES:
                    raise UsageError(f"there are more than {MOST_FILES} files below {given}", "Name fewer of them.")
                files.setdefault(os.path.realpath(source.path), source)
    if not files:
        raise UsageError(f"no log to read below {', '.join(paths)}", "Name the files that the job has written.")
    return Sources(tuple(files.values()), tuple(notes))


def _expanded(given: str) -> list[str]:
    """Return the path, or what a pattern that the shell has left alone stands for."""
    if os.path.lexists(given):
        return [given]
    matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []
    if not matches:
        raise UsageError(f"there is no file {one_line(given)}", "Name a file, a folder, a pattern, or - for stdin.")
    return matches


def _named_file(path: str) -> Source:
    """Return a file that the command line names. Raises UsageError where it cannot be read as a log."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                f"{one_line(path)} is {_what(status.st_mode)}, not a file", "Copy what comes out of it into a file."
            )
        begin = _begin(path, 6)
        for magic, what in ARCHIVES.items():
            if begin.startswith(magic):
                raise UsageError(f"{one_line(path)} is {what}, not a log", "Unpack it, and name the folder.")
        return Source(path, path, format_of(path), status.st_size)
    except OSError as error:
        raise UsageError(
            f"{one_line(path)} cannot be read: {error.strerror}", "Correct that, or leave it out."
        ) from error


def _what(mode: int) -> str:
    names = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    return next((name for test, name in names.items() if test(mode)), "something else")


def _folder(top: str, notes: list[str]) -> Iterator[Source]:
    """Yield the logs below a folder, in order of name. Links to folders are not followed: there may be a circle."""
    for folder, folders, names in os.walk(top, onerror=lambda error: notes.append(f"not read: {error}")):
        folders[:] = sorted(name for name in folders if name not in {".git", "__pycache__", "checkpoints"})
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.splitext(name)[1].lower() in OTHER:
                continue
            try:
                status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    notes.append(f"{path} was passed over: it is {_what(status.st_mode)}")
                    continue
                if status.st_size and (kind := format_of(path)) == "text" and is_binary(_begin(path, 4096)):
                    notes.append(f"{path} was passed over: it is no text")
                elif status.st_size:
                    yield Source(path, path, kind, status.st_size)
            except OSError as error:
                notes.append(f"{path} was passed over: {error.strerror}")


def _begin(path: str, size: int) -> bytes:
    # O_NONBLOCK: between stat and open somebody may have put a FIFO in the file's place.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return file.read(size)


def format_of(path: str) -> Format:
    """Tell what a file is, by how it begins."""
    begin = _begin(path, 4)
    if begin[:2] == GZIP:
        return "gzip"
    if begin == ZSTD:
        return "zstd"
    if begin[:1] == b"\x80" and begin[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:  # the opcode PROTO and its number
        return "dump"
    return "dump" if begin[:1] == b"{" and is_dump_of_json(path) else "text"


def is_dump_of_json(path: str) -> bool:
    """Tell whether a JSON file is a flight-recorder dump, as PyTorch's debug server gives it."""
    return bool(DUMP_NAME.search(path)) and b'"entries"' in _begin(path, 1 << 16)


def is_binary(begin: bytes) -> bool:
    """Tell whether zeros are more than a fiftieth of a file's begin: a few stand in logs too."""
    return 50 * begin.count(0) > len(begin)


@contextlib.contextmanager
def opened(source: Source) -> Iterator[IO[bytes]]:
    """Open a source for reading bytes, decompressed.

    Raises:
        ScaffoldError: a compressed file is broken, or nothing here can decompress it. A file that is cut off gives
            what it has.
    """
    if source.format == "stdin":
        yield sys.stdin.buffer
    elif source.format == "gzip":
        with gzip.open(source.path, "rb") as file:
            yield cast("IO[bytes]", file)
    elif source.format == "zstd":
        with _zstd(source.path) as stream:
            yield stream
    else:
        with open(source.path, "rb") as plain:
            yield plain


@contextlib.contextmanager
def _zstd(path: str) -> Iterator[IO[bytes]]:
    with contextlib.suppress(ImportError):
        module = importlib.import_module("compression.zstd")  # Python 3.14
        with module.open(path, "rb") as file:
            yield file
        return
    program = shutil.which("zstd")
    if not program:
        raise ScaffoldError(
            f"{path} is compressed with zstd, which this Python cannot read",
            f"Decompress it first: zstd -d {path}",
            2,
        )
    with subprocess.Popen([program, "-dcq", "--", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        try:
            yield process.stdout
        finally:
            process.stdout.close()
            process.terminate()


def blocks(source: Source, size: int = 1 << 20) -> Iterator[bytes]:
    """Yield the bytes of a source in blocks. A compressed file that ends too early, or grows too much, just ends."""
    total = 0
    with opened(source) as stream:
        if source.begin:
            stream.seek(source.begin - source.lead)
        while True:
            try:
                block = cast("BufferedIOBase", stream).read1(size)  # read() would lose what stands before the cut
            except (EOFError, zlib.error, gzip.BadGzipFile):  # cut off while it was copied
                return
            if not block:
                return
            total += len(block)
            yield block
            if source.format in {"gzip", "zstd"} and total > max(BOMB_BYTES, BOMB_RATIO * source.size):
                return
