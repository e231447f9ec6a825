"""Where one rank is, as all others know it: published in the store, left in heartbeats/, compared by the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from .ranks import rank_on

Entry = tuple[int, str, str]  # number from 1 on, "all_reduce float32[3]", "utils.py:12 < train.py:88"


@dataclass(frozen=True)
class RankState:
    """What a rank says of itself. Times in seconds.

    The documentation (run-directory.md) has the published names; `PUBLISHED` has those that differ from the names here.
    """

    rank: int
    host: str
    phase: str = "init"
    epoch: int = 0
    step: int = 0  # finished optimiser steps, counted from the start of the run
    note: str = ""  # the last progress(...) in this phase
    progress: int = 0  # signs of progress
    phase_progress: int = 0  # of them in this phase, which it has been in for `in_phase_s`
    in_phase_s: float = 0.0
    idle_s: float = 0.0  # since the last sign of progress
    collectives: int = 0  # issued on the training group, or -1 where PyTorch does not tell
    decisions: int = 0  # calls on the control group
    open_collectives: int = 0  # of `collectives`, not finished by the GPU; -1 on gloo
    waits_in: str = ""  # the call in which the main thread waits for others
    lost_peers: bool = False  # that call has failed because of another rank
    line: str = ""  # of the user's code, where the main thread is
    group: str = ""  # whose call `waits_in` is; empty for the training group
    python_collectives: int = 0  # collectives of the training group that Python code has made
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds spent in it so far
    # In answers to a diagnosis only:
    recent: tuple[Entry, ...] = ()  # the last collectives from Python
    unfinished: tuple[tuple[int, str, str], ...] = ()  # of the GPU: number, name, "scheduled" or "started"
    without_gradient: tuple[str, ...] = ()  # parameters after the last backward
    reached: tuple[int, int, str] | None = None  # by the GPU: step, number in it, phase
    # In the store only:
    pid: int = 0
    news: int = 0  # the number of the last question that this state answers
    ended: Mapping[int, str] = field(default_factory=dict)  # ranks of this host whose process is gone -> how it ended

    @property
    def who(self) -> str:
        """'rank 3 (n2)', for messages."""
        return rank_on(self.rank, self.host)

    def to_json(self) -> str:
        """With the published names, and without what is empty of the fields that not every reader gets."""
        given = {PUBLISHED.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps({name: value for name, value in given.items() if value or name not in SOMETIMES})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        """Of the same release or another: what is not known is left out. Raises ValueError, KeyError or TypeError."""
        try:
            read = json.loads(text)
        except RecursionError as error:  # [[[[...
            raise ValueError("nested too deeply") from error
        given = {each.name: read[name] for each in fields(cls) if (name := PUBLISHED.get(each.name, each.name)) in read}
        for name in ("recent", "unfinished"):
            given[name] = tuple(tuple(item) for item in given.get(name, ()))
        given["without_gradient"] = tuple(given.get("without_gradient", ()))
        given["reached"] = tuple(given.get("reached") or ()) or None
        given["ended"] = {int(rank): ending for rank, ending in given.get("ended", {}).items()}
        return cls(**given)


# Name here -> name in the store and in heartbeats/*.json, which is a contract.
PUBLISHED = {
    "phase_progress": "moves",
    "in_phase_s": "here_s",
    "idle_s": "age_s",
    "decisions": "control",
    "open_collectives": "open",
    "waits_in": "waits",
    "lost_peers": "lost",
    "line": "at",
    "python_collectives": "asked",
    "phase_seconds": "phase_s",
    "without_gradient": "missing",
}
SOMETIMES = {"recent", "unfinished", "missing", "reached", "pid", "news", "ended"}
