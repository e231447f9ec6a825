"""Whether checkpoints can be written, and whether all ranks see the same directory."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..agree import from_rank0, gather
from ..polling import poll
from ..start.findings import Finding
from ..start.groups import Job
from ..start.launcher import has_own_disk
from ..start.settings import RunSettings

LITTLE_DISK = 1 << 30
APPEAR_S = 3.0  # until a new file is seen on the other nodes


def checkpoint_directory(run: RunSettings) -> Path:
    """Where checkpoints of this run will be, as far as that exists already."""
    found = run.dir
    for name in (run.id, "checkpoints") if run.id else ():
        if not (found / name).exists():
            break
        found /= name
    return found.absolute()


def writable(directory: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Whether a file can be written there; with fsync, as for a checkpoint: a full quota may show only then."""
    probe = directory / f".preflight-{os.uname().nodename}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        remedy = "set run.dir to a directory that every rank can write to"
        return {"disk_gb": None}, [Finding(f"cannot write to {directory}: {error}", remedy)]
    found = [Finding(f"{directory} has {free >> 20} MB left", "make room", warning=True)] if free < LITTLE_DISK else []
    return {"disk_gb": free >> 30}, found


def shared(job: Job, directory: Path) -> list[Finding]:
    """Every rank writes a file; rank 0 looks for all of them, the others for rank 0's. Every rank calls it.

    By name, never by listing: a network file system may answer an old listing for a minute. Where each node has a
    directory of its own, which the launch script has filled and keeps in a bucket, there is nothing to share.
    """
    if has_own_disk():
        return []
    token = from_rank0(job, f"{time.time():.6f}-{os.getpid()}")
    files = [directory / f".preflight-{token}-{rank}" for rank in range(job.world_size)]
    mine = files[job.rank]
    try:
        mine.write_text(job.place.host)
        wrote = True
    except OSError:
        wrote = False  # which `writable` has said already
    try:
        there = gather(job, wrote)
        others = range(1, job.world_size) if job.rank == 0 else [0]
        unseen = _unseen([rank for rank in others if there[rank] and wrote], files, job.hosts)
        every = gather(job, unseen)
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
    alone = sorted({*every[0], *(rank for rank in range(1, job.world_size) if every[rank])})
    what = f"{directory} is not the directory that rank 0 ({job.hosts[0]}) sees under this name"
    remedy = "set run.dir to a file system that all nodes share, with an absolute path"
    return [Finding(what, remedy, ranks=tuple(alone))] if alone else []


def _unseen(ranks: list[int], files: list[Path], hosts: tuple[str, ...]) -> list[int]:
    """Of these ranks, those whose file does not come up here, or says something else."""
    unseen = list(ranks)

    def all_seen() -> bool:
        unseen[:] = [rank for rank in unseen if not _says(files[rank], hosts[rank])]
        return not unseen

    poll(all_seen, APPEAR_S, pause_s=0.1)
    return unseen


def _says(file: Path, text: str) -> bool:
    try:
        return file.read_text() == text
    except OSError:
        return False
