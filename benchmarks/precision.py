"""What `train.precision` is worth: a training step of a GPT in fp32, TF32 and bf16, in the same processes.

    PYTHONPATH=PROJECT/src torchrun --nproc-per-node 2 benchmarks/precision.py [--package digits] [--json FILE]
    PYTHONPATH=PROJECT/src python benchmarks/precision.py --device cpu --small     (a rehearsal, without TF32)

Blocks of the loops alternate, with the same model, data and optimiser; the step is that of the generated train.py:
forward under autocast, DDP's backward, one norm, clipping, a fused AdamW. Weights and gradients are in fp32 in all of
them. `fp32` is what PyTorch does by default; `tf32` is torch.set_float32_matmul_precision("high"). The package is a
rendered project (examples/digits-local is one); it needs torch, pydantic and PyYAML.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import FULL, SMALL, Gpt, block
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Join, alternate, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="digits", help="the generated package that the step is taken from")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--batch-size", type=int, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each loop, after one for warm-up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = dict(SMALL if options.small else FULL)
    batch = options.batch_size or sizes["batch"]
    del sizes["batch"]

    def part(name: str) -> Any:
        return importlib.import_module(f"{options.package}.ddp.{name}")

    job = part("start.rendezvous").rendezvous(part("start.launcher").detect(), part("clocks").Clocks())
    job = part("start.groups").setup_distributed(job, options.device)
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(**sizes).to(job.device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(job.rank)
    texts = torch.randint(sizes["vocabulary"], (8, batch, sizes["length"] + 1), device=job.device)
    rows = measure(part, model, optimizer, texts, job, options)
    result = {
        "device": f"{job.world_size} x {torch.cuda.get_device_name() if job.device.type == 'cuda' else 'cpu'}",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": f"{batch}x{sizes['length']}",
        "rows": rows,
    }
    if job.rank == 0:
        print(
            f"{result['device']}, torch {result['torch']}, {result['parameters']} parameters, batch {result['batch']}"
        )
        print("| precision | ms a step | of fp32 | tokens/s, all ranks | peak GiB | TFLOP/s a GPU | mfu |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for row in rows:
            print("| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |")
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")
    part("start.groups").shutdown(job)


def measure(part: Callable[[str], Any], model: Any, optimizer: Any, texts: Any, job: Any, options: Any) -> list[Any]:
    """A row for each precision: the median of its blocks, and what follows from it."""
    metrics, flops = part("metrics"), part("trace.flops")
    on_gpu = job.device.type == "cuda"
    names = ["fp32", "tf32", "bf16"] if on_gpu else ["fp32", "bf16"]
    steps = {name: one_step(metrics, model, optimizer, texts, job, name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    for number in range(options.rounds + 1):
        for name in names if number % 2 else reversed(names):
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            took = block(steps[name], options.steps, job)
            if number:
                times[name].append(statistics.mean(took))
            if on_gpu:
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    rows = []
    for name in names:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        with model.no_sync():
            flops.count([model], lambda name=name: forward(model, texts[0], name, job.device).backward(), job.device)
        model.zero_grad(set_to_none=True)
        work, seconds = flops.of_a_batch(), statistics.median(times[name])
        known = on_gpu and work is not None
        rows.append(
            {
                "precision": name,
                "ms": round(seconds * 1e3, 2),
                "of_fp32": round(seconds / statistics.median(times["fp32"]), 3),
                "tokens_per_second": round(texts.shape[1] * (texts.shape[2] - 1) * job.world_size / seconds),
                "peak_gib": round(peaks[name], 2) if on_gpu else None,
                "tflops_per_gpu": round(work.flops / seconds / 1e12, 1) if known else None,
                "mfu": round(work.least_s / seconds, 3) if known and work.least_s else None,
            }
        )
    return rows


def forward(model: nn.Module, text: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """The loss, under autocast for bf16."""
    with torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16"):
        loss: torch.Tensor = model(text)
    return loss


def one_step(metrics: Any, model: Any, optimizer: Any, texts: Any, job: Any, name: str) -> Callable[[], None]:
    """The step of the generated train.py, without what watches over it."""
    count = 0

    def step() -> None:
        nonlocal count
        loss = forward(model, texts[count % len(texts)], name, job.device)
        loss.backward()
        totals = torch.stack([loss.detach().float(), metrics.gradient_norm(model.parameters()) / job.world_size])
        dist.all_reduce(totals)
        norm = metrics.clip_gradients(model.parameters(), 1.0, 1.0, totals[1])
        metrics.step_if_finite(optimizer, norm)
        optimizer.zero_grad(set_to_none=True)
        count += 1

    return step


if __name__ == "__main__":
    main()
