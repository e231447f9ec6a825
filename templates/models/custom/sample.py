"""Something to look at, to be replaced by your own. Here: every answer beside the truth, as a picture.

train.py calls `draw` every `sample.every_steps` steps and at the end, under autocast, on rank 0 alone and inside the
guard: the other ranks wait, off the clock of the collectives. The contract:
- It may take as long as it needs while it calls `progress("part 3 of 50")`; silent for `clocks.guard_s`, it is hung.
- `model` is the network without DDP, averaged if `train.ema` is on. A collective in here raises.
- Training must not notice: random numbers come from a generator of your own, and the mode of `model` is put back.
- It writes `path` plus a suffix, first beside it and then by os.replace, so that a killed job leaves no half file. An
  OSError (a full disk) costs the picture, not the run; any other exception ends it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from .model import logits

WIDTH, HEIGHT = 640, 320  # of the picture, in pixels
COLOURS = ("#3b7dd8", "#d8433b")  # benign, malignant


class SampleSettings(BaseModel, extra="forbid"):
    """When and how to draw."""

    every_steps: int = Field(default=50, ge=0, description="training steps between pictures; 0: none")
    samples: int = Field(default=200, ge=1, description="validation samples to show, at most")


def draw(
    model: nn.Module,
    dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Write a picture of the probabilities that the model gives to `path`.png. Raises OSError if writing fails."""
    count = min(settings.samples, len(dataset))  # type: ignore[arg-type]
    # Not with a DataLoader, which draws a seed from the default generator.
    features, malignant = default_collate([dataset[index] for index in range(count)])
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            probabilities = logits(model, features.to(device)).sigmoid().cpu()
    finally:
        model.train(was_training)
    progress(f"{count} answers")
    save_picture(probabilities, malignant, path.with_suffix(".png"))


def save_picture(probabilities: Tensor, malignant: Tensor, path: Path) -> None:
    """Write a PNG of points, [N] from the lowest probability to the highest, coloured by the truth, [N] 0 or 1."""
    picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(picture)
    canvas.line([(0, HEIGHT / 2), (WIDTH, HEIGHT / 2)], "#bbbbbb")  # above it, the answer is malignant
    canvas.text((10, 10), "malignant", COLOURS[1])
    canvas.text((10, 25), "benign", COLOURS[0])
    canvas.text((10, 40), "height: the probability that the model gives to malignant", "#666666")
    for place, index in enumerate(probabilities.argsort().tolist()):
        x = 10 + (WIDTH - 20) * (place + 0.5) / len(probabilities)
        y = 10 + (HEIGHT - 20) * (1 - probabilities[index].item())
        canvas.ellipse([(x - 3, y - 3), (x + 3, y + 3)], COLOURS[int(malignant[index])])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    picture.save(partial, format="PNG")
    os.replace(partial, path)
