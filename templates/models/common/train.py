"""The training loop. Start it with `python -m {{ package }}.train`, launch/torchrun.sh or sbatch.

`Learner` holds what a step changes, `train` is the loop. Evaluation, pictures and checkpoints stand at its top, so that
a resumed run first catches up on what was due at the step of its checkpoint. Every rank runs every line; work for
rank 0 alone goes through `on_rank0`.
"""

from __future__ import annotations

import logging
import math
import sys
{% if model == 'adversarial-diffusion' %}
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
{% else %}
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
{% endif %}
from itertools import chain
from typing import Any{{ ', cast' if model == 'adversarial-diffusion' }}

import torch
import torch.distributed as dist
from torch import Tensor, nn
{% if model == 'adversarial-diffusion' %}
from torch.nn.parallel import DistributedDataParallel
{% endif %}
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from tqdm import tqdm

from . import evaluate as evaluation
from .config import Settings, TrainSettings
from .data import build_datasets
from .ddp import (
    Job,
    NonFinite,
    Position,
    Progress,
    StopRequested,
    batches,
    checkpoint,
    clip_gradients,
    endless,
    full_batches,
    gather,
    global_norm,
    gradient_norm,
    largest_batch,
    load_settings,
    make_loader,
    moving_average,
    on_rank0,
    parts,
    phase,
    polled,
    progress,
    rehearse,
    seed_generators,
    settings_table,
    step_done,
    step_if_finite,
    to_device,
)
from .ddp.session import Session, session
from .evaluate import evaluate
{% if model == 'adversarial-diffusion' %}
from .model import Generators, build_model, discriminator_loss, generator_loss, wrap
{% else %}
from .model import build_model, training_loss, wrap
{% endif %}
from .sample import draw

log = logging.getLogger("ddp")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Batch = Any  # what the data set's samples become: tensors in a tuple, a list or a dict
{% if model == 'adversarial-diffusion' %}
Loss = Callable[[Batch], tuple[Tensor, Tensor]]
{% endif %}


def main() -> None:
    """Read the settings, join the other ranks, train. The exit code says how it ended (see README.md)."""
    settings, origin = load_settings(Settings)  # from the file, variables and the command line; who set what
    table = settings_table(settings, origin)  # printed at the start, and kept in settings.txt of the run
    with session(settings.run, settings.clocks, settings.log, settings.preempt, table) as run:
        for each in parts(with_precision(settings, run.job), run.job, run.dir):  # one; --fast-dev-run: two
            train(each, run)


def train(settings: Settings, run: Session) -> None:
    """Train from the newest checkpoint, or from nothing, to `train.steps`."""
    job, options = run.job, settings.train

    seed_generators(settings.run.seed)  # equal weights and equal data sets on all ranks
    learner = Learner(settings, job)
    train_data, val_data = build_datasets(settings.data)
    seed_generators(settings.run.seed + 1 + job.rank)  # different noise on each rank

    loader = make_loader(
        train_data,
        job,
        settings.loader,
        batch_size=options.batch_size,
        seed=settings.run.seed,
        full=options.compile,  # a smaller last batch would be compiled once more
    )
    val_loader = make_loader(val_data, job, settings.loader, batch_size=settings.eval.batch_size, train=False)
    common_val_batches = full_batches(val_data, job, settings.eval.batch_size)  # that every rank has; None for a stream

    position = resume(settings, run, learner)
    feed = endless(loader, job, position.epoch, position.samples, position.global_batch)
    if options.rehearse:
        counters, first_batch = next(feed)
        learner.rehearse(largest_batch(train_data, options.batch_size, first_batch))
        feed = chain([(counters, first_batch)], feed)  # put back: it has not been trained on
    step_done(position.step, position.epoch)

    with progress_bar(position, options.steps, visible=job.rank == 0) as bar:
        try:
            while True:
                finished = position.step >= options.steps

                if due(settings.eval.every_steps, position.step, finished, position.evaluated):
                    validate(settings, run, learner, val_loader, common_val_batches, position.step)
                    position.evaluated = position.step

                if due(settings.sample.every_steps, position.step, finished, position.sampled):
                    draw_samples(settings, run, learner, val_data, position.step)
                    position.sampled = position.step

                saving = due(settings.checkpoint.every_steps, position.step, finished, position.saved)
                if saving or checkpoint.is_best(position.step):
                    save(settings, run, learner, position, must=finished)

                if finished:
                    break
                run.agreement.poll(position.step)  # raises StopRequested on all ranks at the same step

                batches_of_step = (next_batch(feed, position) for _ in range(options.accumulate))  # read as needed
                values = learner.train_step(position.step, batches_of_step)
                position.step += 1
                step_done(position.step, position.epoch)
                bar.update()

                if due(settings.log.every_steps, position.step):
                    log_scalars(settings, run, learner, position.step, values)
                    bar.set_postfix(run.metrics.glance("loss"))
        except StopRequested:
            if position.saved < position.step or not checkpoint.finish(run.job):
                save(settings, run, learner, position, must=True)
            raise


{% include ['templates/models/' ~ model ~ '/learner.py', 'templates/models/common/learner.py'] %}

def make_ema(network: nn.Module, decay: float) -> AveragedModel | None:
    """A copy of the network for the exponential moving average of its weights, or None if `decay` is 0."""
    return moving_average(network, decay) if decay else None


def with_precision(settings: Settings, job: Job) -> Settings:
    """In the place of `auto`: bf16 if the GPUs of all ranks have it, else fp32."""
    if settings.train.precision != "auto":
        return settings
    return settings.model_copy(update={"train": settings.train.model_copy(update={"precision": job.precision})})


def loss_scaler(options: TrainSettings, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for fp16. PyTorch's initial 65536 is meant for a mean, and our loss is a sum over the batch.

    So it is divided by the samples of a batch. If each has many terms, such as the bytes of a text, the scale is still
    too large at first: steps are skipped, each of which halves it.
    """
    return torch.amp.GradScaler(device.type, 65536.0 / options.batch_size, enabled=options.precision == "fp16")


def autocast(options: TrainSettings, device: torch.device) -> torch.autocast:
    """Autocast to `train.precision`. Weights and gradients stay in fp32."""
    return torch.autocast(device.type, PRECISIONS[options.precision], enabled=options.precision != "fp32")


def update_weights(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loss_and_terms: Tensor,
    job: Job,
    clip_norm: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Step with the gradients that DDP has averaged; skip the step, on all ranks, if they are not finite on one.

    Args:
        loss_and_terms: of this rank: its summed loss, and the number of terms (samples, tokens) in it, float32 [2].

    Returns:
        Scalars, equal on all ranks: the mean loss over all terms of all ranks, the norm of its gradient before it is
        clipped, and 1 if the step was skipped, else 0.
    """
    with phase("optim"):
        scaler.unscale_(optimizer)
        norm = gradient_norm(network.parameters())
    totals = torch.cat([loss_and_terms, norm[None]])
    with phase("agree"):
        dist.all_reduce(totals)
    with phase("optim"):
        loss, terms, norm_sum = totals
        # Equal on all ranks up to rounding. With its mean they clip alike to the bit, and skip the same steps.
        norm = norm_sum / job.world_size
        # DDP leaves (sum of the ranks' gradients) / world_size. The gradient of the mean loss is that sum / terms.
        norm = clip_gradients(network.parameters(), job.world_size / terms, clip_norm, norm)
        skipped = step_if_finite(optimizer, norm)  # in the place of scaler.step
        optimizer.zero_grad(set_to_none=True)
    return loss / terms, norm, skipped


def highest_rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rate and weight decay with which each parameter group was made, before a checkpoint is loaded."""
    names = ("lr", "weight_decay")
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, highest: list[dict[str, Any]], settings: Settings, step: int
) -> None:
    """Linear warm-up, then a cosine to zero: a function of the step, so there is no scheduler state to restore.

    Each parameter group goes up to its own rate, from `highest_rates`: that of this start, not of the checkpoint.
    """
    warmup, steps = settings.train.warmup_steps, settings.train.steps
    rising = min(1.0, (step + 1) / (warmup + 1))
    falling = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    for group, own in zip(optimizer.param_groups, highest, strict=True):
        group.update(own)
        group["lr"] = own["lr"] * rising * falling


def due(every: int, step: int, finished: bool = False, last_done: int = 0) -> bool:
    """True every `every` steps and at the end, unless it was done at this step already (before a resume). 0: never."""
    return every > 0 and step > max(0, last_done) and (finished or step % every == 0)


def next_batch(feed: Iterator[tuple[dict[str, int], Batch]], position: Position) -> Batch:
    """The next batch, with which `position` moves on."""
    counters, batch = next(feed)
    position.move(counters)
    return batch


def resume(settings: Settings, run: Session, learner: Learner) -> Position:
    """Load the newest good checkpoint of this run into `learner`, and return its position; step 0 if there is none."""
    objects, counters = learner.checkpoint_objects(), None
    if settings.checkpoint.keep_best:
        checkpoint.keep_best(evaluation)
    if settings.run.resume:
        counters = checkpoint.load(run.job, run.dir, objects)
    else:
        checkpoint.set_aside(run.job, run.dir, objects)
    if learner.ema and not learner.ema.n_averaged:  # switched on since the checkpoint: it begins with these weights
        learner.ema.module.load_state_dict(learner.network.state_dict())
    return Position.of(counters or {})


def validate(
    settings: Settings, run: Session, learner: Learner, loader: DataLoader[Any], common_batches: int | None, step: int
) -> dict[str, float]:
    """Evaluate, each rank on its shard of the validation data; log the metrics, and return them."""
    # Before each of the first `common_batches`, which all ranks have, they agree whether to stop.
    shard = polled(batches(loader, run.job), run.agreement, step, common_batches)
    with phase("eval"), autocast(settings.train, run.job.device):
        metrics = evaluate(learner.eval_network, shard, run.job, settings.eval, progress)
    run.metrics.flush()
    run.metrics.write(step, metrics)
    checkpoint.rate(run.job, run.dir, step, metrics)
    return metrics


def log_scalars(settings: Settings, run: Session, learner: Learner, step: int, values: dict[str, Tensor]) -> None:
    """Log the values of a step. They are read without a host sync: `latest` has those of the call before."""
    values = values | {"param_norm": global_norm(learner.network.parameters())}
    run.metrics.scalars(step, values, learning_rate=learner.optimizer.param_groups[0]["lr"])
    raise_if_diverged(learner, settings.train, step, run.metrics.latest.get("nonfinite_steps", 0))


def draw_samples(settings: Settings, run: Session, learner: Learner, dataset: Any, step: int) -> None:
    """Draw on rank 0. The others wait for it without a collective, so the collective timeout does not matter."""
    device, path = run.job.device, run.dir / "samples" / f"step_{step:08d}"

    def draw_or_warn(progress: Progress) -> None:
        try:
            with autocast(settings.train, device):
                draw(learner.eval_network, dataset, settings.sample, device, progress, path)
        except OSError as error:  # a full disk costs the picture, not the run
            log.warning("no picture of step %d: %s", step, error)

    on_rank0(run.job, "sample", draw_or_warn, run.flags)
    run.metrics.drawn(step, path)


def save(settings: Settings, run: Session, learner: Learner, position: Position, must: bool) -> None:
    """Write a checkpoint. A diverged run writes none: it would push the last good one out of `checkpoint.keep`."""
    raise_if_diverged(learner, settings.train, position.step, learner.skipped.item())
    before, position.saved = position.saved, position.step
    counters, objects = position.counters(), learner.checkpoint_objects()
    if not checkpoint.save(run.job, run.dir, counters, objects, keep=settings.checkpoint.keep, must=must):
        position.saved = before


def raise_if_diverged(learner: Learner, options: TrainSettings, step: int, skipped: float) -> None:
    """Raise NonFinite if more steps were skipped since this start than `train.max_nonfinite` allows."""
    # fp16's scaler halves its initial 65536 at most 16 times, and tries a larger scale every 2000 steps.
    search = 16 + step // learner.scaler.get_growth_interval() if learner.scaler.is_enabled() else 0
    if skipped > options.max_nonfinite + search:
        limit = f"train.max_nonfinite allows ({options.max_nonfinite})"
        losses = gather(learner.job, learner.nonfinite_losses.item())
        raise NonFinite(f"{skipped:.0f} steps had a NaN or infinite gradient, more than {limit}", losses)


def progress_bar(position: Position, steps: int, visible: bool) -> tqdm[Any]:
    """A bar of steps, hidden where stderr is no terminal (tqdm's `disable=None`) or closed."""
    hidden = None if visible and sys.stderr is not None else True
    return tqdm(total=steps, initial=position.step, unit="step", disable=hidden)


if __name__ == "__main__":
    main()
