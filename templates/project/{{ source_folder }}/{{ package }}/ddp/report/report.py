"""report.md, from the files of the run directory only: `python -m <package>.ddp.report runs/<id>` makes it again."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..best import best_of, checkpoints
from ..errors import DONE, STOPPED
from ..rank_state import RankState
from . import json_lines, outcome, picture, silence, timeline, trace_events
from .chart import line_chart
from .sentence import sentence
from .speed import speed_rows, without_numbers

log = logging.getLogger("ddp")
MARKS = {
    "done": "✔ done",
    "stopped": "■ stopped, to be continued",
    "stalled": "✘ stalled",
    "failed": "✘ failed",
    "config": "✘ wrong configuration",
}


def write(run_dir: Path, running: bool = True) -> bool:
    """Write report.md, loss.svg and, of the last end that was not clean, timeline.svg.

    Unless the run calls this itself (`running`), a start without an end may be one of which no rank has lived to tell.
    A problem here is a warning: the run's end must not depend on its report. Returns whether report.md was written.
    """
    try:
        metrics = _read_lines(run_dir / "metrics.jsonl")
        (run_dir / "loss.svg").write_text(line_chart(_series(metrics, ("loss", "val_loss"))))
        text = "\n\n".join(_sections(run_dir, metrics, running)) + "\n"
        (run_dir / "report.md").write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("report.md not written: %s: %s", type(error).__name__, error)
        return False
    return True


def note_slow(run_dir: Path, step: int, texts: Sequence[str]) -> None:
    """Keep what was noticed about slow ranks and steps, and write the report while training goes on. Rank 0 only."""
    try:
        json_lines.append(run_dir / "slow.jsonl", [{"step": step, "text": text} for text in texts])
    except OSError as error:
        log.warning("slow.jsonl not written: %s", error)
    write(run_dir)


def _end_of(events: list[dict[str, Any]], start: int) -> dict[str, Any]:
    """How the start with this number, from 1 on, has ended; empty if nothing tells."""
    at = [number for number, event in enumerate(events) if event["event"] == "start"]
    following = events[at[start - 1] + 1 :] if 0 < start <= len(at) else []
    return following[0] if following and following[0]["event"] == "end" else {}


def _last_end(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How the run has ended; empty while its last start has left no end."""
    return events[-1] if events and events[-1]["event"] == "end" else {}


def _picture(run_dir: Path, events: list[dict[str, Any]], silent: timeline.Timeline | None) -> tuple[int, list[str]]:
    """Draw the last end that was not clean, if there was one; returns which start it was of, and what to say of it."""
    start = sum(event["event"] == "start" for event in events)
    try:
        found = silent or timeline.load(run_dir)
        if found is None:
            return start, []
        start, end = found.start, _end_of(events, found.start)
        (run_dir / "timeline.svg").write_text(picture.draw(found, end), encoding="utf-8")
        said = escaped(sentence(found, end))
        return start, [f"![{said}](timeline.svg)", f"{said}."]
    except Exception as error:  # whatever the file holds: the report is what matters
        return start, [escaped(f"There is no picture of the ranks: {type(error).__name__}: {error}")]


def escaped(text: str) -> str:
    """Text of others (names of phases and metrics, messages) in one line that Markdown shows as it is, also in a table.

    Only what would mean something there gets a backslash (GitHub Flavored Markdown, 2.4), since people read the file
    as it is, too: `_` within a word does not, nor do brackets without square ones before them.
    """
    line = " ".join(text.split("\n")).replace("\r", " ")
    line = re.sub(r"([\\`*\[\]<|~$]|&(?=[#\w])|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)
    return re.sub(r"^(\s*\d*)([#>]|[-+=.)](?=[\s=-]|$))", r"\1\\\2", line)


def _fenced(text: str) -> str:
    """A block of code, within more backquotes than stand side by side in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _sections(run_dir: Path, metrics: list[dict[str, Any]], running: bool) -> list[str]:
    events = outcome.known(run_dir)
    left = None if running else silence.seen(run_dir, events)
    events += [left[1]] if left else []
    last = _last_end(events)
    # `seen` has told of a start that is over; while the run itself writes, a rank that leaves may have given it back.
    going_on = bool(events) and not last and (not running or silence.may_go_on(run_dir))
    otherwise = "going on" if going_on else "no outcome yet"
    parts = [f"# Run {escaped(run_dir.name)}: {MARKS.get(last.get('outcome', ''), otherwise)}"]
    if last.get("reason") and last["outcome"] != "done":
        reason = "\n".join(map(escaped, str(last["reason"]).splitlines()))
        parts.append(f"**{last['kind']}**: {reason}")
        parts += [f"What to do: {last['advice']}."] if last["advice"] else []
    elif ": " in str(last.get("reason", "")):  # an early stop, or no step to make
        parts.append(f"{escaped(str(last['reason']))}.")
    drawn, picture_of_ranks = _picture(run_dir, events, left and left[0])
    starts = sum(event["event"] == "start" for event in events)
    parts += picture_of_ranks if drawn == starts else []
    parts += [f"Stack of rank {rank}:\n\n{_fenced(stack)}" for rank, stack in last.get("stacks", {}).items()]
    parts += ["## Attempts", _attempt_table(events, going_on)]
    parts += [f"Start {drawn}:", *picture_of_ranks] if drawn != starts else []
    if metrics:
        parts += ["## Metrics", "![loss over steps](loss.svg)", _metric_table(metrics)]
        parts += _best_checkpoint(run_dir)
        parts += _speed(metrics, events)
    pictures = sorted((run_dir / "samples").glob("*.png"))
    if pictures:
        newest = pictures[-1]
        parts += ["## Samples", f"![newest samples](samples/{newest.name})"]
        parts += [f"{newest.stem}, {len(pictures)} pictures in samples/"]
    ranks = next((event["world_size"] for event in reversed(events) if event["event"] == "start"), 0)
    states = _states(run_dir / "heartbeats" / f"rank{rank}.json" for rank in range(int(ranks)))
    if states:
        parts += ["## Ranks", "Seconds in each phase that took 1% or more, since the last start.", _rank_table(states)]
    slow = _slow(run_dir / "slow.jsonl")
    if slow:
        parts += ["## Slow ranks and steps", "\n".join(f"- {escaped(text)}" for text in slow[-10:])]
        parts += [f"The last 10 of {len(slow)}; all are in slow.jsonl."] if len(slow) > 10 else []
    settings = (run_dir / "settings.txt").read_text(errors="replace") if (run_dir / "settings.txt").exists() else ""
    parts += ["<details><summary>Effective settings, and who set each</summary>", _fenced(settings), "</details>"]
    return parts


def _attempt_table(events: list[dict[str, Any]], going_on: bool) -> str:
    """One row a start; an end belongs to the start before it. One without an end was killed, or is `going_on`."""
    rows: list[list[str]] = []
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    for number in starts:
        event, ended = events[number], _end_of(events, len(rows) + 1)
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        if going_on and number == starts[-1]:
            how = ["", "going on", ""]
        elif ended:
            why = str(ended["reason"]).splitlines() or [""]
            how = [f"{ended['time'] - event['time']:.0f} s", str(ended["outcome"]), why[0]]
        else:
            how = ["?", "?", "left no outcome: killed from outside"]
        rows.append([str(len(rows) + 1), str(event["world_size"]), began, *how])
    if not rows:
        return "No start is on record."
    return _table(["start", "ranks", "began", "took", "outcome", "why"], rows)


def _metric_table(metrics: list[dict[str, Any]]) -> str:
    """The last value of each metric, and its step."""
    last = {name: (row[name], row["step"]) for row in metrics for name in without_numbers(row) - {"step"}}
    rows = [
        [name, "not finite" if value is None else f"{value:.5g}", str(step)]
        for name, (value, step) in sorted(last.items())
    ]
    return _table(["metric", "last value", "at step"], rows)


def _best_checkpoint(run_dir: Path) -> list[str]:
    found = best_of(checkpoints(run_dir / "checkpoints"))
    if found is None:
        return []
    path, rating = found
    step, better = int(path.name.split(".")[0].removeprefix("step_")), "higher" if rating.higher_is_better else "lower"
    what = f"{escaped(rating.name)} {rating.value:.5g} ({better} is better)"
    return [f"Best checkpoint: step {step}, {what}, in checkpoints/{path.name}."]


def _speed(metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[str]:
    began = max((event["time"] for event in events if event["event"] == "start"), default=0.0)
    rows = speed_rows(metrics, began)
    about = "Of the lines since the last start, whose first step is left out."
    return ["## Speed", about, _table(["", "median", "last"], rows)] if rows else []


def _states(paths: Iterable[Path]) -> list[RankState]:
    """The last heartbeats that are there and whole: a full disk or a power failure may have left an empty one."""
    found = []
    for path in paths:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(RankState.from_json(path.read_text()))
    return found


def _rank_table(states: list[RankState]) -> str:
    longest = max(sum(state.phase_seconds.values()) for state in states)
    names = sorted({name for state in states for name, spent in state.phase_seconds.items() if spent >= longest / 100})
    rows = [
        [str(state.rank), state.host, str(state.step), state.phase]
        + [f"{state.phase_seconds.get(name, 0.0):.1f}" for name in names]
        for state in sorted(states, key=lambda state: state.rank)
    ]
    return _table(["rank", "host", "step", "last phase", *names], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[escaped(cell) for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _series(metrics: list[dict[str, Any]], names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(row["step"], row[name]) for row in metrics if row.get(name) is not None] for name in names}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Metrics of the steps that count: after a resume, steps made again replace those made before."""
    rows: list[dict[str, Any]] = []
    for read in json_lines.read(path) if path.is_file() else []:
        row = {name: value for name, value in read.items() if value is None or json_lines.is_number(value)}
        if row.get("step") is None:
            continue
        while rows and _replaces(row, rows[-1]):
            rows.pop()
        rows.append(row)
    return rows


def _slow(path: Path) -> list[str]:
    rows = json_lines.read(path) if path.is_file() else []
    return [f"step {row['step']}: {row['text']}" for row in rows if {"step", "text"} <= row.keys()]


def _replaces(row: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """A step can have two rows that count, of training and of evaluation: they differ in their names."""
    step: int = earlier["step"]
    return step > row["step"] or (step == row["step"] and without_numbers(earlier) == without_numbers(row))


def main() -> None:
    """Make the reports of the run directories that the command line names, or a trace of one of them."""
    parser = argparse.ArgumentParser(description="Make report.md again, from the files of a run directory.")
    parser.add_argument("runs", nargs="*", type=Path, help="run directories; --trace takes the newest in runs/")
    parser.add_argument("--ended", action="store_true", help="no rank is alive: if none has left an outcome, make one")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last bad end there, for Perfetto")
    options = parser.parse_args()
    runs = options.runs
    if options.trace and not runs:
        newest = sorted(Path("runs").glob("*/attempts.jsonl"), key=lambda path: path.stat().st_mtime)
        runs = [path.parent for path in newest[-1:]]
    if options.trace and len(runs) != 1:
        what = "of one run, not of several" if runs else "of a run, and there is none in runs/"
        sys.exit(f"error: a trace is {what}\n  -> name one run directory")
    failed = False
    for run_dir in runs:
        if not (run_dir / "attempts.jsonl").exists():
            sys.exit(f"error: {run_dir} is not a run directory (no attempts.jsonl)")
        if options.trace:
            _write_trace(run_dir, options.trace)
            continue
        if options.ended and not silence.may_go_on(run_dir, os.environ) and (said := silence.record(run_dir)):
            print(said)
        if write(run_dir, running=False):
            print(run_dir / "report.md")
        else:
            failed = True
    if failed:
        sys.exit(1)


def _write_trace(run_dir: Path, path: Path) -> None:
    try:
        events = outcome.known(run_dir)
        left = silence.seen(run_dir, events)
        found = left[0] if left else timeline.load(run_dir)
        if found is None:
            sys.exit(f"error: {run_dir} has no {timeline.FILE}: {_why_none(run_dir, events)}")
        trace_events.write(found, left[1] if left else _end_of(events, found.start), path)
    except (OSError, ValueError) as error:
        sys.exit(f"error: no trace of {run_dir}: {error}")
    except (KeyError, TypeError) as error:
        sys.exit(f"error: no trace of {run_dir}: a line of attempts.jsonl is spoilt: {type(error).__name__}: {error}")
    print(path)


def _why_none(run_dir: Path, events: Sequence[dict[str, Any]]) -> str:
    """Why there is nothing to make a trace of, and what to do."""
    last = _last_end(events)
    if not events:
        return "attempts.jsonl holds no whole line, so no start is on record\n  -> name another run"
    if not last:
        return "it is going on, and no start has left one so far\n  -> wait for its end, or name another run"
    reason = (str(last["reason"]).splitlines() or [""])[0]
    if last["exit_code"] in (DONE, STOPPED):
        return f"it has ended well ({reason})\n  -> name another run"
    how = f"it ended with {last['exit_code']} ({last['kind']}: {reason}), and no rank has left word of what it did"
    return f"{how}\n  -> read {run_dir / 'outcome.json'}, or name another run"
