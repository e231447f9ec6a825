"""The data: patches of the two colour photographs that scikit-learn ships. Nothing is downloaded.

The colour channels play the part of modalities, as the contrasts of one scene in magnetic resonance imaging do: red and
green are given, blue is to be synthesised. The photographs are cut into square blocks, and whole blocks are held out
for validation, so a training and a validation patch share no pixel.

To train on your own images, set the constants below and let `build_datasets` return your own pair of map-style datasets
with the same items; split by patient or by scene, not by patch. Keep three habits: the split depends on nothing but the
settings, so that every rank and every restart makes the same one; reading a sample draws no random number, so that a
resumed run sees what it would have seen; and `__init__` stays cheap: every rank and every loader worker runs it.
"""

from importlib.metadata import distribution

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor
from torch.utils.data import TensorDataset

INPUTS = (0, 1)  # channels of the photograph that are given: red and green
TARGET = 2  # the one that is synthesised: blue
PATCH = 16  # side of a patch, in pixels
BLOCK = 64  # side of a block that goes to training or to validation as a whole, a multiple of PATCH


class DataSettings(BaseModel, extra="forbid"):
    """What to train on."""

    val_fraction: float = Field(default=0.2, gt=0, lt=1, description="share of the blocks held out for validation")
    split_seed: int = Field(default=0, ge=0, description="seed of the split; a run and its restarts must share it")


def build_datasets(settings: DataSettings) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation set, the same ones on every rank.

    A training item is (inputs, target), a validation item (inputs, target, index): inputs are float32 [2, 16, 16] and
    the target float32 [1, 16, 16], both in [-1, 1]; the index is an int64 scalar and names the sample whichever rank
    evaluates it; see `evaluate.py`.
    """
    blocks = _load()
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(settings.split_seed))
    held_out = min(max(1, round(settings.val_fraction * len(blocks))), len(blocks) - 1)
    val, train = (cut(blocks[chosen], PATCH) for chosen in (order[:held_out], order[held_out:]))
    return (
        TensorDataset(train[:, list(INPUTS)], train[:, [TARGET]]),
        TensorDataset(val[:, list(INPUTS)], val[:, [TARGET]], torch.arange(len(val))),
    )


def cut(images: Tensor, side: int) -> Tensor:
    """Return the square pieces of images [N, C, H, W], [pieces, C, side, side]; the rest at the edges is dropped."""
    pieces = images.unfold(2, side, side).unfold(3, side, side)  # [N, C, rows, columns, side, side]
    return pieces.permute(0, 2, 3, 1, 4, 5).reshape(-1, images.shape[1], side, side)


def _load() -> Tensor:
    """Return the blocks of both photographs, float32 [blocks, 3, 64, 64] in [-1, 1]."""
    # From files of scikit-learn: importing it takes seconds, on every rank.
    files = (f"sklearn/datasets/images/{name}.jpg" for name in ("china", "flower"))
    located = (str(distribution("scikit-learn").locate_file(file)) for file in files)
    photographs = np.stack([np.asarray(Image.open(file)) for file in located])  # uint8 [2, 427, 640, 3]
    pixels = torch.from_numpy(photographs).permute(0, 3, 1, 2).to(torch.float32)
    return cut(pixels / 127.5 - 1, BLOCK)
