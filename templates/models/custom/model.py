"""The model and its loss, to be replaced by your own. Here: a small multilayer perceptron that answers yes or no.

What train.py calls, always on every rank. The contract:
- `build_model` once, with equally seeded generators, so that all ranks begin with the same weights. Every parameter
  that requires a gradient must get one in every step: DDP waits for it. Buffers that stay as they are, like a mask, do
  no harm. Those that a forward changes, like BatchNorm's, are each rank's own: you are warned, and rank 0's are saved.
  The network itself goes to evaluation and sampling, and its state_dict into the checkpoints.
- `wrap` once, with the network on its device. What to tell DDP about this network stands there and nowhere else.
- `training_loss` for every batch, already on the device, under autocast if `train.precision` asks for it. It calls the
  wrapped model, makes no collective of its own, and never waits for the device: no .item(), no print, no `if` on a
  value, no boolean-mask indexing. Random numbers come from the default generator, whose state a checkpoint holds.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .data import FEATURES


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the network."""

    width: int = Field(default=32, ge=1, description="units of each hidden layer")


def build_model(settings: ModelSettings) -> nn.Module:
    """Return a network from features [N, 30] to a logit [N, 1]; positive is malignant."""
    width = settings.width
    return nn.Sequential(nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP around the network, and torch.compile between them.

    No device_ids: the network and its batches are on their device already. No find_unused_parameters: it searches the
    graph in every step, for a model that does not use all parameters. The view saves a copy of the gradients.
    """
    compiled = cast(nn.Module, torch.compile(network)) if compile else network
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True)


def training_loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the batch and the number of its terms: two scalars on the device.

    Not the mean: train.py divides by the terms of all ranks, so batches may have unequal numbers of them.
    """
    features, malignant = batch
    losses = F.binary_cross_entropy_with_logits(logits(model, features), malignant, reduction="none")
    return losses.sum(), torch.ones_like(losses).sum()


def logits(model: nn.Module, features: Tensor) -> Tensor:
    """Return the logits of features [N, 30], float32 [N]: under autocast the network answers in half precision."""
    answer: Tensor = model(features)
    return answer.squeeze(1).float()
