"""Sampling: hide bytes of some held-out texts and let the model fill them in.

This is work that one rank does while the others wait: `train.py` runs it inside the guard, off the clock of the
collectives. It reports progress as it moves on, so that slow and stuck can be told apart.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .data import MASK, Texts
from .model import IGNORED, fill_in, hide

HIDDEN = "\N{LOWER ONE EIGHTH BLOCK}"  # in the file; no text contains it by chance


class SampleSettings(BaseModel, extra="forbid"):
    """When and how to draw samples."""

    every_steps: int = Field(default=200, ge=0, description="training steps between samples; 0: none")
    texts: int = Field(default=12, ge=1, description="texts to fill in, evenly spaced in the order of their lengths")
    seed: int = Field(default=0, ge=0, description="seed of what is hidden, so that the texts of two steps compare")


def draw(
    model: nn.Module,
    dataset: Texts,
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Fill in texts and write them to `path`.txt. Raises OSError if writing fails."""
    generator = torch.Generator().manual_seed(settings.seed)  # on the CPU: the same numbers on any device
    parts = []
    for number in range(settings.texts):
        progress(f"text {number + 1} of {settings.texts}")
        text, _ = dataset[number * len(dataset) // settings.texts]
        hidden, filled = complete(model, text, device, generator)
        right, count = int((filled == text)[hidden].sum()), int(hidden.sum())
        parts.append(
            f"text {number + 1}: {right} of {count} right\n"
            f"  hidden  {readable(text, hidden)}\n  filled  {readable(filled)}\n  truth   {readable(text)}\n"
        )
    write("\n".join(parts), path.with_suffix(".txt"))


def complete(model: nn.Module, text: Tensor, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return which bytes of a text, int64 [L], were hidden, bool [L], and the text with the model's guesses, int64 [L].

    `model` is the bare module: the DDP wrapper may communicate in its forward. What is hidden comes from a generator of
    its own, so training continues with the same random numbers whether samples are drawn or not.
    """
    _, targets = hide(text[None], generator)
    hidden = targets[0] != IGNORED
    inputs = torch.where(hidden, MASK, text)[None]  # all of them: the random and the kept bytes are for training
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            _, guesses = fill_in(model, inputs.to(device), targets.to(device))
    finally:
        model.train(was_training)
    return hidden, torch.where(hidden, guesses.cpu(), text)


def readable(text: Tensor, hidden: Tensor | None = None) -> str:
    """Return bytes, int64 [L], as one line of text, with HIDDEN in place of each hidden one."""
    line = bytearray()
    for place, byte in enumerate(text.tolist()):
        line += HIDDEN.encode() if hidden is not None and hidden[place] else bytes([byte])
    return line.decode(errors="replace").replace("\n", " ")  # half a character becomes a replacement mark


def write(content: str, path: Path) -> None:
    """Write a text file. It appears complete or not at all, also when the job is killed meanwhile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
