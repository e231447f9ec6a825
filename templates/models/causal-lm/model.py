"""The model: a small GPT, a transformer that predicts each byte from those before it, and the loss it is trained with.

LayerNorm stands before attention and feed-forward (arXiv:2002.04745). Positions are rotations of queries and keys
(arXiv:2104.09864): what attention sees is the distance between two bytes. With a table of learned positions, which has
to learn each distance anew at each position, 600 steps led to 2.28 instead of 2.01 bits a byte. The rotations are
computed, not kept in a buffer: there is nothing that DDP could broadcast in each forward, nothing to save in a
checkpoint, and no longest text.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .data import BYTES


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the network. The heads must be able to share the features in pairs."""

    width: int = Field(default=64, ge=2, description="features of a byte; a multiple of twice the heads")
    heads: int = Field(default=4, ge=1, description="of attention, each with its share of the features")
    layers: int = Field(default=2, ge=1)
    checkpointing: bool = Field(default=False, description="compute activations twice instead of keeping them")

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.width = {self.width} is no multiple of {2 * self.heads}, twice model.heads\n"
                "positions rotate pairs of features: choose another width or other heads"
            )
        return self


def build_model(settings: ModelSettings) -> nn.Module:
    """Return the network, initialised from the default generator."""
    return Transformer(settings)


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP with what this network needs, and nothing out of superstition.

    No device_ids: the network is on its device already, and its inputs are moved in the loop. No
    find_unused_parameters: every parameter gets a gradient in every step. Nothing about buffers: there are none.
    Parameters need no broadcast by hand: DDP makes it here.
    """
    compiled = cast(nn.Module, torch.compile(network)) if compile else network  # all windows have one length
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True)  # the view saves a copy of the gradients


def training_loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy in nats summed over the bytes of a batch, and their number, two scalars.

    batch: windows, uint8 [N, T + 1]. `model` is the DDP wrapper: only its forward prepares the reduction of gradients.
    Draws no random numbers and never waits for the device.
    """
    losses = byte_losses(model, batch[0])
    return losses.sum(), losses.new_full((), losses.numel())


def byte_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the cross entropy in nats of each byte but the first, float32 [N * T], for windows, uint8 [N, T + 1]."""
    windows = windows.long()  # here, on the device: eight times as much would have to be copied to it
    logits: Tensor = model(windows[:, :-1])
    # Flat, for the plain kernel: that for [N, C, T] adds up with atomics on CUDA, which deterministic mode refuses.
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none")


class Transformer(nn.Module):
    """Predicts from bytes, int64 [N, T], the next one at each place: logits, [N, T, 256].

    Embedding and output have a matrix each. The gradient of a shared one would be complete only when the backward
    reaches the embedding, at its very end, so that DDP could not reduce it while the rest is computed; and with 256
    rows there is little to save.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.head_width, self.checkpointing = settings.width // settings.heads, settings.checkpointing
        self.embedding = nn.Embedding(BYTES, settings.width)
        nn.init.normal_(self.embedding.weight, std=0.2)  # of 1, what the blocks add would be a small part
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.output = nn.Sequential(nn.LayerNorm(settings.width), nn.Linear(settings.width, BYTES))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotation = rotations(tokens.shape[1], self.head_width, tokens.device)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # Not reentrant: the only kind that works with DDP and torch.compile without further settings.
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        logits: Tensor = self.output(x)
        return logits


class Block(nn.Module):
    """Causal attention, then a feed-forward network, each added to its input [N, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        # Without bias: softmax cancels that of the keys, and Adam would turn its rounding errors into full steps.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [N, heads, T, D]
        seen = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        result: Tensor = x + self.feed_forward(self.norm2(x))
        return result


def rotations(length: int, width: int, device: torch.device) -> Tensor:
    """Return cosines and sines of position times frequency, float32 [2, length, width / 2].

    The angles of neighbours differ by 1 radian in the first pair of features, by ever less in the next, by about 1/1000
    in the last.
    """
    frequencies = 1000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return queries or keys x, [N, heads, T, D], turned by their positions; feature i pairs with i + D / 2."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
