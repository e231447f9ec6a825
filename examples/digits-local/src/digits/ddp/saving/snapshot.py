"""A state as it is now, in memory of its own: what training changes from now on does not change it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import faults
from .host_memory import ALIGNED, Block, HostMemory

_memory = HostMemory()


def prepare(objects: Iterable[object]) -> None:
    """Begin to make memory ready for copies of `objects`; call it after their first step.

    Modules and optimisers count. Their `state_dict()` is not called: it may be user code that nobody expects now.
    """
    tensors = [tensor for item in objects for tensor in _held(item)]
    places = _places(tensors)
    if places:
        _memory.prepare(_size(places) + (1 << 20), _device(tensors))


@dataclass(frozen=True)
class Frozen:
    """A copied state, and the memory in which its tensors are."""

    state: dict[str, Any]
    block: Block


def freeze(state: Mapping[str, Any], step: int = 0) -> Frozen | str:
    """A copy of `state` in host memory, or why there is none.

    Tensors go to the memory that the last copy was in, which must not be needed any more. Tensors that share memory
    share it in the copy, too. When this returns, GPUs have copied all. Other values are copied by `copy.deepcopy`.

    Raises:
        RuntimeError: a GPU failed.
    """
    tensors = list(_tensors(state))
    places = _places(tensors)
    block = _memory.take(_size(places), _device(tensors))
    if isinstance(block, str):
        return block
    copies = {}
    for number, (key, (offset, storage)) in enumerate(places.items()):
        if number == len(places) // 2:
            faults.inject("checkpoint:copy", step)
        if size := storage.nbytes():
            part = block.part(offset, size)
            part.copy_(_bytes(storage), non_blocking=block.pinned)
            copies[key] = part.untyped_storage()
        else:
            copies[key] = torch.UntypedStorage(0)
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    known = {id(tensor): _like(tensor, copies[tensor.untyped_storage()._cdata]) for tensor in tensors}
    try:
        return Frozen(copy.deepcopy(dict(state), known), block)
    except Exception as error:  # of user code, of a tensor of a kind that cannot be copied so
        return f"{type(error).__name__}: {error}"


def _tensors(state: Any) -> Iterator[Tensor]:
    """Plain tensors in plain containers. `copy.deepcopy` finds the others, and clones them where they are."""
    todo, seen = [state], set[int]()  # a state may hold itself
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        if type(value) in (dict, OrderedDict):
            seen.add(id(value))
            todo += value.values()
        elif type(value) in (list, tuple):
            seen.add(id(value))
            todo += value
        elif type(value) in (Tensor, nn.Parameter):
            seen.add(id(value))
            if _plain(value):
                yield value


def _plain(tensor: Tensor) -> bool:
    """Bytes and a shape, and nothing that `_like` would lose."""
    dense = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
    return dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))


def _held(item: object) -> Iterator[Tensor]:
    if isinstance(item, nn.Module):
        yield from filter(_plain, [*item.parameters(), *item.buffers()])
    if isinstance(item, torch.optim.Optimizer):
        yield from _tensors([dict(state) for state in item.state.values()])


def _places(tensors: Iterable[Tensor]) -> dict[int, tuple[int, torch.UntypedStorage]]:
    """Where in a block each storage goes, and the storage; once for all tensors that share it."""
    places: dict[int, tuple[int, torch.UntypedStorage]] = {}
    end = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            places[storage._cdata] = end, storage
            end += -(-storage.nbytes() // ALIGNED) * ALIGNED
    return places


def _size(places: Mapping[int, tuple[int, torch.UntypedStorage]]) -> int:
    return max((offset + storage.nbytes() for offset, storage in places.values()), default=0)


def _device(tensors: Iterable[Tensor]) -> torch.device:
    return next((each.device for each in tensors if each.device.type == "cuda"), torch.device("cpu"))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _like(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """`tensor` in another storage."""
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    found = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)
    if type(tensor) is nn.Parameter:
        return nn.Parameter(found, tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)
