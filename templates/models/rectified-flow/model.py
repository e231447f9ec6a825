"""The model: a small transformer over image patches that learns the straight path from noise to image, and its loss.

Rectified flow (Liu et al. 2022, arXiv:2209.03003): an image x0 and Gaussian noise are joined by a straight line,
x_t = (1 - t) x0 + t noise, with t from 0 (clean) to 1 (noise only). The network sees x_t, t and the label, and predicts
the velocity along the line, v = noise - x0. New images come from following v from t = 1 to 0; see `sample.py`.

There is no schedule, so no table in a buffer: nothing that DDP could broadcast in each forward, nothing to save in a
checkpoint, and nothing to keep on the right device.
"""

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


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the network. Patches fill the images of `data.py`, and heads share the width evenly."""

    patch: int = Field(default=2, ge=1, description="side of a patch in pixels; the patches are the tokens")
    width: int = Field(default=64, ge=2, multiple_of=2, description="features of a token")
    depth: int = Field(default=3, ge=1, description="blocks of attention and a perceptron")
    heads: int = Field(default=4, ge=1, description="attention heads, which share the width")
    checkpointing: bool = Field(default=False, description="compute activations twice instead of keeping them")

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        _, height, width = IMAGE_SHAPE
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"model.patch = {self.patch} needs sides that are multiples of it, not {height}x{width}\n"
                "change model.patch, or pad the images in data.py"
            )
        if self.width % self.heads:
            raise ValueError(
                f"model.width = {self.width} is not a multiple of model.heads = {self.heads}\nchange one of them"
            )
        return self


def build_model(settings: ModelSettings) -> nn.Module:
    """Return the network for the images and classes of `data.py`, initialised from the default generator."""
    return PatchTransformer(settings, IMAGE_SHAPE, CLASSES)


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP with what this network needs, and nothing out of superstition.

    No device_ids: the network is on its device already, and its inputs are moved in the loop. No
    find_unused_parameters: every parameter gets a gradient in every step. Nothing about buffers: there are none, since
    LayerNorm keeps no running statistics. Parameters need no broadcast by hand: DDP makes it here.
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

    Times are logit-normal: the middle of the path is the hardest to learn, and matters most for what is drawn
    (arXiv:2403.03206). So this loss weighs times otherwise than the validation loss, which takes them evenly.
    """
    images, labels = batch
    n, device = len(images), images.device
    # One quantile in each n-th of [0, 1), shifted together: every batch covers all noise levels (arXiv:2107.00630).
    quantiles = (torch.arange(n, device=device) / n + torch.rand(1, device=device, generator=generator)) % 1
    t = torch.special.ndtri(quantiles).sigmoid()
    noise = torch.randn(images.shape, device=device, generator=generator)
    hidden = torch.rand(n, device=device, generator=generator) < drop
    errors = velocity_error(model, images, labels.masked_fill(hidden, NO_LABEL), t, noise)
    return errors.sum(), torch.ones_like(errors).sum()


def velocity_error(model: nn.Module, images: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Return the squared error of the predicted velocity of each image, float32 [N], at times t [N] with this noise."""
    share = t[:, None, None, None]
    velocity: Tensor = model((1 - share) * images + share * noise, t, labels)
    return (velocity.float() - (noise - images)).square().mean(dim=(1, 2, 3))


class PatchTransformer(nn.Module):
    """Predicts the velocity, [N, C, H, W], from noisy images [N, C, H, W], times [N] and labels [N] (or NO_LABEL)."""

    def __init__(self, settings: ModelSettings, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        (channels, height, width), patch, features = shape, settings.patch, settings.width
        self.patch, self.features, self.classes = patch, features, classes
        self.checkpointing = settings.checkpointing
        self.first = nn.Conv2d(channels, features, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(height // patch * (width // patch), features))
        self.time = nn.Sequential(nn.Linear(features, features), nn.SiLU(), nn.Linear(features, features))
        self.label = nn.Linear(classes, features)
        self.blocks = nn.ModuleList(Block(features, settings.heads) for _ in range(settings.depth))
        self.modulate = modulation(features, 2)
        self.last = nn.Linear(features, channels * patch**2)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        # A one in the column of the class, none for NO_LABEL. Not F.one_hot, which has no such row.
        columns = (labels[:, None] == torch.arange(self.classes, device=labels.device)).to(t.dtype)
        condition = F.silu(self.time(waves(t, self.features // 2)) + self.label(columns))
        x = self.first(x)
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # Not reentrant: the only kind that works with DDP and torch.compile without further settings.
                x = checkpoint(block, x, condition, use_reentrant=False)
            else:
                x = block(x, condition)
        scale, shift = self.modulate(condition)[:, None].chunk(2, dim=-1)
        x = self.last(normal(x) * (1 + scale) + shift)
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (height, width)), self.patch)


class Block(nn.Module):
    """Attention, then a perceptron, on tokens [N, T, D]; the condition [N, D] scales, shifts and weighs both.

    The weights begin at zero, so that each block begins as the identity (adaLN-Zero, arXiv:2212.09748).
    """

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = modulation(features, 6)
        self.attend = nn.Linear(features, 3 * features)
        self.mix = nn.Linear(features, features)
        self.perceptron = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale1, shift1, weight1, scale2, shift2, weight2 = self.modulate(condition)[:, None].chunk(6, dim=-1)
        vectors = self.attend(normal(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1))
        query, key, value = vectors.permute(2, 0, 3, 1, 4)  # each [N, heads, T, D / heads]
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + weight1 * self.mix(attended)
        result: Tensor = x + weight2 * self.perceptron(normal(x) * (1 + scale2) + shift2)
        return result


def modulation(features: int, count: int) -> nn.Linear:
    """Return a layer from the condition [N, D] to `count` vectors [N, D] side by side, all zero at first."""
    layer = nn.Linear(features, count * features)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def normal(x: Tensor) -> Tensor:
    """LayerNorm over the last dimension, without weights of its own: the modulation has them."""
    return F.layer_norm(x, x.shape[-1:])


def waves(t: Tensor, count: int) -> Tensor:
    """Return sines and cosines of t [N] at `count` frequencies from 1 to 1000 radians, float32 [N, 2 * count]."""
    frequencies = torch.logspace(0, 3, count, device=t.device)
    angles = t[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
