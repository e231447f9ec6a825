"""The training loop. Start it with `python -m <package>.train`, launch/torchrun.sh or sbatch; it reads top to bottom.

What happens every so many steps stands at the head of the loop, so that a resumed run first does what its checkpoint
still owes. Every rank goes through every line; work for rank 0 alone goes through `on_rank0`.
"""

import logging
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from .config import Settings
from .data import build_datasets
from .ddp import (
    NonFinite,
    Progress,
    StopRequested,
    batches,
    checkpoint,
    clip_gradients,
    effective,
    endless,
    global_norm,
    gradient_norm,
    largest_batch,
    load,
    make_loader,
    on_rank0,
    phase,
    polled,
    progress,
    rehearse,
    seed_generators,
    step_done,
    step_if_finite,
)
from .ddp.session import Session, session
from .evaluate import evaluate
from .model import build_model, training_loss, wrap
from .sample import draw

log = logging.getLogger("ddp")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Read the settings, join the other ranks, train. The exit code says how it ended (see README.md)."""
    settings, origin = load(Settings)
    with session(settings.run, settings.clocks, settings.log, settings.preempt, effective(settings, origin)) as run:
        train(settings, run)


def train(settings: Settings, run: Session) -> None:
    """Train from the newest checkpoint, or from nothing, to `train.steps`."""
    job, device, options = run.dist, run.dist.device, settings.train

    seed_generators(settings.run.seed)  # equal weights and equal data sets on all ranks
    network = build_model(settings.model).to(device)
    model = wrap(network, options.compile)  # the same weights, with DDP and perhaps torch.compile around them
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(options.ema)) if options.ema else None
    shown = average.module if average else network  # what is evaluated and drawn: plain, so it never communicates
    train_data, val_data = build_datasets(settings.data)
    seed_generators(settings.run.seed + 1 + job.rank)  # different noise on each rank
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, fused=True
    )
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")

    seed, full = settings.run.seed, options.compile  # a smaller last batch would be compiled once more
    loader = make_loader(train_data, job, settings.loader, batch_size=options.batch_size, seed=seed, full=full)
    val_loader = make_loader(val_data, job, settings.loader, batch_size=settings.eval.batch_size, train=False)
    val_rounds = len(val_data) // job.world_size // settings.eval.batch_size  # batches that every rank has

    # Where the run stands. "evaluated", "sampled" and "saved" are the steps at which that was last done.
    at = {"step": 0, "epoch": 0, "used": 0, "begun": 0, "evaluated": 0, "sampled": 0, "saved": 0}
    state: dict[str, checkpoint.Stateful] = {"model": network, "optimizer": optimizer}
    state |= {"average": average} if average else {}
    state |= {"scaler": scaler} if scaler.is_enabled() else {}
    if settings.run.resume:
        at |= checkpoint.load(job, run.dir, state) or {}
    else:
        checkpoint.set_aside(job, run.dir, state)
    if average and not average.n_averaged:  # at the start, or switched on since
        average.module.load_state_dict(network.state_dict())
    nonfinite = torch.zeros((), device=device)

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, PRECISIONS[options.precision], enabled=options.precision != "fp32")

    def forward_backward(batch: Sequence[Tensor]) -> Tensor:
        """Add to the gradients; returns the summed loss of the batch and how many terms it has, float32 [2]."""
        batch = [tensor.to(device, non_blocking=True) for tensor in batch]
        with phase("forward"), autocast():
            loss, terms = training_loss(model, batch)
        with phase("backward"):  # DDP averages the gradients over the ranks while it computes them
            scaler.scale(loss / options.batch_size).backward()
        return torch.stack([loss.detach().float(), terms.float()])

    def refuse_nonfinite(steps: float) -> None:
        # In fp16 the scaler tries a larger scale every 2000 steps, and finds the first one by halving.
        search = 16 + at["step"] // scaler.get_growth_interval() if scaler.is_enabled() else 0
        if steps > options.max_nonfinite + search:
            raise NonFinite(f"{steps:.0f} steps had a NaN or infinite gradient, more than train.max_nonfinite allows")

    def save(must: bool = False) -> None:
        refuse_nonfinite(nonfinite.item())  # no good checkpoint makes room for what a diverged run has left
        counters = at | {"saved": at["step"]}
        if checkpoint.save(job, run.dir, counters, state, keep=settings.checkpoint.keep, must=must):
            at["saved"] = at["step"]

    def picture(progress: Progress) -> None:
        try:
            with autocast():
                draw(shown, val_data, settings.sample, device, progress, run.dir / "samples" / f"step_{at['step']:08d}")
        except OSError as error:  # a full disk costs the picture, not the run
            log.warning("no picture of step %d: %s", at["step"], error)

    feed = endless(loader, job, at["epoch"], at["used"], at["begun"])
    first = next(feed)
    feed = chain([first], feed)
    if options.rehearse:
        largest = largest_batch(train_data, options.batch_size, first[1])
        rehearse(job, [model], lambda: forward_backward(largest))
    step_done(at["step"], at["epoch"])
    visible = job.rank == 0 and sys.stderr is not None  # a terminal, tqdm finds out by itself
    bar = tqdm(total=options.steps, initial=at["step"], unit="step", disable=None if visible else True)
    try:
        while True:
            step, last = at["step"], at["step"] >= options.steps

            if due(step, settings.eval.every_steps, last) and at["evaluated"] < step:
                shard = polled(batches(val_loader, job), run.agreement, step, val_rounds)
                with phase("eval"), autocast():
                    found = evaluate(shown, shard, job, settings.eval, progress)
                run.metrics.flush()
                run.metrics.write(step, found)
                at["evaluated"] = step

            if due(step, settings.sample.every_steps, last) and at["sampled"] < step:
                on_rank0(job, "sample", picture, run.flags)
                at["sampled"] = step

            if due(step, settings.checkpoint.every_steps, last) and at["saved"] < step:
                save(must=last)

            if last:
                break
            run.agreement.poll(step)  # raises StopRequested on all ranks at the same step

            set_learning_rate(optimizer, settings, step)
            summed = torch.zeros(2, device=device)
            for part in range(1, options.accumulate + 1):
                position, batch = next(feed)
                at |= position
                with nullcontext() if part == options.accumulate else model.no_sync():  # one reduction a step
                    summed += forward_backward(batch)
            with phase("optim"):
                scaler.unscale_(optimizer)
                norm = gradient_norm(network.parameters()) / job.world_size
            totals = torch.cat([summed, norm[None]])
            with phase("agree"):  # one norm for all ranks: they clip alike to the bit, and skip a step alike
                dist.all_reduce(totals)
            with phase("optim"):
                loss, terms, norm = totals
                # Batches may have unequal numbers of terms: from DDP's mean of sums to the mean over all terms.
                factor = job.world_size * options.batch_size / terms
                norm = clip_gradients(network.parameters(), factor, options.clip_norm, norm)
                nonfinite += step_if_finite(optimizer, norm)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                if average:
                    average.update_parameters(network)

            at["step"] = step + 1
            step_done(at["step"], at["epoch"])
            bar.update()
            if due(at["step"], settings.log.every_steps):
                values = {"loss": loss / terms, "grad_norm": norm, "nonfinite_steps": nonfinite}
                run.metrics.scalars(at["step"], values | {"param_norm": global_norm(network.parameters())})
                bar.set_postfix({"loss": run.metrics.latest.get("loss")})
                refuse_nonfinite(run.metrics.latest.get("nonfinite_steps", 0))
    except StopRequested:
        save(must=True)
        raise
    finally:
        bar.close()


def due(step: int, every: int, last: bool = False) -> bool:
    """Whether something done every so many steps, and at the end, is to be done now."""
    return step > 0 and (last or step % every == 0)


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> None:
    """Linear warm-up, then a cosine to zero: a function of the step, so there is no scheduler state to restore."""
    warmup, steps = settings.train.warmup_steps, settings.train.steps
    rising = min(1.0, (step + 1) / (warmup + 1))
    falling = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = settings.train.learning_rate * rising * falling
        group["weight_decay"] = settings.train.weight_decay  # today's, not that of the checkpoint


if __name__ == "__main__":
    main()
