"""The model: a small residual convolutional network (He et al. 2015, arXiv:1512.03385) with GroupNorm, and its loss.

GroupNorm (arXiv:1803.08494) in place of BatchNorm: it looks at one image at a time. There are no running statistics
that would differ between ranks or that DDP would broadcast in each forward, and the result does not depend on how many
images a rank has.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .data import IMAGE_SHAPE, NAMES

GROUPS = 8  # of every GroupNorm


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the network. It takes images of any size: each stage halves them, rounded up, and 1 stays 1."""

    channels: int = Field(default=16, ge=GROUPS, multiple_of=GROUPS, description="feature maps at full resolution")
    stages: int = Field(default=2, ge=1, le=6, description="resolutions; each halves the image, doubles the channels")
    blocks: int = Field(default=2, ge=1, description="residual blocks a stage")
    checkpointing: bool = Field(default=False, description="compute activations twice instead of keeping them")


def build_model(settings: ModelSettings) -> nn.Module:
    """Return the network for the images and classes of `data.py`, initialised from the default generator."""
    return ResNet(settings, IMAGE_SHAPE[0], len(NAMES))


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP with what this network needs, and nothing out of superstition.

    No device_ids: the network is on its device already, and its inputs are moved in the loop. No
    find_unused_parameters: every parameter gets a gradient in every step. Nothing about buffers: there are none, since
    GroupNorm keeps no running statistics. Parameters need no broadcast by hand: DDP makes it here.
    """
    compiled = cast(nn.Module, torch.compile(network)) if compile else network
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True)  # the view saves a copy of the gradients


def training_loss(
    model: nn.Module,
    batch: Sequence[Tensor],
    generator: torch.Generator | None = None,
    smoothing: float = 0.1,
    reach: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over a batch and the number of its terms, two scalars, for randomly shifted images.

    batch: images, float [N, C, H, W] in [-1, 1], and labels, int64 [N]. `smoothing` is the share of each target that
    is spread over all classes (arXiv:1512.00567), `reach` the longest shift in pixels. `model` is the DDP wrapper: only
    its forward prepares the reduction of gradients. Without `generator` the draws come from the default generator of
    the images' device, whose state a checkpoint holds, so a resumed run draws the same. Never waits for the device.
    """
    images, labels = batch
    logits: Tensor = model(shifted(images, reach, generator))
    losses = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
    return losses.sum(), torch.ones_like(losses).sum()


def shifted(images: Tensor, reach: int, generator: torch.Generator | None = None, empty: float = -1.0) -> Tensor:
    """Return images [N, C, H, W], each moved by up to `reach` pixels in both directions; `empty` fills the gaps.

    One gather for the whole batch: all shapes are known beforehand, so nothing has to be read back from the device.
    """
    n, channels, height, width = images.shape
    device = images.device
    top, left = torch.randint(2 * reach + 1, (2, n, 1, 1, 1), device=device, generator=generator)
    return F.pad(images, (reach, reach, reach, reach), value=empty)[
        torch.arange(n, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[:, None, None],
        top + torch.arange(height, device=device)[:, None],
        left + torch.arange(width, device=device),
    ]


class ResNet(nn.Module):
    """Logits, [N, classes], of images [N, C, H, W]."""

    def __init__(self, settings: ModelSettings, image_channels: int, classes: int) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.first = nn.Conv2d(image_channels, settings.channels, 3, padding=1)
        self.blocks = nn.ModuleList()
        before = settings.channels
        for stage in range(settings.stages):
            after = settings.channels * 2**stage
            for block in range(settings.blocks):
                self.blocks.append(Block(before, after, stride=2 if stage and block == 0 else 1))
                before = after
        self.norm = nn.GroupNorm(GROUPS, before)
        self.last = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # Not reentrant: the only kind that works with DDP and torch.compile without further settings.
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.last(F.silu(self.norm(x)).mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions with a shortcut, normalised before each (arXiv:1603.05027); the first may halve the image."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        result: Tensor = self.shortcut(x) + h
        return result
