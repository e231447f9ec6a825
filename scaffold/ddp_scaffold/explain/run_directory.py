"""Reads the run directory of a generated project: what its ranks found out themselves, before they ended.

The format is documented in docs/run-directory.md. Its verdict was made by ranks that could still ask each other, so
this repeats it and does not judge anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ddp_scaffold._errors import UsageError

from .explanation import Evidence, Explanation, RankRow, Span, Verdict
from .kinds import KINDS

MOST_BYTES = 64 * 2**20  # of one JSON file, or of one line
MOST_RANKS = 16_384
VERSION = 1
WAITS = ("agree", "wait:", "shutdown")  # phases in which a rank does nothing but wait for others
Record = Mapping[str, object]


def is_run_directory(folder: Path) -> bool:
    """Whether a generated project has left this folder."""
    return (folder / "attempts.jsonl").is_file() or (folder / "outcome.json").is_file()


def explain(folder: Path) -> Explanation:
    """Return what the run directory says of its last end.

    Raises UsageError where `folder` is no run directory, or outcome.json has another version.
    """
    if not is_run_directory(folder):
        raise UsageError(f"{folder} is no run directory.", "Name a folder with attempts.jsonl, as in runs/<id>.")
    outcome, line, file = _last_end(folder)
    timeline = _lines(folder / "timeline.jsonl")
    verdict = _verdict(folder, outcome, file, line)
    spans, gone = _spans(timeline, outcome)
    rows = tuple(_row(rank, folder, verdict, timeline, spans, gone) for rank in _ranks(folder, timeline))
    names = ("outcome.json", "attempts.jsonl", "timeline.jsonl")
    sources = tuple(str(folder / name) for name in names if (folder / name).is_file())
    return Explanation(verdict, rows, spans, sources)


def _last_end(folder: Path) -> tuple[Record, int, Path]:
    """Return the fields of the last end, or none of them where the last start has no end, and where they stand."""
    outcome = _object(folder / "outcome.json")
    if outcome:
        if outcome.get("version") != VERSION:
            raise UsageError(
                f"{folder / 'outcome.json'} has a version other than {VERSION}.", "Use a newer ddp-scaffold."
            )
        return outcome, 1, folder / "outcome.json"
    last, number = next(reversed(list(_numbered(folder / "attempts.jsonl"))), ({}, 0))
    if last.get("event") == "end":
        return last, number, folder / "attempts.jsonl"
    return {}, 0, folder / "attempts.jsonl"


def _verdict(folder: Path, outcome: Record, file: Path, line: int) -> Verdict:
    if not outcome:
        return _from_logs(folder)
    told = str(outcome.get("kind") or "unknown")
    kind = KINDS.get(told, told)
    ranks = outcome.get("first_ranks")
    first = tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else None
    reason, advice = str(outcome.get("reason") or ""), str(outcome.get("advice") or "")
    evidence = [Evidence(str(file), line, reason)] if reason else []
    stacks = outcome.get("stacks")
    for rank, stack in sorted(stacks.items()) if isinstance(stacks, dict) else []:
        last = str(stack).strip().rpartition("\n")[2].strip()
        if last and (first is None or rank in map(str, first)):
            evidence.append(Evidence(str(folder / "stacks" / f"rank{rank}.txt"), 0, f"rank {rank}: {last}"))
    return Verdict(
        kind,
        first,
        str(outcome.get("phase") or ""),
        "unknown" if kind == "unknown" else "certain",
        reason,
        tuple(evidence),
        (advice,) if advice else (),
        ("the logs of the ranks, in logs/",) if kind == "unknown" else (),
    )


def _from_logs(folder: Path) -> Verdict:
    """Return what the logs tell where no rank has lived to say how the run ended: whose heartbeats stopped first.

    All ranks end at once where a node is lost, or the scheduler kills them.
    """
    from .explain import explain as answer_of

    needs = ("outcome.json, or the output of the launcher: no rank has written how the run ended",)
    summary = "The run goes on, or no rank has lived to tell how it ended."
    with suppress(UsageError):
        verdict = answer_of([str(folder / "logs")])[0].verdict
        if verdict.kind not in {"unknown", "benign"}:
            return replace(verdict, needs=(*verdict.needs, *needs))
    return Verdict("unknown", None, "", "unknown", summary, needs=needs)


def _ranks(folder: Path, timeline: list[Record]) -> range:
    sizes = [head.get("world_size") for head in [*timeline[:1], *_lines(folder / "attempts.jsonl")[-2:]]]
    return range(max((min(size, MOST_RANKS) for size in sizes if isinstance(size, int)), default=0))


def _row(
    rank: int, folder: Path, verdict: Verdict, timeline: list[Record], spans: Iterable[Span], gone: Mapping[int, str]
) -> RankRow:
    record = next((each for each in timeline[1:] if each.get("rank") == rank), {})
    beat = _object(folder / "heartbeats" / f"rank{rank}.json")
    last = max((span for span in spans if span.rank == rank), key=lambda span: span.end, default=None)
    if verdict.first_ranks is not None and rank in verdict.first_ranks:
        role = "culprit"
    else:
        role = "victim" if record.get("waiting") or (last and last.waiting) else "no sign"
    call, line = str(record.get("call") or ""), str(record.get("line") or "")
    return RankRow(
        rank,
        role,
        str(record.get("host") or beat.get("host") or _host(timeline, rank)),
        last.phase if last else str(beat.get("phase") or ""),
        f"{call} at {line}" if call and line else call,
        gone.get(rank, ""),
        last.end if last else None,
    )


def _host(timeline: list[Record], rank: int) -> str:
    hosts = timeline[0].get("hosts") if timeline else None
    return str(hosts[rank]) if isinstance(hosts, list) and rank < len(hosts) else ""


def _spans(timeline: list[Record], outcome: Record) -> tuple[tuple[Span, ...], dict[int, str]]:
    """Return each rank's phases, on one clock, and how the processes of those that are gone ended.

    A timeline that is older than the end that it should show by over an hour belongs to another one.
    """
    head = timeline[0] if timeline else {}
    time, ended_at = head.get("time"), outcome.get("time")
    if head.get("version") != VERSION or not isinstance(time, int | float):
        return (), {}
    if isinstance(ended_at, int | float) and abs(ended_at - time) > 3600:
        return (), {}
    records = [each for each in timeline[1:] if isinstance(each.get("rank"), int) and _changes(each)]
    author = next((each for each in records if each.get("rank") == head.get("author")), records[0] if records else {})
    offsets = _offsets(records, str(author.get("clock")))
    spans: list[Span] = []
    gone: dict[int, str] = {}
    for record in records:
        rank, ahead = int(str(record["rank"])), offsets.get(str(record.get("clock")), 0)
        spans += _of_rank(rank, record, ahead, head.get("now"))
        if "ended" in record:
            gone[rank] = str(record["ended"] or "gone")
    begin = min((span.start for span in spans), default=0.0)
    return tuple(replace(span, start=span.start - begin, end=span.end - begin) for span in spans), gone


def _of_rank(rank: int, record: Record, ahead: int, now: object) -> list[Span]:
    changes = _changes(record)
    until = next(
        (at for at in (record.get("until"), record.get("gone_at"), now) if isinstance(at, int)), changes[-1][0]
    )
    moments = [*changes, (max(until, changes[-1][0]), "")]
    spans: list[Span] = []
    for (start, phase), (end, _) in pairwise(moments):
        if spans and spans[-1].phase == phase:
            spans[-1] = replace(spans[-1], end=(end - ahead) / 1e6)
        else:
            spans.append(
                Span(rank, (start - ahead) / 1e6, (end - ahead) / 1e6, phase, phase.startswith(WAITS), label="")
            )
    if record.get("waiting"):
        moved, last = record.get("moved"), spans[-1]
        since = min(max((moved - ahead) / 1e6, last.start), last.end) if isinstance(moved, int) else last.start
        spans[-1:] = [replace(last, end=since)] if last.start < since and not last.waiting else []
        since = last.start if last.waiting else since
        spans.append(replace(last, start=since, waiting=True, label=str(record.get("call") or "")))
    return spans


def _changes(record: Record) -> list[tuple[int, str]]:
    changes = record.get("changes")
    return [
        (each[0], str(each[1]))
        for each in (changes if isinstance(changes, list) else [])
        if isinstance(each, list) and len(each) == 3 and isinstance(each[0], int)
    ]


def _offsets(records: Iterable[Record], reference: str) -> dict[str, int]:
    """Return the microseconds by which each clock is ahead of `reference`, by the newest message that both heard."""
    heard: dict[int, dict[str, list[int]]] = {}
    for record in records:
        messages = record.get("heard")
        for number, at in messages.items() if isinstance(messages, dict) else []:
            if isinstance(at, int) and str(number).isdecimal():
                heard.setdefault(int(number), {}).setdefault(str(record.get("clock")), []).append(at // 1000)
    offsets = {reference: 0}
    for _, times in sorted(heard.items(), reverse=True):
        for clock, those in times.items():
            if reference in times:
                offsets.setdefault(clock, min(those) - min(times[reference]))
    return offsets


def _object(file: Path) -> Record:
    """Return the JSON object in a file; an empty one where there is none, or it is damaged or too large."""
    with suppress(OSError, ValueError, RecursionError):
        if file.is_file() and file.stat().st_size <= MOST_BYTES:
            content = json.loads(file.read_bytes())
            return content if isinstance(content, dict) else {}
    return {}


def _lines(file: Path) -> list[Record]:
    """Return the JSON objects of a file, one a line; a line that is cut short is left out."""
    return [content for content, _ in _numbered(file)]


def _numbered(file: Path) -> Iterator[tuple[Record, int]]:
    """Yield the JSON objects of a file, each with the number of its line: those that are cut short count as lines."""
    with suppress(OSError):
        if not file.is_file():
            return
        number = 1
        with file.open("rb") as stream:
            for _ in range(MOST_RANKS + 1):
                line = stream.readline(MOST_BYTES)
                if not line:
                    return
                with suppress(ValueError, RecursionError):
                    content = json.loads(line)
                    if isinstance(content, dict):
                        yield content, number
                number += line.endswith(b"\n")
