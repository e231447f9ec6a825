"""How long training stands still for a checkpoint, beside torch.save and torch.distributed.checkpoint, in one run.

    python benchmarks/checkpoint.py [PROJECT] [--parameters 368e6] [--directory DIR] [--only WAY] [--json FILE]

PROJECT is a generated project (default: examples/digits-local), whose own code is measured; torch, pydantic,
pydantic-settings and PyYAML must be there. One process, a GPT with AdamW, so twelve bytes a parameter. The columns:

- first, warm: seconds that training stands still, for the first save and, median of three, for later ones
- write: seconds until the checkpoint is on the disk (warm, no training beside it)
- beside: a training step while a checkpoint is written, as a ratio to one before; all steps of one write
- load: seconds to read it, from the page cache, into the model and the optimiser; median of three, after one that does
  not count (memory that a virtual machine touches for the first time is slow)
- memory: GB of host memory at the peak above what the process has before, for a save of that kind
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gpt import Gpt
from torch import nn

ROOT = Path(__file__).parents[1]
WARM, LOADS = 3, 3  # saves and loads after the first
Done = Callable[[], bool]


@dataclass(frozen=True)
class Way:
    """One way to save. `save` returns when training may go on, and a function that tells whether all is written."""

    name: str
    save: Callable[[Path], Done]
    finish: Callable[[], None]
    load: Callable[[Path], None]


def main() -> None:
    """Measure all ways one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", nargs="?", type=Path, default=ROOT / "examples/digits-local")
    parser.add_argument("--package", default="digits", help="the package in it")
    parser.add_argument("--parameters", type=float, default=2e6, help="how many the model has, about")
    parser.add_argument("--batch-size", type=int, default=0, help="sequences of a step; 32 on a GPU, else 1")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--directory", type=Path, help="where checkpoints go; a temporary directory by default")
    parser.add_argument("--only", action="append", help="a way to compare with, instead of all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.project / "src"))

    def part(name: str) -> Any:
        return importlib.import_module(f"{options.package}.ddp.{name}")

    job = part("start.rendezvous").rendezvous(part("start.launcher").detect(), part("clocks").Clocks())
    job = part("start.groups").setup_distributed(job, options.device)
    model, optimizer, step = training(options.parameters, options.batch_size, job.device)
    for _ in range(3):
        step()
    scratch = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.directory))
    try:
        rows = [measure(ours(part, job, model, optimizer), scratch / "ours", step, job.device)]
        part("start.groups").shutdown(job)  # async_save wants a group with a CPU backend, or none
        for way in (plain(model, optimizer), dcp_save(model, optimizer), dcp_async(model, optimizer)):
            print(rows[-1], file=sys.stderr, flush=True)  # the whole takes minutes
            if not options.only or way.name in options.only:
                rows.append(measure(way, scratch / way.name.replace(" ", "-"), step, job.device))
    finally:
        shutil.rmtree(scratch)
    size = sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {size / 1e6:.1f} million parameters, {12 * size / 1e9:.2f} GB\n")
    print(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(f'{value:.3f}' if isinstance(value, float) else str(value) for value in row.values())} |")
    if options.json:
        options.json.write_text(json.dumps({"device": name, "parameters": size, "rows": rows}, indent=1) + "\n")


def training(
    parameters: float, batch_size: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model of about that size, its optimiser, and a training step in bf16 on a GPU."""
    width, heads, vocabulary, length = (1024, 16, 64000, 512) if parameters >= 1e8 else (256, 4, 4000, 128)
    layers = max(1, round((parameters - vocabulary * width) / (12 * width * width)))
    torch.manual_seed(0)
    model = Gpt(layers, width, heads, vocabulary, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = batch_size or (32 if device.type == "cuda" else 1)
    text = torch.randint(vocabulary, (batch, length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


def ours(part: Any, job: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """The project's own, with all that it checks; memory is made ready beside training, as in a run."""
    checkpoint, writer, objects = part("checkpoint"), part("saving.writer"), {"model": model, "optimizer": optimizer}
    part("storable").optimizers = lambda: [optimizer]  # as in a run, where DDP's models and optimisers are compared
    part("storable").models = lambda: [SimpleNamespace(module=model)]  # while training, and not at each save
    number = 0
    checkpoint.load(job, Path(tempfile.gettempdir()) / "no-such-run", objects)
    checkpoint.look(1)

    def save(path: Path) -> Done:
        nonlocal number
        number += 1
        assert checkpoint.save(job, path, {"step": number}, objects, keep=1)
        return lambda: not writer.in_flight()

    return Way(
        "this project",
        save,
        lambda: wanted(checkpoint.finish(job)),
        lambda path: wanted(checkpoint.load(job, path, objects) is not None),
    )


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """torch.save into a file that is synced; no checksum, no rename."""

    def save(path: Path) -> Done:
        with open(path, "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True

    def load(path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Way("torch.save, fsync", save, lambda: None, load)


def dcp_save(model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """torch.distributed.checkpoint, which syncs by itself."""

    def save(path: Path) -> Done:
        shutil.rmtree(path, ignore_errors=True)
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
        return lambda: True

    return Way("dcp.save", save, lambda: None, lambda path: dcp_load(path, model, optimizer))


def dcp_async(model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """The same beside training."""
    pending: list[Any] = []

    def save(path: Path) -> Done:
        shutil.rmtree(path, ignore_errors=True)
        pending[:] = [dcp.async_save(state_of(model, optimizer), checkpoint_id=path)]
        return lambda: bool(pending[0].done())

    def finish() -> None:
        pending.pop().result()

    return Way("dcp.async_save", save, finish, lambda path: dcp_load(path, model, optimizer))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What dcp saves: tensors by name, in nested dictionaries."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def dcp_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Into the tensors that are there."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def measure(way: Way, path: Path, step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """One row of the table."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(work: Callable[[], Any]) -> float:
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - began

    def steps(count: int) -> float:
        return seconds(lambda: [step() for _ in range(count)])

    before = peak_gb(reset=True)
    stood, whole = [], []
    for _ in range(1 + WARM):
        steps(20)  # and, before the first, memory is made ready beside them
        began = time.perf_counter()
        stood.append(seconds(lambda: way.save(path)))
        way.finish()
        whole.append(time.perf_counter() - began)
    memory = peak_gb() - before

    beside: Any = "-"
    done = way.save(path)
    if not done():
        count = 0
        synchronize()
        began = time.perf_counter()
        while not done():
            step()
            count += 1
        synchronize()
        took = time.perf_counter() - began
        way.finish()
        beside = took / statistics.mean([steps(count), steps(count)])
    return {
        "way": way.name,
        "first": stood[0],
        "warm": statistics.median(stood[1:]),
        "write": statistics.median(whole[1:]),
        "beside": beside,
        "load": statistics.median([seconds(lambda: way.load(path)) for _ in range(1 + LOADS)][1:]),
        "memory": memory,
    }


def peak_gb(reset: bool = False) -> float:
    """The most memory that was resident since the last reset (proc_pid_status(5), VmHWM)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e9


def wanted(happened: bool) -> None:
    """Raise if it has not: a table of what has failed would look well."""
    if not happened:
        raise RuntimeError("a checkpoint was not written or not found")


if __name__ == "__main__":
    main()
