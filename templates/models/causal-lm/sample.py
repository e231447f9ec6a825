"""Sampling: let the model go on with the beginnings of some held-out texts, a byte at a time.

This is slow work that one rank does while the others wait: `train.py` runs it inside the guard, off the clock of the
collectives. It reports progress as it moves on, so that slow and stuck can be told apart.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class SampleSettings(BaseModel, extra="forbid"):
    """When and how to draw samples."""

    every_steps: int = Field(default=200, ge=0, description="training steps between samples; 0: none")
    texts: int = Field(default=4, ge=1, description="texts to go on with, evenly spaced in the held-out text")
    prompt: int = Field(default=64, ge=1, description="bytes of each that the model is given; at most data.context")
    length: int = Field(default=200, ge=1, description="bytes that it adds")
    temperature: float = Field(default=0.8, ge=0.01, description="below 1: likely bytes, above 1: surprising ones")
    seed: int = Field(default=0, ge=0, description="seed of the choices, so that the texts of two steps compare")


def draw(
    model: nn.Module,
    dataset: TensorDataset,
    settings: SampleSettings,
    device: torch.device,
    progress: Callable[[str], None],
    path: Path,
) -> None:
    """Go on with texts and write them to `path`.txt. Raises OSError if writing fails."""
    windows = dataset.tensors[0]
    chosen = torch.arange(settings.texts) * len(windows) // settings.texts
    prompts = windows[chosen, : min(settings.prompt, windows.shape[1] - 1)]
    texts = go_on(model, prompts.to(device), settings, windows.shape[1] - 1, progress)
    write(prompts, texts[:, prompts.shape[1] :].cpu(), path.with_suffix(".txt"))


def go_on(
    model: nn.Module, prompts: Tensor, settings: SampleSettings, context: int, progress: Callable[[str], None]
) -> Tensor:
    """Return the prompts, uint8 [N, P], with what the model adds, int64 [N, P + length] on the same device.

    The model never sees more than the last `context` bytes, as in training. `model` is the bare module: the DDP wrapper
    may communicate in its forward. The choices come from a generator of their own, so training continues with the same
    random numbers whether samples are drawn or not.
    """
    generator = torch.Generator().manual_seed(settings.seed)  # on the CPU: the same numbers on any device
    text = prompts.long()
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for done in range(settings.length):
                if done % 16 == 0:
                    progress(f"byte {done} of {settings.length}")
                logits = model(text[:, -context:])[:, -1].float().cpu()
                likely = (logits.nan_to_num() / settings.temperature).softmax(dim=1)  # a network may have diverged
                following = torch.multinomial(likely, 1, generator=generator)
                text = torch.cat([text, following.to(text.device)], dim=1)
    finally:
        model.train(was_training)
    return text


def write(prompts: Tensor, added: Tensor, path: Path) -> None:
    """Write each prompt and what was added, bytes [N, P] and [N, L], as UTF-8 text.

    The file appears complete or not at all, also when the job is killed meanwhile. Raises OSError if writing fails.
    """
    parts = []
    for number, (prompt, more) in enumerate(zip(prompts.tolist(), added.tolist(), strict=True), 1):
        parts.append(f"===== text {number}: given\n{readable(prompt)}\n----- the model goes on\n{readable(more)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text("\n".join(parts), encoding="utf-8")
    os.replace(partial, path)


def readable(text: list[int]) -> str:
    """Return bytes as text; what is no UTF-8, as half a character at the edge of a window, becomes a question mark."""
    return bytes(text).decode(errors="replace")
