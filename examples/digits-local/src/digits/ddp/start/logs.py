"""Where log lines go, and what a run writes down about itself at its start."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from .groups import Job
from .launcher import Place

log = logging.getLogger("ddp")
Rows = Sequence[tuple[str, str, str]]  # (setting, value, who set it)
SETTINGS = "settings.yaml"  # in the run directory: the values, as programs want them
PRECISION = "train.precision"  # a project's own setting: `auto` is what all ranks can train in

STDERR = 2  # its descriptor
# Beginnings of the environment variables that environment.txt keeps.
_LIBRARIES = ("TORCH", "NCCL_", "RCCL_", "GLOO_", "OMP_", "FI_", "CUDA_VISIBLE", "HIP_", "ROCR_")
RECORDED = ("DDP_", "SLURM_", "MASTER_", *_LIBRARIES)


class TypedRows(list[tuple[str, str, str]]):
    """Rows, and beside their texts the values by section, plain ones only: text does not tell '12' from 12."""

    def __init__(self, rows: Rows, values: dict[str, Any]) -> None:
        super().__init__(rows)
        self.values = values


def log_to_console(place: Place) -> None:
    """Everything of rank 0, and the warnings of the others with their rank and host."""
    handler = _ConsoleHandler()
    who = "" if place.rank == 0 else f"[rank {place.rank} {place.host}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(mark)s%(shown)s", "%H:%M:%S"))
    handler.setLevel(logging.INFO if place.rank == 0 else logging.WARNING)
    handler.addFilter(handler.takes)
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def show_whole_lines(whole: bool) -> None:
    """Whether the console gets all that the file gets, or the short form of the lines that have one.

    A line's short form is its `extra={"short": text}`; "" is for the file only.
    """
    for handler in log.handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.whole = whole


def log_to_file(directory: Path, place: Place) -> None:
    """Everything of this rank, to logs/rank<N>.log."""
    try:
        path = directory / "logs" / f"rank{place.rank}.log"
        handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        log.warning("no log file for this rank: %s", error)
        return
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank{place.rank} %(levelname)s %(message)s"))
    log.addHandler(handler)


def describe(directory: Path, job: Job, rows: Rows) -> None:
    """Print the effective settings with who set each, and keep them in the run directory."""
    place = job.place
    automatic = (PRECISION, "auto")
    values = rows.values if isinstance(rows, TypedRows) else None
    if values and automatic in (row[:2] for row in rows):
        section, key = PRECISION.split(".")
        values = {**values, section: {**values[section], key: job.precision}}
    rows = [(row[0], f"auto: {job.precision}", row[2]) if row[:2] == automatic else row for row in rows]
    _compare_precision(directory, rows)
    changed = _changed(directory, rows, job)
    names = max((len(name) for name, _, _ in rows), default=0)
    settings = "\n".join(f"  {name:<{names}}  {value}  ({who})" for name, value, who in rows)
    log.info("run %s, attempt %d, settings:\n%s", directory, place.attempt, settings)
    _warn_of_warmup(values or {})
    if changed:
        log.info("changed since the last start of this run: %s", ", ".join(changed))
    (directory / "settings.txt").write_text(settings + "\n")
    if values is not None:
        (directory / SETTINGS).write_text(yaml.safe_dump(values, sort_keys=False))
    facts = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"launcher {place.launcher}"]
    facts += [f"rank {rank} host {host}" for rank, host in enumerate(job.hosts)]
    facts += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(RECORDED))
    (directory / "environment.txt").write_text("\n".join(facts) + "\n")


def _changed(directory: Path, rows: Rows, job: Job) -> list[str]:
    """What is not as at the last start of this run: 'train.steps 100 -> 200', 'world size 4 -> 2'."""
    with suppress(OSError):
        lines = (directory / "settings.txt").read_text().splitlines()
        found = (re.fullmatch(r"  (\S+)\s{2,}(.*)  \(.*\)", line) for line in lines)
        before = {line[1]: line[2] for line in found if line}
        changed = [
            f"{name} {before[name] or 'empty'} -> {value or 'empty'}"
            for name, value, _ in rows
            if name in before and before[name] != value
        ]
        facts = (directory / "environment.txt").read_text()
        size, now = len(re.findall(r"^rank \d+ host ", facts, re.MULTILINE)), len(job.hosts)
        return [*changed, *([f"world size {size} -> {now}"] if size != now else [])]
    return []


def _warn_of_warmup(values: dict[str, Any]) -> None:
    train = values.get("train") or {}
    warmup, steps = train.get("warmup_steps", 0), train.get("steps", 0)
    if 0 < steps <= warmup and not train.get("fast_dev_run"):
        what = f"train.warmup_steps ({warmup}) is not below train.steps ({steps})"
        log.warning("%s, so the learning rate never gets to its highest value: lower train.warmup_steps", what)


def _compare_precision(directory: Path, rows: Rows) -> None:
    """Say it if `auto` is something else than at the last start, whose checkpoint this one goes on from."""
    before = now = ""
    with suppress(OSError):
        before = next((text for text in (directory / "settings.txt").read_text().splitlines() if PRECISION in text), "")
    now = next((value for name, value, _ in rows if name == PRECISION), "")
    was = re.search(r" auto: (\w+) ", before)
    if was and now.startswith("auto: ") and now != f"auto: {was[1]}" and any(directory.glob("checkpoints/step_*")):
        what = f"{PRECISION} is auto, which is {now.removeprefix('auto: ')} here and was {was[1]} at the last start"
        log.warning("%s: the run goes on in it. To keep what it was, set %s to %s", what, PRECISION, was[1])


def silence_console() -> None:
    """Log to files only from now on."""
    log.handlers[:] = [handler for handler in log.handlers if not isinstance(handler, _ConsoleHandler)]


def say_last(text: str) -> None:
    """Print once more before the process ends, in a thread: a terminal that nobody reads must not hold the end up.

    To the process's own stderr: user code may have replaced `print` or `sys.stderr`, or have switched logging off.
    """

    def speak() -> None:
        for stream in filter(None, (sys.stdout, sys.__stdout__)):
            with suppress(Exception):  # closed, full, or user code
                stream.flush()
        rest = f"{text}\n".encode(errors="backslashreplace")
        with suppress(OSError):  # the line is in outcome.json
            while rest:
                rest = rest[os.write(STDERR, rest) :]

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    thread.join(timeout=1)


class _ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the stubs
    """Prints above the progress bar instead of through it. A console that fails is given up, training goes on."""

    whole = False  # lines as they stand in the file

    def takes(self, record: logging.LogRecord) -> bool:
        """Not what is for files only; a warning must not look like one of many lines of metrics."""
        record.mark = "warning: " if record.levelno == logging.WARNING else ""
        short = None if self.whole else getattr(record, "short", None)
        record.shown = record.getMessage() if short is None else short
        return short != "" and not getattr(record, "file_only", False)

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        try:
            tqdm.write(self.format(record), file=sys.stderr)
            self.flush()
        except (OSError, ValueError, AttributeError):
            log.removeHandler(self)


class _FileHandler(logging.FileHandler):
    """A full disk costs one warning on the console, and the lines from then on."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        log.warning("%s is no longer written: %s", self.baseFilename, sys.exc_info()[1])
