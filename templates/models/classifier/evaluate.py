"""Validation: the share of held-out images that are recognised, the same number however many ranks share the work.

Each rank adds up three numbers over its own share, and the ranks add up theirs once, at the end. There is no collective
in between, so the shares may differ in size: no rank waits for a batch that another does not have. A mean of the ranks'
accuracies would be another number, since their shares differ.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .ddp import ConfigError, Job, total

METRIC = "val_accuracy"  # the number to watch
HIGHER_IS_BETTER = True


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=100, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=128, ge=1, description="images a rank evaluates at once")


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return the metrics, the same on every rank. All ranks must call it.

    `batches` yields images and labels as described in `data.py`, this rank's share of them, without repeats. `model` is
    the bare module, as the DDP wrapper may communicate in its forward. `progress` is called after every batch. Raises
    ConfigError if no image was evaluated.
    """
    loss_sum, right, count = total(job, add_up(model, batches, job.device, progress)).tolist()
    if count == 0:
        raise ConfigError("no image was evaluated: the validation set is empty", "raise data.val_fraction")
    return {METRIC: right / count, "val_loss": loss_sum / count}


def add_up(
    model: nn.Module, batches: Iterable[Sequence[Tensor]], device: torch.device, progress: Callable[[], None]
) -> Tensor:
    """Return the sum of the losses, the images recognised and all images of this rank, float64 [3] on `device`."""
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
                logits = model(images).float()
                totals[0] += F.cross_entropy(logits, labels, reduction="none").sum(dtype=torch.float64)
                totals[1] += (logits.argmax(dim=1) == labels).sum()
                totals[2] += len(images)
                progress()
    finally:
        model.train(was_training)
    return totals


if __name__ == "__main__":  # python -m {{ package }}.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
