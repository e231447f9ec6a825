"""Sampling: synthesise the missing modality of held-out patches and lay them out beside the truth.

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
from torch import Tensor
from torch.utils.data import Dataset

from .model import Generators, refine, signal


class SampleSettings(BaseModel, extra="forbid"):
    """When and how to draw samples."""

    every_steps: int = Field(default=200, ge=0, description="training steps between samples; 0: none")
    images: int = Field(default=12, ge=1, description="patches to draw, evenly spread over the validation set")
    seed: int = Field(default=0, ge=0, description="seed of the noise, so that pictures of two steps compare")


def draw(
    model: Generators,
    dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Write rows of inputs | coarse | refined | truth to `path`.png, and the last two in colour as well.

    Raises OSError if writing fails.
    """
    length = len(dataset)  # type: ignore[arg-type]
    count = min(settings.images, length)
    items = [dataset[row * length // count] for row in range(count)]
    inputs, target, indices = (torch.stack(part) for part in zip(*items, strict=True))
    coarse, refined = sample(model, inputs, indices, settings.seed, device, progress)
    grey = [*inputs.split(1, dim=1), coarse, refined, target]
    colour = [torch.cat([inputs, blue], dim=1) for blue in (refined, target)]
    tiles = torch.stack([image.expand(-1, 3, -1, -1) for image in [*grey, *colour]], dim=1)
    save_grid(tiles, path.with_suffix(".png"))


def sample(
    model: Generators, inputs: Tensor, indices: Tensor, seed: int, device: torch.device, progress: Callable[[str], None]
) -> tuple[Tensor, Tensor]:
    """Return the coarse and the refined image of inputs [N, 2, H, W], float32 [N, 1, H, W] in [-1, 1], on the CPU.

    `model` holds the bare modules: a DDP wrapper may communicate in its forward. The noise comes from generators of its
    own, so training continues with the same random numbers whether samples are drawn or not.
    """
    noise = noise_of(indices, model.steps, torch.Size([1, *inputs.shape[2:]]), seed)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            coarse, refined = synthesise(model, inputs.to(device), noise.to(device), progress)
    finally:
        model.train(was_training)
    return coarse.cpu(), refined.cpu()


def synthesise(
    model: Generators, inputs: Tensor, noise: Tensor, progress: Callable[[str], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the coarse and the refined image for inputs [N, 2, H, W], float32 [N, 1, H, W] in [-1, 1] each.

    noise: [N, steps, 1, H, W]; the refiner starts from the first, the others are added again after all steps but the
    last. With `progress`, called after each step, the host waits for the device: a step is progress when it is done.
    The caller sees to the mode of the model and to inference without gradients.
    """
    coarse: Tensor = model.coarse(inputs).float()
    x = noise[:, 0]
    for done, step in enumerate(range(model.steps, 0, -1), 1):
        t = torch.full((len(inputs),), step, device=inputs.device)
        clean = refine(model.refiner, x, inputs, coarse, t)
        x = clean if step == 1 else posterior(clean, x, noise[:, done], t, model.steps)
        if progress:
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            progress(f"denoising step {done} of {model.steps}")
    return coarse.clamp(-1, 1), x.clamp(-1, 1)


def posterior(clean: Tensor, x: Tensor, noise: Tensor, t: Tensor, steps: int) -> Tensor:
    """Return x [N, C, H, W] moved from times t [N] to t - 1, if it began as `clean` there.

    A draw from q(x_{t-1} | x_t, x_0), the posterior of the forward process (arXiv:2006.11239, equations 6 and 7).
    """
    now, before = signal(t, steps), signal(t - 1, steps)
    beta = 1 - now / before  # the share of noise that the step from t - 1 to t has added
    mean = (before.sqrt() * beta * clean + (now / before).sqrt() * (1 - before) * x) / (1 - now)
    return mean + ((1 - before) / (1 - now) * beta).sqrt() * noise


def noise_of(indices: Tensor, steps: int, shape: torch.Size, seed: int) -> Tensor:
    """Return noise [N, steps, *shape] that depends on each sample's index only, not on its batch, rank or device."""
    generator = torch.Generator()
    rows = []
    for index in indices.tolist():
        generator.manual_seed(seed * 1_000_003 + index)  # the CPU generator uses the lower 32 bits
        rows.append(torch.randn(steps, *shape, generator=generator))
    return torch.stack(rows)


def save_grid(tiles: Tensor, path: Path, scale: int = 4, gutter: int = 4) -> None:
    """Write tiles [rows, columns, 3, H, W] in [-1, 1] as a PNG, each enlarged `scale` times.

    The file appears complete or not at all, also when the job is killed meanwhile. Raises OSError if writing fails.
    """
    rows, columns = tiles.shape[:2]
    large = F.interpolate(tiles.flatten(0, 1).float(), scale_factor=float(scale), mode="nearest")
    framed = F.pad(large, (gutter, 0, gutter, 0), value=1.0).unflatten(0, (rows, columns))  # white above and left
    canvas = framed.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # [height, width, 3]
    canvas = F.pad(canvas, (0, 0, 0, gutter, 0, gutter), value=1.0)
    pixels = ((canvas.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    Image.fromarray(pixels.numpy()).save(partial, format="PNG")
    os.replace(partial, path)
