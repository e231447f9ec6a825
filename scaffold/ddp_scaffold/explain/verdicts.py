"""Builds verdicts, and names ranks: what all rules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .events import Event
from .explanation import Confidence, Evidence, Verdict
from .kinds import ADVICE

MOST_EVIDENCE = 6


def verdict_of(
    kind: str,
    ranks: Iterable[int] | None,
    confidence: Confidence,
    summary: str,
    events: Iterable[Event | Evidence],
    *,
    phase: str = "",
    needs: Sequence[str] = (),
) -> Verdict:
    evidence = tuple(Evidence(event.file, event.line, event.text) for event in events)[:MOST_EVIDENCE]
    first = tuple(sorted(set(ranks))) if ranks is not None else None
    advice = (ADVICE[kind],) if ADVICE[kind] else ()
    return Verdict(kind, first or None, phase, confidence, summary, evidence, advice, tuple(needs))


def name(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 1, 2, 5-7"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    return ("rank " if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks ") + ", ".join(parts)
