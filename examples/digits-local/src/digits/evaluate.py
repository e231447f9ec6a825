"""Validation: the mean loss over the held-out images, the same number however many ranks share the work.

Each rank adds up two numbers over its own share, and the ranks add up theirs once, at the end. There is no collective
in between, so the shares may differ in size: no rank waits for a batch that another does not have.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .ddp import ConfigError, Job, total
from .model import velocity_error

METRIC = "val_loss"  # the number to watch
HIGHER_IS_BETTER = False


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=200, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=128, ge=1, description="images a rank evaluates at once")
    seed: int = Field(default=0, ge=0, description="seed of the noise; the loss is comparable only between equal seeds")


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return the metrics, the same on every rank. All ranks must call it.

    `batches` yields images, labels and indices as described in `data.py`, this rank's share of them, without repeats.
    `model` is the bare module, as the DDP wrapper may communicate in its forward. `progress` is called after every
    batch. Raises ConfigError if no image was evaluated.
    """
    loss_sum, count = total(job, add_up(model, batches, job.device, settings, progress)).tolist()
    if count == 0:
        raise ConfigError("no image was evaluated: the validation set is empty", "raise data.val_fraction")
    return {METRIC: loss_sum / count}


def add_up(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    device: torch.device,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> Tensor:
    """Return the sum of the losses and the number of images of this rank, float64 [2] on `device`."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for images, labels, indices in batches:
                t, noise = draws(indices, images.shape[1:], settings.seed)
                inputs = (tensor.to(device, non_blocking=True) for tensor in (images, labels, t, noise))
                losses = velocity_error(model, *inputs)
                totals[0] += losses.sum(dtype=torch.float64)
                totals[1] += len(images)
                progress()
    finally:
        model.train(was_training)
    return totals


def draws(indices: Tensor, shape: torch.Size, seed: int) -> tuple[Tensor, Tensor]:
    """Return a time [N] and noise [N, *shape] that depend on each sample's index only, not on its batch or rank."""
    golden = 0.6180339887498949  # its multiples, modulo 1, fill [0, 1) evenly at any length
    t = ((indices.double() + 0.5) * golden % 1).float()
    generator = torch.Generator()
    rows = []
    for index in indices.tolist():
        generator.manual_seed(seed * 1_000_003 + index)  # the CPU generator uses the lower 32 bits
        rows.append(torch.randn(shape, generator=generator))
    return t, torch.stack(rows)


if __name__ == "__main__":  # python -m digits.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
