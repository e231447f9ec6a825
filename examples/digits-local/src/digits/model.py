"""The model: a small class-conditional U-Net that learns to remove noise, and the loss it is trained with.

An image x0 is mixed with Gaussian noise, x_t = a(t) x0 + s(t) noise, by the cosine schedule a = cos(pi t / 2),
s = sin(pi t / 2), with t from 0 (clean) to 1 (noise only). The network sees x_t, t and the label and predicts the
velocity v = a noise - s x0 (Salimans and Ho 2022, arXiv:2202.00512), which is well scaled at every t.

The schedule is a function of t, not a table in a buffer: there is nothing that DDP could broadcast in each forward,
nothing to save in a checkpoint, and nothing to keep on the right device.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .data import CLASSES, IMAGE_SHAPE

NO_LABEL = -1  # stands for "any class": trained on some of the images, needed for guidance when sampling
GROUPS = 8  # of every GroupNorm; it keeps no running statistics, so nothing has to be synchronised between ranks


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the network. The images of `data.py` are halved as often as `levels` asks."""

    channels: int = Field(default=16, ge=GROUPS, multiple_of=GROUPS, description="feature maps at full resolution")
    levels: int = Field(default=2, ge=1, le=6, description="resolutions; each halves the image, doubles the channels")
    checkpointing: bool = Field(default=False, description="compute activations twice instead of keeping them")

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        _, height, width = IMAGE_SHAPE
        multiple = 2 ** (self.levels - 1)
        if height % multiple or width % multiple:
            raise ValueError(
                f"model.levels = {self.levels} needs sides that are multiples of {multiple}, not {height}x{width}\n"
                "lower model.levels, or pad the images in data.py"
            )
        return self


def build_model(settings: ModelSettings) -> nn.Module:
    """Return the network for the images and classes of `data.py`, initialised from the default generator."""
    return UNet(settings, IMAGE_SHAPE[0], CLASSES)


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP with what this network needs, and nothing out of superstition.

    No device_ids: the network is on its device already, and its inputs are moved in the loop. No
    find_unused_parameters: every parameter gets a gradient in every step. Nothing about buffers: there are none, since
    GroupNorm keeps no running statistics. Parameters need no broadcast by hand: DDP makes it here.
    """
    compiled = cast(nn.Module, torch.compile(network)) if compile else network
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True)  # the view saves a copy of the gradients


def training_loss(
    model: nn.Module, batch: Sequence[Tensor], generator: torch.Generator | None = None, drop: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over a batch and the number of its terms, two scalars, at random times with random noise.

    batch: images, float [N, C, H, W] in [-1, 1], and labels, int64 [N]; `drop` is the share of labels hidden from the
    network. `model` is the DDP wrapper: only its forward prepares the reduction of gradients. Without `generator` the
    draws come from the default generator of the images' device, whose state a checkpoint holds, so a resumed run draws
    the same. Never waits for the device.
    """
    images, labels = batch
    n, device = len(images), images.device
    # One time in each n-th of [0, 1), shifted together: covers all noise levels in every batch (arXiv:2107.00630).
    t = (torch.arange(n, device=device) / n + torch.rand(1, device=device, generator=generator)) % 1
    noise = torch.randn(images.shape, device=device, generator=generator)
    hidden = torch.rand(n, device=device, generator=generator) < drop
    errors = velocity_error(model, images, labels.masked_fill(hidden, NO_LABEL), t, noise)
    return errors.sum(), torch.ones_like(errors).sum()


def velocity_error(model: nn.Module, images: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Return the squared error of the predicted velocity of each image, float32 [N], at times t [N] with this noise."""
    a, s = schedule(t)
    velocity: Tensor = model(a * images + s * noise, t, labels)
    return (velocity.float() - (a * noise - s * images)).square().mean(dim=(1, 2, 3))


def schedule(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much image and how much noise there is at times t [N], each [N, 1, 1, 1]."""
    angle = t[:, None, None, None] * (math.pi / 2)
    return angle.cos(), angle.sin()


class UNet(nn.Module):
    """Predicts the velocity, [N, C, H, W], from noisy images [N, C, H, W], times [N] and labels [N] (or NO_LABEL)."""

    def __init__(self, settings: ModelSettings, image_channels: int, classes: int) -> None:
        super().__init__()
        channels, self.checkpointing = settings.channels, settings.checkpointing
        widths = [channels * 2**level for level in range(settings.levels)]
        condition = 4 * channels
        self.channels = channels
        self.time = nn.Sequential(nn.Linear(2 * channels, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.label = nn.Embedding(classes + 1, condition)  # row 0 is NO_LABEL
        self.first = nn.Conv2d(image_channels, channels, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()  # from the lowest resolution to the highest
        for above, width, below in zip([channels, *widths], widths, [*widths[1:], widths[-1]], strict=False):
            self.down.append(Block(above, width, condition))
            self.up.insert(0, Block(below + width, width, condition))
        self.middle = Block(widths[-1], widths[-1], condition)
        self.last = nn.Sequential(
            nn.GroupNorm(GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, image_channels, 3, padding=1)
        )

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        condition = F.silu(self.time(waves(t, self.channels)) + self.label(labels + 1))
        x = self.first(x)
        skips = []
        for level, block in enumerate(self.down):
            x = self._run(block, F.avg_pool2d(x, 2) if level else x, condition)
            skips.append(x)
        x = self._run(self.middle, x, condition)
        for level, block in enumerate(self.up):
            x = torch.cat([F.interpolate(x, scale_factor=2.0) if level else x, skips.pop()], dim=1)
            x = self._run(block, x, condition)
        velocity: Tensor = self.last(x)
        return velocity

    def _run(self, block: nn.Module, x: Tensor, condition: Tensor) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            result: Tensor = block(x, condition)
            return result
        # Not reentrant: the only kind that works with DDP and torch.compile without further settings.
        recomputed: Tensor = checkpoint(block, x, condition, use_reentrant=False)
        return recomputed


class Block(nn.Module):
    """Two convolutions with a shortcut; the condition [N, D] scales and shifts the features between them."""

    def __init__(self, before: int, after: int, condition: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.modulate = nn.Linear(condition, 2 * after)
        self.norm2 = nn.GroupNorm(GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulate(condition)[:, :, None, None].chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        result: Tensor = self.shortcut(x) + h
        return result


def waves(t: Tensor, count: int) -> Tensor:
    """Return sines and cosines of t [N] at `count` frequencies from 1 to 1000 radians, float32 [N, 2 * count]."""
    frequencies = torch.logspace(0, 3, count, device=t.device)
    angles = t[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
