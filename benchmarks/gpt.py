"""What the hardening costs a training step of a GPT, as a ratio to a bare DDP loop in the same processes.

    PYTHONPATH=PROJECT/src torchrun --nproc-per-node 2 benchmarks/gpt.py [--package digits] [--json FILE]
    PYTHONPATH=PROJECT/src torchrun --nproc-per-node 2 benchmarks/gpt.py --device cpu --small     (a rehearsal)

Blocks of two loops alternate, with the same model, data and optimiser, in turn first and second of a round:

- bare: forward, backward, torch's clip_grad_norm_, optimiser step, and nothing else; no monitor runs;
- watched: the same as in the generated train.py, with its phases, agreement, comparison of replicas, one reduction of
  loss and norm, clipping and skipped steps, metrics averaged over the ranks every 20 steps, and its monitor's threads,
  heartbeats and stall detection running with default clocks. With one rank, replicas are summed as with many.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# 24 layers of 1024 with 16 heads, 64,000 tokens, tied embedding: 368 million parameters.
FULL = {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 64000, "length": 512, "batch": 32}
SMALL = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 512, "length": 64, "batch": 8}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Gpt(nn.Module):
    """A decoder whose output layer is the token embedding; returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        read, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(read) + self.positions(torch.arange(read.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def main() -> None:
    """Join, alternate, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="digits", help="the generated package to measure")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--batch-size", type=int, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--without-replicas", action="store_true", help="do not compare replicas in the watched loop")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each loop, after one for warm-up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = dict(SMALL if options.small else FULL)
    batch = options.batch_size or sizes["batch"]
    del sizes["batch"]

    def part(name: str) -> Any:
        return importlib.import_module(f"{options.package}.ddp.{name}")

    job = part("start.rendezvous").rendezvous(part("start.launcher").detect(), part("clocks").Clocks())
    job = part("start.groups").setup_distributed(job, options.device)
    part("trace.heartbeat").beat.control = job.control
    part("trace.collectives").keep_ledger()
    part("trace.replicas").keep_models(lambda _module: None)
    part("trace.replicas").keep_optimizers()
    if job.device.type == "cuda":
        part("trace.spent").begin()
    mine = tempfile.mkdtemp(prefix="gpt-benchmark-") if job.rank == 0 else ""
    scratch = Path(part("agree").from_rank0(job, mine))
    for name in ("stacks", "heartbeats"):
        (scratch / name).mkdir(exist_ok=True)

    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(**sizes).to(job.device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(job.rank)
    texts = torch.randint(sizes["vocabulary"], (8, batch, sizes["length"] + 1), device=job.device)
    drift = None if options.without_replicas else part("trace.drift").Drift(job)
    bare, watched, settle = loops(part, model, optimizer, texts, job, scratch, drift)

    def one(name: str, number: int) -> list[float]:
        if name == "bare":
            return block(bare, options.steps, job)
        # A prefix of its own in the store: the last monitor's keys are still there.
        place = replace(job.place, attempt=1000 + number)
        monitor = part("watch.monitor").Monitor(replace(job, place=place), scratch, heartbeat_s=30)
        dist.barrier()
        monitor.start()
        took = block(watched, options.steps, job)
        settle()
        dist.barrier()
        monitor.stop()
        return took

    times: dict[str, list[float]] = {"bare": [], "watched": []}
    steps: dict[str, list[float]] = {"bare": [], "watched": []}
    for number in range(options.rounds + 1):
        for name in ("bare", "watched") if number % 2 else ("watched", "bare"):
            took = one(name, number)
            if number:
                times[name].append(statistics.mean(took))
                steps[name] += took
    ratios = [b / a for a, b in zip(times["bare"], times["watched"], strict=True)]
    p50 = {name: statistics.median(found) for name, found in steps.items()}
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "cpu"
    result = {
        "device": f"{job.world_size} x {device}",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": f"{batch}x{sizes['length']}",
        "bare_ms": round(statistics.median(times["bare"]) * 1e3, 3),
        "watched_ms": round(statistics.median(times["watched"]) * 1e3, 3),
        "ratio_of_medians": round(statistics.median(times["watched"]) / statistics.median(times["bare"]), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "p50_of_steps_ms": {name: round(found * 1e3, 3) for name, found in p50.items()},
        "ratio_of_p50": round(p50["watched"] / p50["bare"], 4),
        "rounds_ms": {name: [round(value * 1e3, 3) for value in found] for name, found in times.items()},
        "steps_of_a_block": options.steps,
    }
    if job.rank == 0:
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    part("start.groups").shutdown(job)


def block(step: Callable[[], None], steps: int, job: Any) -> list[float]:
    """Seconds of each step, on a GPU by its own events: nothing waits within the block.

    A few steps before do not count: in them the agreement finds its pace again, after a pause that is no training.
    """
    for _ in range(8):
        step()
    gc.collect()
    synchronize(job)
    dist.barrier()
    synchronize(job)
    if job.device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize(job)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def synchronize(job: Any) -> None:
    """Wait for this rank's GPU, if it has one."""
    if job.device.type == "cuda":
        torch.cuda.synchronize()


def loops(
    part: Callable[[str], Any],
    model: nn.Module,
    optimizer: Any,
    texts: torch.Tensor,
    job: Any,
    scratch: Path,
    drift: Any,
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """One step of the bare loop, one of the watched loop, and what ends a block of the watched one."""
    heartbeat, metrics, preempt = part("trace.heartbeat"), part("metrics"), part("start.stop")
    flags = preempt.StopFlags(preempt.PreemptSettings())
    flags.stop_file = scratch / "stop"
    agreement = part("agree").Agreement(job, flags, drift=drift)
    log = metrics.MetricLog(job, scratch, metrics.LogSettings(tracker="none"))
    count = 0

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if job.device.type == "cuda" else nullcontext()

    def bare() -> None:
        nonlocal count
        with precision():
            loss = model(texts[count % len(texts)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1

    def watched() -> None:
        nonlocal count
        agreement.poll(count)
        with heartbeat.phase("forward"), precision():
            loss = model(texts[count % len(texts)])
        with heartbeat.phase("backward"):
            loss.backward()
        norm = metrics.gradient_norm(model.parameters()) / job.world_size
        totals = torch.stack([loss.detach().float(), norm])
        with heartbeat.phase("agree"):
            dist.all_reduce(totals)
        with heartbeat.phase("optim"):
            mean, norm = totals
            norm = metrics.clip_gradients(model.parameters(), 1.0, 1.0, norm)
            metrics.step_if_finite(optimizer, norm)
            optimizer.zero_grad(set_to_none=True)
        count += 1
        heartbeat.step_done(count, 0)
        if count % 20 == 0:
            log.scalars(count, {"loss": mean / job.world_size, "grad_norm": norm})

    def settle() -> None:
        log.flush()
        agreement.settle()

    return bare, watched, settle


if __name__ == "__main__":
    main()
