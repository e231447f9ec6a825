"""What must be the same on all ranks before step 1: compared by digests, in full only where these differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..agree import from_rank0, gather
from ..ranks import named
from ..start.groups import Job

NOTHING = "nothing"


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on all ranks, and what each of them has there, in rank order."""

    name: str
    values: tuple[str, ...]

    def text(self, hosts: Sequence[str], most: int = 4) -> str:
        """'float32[3] on ranks 0, 2 (n1), float32[4] on rank 1 (n2)'."""
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(self.values):
            groups.setdefault(value, []).append(rank)
        texts = [f"{value} on {named(ranks, hosts)}" for value, ranks in groups.items()]
        return ", ".join(texts[:most]) + (f" and {len(texts) - most} other answers" if len(texts) > most else "")


def differences(job: Job, rows: Mapping[str, str], most: int = 3) -> list[Difference]:
    """The first few of `rows` that differ between ranks, or, where only their order does, the place where it begins to.

    One small collective on the control group, and a few more where something differs. All ranks must call it, and get
    the same answer.
    """
    if job.world_size == 1 or len(set(gather(job, digest(chain.from_iterable(rows.items()))))) == 1:
        return []
    of_rank0 = from_rank0(job, dict(rows))
    mine = [name for name in {**of_rank0, **rows} if of_rank0.get(name) != rows.get(name)][:most]
    names = list(dict.fromkeys(chain.from_iterable(gather(job, mine))))[:most]
    if names:
        values = gather(job, [rows.get(name, NOTHING) for name in names])
        return [Difference(name, each) for name, each in zip(names, zip(*values, strict=True), strict=True)]
    order = list(rows)
    place = min(gather(job, next((at for at, name in enumerate(of_rank0) if name != order[at]), len(order))))
    return [Difference("the order", tuple(gather(job, order[place])))]


def digest(texts: Iterable[str]) -> str:
    """A short checksum over all of them, which two processes share only if they have the same in the same order."""
    return hashlib.blake2b("\0".join(texts).encode(errors="backslashreplace"), digest_size=8).hexdigest()
