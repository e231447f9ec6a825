"""Validation: bits a byte of the held-out text, the same number however many ranks share the work.

Each rank adds up two numbers over its own share, and the ranks add up theirs once, at the end. There is no collective
in between, so the shares may differ in size: no rank waits for a batch that another does not have.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .ddp import ConfigError, Job, total
from .model import byte_losses

METRIC = "val_bits_per_byte"  # the number to watch: the length of the text if the model compressed it; 8 is no model
HIGHER_IS_BETTER = False


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=200, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=32, ge=1, description="windows a rank evaluates at once")


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return the metrics, the same on every rank. All ranks must call it.

    `batches` yields windows as described in `data.py`, this rank's share of them, without repeats. `model` is the bare
    module, as the DDP wrapper may communicate in its forward. `progress` is called after every batch. The first bytes
    of a window have little context, so the number is a little above what the model does in the middle of a text.
    Raises ConfigError if nothing was evaluated.
    """
    nats, count = total(job, add_up(model, batches, job.device, progress)).tolist()
    if count == 0:
        raise ConfigError("no byte was evaluated: the validation set is empty", "raise data.val_fraction")
    return {METRIC: nats / count / math.log(2)}


def add_up(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    device: torch.device,
    progress: Callable[[], None],
) -> Tensor:
    """Return the sum of the losses in nats and the number of bytes of this rank, float64 [2] on `device`."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for (windows,) in batches:
                losses = byte_losses(model, windows.to(device, non_blocking=True))
                totals[0] += losses.sum(dtype=torch.float64)
                totals[1] += losses.numel()
                progress()
    finally:
        model.train(was_training)
    return totals


if __name__ == "__main__":  # python -m {{ package }}.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
