"""The model: a small residual network that maps an image to a unit vector, and the loss that compares these vectors.

Images of one identity are to lie close together, and apart from all others. The supervised contrastive loss (Khosla et
al. 2020, arXiv:2004.11362, its L_out) compares every image of a batch with every other one, so it gains from large
batches: here each image is compared with those of all ranks.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .data import IMAGE_SHAPE

GROUPS = 8  # of every GroupNorm; it keeps no running statistics, so nothing has to be synchronised between ranks


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the network. The images of `data.py` are halved, rounded down, as often as `levels` asks."""

    channels: int = Field(default=16, ge=GROUPS, multiple_of=GROUPS, description="feature maps at full resolution")
    levels: int = Field(default=2, ge=1, le=6, description="resolutions; each halves the image, doubles the channels")
    features: int = Field(default=64, ge=1, description="length of the vector that an image becomes")
    checkpointing: bool = Field(default=False, description="compute activations twice instead of keeping them")

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        _, height, width = IMAGE_SHAPE
        most = min(height, width).bit_length() - 1  # halved once more, nothing would be left
        if self.levels > most:
            raise ValueError(
                f"model.levels = {self.levels} needs sides of {2**self.levels} pixels or more, not {height}x{width}\n"
                + (f"lower model.levels to {most} or less" if most else "pad the images in data.py")
            )
        return self


def build_model(settings: ModelSettings) -> nn.Module:
    """Return the network for the images of `data.py`, initialised from the default generator."""
    return Embedder(settings, IMAGE_SHAPE)


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP with what this network needs, and nothing out of superstition.

    No device_ids: the network is on its device already, and its inputs are moved in the loop. No
    find_unused_parameters: every parameter gets a gradient in every step, also on a rank whose images have no partner
    anywhere: they still push others away. Nothing about buffers: there are none, since GroupNorm keeps no running
    statistics. Parameters need no broadcast by hand: DDP makes it here. Only the network is compiled: the features are
    gathered outside, where the call breaks no graph.
    """
    compiled = cast(nn.Module, torch.compile(network)) if compile else network
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True)  # the view saves a copy of the gradients


def training_loss(model: nn.Module, batch: Sequence[Tensor], temperature: float = 0.05) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the loss of the global batch, and of its terms: two scalars.

    batch: images, float [N, C, H, W], and labels, int64 [N]; N must be equal on all ranks, and the loader sees to that.
    `model` is the DDP wrapper: only its forward prepares the reduction of gradients. Without a process group, the batch
    is the global batch. Never waits for the device.

    Every rank computes the loss of the whole global batch, a matrix of [ranks * N, ranks * N], but only its own rows
    carry a gradient. The gradients of the ranks add up to the full one, so the backward needs no collective of its own.
    The values would add up to `ranks` times the loss: the value is divided, the gradient is not.

    All ranks meet here in each forward, also in the rehearsal: with torch.compile, the slowest rank may be at most
    `clocks.collective_s` later than the fastest one.
    """
    images, labels = batch
    own = unit_features(model, images)
    with torch.autocast("cuda" if own.is_cuda else "cpu", enabled=False):  # half precision cannot tell neighbours apart
        loss = contrastive_loss(all_rows(own), all_rows(labels), temperature).sum()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    loss = loss / ranks + (loss - loss.detach()) * (1 - 1 / ranks)
    return loss, torch.full((), float(len(images)), device=loss.device)


def unit_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the vectors of images [N, C, H, W], float32 [N, D] of length 1 whatever precision the network runs in."""
    embeddings: Tensor = model(images)
    return F.normalize(embeddings.float(), dim=1)


def all_rows(own: Tensor) -> Tensor:
    """Return the rows of all ranks [ranks * N, ...] in rank order; those of this rank are `own`, with its gradient."""
    if not dist.is_initialized():
        return own
    from .ddp import phase  # only here: what loads exported weights has neither a process group nor ddp/

    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    with phase("agree"):  # a rank that waits here for another one is not to blame
        dist.all_gather(rows, own.detach())
    rows[dist.get_rank()] = own
    return torch.cat(rows)


def contrastive_loss(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the loss of each row, float32 [M], of unit vectors [M, D] with labels [M].

    It is the mean, over the other rows with the same label, of the negative log-probability to pick that one among all
    other rows by similarity. A row without such a partner has nothing to pick: its loss is 0.
    """
    similarity = features @ features.T / temperature
    itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
    # Not minus infinity: of a batch of one that would make NaN.
    among = similarity.masked_fill(itself, -1e9).logsumexp(dim=1, keepdim=True)
    partners = (labels[:, None] == labels) & ~itself
    return ((among - similarity) * partners).sum(dim=1) / partners.sum(dim=1).clamp(min=1)


class Embedder(nn.Module):
    """Maps images [N, C, H, W] to vectors [N, features], not yet of length 1."""

    def __init__(self, settings: ModelSettings, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = image_shape
        widths = [settings.channels * 2**level for level in range(settings.levels)]
        smallest = (height >> settings.levels) * (width >> settings.levels)
        self.checkpointing = settings.checkpointing
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            Block(before, after) for before, after in zip([widths[0], *widths], widths, strict=False)
        )
        self.norm = nn.GroupNorm(GROUPS, widths[-1])
        self.last = nn.Linear(widths[-1] * smallest, settings.features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = F.avg_pool2d(self._run(block, x), 2)
        vectors: Tensor = self.last(F.silu(self.norm(x)).flatten(1))
        return vectors

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            result: Tensor = block(x)
            return result
        # Not reentrant: the only kind that works with DDP and torch.compile without further settings.
        recomputed: Tensor = checkpoint(block, x, use_reentrant=False)
        return recomputed


class Block(nn.Module):
    """Two convolutions with a shortcut: [N, before, H, W] to [N, after, H, W]."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        result: Tensor = self.shortcut(x) + h
        return result
