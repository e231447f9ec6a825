"""Validation: how close the synthesised images come to the held-out targets, however many ranks share the work.

Each rank adds up squared errors over its own share, and the ranks add up theirs once, at the end. There is no
collective in between, so the shares may differ in size: no rank waits for a batch that another does not have.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from .ddp import ConfigError, Job, total
from .model import Generators
from .sample import noise_of, synthesise

METRIC = "val_psnr"  # the number to watch
HIGHER_IS_BETTER = True


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=200, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=128, ge=1, description="images a rank evaluates at once")
    seed: int = Field(default=0, ge=0, description="seed of the noise; results are comparable only between equal seeds")


def evaluate(
    model: Generators,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return the metrics, the same on every rank. All ranks must call it.

    They are peak signal-to-noise ratios in dB, from the mean squared error of all images together: of the refined image
    (METRIC), of the coarse one, and of the last input, what one would get without any model. `batches` yields inputs,
    targets and indices as described in `data.py`, this rank's share of them, without repeats. `model` holds the bare
    modules, as a DDP wrapper may communicate in its forward. `progress` is called after every batch. Raises ConfigError
    if no image was evaluated.
    """
    *errors, pixels = total(job, add_up(model, batches, job.device, settings, progress)).tolist()
    if pixels == 0:
        raise ConfigError("no image was evaluated: the validation set is empty", "raise data.val_fraction")
    names = (METRIC, "val_psnr_coarse", "val_psnr_copy")
    return {name: psnr(error / pixels) for name, error in zip(names, errors, strict=True)}


def add_up(
    model: Generators,
    batches: Iterable[Sequence[Tensor]],
    device: torch.device,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> Tensor:
    """Return this rank's squared errors (refined, coarse, copied) and its number of pixels, float64 [4] on `device`."""
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for inputs, target, indices in batches:
                noise = noise_of(indices, model.steps, target.shape[1:], settings.seed)
                given, wanted, noise = (tensor.to(device, non_blocking=True) for tensor in (inputs, target, noise))
                coarse, refined = synthesise(model, given, noise)
                for position, image in enumerate((refined, coarse, given[:, -1:])):
                    totals[position] += (image - wanted).square().sum(dtype=torch.float64)
                totals[3] += target.numel()
                progress()
    finally:
        model.train(was_training)
    return totals


def psnr(error: float) -> float:
    """Return the peak signal-to-noise ratio in dB for a mean squared error of images in [-1, 1], whose peak is 2."""
    return 10 * math.log10(4 / error) if error > 0 else math.inf


if __name__ == "__main__":  # python -m {{ package }}.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
