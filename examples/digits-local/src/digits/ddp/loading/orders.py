"""An order of samples that the project gives: checked, compared between the ranks, and cut into their batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch

from ..agree import gather
from ..errors import ConfigError
from ..start.groups import Job
from .shards import GlobalOrder

Order = Callable[[int, int], Sequence[int] | torch.Tensor]  # epoch, seed -> indices, for all ranks together

SAME = "let it follow from epoch and seed alone, with a generator of its own: the default ones differ between ranks"
INDICES = "return whole numbers, one after the other, as a list of int or as an int64 tensor"


class OwnOrder(GlobalOrder):
    """This rank's part of `order(epoch, seed)`: `batch` samples in a row of each global batch.

    With 2 ranks and `batch` = 3, rank 0 reads the samples 0 1 2, 6 7 8, ... of the order, and rank 1 the others; what
    shall be in one batch of one rank stands together. At the end of an epoch fewer than a global batch may be left:
    these are shared out as evenly, each rank's in a row, and `uneven` pads them, from the beginning of the order, or
    drops some to have equally many for each.
    """

    def __init__(self, order: Order, length: int, job: Job, *, seed: int, uneven: str, batch: int) -> None:
        super().__init__(length, job, seed=seed, shuffle=True, uneven=uneven, batch=batch)
        self.samples, self.batch, self.job, self.order = length, batch, job, order
        self.indices: torch.Tensor | None = None  # int64 [length of the epoch]

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Ask for the order of `epoch` and compare it between the ranks, once; all of them must call it.

        Raises:
            ConfigError: on all ranks: it cannot be used, or is another one on some rank.
        """
        if self.indices is None or epoch != self.epoch:
            self.indices = self._asked(epoch)
            self.length = len(self.indices)
        super().set_epoch(epoch, start)

    def __iter__(self) -> Iterator[int]:
        if self.indices is None:
            self.set_epoch(self.epoch, self.start)
        assert self.indices is not None
        left, ranks = self.indices[self.start :], self.world_size
        rest = len(left) % ranks
        if rest and self.uneven == "pad":
            left = torch.cat([left, self.indices[: ranks - rest]])
        elif rest:
            left = left[: len(left) - rest]
        size = self.batch * ranks
        whole = len(left) // size * size
        full, smaller = left[:whole].view(-1, ranks, self.batch), left[whole:].view(ranks, -1)
        return iter(torch.cat([full[:, self.rank].flatten(), smaller[self.rank]]).tolist())

    def _asked(self, epoch: int) -> torch.Tensor:
        indices, problem = self._indices(self.order(epoch, self.seed))
        found = gather(self.job, (problem, "" if problem else _text(indices)))
        for rank, (wrong, _) in enumerate(found):
            if wrong:
                raise ConfigError(f"the order of epoch {epoch} on {self.job.who(rank)} {wrong[0]}", wrong[1])
        texts = [text for _, text in found]
        if odd := next((rank for rank, text in enumerate(texts) if text != texts[0]), 0):
            each = f"{self.job.who(0)} has {texts[0]}, {self.job.who(odd)} has {texts[odd]}"
            raise ConfigError(f"the order of epoch {epoch} is not the same on all ranks: {each}", SAME, "ranks_differ")
        return indices

    def _indices(self, given: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, tuple[str, str] | None]:
        """The order as int64 [samples], and what `_problem` says of it; also of what PyTorch takes for no indices."""
        try:
            indices = given.detach().cpu() if isinstance(given, torch.Tensor) else torch.tensor(list(given))
            problem = self._problem(indices)
            return indices.to(torch.int64), problem
        except (TypeError, ValueError, RuntimeError) as error:  # which one PyTorch raises depends on what it was given
            why = (str(error).splitlines() or [""])[0]
            what = f"is a {type(given).__name__} that cannot be read: {type(error).__name__}: {why}"
            return torch.empty(0, dtype=torch.int64), (what, INDICES)

    def _problem(self, indices: torch.Tensor) -> tuple[str, str] | None:
        """What is wrong with it, and what to do."""
        size = self.batch * self.world_size
        if len(indices.shape) != 1 or (len(indices) and (indices.is_floating_point() or indices.dtype == torch.bool)):
            return f"is {indices.dtype} {list(indices.shape)}", INDICES
        if len(indices) < size:
            what = f"has {len(indices)} samples, and one step of all ranks takes {size}"
            return what, "let it be longer, or use fewer ranks or smaller batches"
        lowest, highest = int(indices.min()), int(indices.max())
        if lowest < 0 or highest >= self.samples:
            what = f"has the index {lowest if lowest < 0 else highest}, and there are {self.samples} samples"
            return what, "return indices from 0 to the number of samples less 1"
        return None


def _text(indices: torch.Tensor) -> str:
    """'640 samples, 17 3 250 ... (checksum 1a2b3c4d)'."""
    first = " ".join(map(str, indices[:6].tolist()))
    return f"{len(indices)} samples, {first} ... (checksum {zlib.crc32(indices.numpy().tobytes()):08x})"
