"""What the model gets wrong: its confusion matrix, and beside it the images with the highest loss, in one picture.

This is work that one rank does while the others wait: `train.py` runs it inside the guard, off the clock of the
collectives. It reports progress at every batch, so that slow and stuck can be told apart.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from .data import NAMES

CELL = 36  # pixels, the side of a cell of the matrix
MARGIN = 40  # pixels to the left of the matrix and above, for the names of the classes
TILE = (100, 90)  # pixels, width and height of an image beside it, with its caption
PORTRAIT = 64  # pixels, the side of the image itself
COLUMNS = 3  # of images
BLUE, RED = (31, 95, 168), (200, 40, 30)  # right, wrong


class SampleSettings(BaseModel, extra="forbid"):
    """When and how to draw."""

    every_steps: int = Field(default=100, ge=0, description="training steps between pictures; 0: none")
    batch_size: int = Field(default=128, ge=1, description="images a forward pass looks at")
    images: int = Field(default=1000, ge=1, description="images to look at, at most: all of them are kept in memory")
    worst: int = Field(default=12, ge=0, description="images to show, those with the highest loss first")


def draw(
    model: nn.Module,
    dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Look at images of `dataset` and write a picture to `path`.png. Raises OSError if writing fails."""
    images, labels, logits = answers(model, dataset, settings, device, progress)
    chances, found = logits.softmax(dim=1).max(dim=1)
    losses = F.cross_entropy(logits, labels, reduction="none")
    worst = losses.argsort(descending=True, stable=True)[: settings.worst].tolist()
    captions = [f"{NAMES[labels[index]]} as {NAMES[found[index]]}, {chances[index]:.0%}" for index in worst]
    colours = [BLUE if labels[index] == found[index] else RED for index in worst]
    save(picture(confusion(labels, found), images[worst], captions, colours), path.with_suffix(".png"))


def answers(
    model: nn.Module,
    dataset: Dataset[Any],
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images [N, C, H, W] of `dataset`, their labels [N] and logits [N, classes], float32, all on the CPU.

    `model` is the bare module: the DDP wrapper may communicate in its forward. The samples are read without a
    DataLoader, which would draw a seed from the default generator and so change how training continues.
    """
    count = min(settings.images, len(dataset))  # type: ignore[arg-type]
    rows = []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for part in torch.arange(count).split(settings.batch_size):
                images, labels = default_collate([dataset[index] for index in part.tolist()])
                rows.append((images, labels, model(images.to(device)).float().cpu()))
                progress(f"{part[-1] + 1} of {count} images")
    finally:
        model.train(was_training)
    images, labels, logits = (torch.cat(column) for column in zip(*rows, strict=True))
    return images, labels, logits


def confusion(labels: Tensor, found: Tensor) -> Tensor:
    """Return how many images of each class (row) were taken for each class (column), int64 [classes, classes]."""
    classes = len(NAMES)
    return torch.bincount(labels * classes + found, minlength=classes**2).reshape(classes, classes)


def picture(
    counts: Tensor, images: Tensor, captions: Sequence[str], colours: Sequence[tuple[int, int, int]]
) -> Image.Image:
    """Return the matrix of `counts` as a heat map, and beside it images [N, C, H, W] in [-1, 1], C 1 or 3, captioned.

    A cell is the darker the larger its share of its row; mistakes, off the diagonal, are red and darkened, since few.
    """
    side = MARGIN + len(NAMES) * CELL
    height = max(side, MARGIN + -(-len(captions) // COLUMNS) * TILE[1]) + 10
    image = Image.new("RGB", (side + 20 + (COLUMNS * TILE[0] if captions else 0), height), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(size=12)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    for row, name in enumerate(NAMES):
        middle = MARGIN + row * CELL + CELL / 2
        canvas.text((MARGIN - 8, middle), name, "black", font, anchor="rm")
        canvas.text((middle, MARGIN - 8), name, "black", font, anchor="ms")
        for column in range(len(NAMES)):
            share = shares[row, column].item() if row == column else shares[row, column].item() ** 0.5
            x, y = MARGIN + column * CELL, MARGIN + row * CELL
            fill = tuple(round(255 + share * (part - 255)) for part in (BLUE if row == column else RED))
            canvas.rectangle([(x, y), (x + CELL - 2, y + CELL - 2)], fill, "#dddddd")
            if number := int(counts[row, column]):
                ink = "white" if share > 0.5 else "black"
                canvas.text((x + CELL / 2, y + CELL / 2), str(number), ink, font, anchor="mm")
    canvas.text((MARGIN, 4), "taken for; a row is a true class", "#666666", font)
    for place, (caption, colour) in enumerate(zip(captions, colours, strict=True)):
        x = side + 20 + place % COLUMNS * TILE[0]
        y = MARGIN + place // COLUMNS * TILE[1]
        image.paste(portrait(images[place]), (x, y))
        canvas.text((x, y + PORTRAIT + 4), caption, colour, font)
    if captions:
        canvas.text((side + 20, 4), "the highest losses: class as answer, how sure", "#666666", font)
    return image


def portrait(image: Tensor) -> Image.Image:
    """Return an image [C, H, W] in [-1, 1] enlarged smoothly, because people cannot read a digit of 8x8 blocks."""
    pixels = ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).squeeze(2)
    return Image.fromarray(pixels.numpy()).resize((PORTRAIT, PORTRAIT), Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path) -> None:
    """Write a PNG that appears complete or not at all, also when the job is killed. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    image.save(partial, format="PNG")
    os.replace(partial, path)
