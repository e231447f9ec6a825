"""The directory of checkpoints: a new one is visible only when it is whole, and one that is not whole is not loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .. import faults
from ..best import MANIFEST, METRIC, best_of, checkpoints
from .hashed import PIECE, Checksums, HashedReader, HashedWriter

log = logging.getLogger("ddp")
FORMAT = 1
STATE = "state.pt"
LARGEST_PIECE = 1 << 28  # bytes: a reader holds sixteen of them
Note = Callable[[str], None]  # called with how far it is
Kept = Callable[[memoryview], bool]


class Damaged(Exception):
    """The files of a checkpoint are not those that were written."""


class NoneWhole(Exception):
    """There are checkpoints, and not one that can be loaded."""


def write(
    root: Path,
    payload: dict[str, Any],
    keep: int,
    note: Note,
    kept: Kept = lambda _piece: False,
    keep_best: bool = False,
) -> str | None:
    """Write one checkpoint directory; returns what went wrong, or None. Only the final rename makes it visible.

    Args:
        keep: how many of the newest stay.
        kept: whether a piece of memory stays as it is meanwhile.
        keep_best: whether the best one stays as well, by what `payload["metric"]` of each was.
    """
    aside = root / f".writing-{socket.gethostname()}-{os.getpid()}"  # a requeued job may meet its predecessor
    step = payload["counters"]["step"]
    state: HashedWriter | None = None
    try:
        _remove_leftovers(root)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with HashedWriter(aside / STATE, _in_gigabytes(note, "written"), kept) as state:
            torch.save(payload, state)  # type: ignore[arg-type]  # write and flush are all it calls
            faults.inject("checkpoint:write", step)
            note("waiting for the disk")
            sums = state.sync()
        pieces = {"bytes": sums.piece, "sha256": sums.pieces}
        manifest = {
            "format": FORMAT,
            "counters": payload["counters"],
            "world_size": len(payload["rng"]),
            "torch": torch.__version__,
            "files": {STATE: {"bytes": state.bytes, "sha256": sums.sha256, "pieces": pieces}},
        }
        manifest |= {METRIC: payload[METRIC]} if METRIC in payload else {}
        with open(aside / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(aside)
        faults.inject("checkpoint:rename", step)
        _make_visible(aside, root, step)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeErrors of its own
        shutil.rmtree(aside, ignore_errors=True)
        cause = state.error if state and state.error else error
        return f"{type(cause).__name__}: {cause}{_left(cause, root)}"
    there = checkpoints(root)
    best = best_of(there) if keep_best else None
    for old in there[:-keep]:
        if best is None or old != best[0]:
            shutil.rmtree(old, ignore_errors=True)
    return None


def _left(cause: Exception, root: Path) -> str:
    """Of a disk that is full: which one, since the error of a write names no file, and how much of it is left."""
    if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    with suppress(OSError):
        return f": {root} (the file system has {shutil.disk_usage(root).free >> 20} MB left)"
    return f": {root}"


def read_newest(root: Path, note: Note) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the newest checkpoint that is whole; None if there are no checkpoints.

    Newer ones are reported, and get another name, so that they are neither tried again nor counted.

    Raises:
        NoneWhole: there are some, and none is whole or can be read. They are left as they are.
        Exception: what torch.load raises of a file that is as it was written.
    """
    there, broken = checkpoints(root), dict[Path, Exception]()
    for candidate in reversed(there):
        try:
            payload = read(candidate, note)
        except (OSError, Damaged) as error:
            log.warning("skipping broken checkpoint %s: %s", candidate, error)
            broken[candidate] = error
            continue
        for path in broken:
            with suppress(OSError):
                path.rename(root / f"broken-{path.name}")
        return candidate.name, payload
    if broken and checkpoints(root) == there:
        raise NoneWhole("; ".join(f"{path.name}: {error}" for path, error in broken.items()))
    return read_newest(root, note) if broken else None  # another job has changed them meanwhile


def read(directory: Path, note: Note) -> dict[str, Any]:
    """What the checkpoint holds, on the CPU. Its files are compared with their checksums while they are read.

    Raises:
        Damaged: they differ.
        OSError: they cannot be read.
        UnpicklingError: the file is as it was written, and `torch.load` does not take it with `weights_only=True`.
    """
    files = _expected(directory)
    for name, (size, sums) in files.items():
        try:
            differs = (directory / name).stat().st_size != size
            differs = differs or (name != STATE and _sha256(directory / name) != sums.sha256)
        except ValueError as error:  # no file can have this name
            raise Damaged(f"manifest.json names {name!r}: {error}") from error
        if differs:
            raise Damaged(f"{name} does not match its checksum")
    sums = files[STATE][1]
    note_bytes = _in_gigabytes(note, f"of {directory.name} read")
    with HashedReader(directory / STATE, note_bytes, sums.piece) as state:
        try:
            payload = torch.load(state, map_location="cpu", weights_only=True)  # type: ignore[arg-type]  # as above
        except Exception as error:
            if state.digest() != (sums.pieces or sums.sha256):
                raise Damaged(f"{STATE} does not match its checksum") from error
            raise
        if state.digest() != (sums.pieces or sums.sha256):
            raise Damaged(f"{STATE} does not match its checksum")
    return dict(payload)


def _make_visible(aside: Path, root: Path, step: int) -> None:
    while True:
        try:
            os.replace(aside, root / _new_name(root, step))
            break
        except OSError as error:  # another job took the name a moment ago
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    _sync_directory(root)


def _remove_leftovers(root: Path) -> None:
    """Of killed writers: those of this host at once, of others after an hour, which nobody takes between two files."""
    for path in root.glob(".writing-*"):
        host, _, pid = path.name.removeprefix(".writing-").rpartition("-")
        with suppress(OSError):
            ended = host == socket.gethostname() and pid.isdecimal() and not Path("/proc", pid).exists()
            if ended or time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir())) > 3600:
                shutil.rmtree(path, ignore_errors=True)


def _new_name(root: Path, step: int) -> str:
    """A name that sorts after all of this step: an older one is never taken away before the new one is there."""
    name = f"step_{step:08d}"
    taken = [int(path.suffix[1:] or 0) for path in checkpoints(root) if path.stem == name]
    return f"{name}.{max(taken) + 1:03d}" if taken else name


def _expected(directory: Path) -> dict[str, tuple[int, Checksums]]:
    """Size and checksums of each file, by the manifest."""
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        found = {str(name): (int(each["bytes"]), _checksums(each)) for name, each in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:  # 1e999; [[[[...
        raise Damaged(f"manifest.json: {error!r}") from error
    if STATE not in found:
        raise Damaged(f"manifest.json names no {STATE}")
    return found


def _checksums(of_file: dict[str, Any]) -> Checksums:
    pieces = of_file.get("pieces")  # releases before 0.5.0 write none
    if not pieces:
        return Checksums(str(of_file["sha256"]))
    if not 0 < int(pieces["bytes"]) <= LARGEST_PIECE:
        raise ValueError(f"pieces of {pieces['bytes']} bytes")
    return Checksums(str(of_file["sha256"]), int(pieces["bytes"]), str(pieces["sha256"]))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(PIECE):
            digest.update(chunk)
    return digest.hexdigest()


def _in_gigabytes(note: Note, what: str) -> Callable[[int], None]:
    return lambda done: note(f"{done / 1e9:.2f} GB {what}")


def _sync_directory(path: Path) -> None:
    """Without it new or renamed entries can be lost in a power failure: fsync(2) of a file is not one of its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
