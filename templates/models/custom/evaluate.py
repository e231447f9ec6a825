"""Validation, to be replaced by your own. Here: how many answers are right.

train.py calls `evaluate` on every rank, every `eval.every_steps` steps and at the end, under autocast. The contract:
- `model` is the network without DDP, whose forward may communicate; averaged weights if `train.ema` is on.
- `batches` is this rank's share, without repeats, so one rank may have a batch more than another: no collective inside
  the loop. Add up on the device; `total` adds up over the ranks, once, after it.
- The default generators and the mode of `model` stay as they are. `progress()` is called after each batch: a rank
  without progress for `clocks.stall_s` counts as hung.
- It returns numbers under the same names every time, equal on all ranks. `METRIC` names the one to watch, by which
  `checkpoint.keep_best` keeps the best checkpoint, and HIGHER_IS_BETTER says which way.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .ddp import ConfigError, Job, total
from .model import logits

METRIC = "val_accuracy"
HIGHER_IS_BETTER = True


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=50, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=64, ge=1, description="samples a rank evaluates at once")


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return the share of right answers. Raises ConfigError if nothing was evaluated."""
    right, count = total(job, add_up(model, batches, job.device, progress)).tolist()
    if count == 0:
        raise ConfigError("nothing was evaluated: the validation set is empty", "raise data.val_fraction")
    return {METRIC: right / count}


def add_up(
    model: nn.Module, batches: Iterable[Sequence[Tensor]], device: torch.device, progress: Callable[[], None]
) -> Tensor:
    """Return how many answers of this rank are right, of how many: float64 [2] on `device`."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                features, malignant = (tensor.to(device, non_blocking=True) for tensor in batch)
                totals[0] += ((logits(model, features) > 0) == (malignant > 0)).sum()
                totals[1] += len(features)
                progress()
    finally:
        model.train(was_training)
    return totals


if __name__ == "__main__":  # python -m {{ package }}.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
