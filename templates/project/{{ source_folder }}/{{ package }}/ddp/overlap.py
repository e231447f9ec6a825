"""Whether what readers give by themselves overlaps: digests of their first samples, compared once over all ranks."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from .agree import gather
from .parts import parts_of
from .same import digest
from .setup import Dist

log = logging.getLogger("ddp")
T = TypeVar("T")

FIRST = 4096  # samples of a rank
ENOUGH = 1024  # elements of a tensor that tell it from another
OF_RANKS = "shuffle by the same seed on all ranks, then take [rank::world_size]"
OF_WORKERS = "let each worker take [info.id::info.num_workers] of its rank's part, info being get_worker_info()"


class Given:
    """Digests of the first samples that each process of a rank gives, in memory that the training process sees."""

    def __init__(self, workers: int) -> None:
        readers = max(workers, 1)
        self._digests = torch.zeros(readers, FIRST // readers, dtype=torch.int64).share_memory_()

    def note(self, position: int, sample: Any) -> None:
        """Keep a digest of `sample`, the reading process's own number `position`."""
        if position >= self._digests.shape[1]:
            return
        info = get_worker_info()
        with suppress(Exception):  # a sample may be anything, and reading it has succeeded
            parts = parts_of(_thinned(sample))
            self._digests[info.id if info else 0, position] = int(digest([*parts, *parts.values()]), 16) >> 1

    def rows(self) -> list[list[int]]:
        """The digests of each process."""
        return [[value for value in row if value] for row in self._digests.tolist()]


def compared(batches: Iterator[T], given: Given, name: str, joined: Dist, batch: int) -> Iterator[T]:
    """The batches of an epoch, equally many on all ranks, with one comparison: at its end, or once enough were read."""
    for number in count(1):
        item = next(batches, None)
        if item is None or number * batch == FIRST // batch * batch:
            warn_of_overlap(given, name, joined)
        if item is None:
            return
        yield item


def warn_of_overlap(given: Given, name: str, joined: Dist) -> None:
    """Say if ranks, or workers of a rank, have given the same samples more often than the data repeats by itself.

    All ranks must call it. Samples that are augmented at random are never the same, and tell nothing.
    """
    ranks = gather(joined, given.rows())
    if joined.rank:
        return
    readers = [row for rows in ranks for row in rows]
    repeated = sum(len(row) - len(set(row)) for row in readers)
    by_rank = [set().union(*rows) for rows in ranks]
    twice = _more_than_once(by_rank)
    for rank_of, found, others, remedy in (
        (None, sum(value in twice for row in readers for value in row), "another rank", OF_RANKS),
        (0, sum(_among_workers(rows) for rows in ranks), "another worker of its rank", OF_WORKERS),
    ):
        of = len(readers) if rank_of is None else max(map(len, ranks))
        total = sum(map(len, readers))
        # Duplicates of the data itself lie in two parts about (of - 1) times as often as in one, with two samples each.
        if of > 1 and found > max(8 * of, total // 50, 8 * (of - 1) * repeated):
            what = f"{name}: of the first {total} samples, {found} were also given by {others}"
            log.warning("%s\n  -> %s; make_loader(..., compare=False) if that is meant", what, remedy)


def _among_workers(rows: Sequence[Sequence[int]]) -> int:
    twice = _more_than_once([set(row) for row in rows])
    return sum(value in twice for row in rows for value in row)


def _more_than_once(sets: Sequence[set[int]]) -> set[int]:
    return {value for value, times in Counter(value for each in sets for value in each).items() if times > 1}


def _thinned(value: Any) -> Any:
    """`value` with some elements of each large tensor and array: a checksum over all of them would take long."""
    if isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__") and hasattr(value, "reshape"):
        return value.reshape(-1)[:: 1 + value.numel() // ENOUGH] if isinstance(value, torch.Tensor) else value
    if isinstance(value, bytes):
        return zlib.crc32(value)
    if isinstance(value, Mapping):
        return {key: _thinned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and len(value) < 64:
        return [_thinned(item) for item in value]
    return value
