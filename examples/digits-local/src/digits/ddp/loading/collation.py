"""From samples to a batch. When that fails, the sample that is not like the others is named by its index."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from ..errors import DataFailed
from .fetch import loader_failure
from .located import Reading

Collate = Callable[[list[Any]], Any]
LEVELS = range(3)  # what two samples may differ in, the gravest first: types and keys; shapes and lengths; dtypes
MOST = 64  # elements of one list that are looked at


class Collation:
    """`collate`, by default PyTorch's, for the samples of a loader. Errors of it name a sample."""

    def __init__(self, collate: Collate | None, reading: Reading) -> None:
        self.collate, self.reading = collate or default_collate, reading

    def __call__(self, samples: list[Any]) -> Any:
        indices = self.reading.taken(len(samples))
        return put_together(self.collate, samples, indices, self.reading.name, self.reading.unit)


def put_together(collate: Collate, samples: list[Any], indices: Sequence[int], name: str, unit: str = "index") -> Any:
    """`collate(samples)`; `indices` are theirs in the data set `name`.

    Raises:
        DataFailed: with the index of the sample that has another shape, dtype, type or other keys than most.
    """
    try:
        return collate(samples)
    except (torch.OutOfMemoryError, DataFailed):
        raise
    except Exception as error:  # a user's function may raise anything
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        if loader_failure(cause) != "rank_exception":  # of the machine: shared memory, descriptors
            raise
        info = get_worker_info()
        worker = f" (worker {info.id})" if info else ""
        which, why = _odd(samples, indices) or (_listed(indices), "")
        hint = "; `collate(samples)` of a data set makes batches of unequal ones" if collate is default_collate else ""
        problem = f"{unit} {which} of {name}{worker}: no batch can be made of it: {why}{_place(error)}{cause}{hint}"
        raise DataFailed(problem) from error


def _odd(samples: list[Any], indices: Sequence[int]) -> tuple[str, str] | None:
    """The indices of the samples that are not like most, and in what; None where no such thing can be said."""
    for level in LEVELS:
        each = [dict(_facts(sample, level)) for sample in samples]
        for place in dict.fromkeys(place for facts in each for place in facts):
            found = [facts.get(place, "missing") for facts in each]
            (usual, times), *others = Counter(found).most_common()
            if not others:
                continue
            if 2 * times > len(found):
                odd = [(index, fact) for index, fact in zip(indices, found, strict=True) if fact != usual]
                return _listed([index for index, _ in odd]), f"sample{place} is {odd[0][1]}, in most others {usual}; "
            if len(found) == 2 or level == 0:  # who is right, two cannot tell
                told = ", ".join(f"{fact} at {index}" for index, fact in zip(indices[:4], found, strict=False))
                return _listed(indices), f"sample{place} is {told}; "
    return None


def _facts(sample: Any, level: int, place: str = "") -> Iterator[tuple[str, str]]:
    """What is at each place inside a sample, as far as `level` is about it."""
    if isinstance(sample, torch.Tensor) or (hasattr(sample, "shape") and hasattr(sample, "dtype")):
        kind = "a tensor" if isinstance(sample, torch.Tensor) else f"a {type(sample).__name__} of numpy"
        shape = list(sample.shape)
        yield place, (kind, f"{kind} of shape {shape}", f"{kind} of shape {shape} and {sample.dtype}")[level]
    elif isinstance(sample, Mapping):
        yield place, f"a {type(sample).__name__} with the keys {', '.join(sorted(map(str, sample)))}"
        for key in sample:
            yield from _facts(sample[key], level, f"{place}[{key!r}]")
    elif isinstance(sample, Sequence) and not isinstance(sample, (str, bytes)):
        kind = f"a {type(sample).__name__}"
        yield place, kind if level == 0 else f"{kind} of length {len(sample)}"
        for index, element in enumerate(sample[:MOST]):
            if level > 0 or isinstance(sample, tuple):  # a list may be of any length, and a collate function pad it
                yield from _facts(element, level, f"{place}[{index}]")
    elif isinstance(sample, Number):
        yield place, "a number" if level < 2 else f"a number, {type(sample).__name__}"
    else:
        yield place, "None" if sample is None else f"a {type(sample).__name__}"


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")


def _place(error: BaseException) -> str:
    """The last line of the user's own code in the traceback, if there is any."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)]
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
