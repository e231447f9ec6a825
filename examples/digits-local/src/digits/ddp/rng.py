"""The random generators of a process: seeded together, saved and restored together."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_generators(seed: int) -> None:
    """Seed every generator whose state a checkpoint holds, so that two runs with one seed are the same run."""
    random.seed(seed)
    torch.manual_seed(seed)  # the CPU's and all GPUs'
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def fingerprint() -> int:
    """A number that changes when any of the CPU's generators is seeded or drawn from."""
    state = random_state(torch.device("cpu"))
    return zlib.crc32(repr([state["python"], state["torch"].tolist(), state.get("numpy")]).encode())


def make_deterministic() -> None:
    """Let GPUs repeat sums to the bit. Call it before anything runs on one; an operation that cannot, raises.

    https://pytorch.org/docs/stable/notes/randomness.html; cuBLAS reads the variable when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


@contextmanager
def draws_of(*numbers: int, put_back: bool = True) -> Iterator[None]:
    """What the block draws on the CPU, with torch, random or numpy.random, follows from `numbers` alone.

    Not `torch.manual_seed`, which would seed the GPUs' generators as well, in the middle of training (torch/random.py).

    Args:
        put_back: leave the generators as they were before the block; there is no need in a loader's worker.
    """
    seed = zlib.crc32(repr(numbers).encode())
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    before = (random.getstate(), torch.get_rng_state(), numpy.get_state() if numpy else None) if put_back else None
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy:
        numpy.seed(seed)
    try:
        yield
    finally:
        if before:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
        if before and numpy:
            numpy.set_state(before[2])


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of every generator of this process, as plain data and tensors (loadable with weights_only=True)."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
