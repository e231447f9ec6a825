"""Validation: the share of hidden bytes of held-out texts that are filled in right, the same for any number of ranks.

Each rank adds up three numbers over its own share, and the ranks add up theirs once, at the end. There is no collective
in between, so the shares may differ in size: no rank waits for a batch that another does not have.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .data import PAD
from .ddp import ConfigError, Job, total
from .model import IGNORED, fill_in, hide

METRIC = "val_accuracy"  # the number to watch: from about 0.2, for the space everywhere, to 1
HIGHER_IS_BETTER = True


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=200, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=32, ge=1, description="texts a rank evaluates at once")
    seed: int = Field(default=0, ge=0, description="seed of what is hidden; compare only between equal seeds")


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return accuracy and loss (in nats) of the hidden bytes, the same on every rank. All ranks must call it.

    `batches` yields tokens and indices as described in `data.py`, this rank's share of them, without repeats. `model`
    is the bare module, as the DDP wrapper may communicate in its forward. `progress` is called after every batch.
    Raises ConfigError if nothing was evaluated.
    """
    right, loss_sum, count = total(job, add_up(model, batches, job.device, settings, progress)).tolist()
    if count == 0:
        raise ConfigError("no byte was evaluated: the validation set is empty", "raise data.val_fraction")
    return {METRIC: right / count, "val_loss": loss_sum / count}


def add_up(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    device: torch.device,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> Tensor:
    """Return for this rank the hidden bytes that are filled in right, the sum of their losses in nats and their number.

    float64 [3] on `device`.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for tokens, indices in batches:
                hidden = hide_by_index(tokens, indices, settings.seed)
                inputs, targets = (tensor.to(device, non_blocking=True) for tensor in hidden)
                losses, guesses = fill_in(model, inputs, targets)
                totals[0] += (guesses == targets.flatten()).sum()
                totals[1] += losses.sum(dtype=torch.float64)
                totals[2] += (targets != IGNORED).sum()
                progress()
    finally:
        model.train(was_training)
    return totals


def hide_by_index(tokens: Tensor, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as `hide` does; what is hidden depends on a text and its index, not on its batch."""
    generator = torch.Generator()
    inputs, targets = [], []
    for text, index in zip(tokens, indices.tolist(), strict=True):
        generator.manual_seed(seed * 1_000_003 + index)  # the CPU generator uses the lower 32 bits
        length = int((text != PAD).sum())
        read, wanted = hide(text[None, :length], generator)
        inputs.append(F.pad(read[0], (0, len(text) - length), value=PAD))
        targets.append(F.pad(wanted[0], (0, len(text) - length), value=IGNORED))
    return torch.stack(inputs), torch.stack(targets)


if __name__ == "__main__":  # python -m {{ package }}.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
