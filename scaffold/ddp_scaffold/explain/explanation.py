"""What `explain` answers: a verdict, a row for each rank, and the timeline, as the documentation promises its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Confidence = Literal["certain", "likely", "unknown"]


@dataclass(frozen=True)
class Evidence:
    """A line of the input on which a verdict stands. `line` counts from 1; 0 where the file has no lines (a dump)."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Verdict:
    """Who failed first, and why. `first_ranks` is None where the input does not tell."""

    kind: str
    first_ranks: tuple[int, ...] | None
    phase: str
    confidence: Confidence
    summary: str
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankRow:
    """What the input says of one rank. Roles: "culprit", "victim", "launcher killed it", "left with 0", "no sign"."""

    rank: int
    role: str
    host: str = ""
    phase: str = ""
    collective: str = ""  # the operation and the sequence number that it was in, "ALLREDUCE 124 of group 0"
    exit: str = ""  # "exit 1", "SIGKILL"
    last_seen: float | None = None  # seconds since the first event of the timeline


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's time, in seconds since the first event; `waiting` where the rank waits for others."""

    rank: int
    start: float
    end: float
    phase: str
    waiting: bool = False
    label: str = ""


@dataclass(frozen=True)
class Explanation:
    """All that `explain` answers."""

    verdict: Verdict
    ranks: tuple[RankRow, ...] = ()
    timeline: tuple[Span, ...] = ()
    sources: tuple[str, ...] = ()  # the files that were read, as given

    def to_json(self) -> dict[str, object]:
        """Return the answer as the JSON of design section 5."""
        return asdict(self)
