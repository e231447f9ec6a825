"""Whether what the readers of a stream give overlaps: digests of their first samples, compared once over all ranks."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from ..agree import gather
from ..start.groups import Job
from .parts import parts_of

log = logging.getLogger("ddp")
T = TypeVar("T")
END: Any = object()

FIRST = 4096  # samples of a rank
ENOUGH = 1024  # elements of a tensor: they tell it from another, and a checksum over all of it would take long
OF_RANKS = "shuffle by the same seed on all ranks, then take [rank::world_size]"
OF_WORKERS = "let each worker take [info.id::info.num_workers] of its rank's part; info = get_worker_info()"


class Given:
    """Digests of the first samples that each process of a rank gives, in memory that the training process sees."""

    def __init__(self, workers: int) -> None:
        readers = max(workers, 1)
        self._digests = torch.zeros(readers, FIRST // readers, dtype=torch.int64).share_memory_()
        self.compared = False

    def note(self, position: int, sample: Any) -> None:
        """Keep a digest of `sample`, which has this position in the reading process."""
        if self.compared or position >= self._digests.shape[1]:
            return
        info = get_worker_info()
        with suppress(Exception):  # a sample may be anything, and reading it has succeeded
            digest = hashlib.blake2b(b"\0".join(_content(sample)), digest_size=8).digest()
            self._digests[info.id if info else 0, position] = int.from_bytes(digest, "big") >> 1

    def rows(self) -> list[list[int]]:
        """The digests of each process."""
        return [[value for value in row if value] for row in self._digests.tolist()]


def watched(batches: Iterator[T], given: Given, name: str, job: Job, batch_size: int) -> Iterator[T]:
    """The batches of an epoch, as many on each rank, with one comparison: once enough are read, or at the end."""
    enough = max(1, FIRST // batch_size)
    for number, batch in enumerate(chain(batches, [END]), 1):
        if not given.compared and (number == enough or batch is END):
            given.compared = True
            warn_of_overlap(given, name, job)
        if batch is not END:
            yield batch


def warn_of_overlap(given: Given, name: str, job: Job) -> None:
    """Say if ranks, or workers of a rank, have given the same samples more often than the data repeats by itself.

    All ranks must call it. Samples that are augmented at random are hardly ever the same, and tell nothing.
    """
    ranks = gather(job, given.rows())
    readers = [row for rows in ranks for row in rows]
    total = sum(map(len, readers))
    repeated = sum(len(row) - len(set(row)) for row in readers)
    # Duplicates of the data itself, spread at random, would be about 2 * len(readers) samples for each one repeated.
    meant = max(total // 50, 8 * len(readers), 3 * len(readers) * repeated)
    of_ranks = _also_given_by_others([list(chain.from_iterable(rows)) for rows in ranks])
    of_workers = sum(_also_given_by_others(rows) for rows in ranks)
    for found, others, remedy in (
        (of_ranks, "another rank", OF_RANKS),
        (of_workers, "another worker of the same rank", OF_WORKERS),
    ):
        if found > meant and job.rank == 0:
            what = f"of the first {total} samples of {name}, on all ranks, {found} were given by {others} as well"
            log.warning("%s\n  -> %s; make_loader(..., compare=False) if that is meant", what, remedy)


def _also_given_by_others(readers: Iterable[list[int]]) -> int:
    rows = list(readers)
    times = Counter(chain.from_iterable(map(set, rows)))
    return sum(times[value] > 1 for row in rows for value in row)


def _content(value: Any) -> Iterator[bytes]:
    """What tells a sample from others; of large tensors, arrays and lists only some elements."""
    if hasattr(value, "__array_interface__") and hasattr(value, "reshape"):  # numpy's
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        few = value.detach().reshape(-1)[:: 1 + value.numel() // ENOUGH].cpu().contiguous()
        yield str(value.shape).encode() + few.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(_content(item) for item in value.values())
    elif isinstance(value, (list, tuple)) and len(value) <= 16:
        yield from chain.from_iterable(map(_content, value))
    elif isinstance(value, (list, tuple, str, bytes)):
        yield repr(value[:: 1 + len(value) // ENOUGH]).encode()
    else:
        yield repr(parts_of(value)).encode()
