"""The training loop. Start it with `python -m <package>.train`, launch/torchrun.sh or sbatch; it reads top to bottom.

What happens every so many steps stands at the head of the loop, so that a resumed run first does what its checkpoint
still owes. Every rank goes through every line; work for rank 0 alone goes through `on_rank0`.

A step updates the discriminator, then the generators. Each of the three DDP wrappers runs in its own half of the step
only, one forward and one backward a batch: the other half calls the network inside it.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
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
from .model import Generators, build_model, discriminator_loss, generator_loss, wrap
from .sample import draw

log = logging.getLogger("ddp")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Loss = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


def main() -> None:
    """Read the settings, join the other ranks, train. The exit code says how it ended (see README.md)."""
    settings, origin = load(Settings)
    with session(settings.run, settings.clocks, settings.log, settings.preempt, effective(settings, origin)) as run:
        train(settings, run)


def train(settings: Settings, run: Session) -> None:
    """Train from the newest checkpoint, or from nothing, to `train.steps`."""
    job, device, options = run.dist, run.dist.device, settings.train

    seed_generators(settings.run.seed)  # equal weights and equal data sets on all ranks
    generators, discriminator = build_model(settings.model)
    networks = [part.to(device) for part in (generators.coarse, generators.refiner, discriminator)]
    g1, g2, d = (wrap(network, options.compile) for network in networks)  # the same weights, each with DDP around them
    average = AveragedModel(generators, multi_avg_fn=get_ema_multi_avg_fn(options.ema)) if options.ema else None
    # What is evaluated and drawn: plain, so it never communicates.
    shown = cast(Generators, average.module) if average else generators
    train_data, val_data = build_datasets(settings.data)
    seed_generators(settings.run.seed + 1 + job.rank)  # different noise on each rank
    lr, decay = options.learning_rate, options.weight_decay
    optimizer, d_optimizer = (  # a long memory of gradients is of little use against an opponent that moves
        torch.optim.AdamW(network.parameters(), lr, betas=(0.5, 0.99), weight_decay=decay, fused=True)
        for network in (generators, discriminator)
    )
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")  # one scale for both optimisers

    seed, full = settings.run.seed, options.compile  # a smaller last batch would be compiled once more
    loader = make_loader(train_data, job, settings.loader, batch_size=options.batch_size, seed=seed, full=full)
    val_loader = make_loader(val_data, job, settings.loader, batch_size=settings.eval.batch_size, train=False)
    val_rounds = len(val_data) // job.world_size // settings.eval.batch_size  # batches that every rank has

    # Where the run stands. "evaluated", "sampled" and "saved" are the steps at which that was last done.
    at = {"step": 0, "epoch": 0, "used": 0, "begun": 0, "evaluated": 0, "sampled": 0, "saved": 0}
    state: dict[str, checkpoint.Stateful] = {"model": generators, "optimizer": optimizer}
    state |= {"discriminator": discriminator, "discriminator_optimizer": d_optimizer}
    state |= {"average": average} if average else {}
    state |= {"scaler": scaler} if scaler.is_enabled() else {}
    if settings.run.resume:
        at |= checkpoint.load(job, run.dir, state) or {}
    else:
        checkpoint.set_aside(job, run.dir, state)
    if average and not average.n_averaged:  # at the start, or switched on since
        average.module.load_state_dict(generators.state_dict())
    nonfinite = torch.zeros((), device=device)

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, PRECISIONS[options.precision], enabled=options.precision != "fp32")

    def d_loss(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return discriminator_loss(d, g1.module, g2.module, batch, settings.model)

    def g_loss(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return generator_loss(d.module, g1, g2, batch, settings.model)

    def forward_backward(loss_of: Loss, batch: Sequence[Tensor]) -> Tensor:
        """Add to the gradients; returns the summed loss of the batch and how many terms it has, float32 [2]."""
        batch = [tensor.to(device, non_blocking=True) for tensor in batch]
        with phase("forward"), autocast():
            loss, terms = loss_of(batch)
        with phase("backward"):  # DDP averages the gradients over the ranks while it computes them
            scaler.scale(loss / options.batch_size).backward()
        return torch.stack([loss.detach().float(), terms.float()])

    def gradients(loss_of: Loss, parts: Sequence[Sequence[Tensor]], *models: DistributedDataParallel) -> Tensor:
        """Forward and backward of all parts through `models`; returns loss and terms of this rank, float32 [2]."""
        summed = torch.zeros(2, device=device)
        for number, part in enumerate(parts, 1):
            with ExitStack() as unsynced:
                for model in models if number < len(parts) else ():  # one reduction a step, of each model
                    unsynced.enter_context(model.no_sync())
                summed += forward_backward(loss_of, part)
        return summed

    def update(optimizer: torch.optim.Optimizer, network: torch.nn.Module, summed: Tensor) -> tuple[Tensor, ...]:
        """Step, unless a gradient is not finite.

        Returns: the mean loss over all terms of all ranks, the norm of the gradients, and 1 if it was skipped, else 0.
        """
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
            skipped = step_if_finite(optimizer, norm)
            optimizer.zero_grad(set_to_none=True)
        return loss / terms, norm, skipped

    def both(batch: Sequence[Tensor]) -> None:  # so that every wrapper has gradients to compare
        forward_backward(d_loss, batch)
        with frozen(discriminator):
            forward_backward(g_loss, batch)

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
        rehearse(job, [g1, g2, d], lambda: both(largest))
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
            set_learning_rate(d_optimizer, settings, step, settings.model.discriminator_rate)
            parts = []  # both halves of the step see the same samples
            for _ in range(options.accumulate):
                position, batch = next(feed)
                at |= position
                parts += [batch]

            d_mean, d_norm, d_skipped = update(d_optimizer, discriminator, gradients(d_loss, parts, d))
            with frozen(discriminator):  # else it would gather gradients here, which nobody reduces
                summed = gradients(g_loss, parts, g1, g2)
            mean, norm, skipped = update(optimizer, generators, summed)
            with phase("optim"):
                scaler.update()  # after both: one loss must not be scaled by one number and unscaled by another
                nonfinite += torch.maximum(skipped, d_skipped)  # each norm is equal on all ranks, so each decision is
                if average:
                    average.update_parameters(generators)

            at["step"] = step + 1
            step_done(at["step"], at["epoch"])
            bar.update()
            if due(at["step"], settings.log.every_steps):
                values = {"loss": mean, "grad_norm": norm, "nonfinite_steps": nonfinite}
                values |= {"d_loss": d_mean, "d_grad_norm": d_norm}
                run.metrics.scalars(at["step"], values | {"param_norm": global_norm(generators.parameters())})
                bar.set_postfix({"loss": run.metrics.latest.get("loss")})
                refuse_nonfinite(run.metrics.latest.get("nonfinite_steps", 0))
    except StopRequested:
        save(must=True)
        raise
    finally:
        bar.close()


@contextmanager
def frozen(network: torch.nn.Module) -> Iterator[None]:
    """Let gradients pass through `network`, in forward and backward, but make none for its parameters."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


def due(step: int, every: int, last: bool = False) -> bool:
    """Whether something done every so many steps, and at the end, is to be done now."""
    return step > 0 and (last or step % every == 0)


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int, scale: float = 1.0) -> None:
    """Linear warm-up, then a cosine to zero: a function of the step, so there is no scheduler state to restore."""
    warmup, steps = settings.train.warmup_steps, settings.train.steps
    rising = min(1.0, (step + 1) / (warmup + 1))
    falling = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = scale * settings.train.learning_rate * rising * falling
        group["weight_decay"] = settings.train.weight_decay  # today's, not that of the checkpoint


if __name__ == "__main__":
    main()
