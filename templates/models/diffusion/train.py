"""The training loop. Start it with `python -m <package>.train`, launch/torchrun.sh or sbatch; it reads top to bottom.

What happens every so many steps stands at the head of the loop, so that a resumed run first does what its checkpoint
still owes. Every rank goes through every line; work for rank 0 alone goes through `on_rank0`.
"""

import logging
import math
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from .config import Settings
from .data import build_datasets
from .ddp import checkpoint
from .ddp.agree import total
from .ddp.errors import NonFinite, StopRequested
from .ddp.guard import Progress, on_rank0
from .ddp.heartbeat import phase, progress, step_done
from .ddp.loader import batches, endless, make_loader
from .ddp.lockstep import polled
from .ddp.metrics import clip_gradients, global_norm, step_if_finite
from .ddp.rng import seed_generators
from .ddp.session import Session, session
from .ddp.settings import effective, load
from .evaluate import evaluate, finish
from .model import build_model, diffusion_loss
from .sample import sample, save_grid

log = logging.getLogger("ddp")


def main() -> None:
    """Read the settings, join the other ranks, train. The exit code says how it ended (see README.md)."""
    settings, origin = load(Settings)
    with session(settings.run, settings.clocks, settings.log, settings.preempt, effective(settings, origin)) as run:
        train(settings, run)


def train(settings: Settings, run: Session) -> None:
    """Train from the newest checkpoint, or from nothing, to `train.steps`."""
    job, device = run.dist, run.dist.device

    seed_generators(settings.run.seed)  # equal weights everywhere, before DDP's broadcast
    model = wrap(build_model(settings.model).to(device))
    seed_generators(settings.run.seed + 1 + job.rank)  # different noise on each rank
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.train.learning_rate, weight_decay=settings.train.weight_decay, fused=True
    )

    train_data, val_data = build_datasets(settings.data)
    seed, batch_size = settings.run.seed, settings.train.batch_size
    loader = make_loader(train_data, job, settings.loader, batch_size=batch_size, seed=seed)
    val_loader = make_loader(val_data, job, settings.loader, batch_size=settings.eval.batch_size, train=False)
    val_rounds = len(val_data) // job.world_size // settings.eval.batch_size  # batches that every rank has

    # Where the run stands. "evaluated", "sampled" and "saved" are the steps at which that was last done.
    at = {"step": 0, "epoch": 0, "used": 0, "evaluated": 0, "sampled": 0, "saved": 0}
    state: dict[str, checkpoint.Stateful] = {"model": model.module, "optimizer": optimizer}
    if settings.run.resume:
        at |= checkpoint.load(job, run.dir, state) or {}
    else:
        checkpoint.set_aside(job, run.dir)
    step_done(at["step"], at["epoch"])
    nonfinite = torch.zeros((), device=device)

    def save(must: bool = False) -> None:
        counters = at | {"saved": at["step"]}
        if checkpoint.save(job, run.dir, counters, state, keep=settings.checkpoint.keep, must=must):
            at["saved"] = at["step"]

    def draw(progress: Progress) -> None:
        images = sample(model.module, settings.sample, device, progress)
        try:
            save_grid(images, run.dir / "samples" / f"step_{at['step']:08d}.png")
        except OSError as error:  # a full disk costs the picture, not the run
            log.warning("no picture of step %d: %s", at["step"], error)

    visible = job.rank == 0 and sys.stderr is not None  # a terminal, tqdm finds out by itself
    bar = tqdm(total=settings.train.steps, initial=at["step"], unit="step", disable=None if visible else True)
    feed = endless(loader, job, at["epoch"], at["used"])
    try:
        while True:
            step, last = at["step"], at["step"] >= settings.train.steps

            if due(step, settings.eval.every_steps, last) and at["evaluated"] < step:
                shard = polled(batches(val_loader, job), run.agreement, step, val_rounds)
                with phase("eval"):
                    part = evaluate(model.module, shard, device, settings.eval, progress)
                run.metrics.flush()
                run.metrics.write(step, finish(total(job, part)))
                at["evaluated"] = step

            if due(step, settings.sample.every_steps, last) and at["sampled"] < step:
                on_rank0(job, "sample", draw, run.flags)
                at["sampled"] = step

            if due(step, settings.checkpoint.every_steps, last) and at["saved"] < step:
                save(must=last)

            if last:
                break
            run.agreement.poll(step)  # raises StopRequested on all ranks at the same step

            at["epoch"], at["used"], (images, labels) = next(feed)
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            set_learning_rate(optimizer, settings, step)
            with phase("forward"):
                loss = diffusion_loss(model, images, labels)
            with phase("backward"):  # DDP averages the gradients over the ranks while it computes them
                loss.backward()
            with phase("optim"):
                norm = global_norm(parameter.grad for parameter in model.parameters())
                clip_gradients(model.parameters(), norm, settings.train.clip_norm)
                nonfinite += step_if_finite(optimizer, norm)
                optimizer.zero_grad(set_to_none=True)

            at["step"] = step + 1
            step_done(at["step"], at["epoch"])
            bar.update()
            if due(at["step"], settings.log.every_steps):
                run.metrics.scalars(at["step"], {"loss": loss, "grad_norm": norm, "nonfinite_steps": nonfinite})
                bar.set_postfix({"loss": run.metrics.latest.get("loss")})
                if run.metrics.latest.get("nonfinite_steps", 0) > settings.train.max_nonfinite:
                    raise NonFinite("more steps than train.max_nonfinite had a NaN or infinite gradient")
    except StopRequested:
        save(must=True)
        raise
    finally:
        bar.close()


def due(step: int, every: int, last: bool = False) -> bool:
    """Whether something done every so many steps, and at the end, is to be done now."""
    return step > 0 and (last or step % every == 0)


def wrap(model: nn.Module) -> DistributedDataParallel:
    """DDP with what this model needs, and nothing out of superstition.

    No device_ids: the module is on its device already, and its inputs are moved in the loop. No word on buffers: there
    are none, since GroupNorm keeps no running statistics. Parameters need no broadcast by hand: DDP makes it here.
    """
    return DistributedDataParallel(model, gradient_as_bucket_view=True)  # the view saves a copy of the gradients


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> None:
    """Linear warm-up, then a cosine to zero: a function of the step, so there is no scheduler state to restore."""
    warmup, steps = settings.train.warmup_steps, settings.train.steps
    rising = min(1.0, (step + 1) / (warmup + 1))
    falling = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = settings.train.learning_rate * rising * falling


if __name__ == "__main__":
    main()
