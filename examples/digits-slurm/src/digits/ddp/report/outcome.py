"""How a run ended, for launch scripts and for people: outcome.json, attempts.jsonl and the run directory's layout."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import CONFIG
from ..kinds import Verdict
from . import json_lines

log = logging.getLogger("ddp")
STARTED = time.time()  # about when this process began; the imports before can take half a minute on a busy host
with suppress(OSError, ValueError, AttributeError, IndexError):  # exactly, where there is /proc: proc(5), starttime
    _ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    STARTED -= time.clock_gettime(time.CLOCK_BOOTTIME) - _ticks / os.sysconf("SC_CLK_TCK")
VERSION = 1  # of the run directory's format: a public contract, see README.md


def make_folders(run_dir: Path) -> None:
    """What ranks write into. Rank 0 makes them, and so does every rank where nodes have directories of their own."""
    for name in ("logs", "heartbeats", "stacks", "checkpoints", "samples"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)


def begin(run_dir: Path, attempt: int, world_size: int) -> None:
    """Make the run directory and note that an attempt begins. Rank 0 only."""
    make_folders(run_dir)
    (run_dir / "outcome.json").unlink(missing_ok=True)
    if attempt == 0:  # started by hand, so an old wish to stop is over; an automatic restart still honours it
        (run_dir / "stop").unlink(missing_ok=True)
    _append(run_dir, {"event": "start", "attempt": attempt, "world_size": world_size, "time": round(time.time(), 1)})


def write(run_dir: Path, verdict: Verdict, attempt: int, replace: bool = False, at: float | None = None) -> bool:
    """Write outcome.json; the first rank to do so in an attempt wins. Returns whether this one did.

    What an earlier attempt left is replaced; with `replace` so is what is older than this process: the run was started
    again by hand, as the same attempt. `at` is when it ended, if that is not now.

    torchrun turns every exit code into 1, so launch scripts read this file instead.
    """
    content = {"version": VERSION, **verdict.as_dict(), "attempt": attempt}
    content["time"] = round(time.time() if at is None else at, 1)
    aside, final = run_dir / f".outcome-{os.getpid()}.json", run_dir / "outcome.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(content, indent=1))
        try:
            os.link(aside, final)  # fails if it exists: unlike rename, never replaces what another rank wrote
        except FileExistsError:
            if not _outdated(json.loads(final.read_text()), attempt, replace):
                return False
            os.replace(aside, final)
        finally:
            aside.unlink(missing_ok=True)
        _append(run_dir, {"event": "end", **content})
    except (OSError, ValueError) as error:
        log.warning("outcome.json not written: %s", error)
        return False
    return True


def found_by_child(run_dir: Path, attempt: int) -> Verdict | None:
    """What a child of a rank has found wrong in this attempt: such a child is no rank and can end no other one."""
    try:
        content = json.loads((run_dir / "outcome.json").read_text())
        names = {field.name for field in fields(Verdict)}
        if content["attempt"] == attempt and content["exit_code"] == CONFIG:
            return Verdict(**{name: value for name, value in content.items() if name in names})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _outdated(existing: dict[str, Any], attempt: int, replace: bool) -> bool:
    if existing.get("attempt", attempt) != attempt:
        return bool(existing["attempt"] < attempt)
    return replace and existing.get("time", 0) < STARTED


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    """All events of attempts.jsonl, oldest first; what a kill cut short, or is no event, is left out."""
    return [event for event in json_lines.read(run_dir / "attempts.jsonl") if _is_event(event)]


def _is_event(row: dict[str, Any]) -> bool:
    numbers = ("attempt", "time", "world_size") if row.get("event") == "start" else ("attempt", "time")
    return row.get("event") in ("start", "end") and all(json_lines.is_number(row.get(name)) for name in numbers)


def known(run_dir: Path) -> list[dict[str, Any]]:
    """The events of `attempts`, and the end in outcome.json where a kill or a full disk kept it from attempts.jsonl."""
    events = attempts(run_dir)
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((run_dir / "outcome.json").read_text())
        last = events[-1] if events else {"event": "start", "attempt": content["attempt"]}
        if (last["event"], last["attempt"]) == ("start", content["attempt"]):
            events.append({"event": "end", **content})
    return events


def _append(run_dir: Path, event: dict[str, Any]) -> None:
    json_lines.append(run_dir / "attempts.jsonl", [event])
