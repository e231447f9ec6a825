"""Whether all ranks read the same stream: its first samples are noted as they are read, and compared after a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..agree import gather
from ..errors import ConfigError
from ..same.rows import NOTHING, Difference, digest
from ..start.groups import Job
from .parts import Parts, parts_of

MOST = 8  # samples
SIZE = 4096  # bytes for each
REMEDY = (
    "let its order follow run.seed and set_epoch alone, and sort what a file system lists; pass sharded=True if each "
    "rank reads its own part, make_loader(..., compare=False) if ranks must differ"
)


class Beginning:
    """What the first samples of a stream consist of, in memory that the training process sees."""

    def __init__(self) -> None:
        self._texts = torch.zeros(MOST, SIZE, dtype=torch.uint8).share_memory_()

    def note(self, position: int, sample: Any) -> None:
        """Keep what `sample` consists of, if it is one of the first; of workers, the first one does."""
        info = get_worker_info()
        if position >= MOST or (info is not None and info.id > 0):
            return
        with suppress(Exception):  # a sample may be anything, and reading it has succeeded
            text = json.dumps(parts_of(sample)).encode()
            text = text if len(text) < SIZE else json.dumps({"": digest([text.decode()])}).encode()
            self._texts[position, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def noted(self) -> list[Parts]:
        """The samples read so far, up to the first that is missing."""
        found: list[Parts] = []
        for row in self._texts:
            text = bytes(row.tolist()).rstrip(b"\0")
            if not text:
                break
            found.append(json.loads(text))
        return found


def compare_streams(beginning: Beginning, name: str, job: Job) -> None:
    """Check that the streams of all ranks begin with the same samples. All ranks must call it, after a batch.

    The generators of the ranks differ by now, so random augmentation does as well. A part that is equal on all ranks
    and changes from sample to sample, like a label or a name, tells that the streams are the same nevertheless.

    Raises:
        ConfigError: on all ranks, naming the first sample that differs and what each rank has there.
    """
    mine = beginning.noted()
    rows = gather(job, [digest([*parts, *parts.values()]) for parts in mine])
    common = min(len(row) for row in rows)
    if all(row[:common] == rows[0][:common] for row in rows):
        return
    if found := _first(gather(job, mine[:common])):
        problem = f"{name} is not the same stream on all ranks: {found.name}: {found.text(job.hosts)}"
        raise ConfigError(problem, REMEDY, "ranks_differ")


def _first(ranks: Sequence[Sequence[Parts]]) -> Difference | None:
    wheres = dict.fromkeys(where for row in ranks for parts in row for where in parts)
    tables = {where: [[parts.get(where, NOTHING) for parts in row] for row in ranks] for where in wheres}
    for table in tables.values():
        if all(row == table[0] for row in table) and len(set(table[0])) > 1:
            return None
    for position in range(len(ranks[0])):
        found = {where: tuple(row[position] for row in table) for where, table in tables.items()}
        odd = [where for where, values in found.items() if len(set(values)) > 1]
        if odd:  # a number or a name says more than a checksum
            where = min(odd, key=lambda where: "(checksum" in found[where][0])
            return Difference(f"sample {position}{where}", found[where])
    return None
