"""All rules on all files: in this process, or, if there is much to read, in one for each CPU."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from .files import SourceFile
from .findings import Finding
from .python import findings, is_python
from .python.parts import parts_of
from .shell.files import check_scripts, project_of
from .variables import Project

LARGE = 1_500_000  # characters: below that, starting processes costs more than it saves
PER_PROCESS = 4  # bins for each process, since they do not take equally long


@dataclass(frozen=True)
class Work:
    """What the processes have in common; they are forked, and so it is not sent to them."""

    bins: tuple[tuple[SourceFile, ...], ...]
    texts: tuple[str, ...]
    project: Project


_work: list[Work] = []


def found_in(files: Sequence[SourceFile]) -> list[Finding]:
    """Return what all rules find in files. How many processes read them makes no difference."""
    cpus = _cpus()
    if cpus < 2 or sum(len(file.text) for file in files) < LARGE or not _may_fork():
        return [*check_scripts(files), *findings(files)]
    try:
        return _in_processes(files, cpus)
    except (BrokenProcessPool, OSError):  # no memory for another process, or one was killed
        return [*check_scripts(files), *findings(files)]


def _cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _may_fork() -> bool:
    """Tell whether a forked process can work: elsewhere than on Linux libraries forbid it, and threads hold locks."""
    return sys.platform == "linux" and threading.active_count() == 1


def _in_processes(files: Sequence[SourceFile], cpus: int) -> list[Finding]:
    python = [file for file in files if is_python(file)]
    others = [[file] for file in files if not is_python(file)]
    bins = divided([*parts_of(python), *others], cpus * PER_PROCESS)
    if len(bins) < 2:
        return [*check_scripts(files), *findings(files)]
    _work.append(Work(bins, tuple(file.text for file in python), project_of(files)))
    try:
        with ProcessPoolExecutor(cpus, multiprocessing.get_context("fork")) as pool:
            return [one for found in pool.map(_found_in_bin, range(len(bins))) for one in found]
    finally:
        _work.pop()


def _found_in_bin(number: int) -> list[Finding]:
    work = _work[-1]
    files = work.bins[number]
    return [*check_scripts(files, work.project), *findings(files, work.texts)]


def divided(parts: Sequence[Sequence[SourceFile]], count: int) -> tuple[tuple[SourceFile, ...], ...]:
    """Return the parts in at most `count` bins of about one length, the longest first; no part is cut."""
    bins: list[list[SourceFile]] = [[] for _ in range(count)]
    lengths = [0] * count
    for part in sorted(parts, key=lambda part: -sum(len(file.text) for file in part)):
        least = lengths.index(min(lengths))
        bins[least] += part
        lengths[least] += sum(len(file.text) for file in part)
    ordered = sorted(zip(lengths, bins, strict=True), key=lambda pair: -pair[0])
    return tuple(tuple(files) for _, files in ordered if files)
