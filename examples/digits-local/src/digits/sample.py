"""Sampling: draw images from the trained model with DDIM and lay them out as a picture.

This is slow work that one rank does while the others wait: `train.py` runs it inside the guard, off the clock of the
collectives. It reports progress at every step, so that slow and stuck can be told apart.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import CLASSES, IMAGE_SHAPE
from .model import NO_LABEL, schedule


class SampleSettings(BaseModel, extra="forbid"):
    """When and how to draw samples."""

    every_steps: int = Field(default=200, ge=0, description="training steps between samples; 0: none")
    images: int = Field(default=80, ge=1, description="images to draw; labels go round, one a column of the picture")
    ddim_steps: int = Field(default=25, ge=1, description="denoising steps: more are slower and finer")
    guidance: float = Field(default=2.0, ge=0, description="weight of the label: 0 ignores it, 1 is as trained")
    seed: int = Field(default=0, ge=0, description="seed of the starting noise, so that pictures of two steps compare")


def draw(
    model: nn.Module,
    _dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Draw images and write them to `path`.png. Raises OSError if writing fails."""
    save_grid(sample(model, settings, device, progress), path.with_suffix(".png"))


def sample(model: nn.Module, settings: SampleSettings, device: torch.device, progress: Callable[[str], None]) -> Tensor:
    """Return new images, float32 [N, 1, 8, 8] in [-1, 1] on `device`; image i shows label i modulo CLASSES.

    `model` is the bare module: the DDP wrapper may communicate in its forward. The noise comes from a generator of its
    own, so training continues with the same random numbers whether samples are drawn or not.
    """
    generator = torch.Generator().manual_seed(settings.seed)  # on the CPU: the same noise on any device
    x = torch.randn(settings.images, *IMAGE_SHAPE, generator=generator).to(device)
    labels = torch.arange(settings.images, device=device) % CLASSES
    times = torch.linspace(1, 0, settings.ddim_steps + 1, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for step in range(settings.ddim_steps):
                progress(f"DDIM step {step + 1} of {settings.ddim_steps}")
                x = ddim_step(model, x, labels, times[step], times[step + 1], settings.guidance)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # a step is progress when it is done, not when it is queued
    finally:
        model.train(was_training)
    return x.clamp(-1, 1)


def ddim_step(model: nn.Module, x: Tensor, labels: Tensor, now: Tensor, then: Tensor, guidance: float) -> Tensor:
    """Return noisy images x [N, C, H, W] of time `now` moved to the earlier time `then` (arXiv:2010.02502, eta 0)."""
    t = now.expand(len(x))
    both = torch.cat([labels, torch.full_like(labels, NO_LABEL)])
    with_label, without = model(torch.cat([x, x]), torch.cat([t, t]), both).float().chunk(2)
    velocity = without + guidance * (with_label - without)  # classifier-free guidance (arXiv:2207.12598)
    a, s = schedule(t)
    image = (a * x - s * velocity).clamp(-1, 1)
    noise = (x - a * image) / s  # of the clipped image: guidance drifts off when image and noise disagree
    a, s = schedule(then.expand(len(x)))
    moved: Tensor = a * image + s * noise
    return moved


def save_grid(images: Tensor, path: Path, scale: int = 8, gutter: int = 8) -> None:
    """Write images [N, C, H, W] in [-1, 1], C 1 or 3, as a PNG with CLASSES images a row, enlarged `scale` times.

    The file appears complete or not at all, also when the job is killed meanwhile. Raises OSError if writing fails.
    """
    # Smoothly, because people cannot read a digit of 8x8 blocks.
    large = F.interpolate(images.float().cpu(), scale_factor=float(scale), mode="bicubic")
    tiles = F.pad(large.clamp(-1, 1), (gutter, 0, gutter, 0), value=1.0)  # white above and to the left of each
    blank = tiles.new_ones(-len(tiles) % CLASSES, *tiles.shape[1:])
    channels, height, width = tiles.shape[1:]
    grid = torch.cat([tiles, blank]).reshape(-1, CLASSES, channels, height, width).permute(0, 3, 1, 4, 2)
    canvas = F.pad(grid.reshape(-1, CLASSES * width, channels), (0, 0, 0, gutter, 0, gutter), value=1.0)
    pixels = ((canvas + 1) * 127.5).round().to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    Image.fromarray(pixels.squeeze(2).numpy()).save(partial, format="PNG")
    os.replace(partial, path)


if __name__ == "__main__":  # python -m digits.sample runs/<id>: draws from a checkpoint, see --help
    from .ddp.inference import sample_run

    sample_run()
