"""The faults of benchmarks/peers.py: every peer calls these functions at the same places of its loop.

PEERS_FAULT names the fault, and the notes that peers.py reads go to PEERS_DIR. Faults on one rank are on rank 1, but
for what is rank 0's work; all come at step 25, but for sampling (20) and the kill while a checkpoint is written (30).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FAULT, FOLDER = os.environ["PEERS_FAULT"], Path(os.environ["PEERS_DIR"])
RANK = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)  # Lightning's own launcher sets the second
STEP, KILLED_SAVE = 25, 30
PACE_S = 0.1  # of a step, so that a signal comes at the step it is meant for
LONG_S = 40  # of sampling: twice the timeout of the group
HALF = 600_000  # bytes: less than a checkpoint's largest file
now_at = 0


class InjectedFault(RuntimeError):
    """What the fault `raise` raises."""


def note(**what: Any) -> None:
    """Tell peers.py."""
    with open(FOLDER / f"rank{RANK}.notes", "a") as file:
        file.write(json.dumps({"time": time.time(), **what}) + "\n")


def hits(name: str, rank: int, step: int, at: int = STEP) -> bool:
    """Whether this is the fault, and here; says so to peers.py."""
    if (FAULT, RANK, step) != (name, rank, at):
        return False
    note(fault=name)
    return True


def begin(step: int) -> None:
    """A step begins, or has its data: whatever the peer does first."""
    global now_at
    now_at = step
    note(step=step)
    time.sleep(PACE_S)
    for name in ("stop", "e1"):  # peers.py sends the signal
        hits(name, 0, step)
    for name in ("s1", "s3"):
        hits(name, 0, step, at=0)


def forward(step: int) -> None:
    """The forward pass begins."""
    if hits("raise", 1, step):
        raise InjectedFault("a bug in the forward pass")
    if hits("kill", 1, step):
        os.kill(os.getpid(), signal.SIGKILL)
    if hits("suspend", 1, step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if hits("hang-forward", 1, step):
        time.sleep(1e6)


class Watched(Dataset[Any]):
    """A data set that may hang."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if now_at == STEP - 1 or now_at == STEP:  # the data of a step are read before it begins, or in it
            hang_in_data()
        return self.dataset[index]


def hang_in_data() -> None:
    """As a network file system that no longer answers."""
    if hits("hang-data", 1, STEP):
        time.sleep(1e6)


def sample(progress: Callable[[str], None] = lambda _text: None) -> None:
    """What rank 0 draws at steps 20 and 40, in parts; only a generated project has somebody to tell of each part."""
    parts = 1
    if now_at < STEP and hits("sample-hang", 0, STEP):
        time.sleep(1e6)
    if now_at < STEP and hits("sample-slow", 0, STEP):
        parts = LONG_S
    for part in range(parts):
        time.sleep(1 if parts > 1 else 0)
        progress(f"part {part + 1} of {parts}")


def spoil(loss: Tensor, step: int) -> Tensor:
    """NaN on one rank, as a bad sample or an overflow gives it."""
    return loss * float("nan") if hits("nan", 1, step) else loss


def skips(step: int) -> bool:
    """Whether this rank does not report its loss."""
    return hits("skip", 1, step)


def misshapen(values: Tensor, step: int) -> Tensor:
    """What is reported, with another shape on one rank."""
    return torch.cat([values.flatten()] * 2) if hits("mismatch", 1, step) else values


def alone(step: int) -> bool:
    """Case n1: rank 0 is about to wait for the others, who do not come."""
    return hits("n1", 0, step)


def as_set(*names: str) -> list[str]:
    """Case s1: names in the order of a set. The hash seed of a process decides it; here rank 1 always has the other."""
    return list(reversed(names)) if FAULT == "s1" and RANK == 1 else list(names)


def bypass(model: nn.Module) -> nn.Module:
    """Case s3: what is inside DDP, where DDP was meant."""
    return model.module if FAULT == "s3" and hasattr(model, "module") else model


def workers() -> int:
    """Case e1 needs a loader worker."""
    return 1 if FAULT == "e1" else 0


def saving(step: int, *modules: nn.Module) -> None:
    """A checkpoint is about to be written."""
    note(saving=step, finite=finite(*modules))
    if (FAULT, RANK, step) == ("kill-save", 0, KILLED_SAVE):
        _kill_in_the_middle_of_a_file()


def _kill_in_the_middle_of_a_file() -> None:
    """SIGKILL while the file is half written, every time: the kernel stops the writer there for lack of permission."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGXFSZ, ctypes.cast(libc.pause, ctypes.c_void_p))
    resource.setrlimit(resource.RLIMIT_FSIZE, (HALF, HALF))
    line = '\'{"time": \'$(date +%s.%N)\', "fault": "kill-save"}\''
    script = f"sleep 2; echo {line} >> '{FOLDER}/killer.notes'; kill -KILL {os.getpid()}"
    unmarked = {name: value for name, value in os.environ.items() if name != "PEERS_DIR"}
    subprocess.Popen(["sh", "-c", script], env=unmarked, start_new_session=True)


def finite(*modules: nn.Module) -> bool:
    """Whether no weight is NaN or infinite."""
    return all(bool(tensor.isfinite().all()) for module in modules for tensor in module.parameters())


def resumed(step: int) -> None:
    """A checkpoint was loaded."""
    note(resumed=step)


def finished(step: int, *modules: nn.Module) -> None:
    """Training is done: what the weights are on this rank."""
    weights = [(name, tensor) for module in modules for name, tensor in module.state_dict().items()]
    digests = {
        f"{number} {name.removeprefix('module.')}": hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:16]
        for number, (name, tensor) in enumerate(sorted(weights, key=lambda item: item[0]))
    }
    note(finished=step, finite=finite(*modules), weights=digests)
