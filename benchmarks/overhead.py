"""What the hardening costs a training step, as a ratio to a bare DDP loop in the same processes.

    PYTHONPATH=PROJECT/src torchrun --nproc-per-node 2 benchmarks/overhead.py [--package digits] [--channels 64]

Blocks of both loops alternate, with the same model, data and optimiser; the monitor runs in hardened blocks only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

Step = Callable[[], None]


def main() -> None:
    """Join, alternate, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="digits", help="the generated package to measure")
    parser.add_argument("--channels", type=int, default=16, help="size of the model")
    parser.add_argument("--batch-size", type=int, default=64, help="of a rank")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=50, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each loop; the first is warm-up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    def part(name: str) -> Any:
        return importlib.import_module(f"{options.package}.{name}")

    clocks = part("ddp.clocks").Clocks()
    job = part("ddp.start.rendezvous").rendezvous(part("ddp.start.launcher").detect(), clocks)
    job = part("ddp.start.groups").setup_distributed(job, options.device)
    scratch = Path(part("ddp.agree").from_rank0(job, tempfile.mkdtemp()))
    for name in ("stacks", "heartbeats"):
        (scratch / name).mkdir(exist_ok=True)
    part("ddp.trace.replicas").keep_models(lambda _module: None)
    part("ddp.trace.replicas").keep_optimizers()
    torch.manual_seed(0)
    net = part("model").build_model(part("model").ModelSettings(channels=options.channels)).to(job.device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = part("data").build_datasets(part("data").DataSettings())[0]

    bare = bare_step(part, model, optimizer, data, job, options.batch_size)
    hardened = hardened_step(part, model, optimizer, data, job, options.batch_size, scratch)
    times: dict[str, list[float]] = {"bare": [], "hardened": []}
    for number in range(options.rounds):
        times["bare"].append(block(bare, options.steps, job))
        # A prefix of its own in the store: the last monitor's keys are still there.
        place = replace(job.place, attempt=1000 + number)
        monitor = part("ddp.watch.monitor").Monitor(replace(job, place=place), scratch, heartbeat_s=1)
        dist.barrier()
        monitor.start()
        times["hardened"].append(block(hardened, options.steps, job))
        monitor.stop()
    medians = {name: statistics.median(found[1:]) * 1e3 for name, found in times.items()}
    ratios = [b / a for a, b in zip(times["bare"][1:], times["hardened"][1:], strict=True)]
    result = {
        "device": str(job.device.type),
        "ranks": job.world_size,
        "parameters": sum(p.numel() for p in net.parameters()),
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    if job.rank == 0:
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")
    part("ddp.start.groups").shutdown(job)


def block(step: Step, steps: int, job: Any) -> float:
    """Mean seconds of a step, synchronised at both ends only."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def bare_step(part: Any, model: Any, optimizer: Any, data: Any, job: Any, batch_size: int) -> Step:
    """The loop of a tutorial: loss, backward, clip, step, a printed loss every 20 steps."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, job.world_size, job.rank)
    loader: DataLoader[Any] = DataLoader(data, batch_size, sampler=sampler, pin_memory=job.device.type == "cuda")
    count = 0

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    feed = forever()

    def step() -> None:
        nonlocal count
        batch = [tensor.to(job.device, non_blocking=True) for tensor in next(feed)]
        loss, terms = part("model").training_loss(model, batch)
        loss = loss / terms
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1
        if count % 20 == 0:
            loss.item()

    return step


def hardened_step(part: Any, model: Any, optimizer: Any, data: Any, job: Any, batch_size: int, scratch: Path) -> Step:
    """The body of the generated train.py, with its agreement, phases, loader, metrics and skipped non-finite steps."""
    heartbeat, metrics, loader = part("ddp.trace.heartbeat"), part("ddp.metrics"), part("ddp.loader")
    flags = part("ddp.start.stop").StopFlags(part("ddp.start.stop").PreemptSettings())
    flags.stop_file = scratch / "stop"
    agreement = part("ddp.agree").Agreement(job, flags, drift=part("ddp.trace.drift").Drift(job))
    log = metrics.MetricLog(job, scratch, metrics.LogSettings(tracker="none"))
    feed = loader.endless(loader.make_loader(data, job, loader.LoaderSettings(), batch_size=batch_size), job, 0, 0)
    count = 0

    def step() -> None:
        nonlocal count
        agreement.poll(count)
        _, batch = next(feed)
        batch = [tensor.to(job.device, non_blocking=True) for tensor in batch]
        with heartbeat.phase("forward"):
            loss, terms = part("model").training_loss(model, batch)
        with heartbeat.phase("backward"):
            (loss / batch_size).backward()
        norm = metrics.gradient_norm(model.parameters()) / job.world_size
        totals = torch.stack([loss.detach().float(), terms.float(), norm])
        with heartbeat.phase("agree"):
            dist.all_reduce(totals)
        with heartbeat.phase("optim"):
            summed, terms, norm = totals
            factor = job.world_size * batch_size / terms
            norm = metrics.clip_gradients(model.parameters(), factor, 1.0, norm)
            metrics.step_if_finite(optimizer, norm)
            optimizer.zero_grad(set_to_none=True)
        count += 1
        heartbeat.step_done(count, 0)
        if count % 20 == 0:
            log.scalars(count, {"loss": summed / terms, "grad_norm": norm})

    return step


if __name__ == "__main__":
    main()
