"""Sampling: draw some queries of the validation set with the images that the model finds nearest to each.

This is work that one rank does while the others wait: `train.py` runs it inside the guard, off the clock of the
collectives. So it searches a bounded part of the gallery, not that of all ranks, and reports progress.
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
from torch.utils.data import Dataset, default_collate

from .evaluate import IS_QUERY, LABEL, embed, order

GREY, GREEN, RED = (0.5, 0.5, 0.5), (0.0, 0.6, 0.2), (0.85, 0.1, 0.1)  # frames: of a query, a right and a wrong image


class SampleSettings(BaseModel, extra="forbid"):
    """When and what to draw."""

    every_steps: int = Field(default=150, ge=0, description="training steps between pictures; 0: none")
    queries: int = Field(default=12, ge=1, description="queries to draw, one a row")
    nearest: int = Field(default=5, ge=1, description="gallery images beside each query, the nearest first")
    images: int = Field(default=1000, ge=2, description="images to read at most, evenly spread over the validation set")
    batch_size: int = Field(default=128, ge=1, description="images embedded at once")


def draw(
    model: nn.Module,
    dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Draw queries and what is found for them, and write them to `path`.png. Raises OSError if writing fails."""
    images, nearest, right = search(model, dataset, settings, device, progress)
    save_rows(images, nearest, right, path.with_suffix(".png"))


def search(
    model: nn.Module,
    dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the images that were read, float32 [N, C, H, W], and what was found, on the CPU.

    The latter is the positions among these images, int64 [rows, 1 + nearest], of each query and its nearest gallery
    images, and whether these are right, bool [rows, nearest]. There are fewer rows or columns where images are fewer.
    """
    length = len(dataset)  # type: ignore[arg-type]
    count = min(length, settings.images)
    which = [number * length // count for number in range(count)]
    parts: list[Tensor] = []

    def read() -> Any:
        for start in range(0, count, settings.batch_size):
            progress(f"image {start} of {count}")
            batch = default_collate([dataset[index] for index in which[start : start + settings.batch_size]])
            parts.append(batch[0])
            yield batch

    table = embed(model, read(), device, settings.batch_size, lambda: None)
    is_query = table[:, IS_QUERY] == 1
    queries, gallery = is_query.nonzero().flatten()[: settings.queries], (~is_query).nonzero().flatten()
    keys = order(table[queries], table[gallery])
    found = gallery[keys.topk(min(settings.nearest, len(gallery)), dim=1).indices]
    right = table[found, LABEL] == table[queries, None, LABEL]
    return torch.cat(parts), torch.cat([queries[:, None], found], dim=1).cpu(), right.cpu()


def save_rows(images: Tensor, nearest: Tensor, right: Tensor, path: Path, scale: int = 6, frame: int = 4) -> None:
    """Write a PNG with a row for each of `nearest`: a query, a gap, and its gallery images in green or red frames.

    The arguments are those that `search` returns; images are in [-1, 1], C is 1 or 3, and are enlarged `scale` times.
    The file appears complete or not at all, also when the job is killed meanwhile. Raises OSError if writing fails.
    """
    rows, columns = nearest.shape
    # Smoothly, because people cannot read a digit of 8x8 blocks.
    tiles = F.interpolate(images[nearest.flatten()].float(), scale_factor=float(scale), mode="bicubic")
    tiles = tiles.clamp(-1, 1).expand(-1, 3, -1, -1).add(1).div(2).unflatten(0, (rows, columns))
    height, width = tiles.shape[-2] + 2 * frame, tiles.shape[-1] + 2 * frame
    colours = torch.where(right[:, :, None], torch.tensor(GREEN), torch.tensor(RED))
    colours = torch.cat([torch.tensor(GREY).expand(rows, 1, 3), colours], dim=1)
    framed = colours[..., None, None].repeat(1, 1, 1, height, width)
    framed[..., frame:-frame, frame:-frame] = tiles
    framed = F.pad(framed, (frame, 0, frame, 0), value=1.0)  # white to the left and above of each
    canvas = framed.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # [rows * height, columns * width, 3]
    first = width + frame
    gap = canvas.new_ones(len(canvas), 3 * frame, 3)
    canvas = F.pad(torch.cat([canvas[:, :first], gap, canvas[:, first:]], dim=1), (0, 0, 0, frame, 0, frame), value=1.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    Image.fromarray((canvas * 255).round().to(torch.uint8).numpy()).save(partial, format="PNG")
    os.replace(partial, path)
