"""A start of which no rank has lived to tell: all were killed, or their hosts are gone. What is on disk must do.

That is the last heartbeat of each rank, up to `log.heartbeat_s` old, on gloo the phase that it had come to, and what
the interpreter of a rank has written about its own end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import STALLED
from ..kinds import KINDS, Verdict
from ..processes import CLAIM, JOBS, began, space
from ..rank_state import RankState
from ..ranks import ranges
from . import outcome, timeline
from .sentence import heard_of, sentence

log = logging.getLogger("ddp")
_Moved = tuple[float, str, int]  # when, to which phase, at which step
LINE = 1000  # bytes of the first thing in collective<N>.json
QUIET_S = 90.0  # without a sign of life for so long, whoever has owned the directory is gone
KIND = {"kind": "rank_killed", "first_ranks": None}
# What an interpreter writes about its own end -> what that means.
WORDS = {
    "Timeout (": "could run no Python code for clocks.silent_s: stuck in C code that holds the GIL, or suspended",
    "Fatal Python error": "crashed: a fault in C or CUDA code",
    "ends with exit code": "called os._exit",
}


def record(run_dir: Path) -> str:
    """If the last start has left no end, leave one for it, and its timeline; returns what is to be said of it, or "".

    Call it only when none of its ranks can be alive. A problem is a warning.
    """
    try:
        events = outcome.attempts(run_dir) if (run_dir / "attempts.jsonl").exists() else []
        lines = what_is_left(run_dir, events)
        if not lines:
            return ""
        verdict, at = _verdict(run_dir, lines)
        aside = run_dir / f".{timeline.FILE}-{os.getpid()}"
        aside.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(aside, run_dir / timeline.FILE)
        outcome.write(run_dir, verdict, int(events[-1]["attempt"]), replace=True, at=at)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("no report of the last start, which left no outcome: %s: %s", type(error).__name__, error)
        return ""
    return f"{verdict.kind}: {verdict.reason}"


def seen(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> tuple[timeline.Timeline, dict[str, Any]] | None:
    """Timeline and end of the last start if it has left none and is not going on, without leaving anything."""
    lines = [] if may_go_on(run_dir) else what_is_left(run_dir, events)
    if not lines:
        return None
    verdict, at = _verdict(run_dir, lines)
    return timeline.of_lines(lines), {"event": "end", **verdict.as_dict(), "time": at}


def what_is_left(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of timeline.jsonl, of a start without an end; none if the last one has left an end."""
    if not events or events[-1]["event"] != "start":
        return []
    size, started = int(events[-1]["world_size"]), float(events[-1]["time"]) - 1
    states = [_state(run_dir / "heartbeats" / f"rank{rank}.json", started) for rank in range(size)]
    entered = [_entered(run_dir / "heartbeats" / f"collective{rank}.json", started) for rank in range(size)]
    signs = [at for at, _ in filter(None, states)] + [at for at, _, _ in filter(None, entered)]
    for path in (*(run_dir / "logs").glob("rank*.log"), run_dir / "metrics.jsonl", run_dir / "attempts.jsonl"):
        with suppress(OSError):
            signs.append(path.stat().st_mtime)
    last = max(signs)
    listed = _hosts(run_dir, size)
    hosts = [found[1].host if found else listed[rank] for rank, found in enumerate(states)]
    head: dict[str, Any] = {"version": timeline.VERSION, "start": sum(event["event"] == "start" for event in events)}
    head |= {"world_size": size, "hosts": hosts, "author": 0, "now": int(1e6 * last), "time": last, "rang": None}
    lines = [head]
    for rank, (told, moved) in enumerate(zip(states, entered, strict=True)):
        changes = _changes(told, moved) or [(started, timeline.NO_WORD, 0)]
        about = {"rank": rank, "host": hosts[rank], "clock": "files", "ended": "", "gone_at": int(1e6 * last)}
        lines.append({**about, "changes": [[int(1e6 * at), phase, step] for at, phase, step in changes]})
    return lines


def _changes(told: tuple[float, RankState] | None, moved: _Moved | None) -> list[tuple[float, str, int]]:
    """When, to which phase, at which step: from the last heartbeat, and the last change of phase if that is known."""
    found = []
    if told:
        at, state = told
        found = [(at - state.in_phase_s, state.phase, state.step), (at, timeline.NO_WORD, state.step)]
    if moved:
        found = [change for change in found if change[0] < moved[0] and change[1] != timeline.NO_WORD] + [moved]
    return found


def last_words(run_dir: Path, rank: int) -> str:
    """What the interpreter of `rank` has written about its own end in this attempt: a crash, or a GIL held too long."""
    try:
        text = (run_dir / "stacks" / f"rank{rank}.txt").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition("=== attempt ")[2].partition("\n")[2][-8000:]


def _verdict(run_dir: Path, lines: Sequence[dict[str, Any]]) -> tuple[Verdict, float]:
    """Why, and when the last sign of life was."""
    rows = timeline.of_lines(lines)
    steps = [span.step for row in rows.rows for span in row.spans]
    reason, advice = sentence(rows, KIND), KINDS["rank_killed"].advice
    found: dict[str, list[int]] = {}
    words = {rank: last_words(run_dir, rank) for rank in range(len(rows.rows))}
    for rank, text in words.items():
        if what := next((what for sign, what in WORDS.items() if sign in text), ""):
            found.setdefault(what, []).append(rank)
    if found:
        reason += "".join(f"; rank{'s' * (len(ranks) > 1)} {ranges(ranks)} {what}" for what, ranks in found.items())
    first = sorted(rank for ranks in found.values() for rank in ranks) or None
    stacks = {str(rank): words[rank] for rank in (first or [])[:8]}
    phase = next((span.phase for row in rows.rows if (span := heard_of(row))), None)
    verdict = Verdict(STALLED, "rank_killed", reason, first, phase, max(steps, default=0), advice, stacks)
    return verdict, rows.time


def _state(path: Path, started: float) -> tuple[float, RankState] | None:
    """The last heartbeat of this start, and when it was written."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if (at := path.stat().st_mtime) >= started:
            return at, RankState.from_json(path.read_text())
    return None


def _entered(path: Path, started: float) -> _Moved | None:
    """The last change of phase, which trace/collectives.py keeps on gloo as the second thing in this file."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if (at := path.stat().st_mtime) >= started:
            kept = json.loads(path.read_bytes()[LINE:].decode(errors="replace"))
            return at, str(kept["phase"]), int(kept["step"])
    return None


def _hosts(run_dir: Path, size: int) -> list[str]:
    """As environment.txt lists them."""
    found = {}
    with suppress(OSError):
        found = dict(re.findall(r"^rank (\d+) host (\S+)$", (run_dir / "environment.txt").read_text(), re.MULTILINE))
    return [found.get(str(rank), "unknown host") for rank in range(size)]


def may_go_on(run_dir: Path, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the owner of the directory is alive, or may be: of one on another host only the files tell.

    Args:
        environ: that of a launch script whose ranks have all ended: what it, or its job, has taken goes on no more.
    """
    try:
        owner = json.loads((run_dir / "owner.json").read_text())
        jobs = [environ.get(name) for name in JOBS] if environ else []
        if environ and (owner["token"] == environ.get(CLAIM) or (owner["job"] and owner["job"] in jobs)):
            return False
        if (owner["host"], owner["space"]) == (socket.gethostname(), space()):
            return bool(owner["began"]) and began(owner["pid"]) == owner["began"]
        quiet_s = float(owner.get("quiet_s", QUIET_S))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        quiet_s = QUIET_S
    beats = [path.stat().st_mtime for path in (run_dir / "heartbeats").glob("rank*.json")]
    return time.time() - max(beats, default=0.0) < quiet_s
