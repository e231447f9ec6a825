"""The picture of a failure as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Chrome's Trace Event Format: "X" is a span with its duration, "i" an instant, "M" names a process or a thread. Times are
microseconds. A host is a process there, and a rank a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .sentence import clock_name, phase_name, sentence
from .timeline import Timeline


def write(timeline: Timeline, end: Mapping[str, Any], path: Path) -> None:
    """Write the trace to `path`. Raises OSError."""
    content = {
        "traceEvents": list(_events(timeline, end)),
        "displayTimeUnit": "ms",
        "otherData": {"summary": sentence(timeline, end), "kind": end.get("kind", ""), "reason": end.get("reason", "")},
    }
    path.write_text(json.dumps(content))


def _events(timeline: Timeline, end: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    hosts = list(dict.fromkeys(row.host for row in timeline.rows))
    zero = min((row.spans[0].begin for row in timeline.rows if row.spans), default=0.0)

    def at(seconds: float) -> float:
        return round(1e6 * (seconds - zero), 1)

    for number, host in enumerate(hosts):
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": host}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    for row in timeline.rows:
        place = {"pid": hosts.index(row.host), "tid": row.rank}
        name = f"rank {row.rank}" + (" (to blame)" if row.rank in (end.get("first_ranks") or []) else "")
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": row.rank}}
        for span in row.spans:
            last = span is row.spans[-1]
            about = {"step": span.step, **({"call": row.call, "line": row.line} if last else {})}
            yield {
                "ph": "X",
                "name": phase_name(span.phase) + (" (waits)" if span.waits else ""),
                "cat": "wait" if span.waits else "phase",
                "ts": at(span.begin),
                "dur": round(1e6 * (span.end - span.begin), 1),
                **place,
                "args": about,
            }
    name = f"the {clock_name(timeline)} rang" if timeline.clock else f"{end.get('kind', 'the end')} noticed"
    rang = {"ph": "i", "name": name, "cat": "clock", "ts": at(timeline.rang_at)}
    blamed = [row for row in timeline.rows if row.rank in (end.get("first_ranks") or [])]
    for row in blamed:  # in its row: Perfetto gives an instant of the whole trace a row without a name
        yield {**rang, "pid": hosts.index(row.host), "tid": row.rank, "s": "t"}
    if not blamed:
        yield {**rang, "pid": 0, "tid": 0, "s": "g"}
