"""The data: the handwritten digits that scikit-learn ships, 1797 real images of 8x8 pixels. Nothing is downloaded.

To train on your own images, set the two constants below and let `build_datasets` return your own pair of map-style
datasets with the same items. Keep three habits: the split depends on nothing but the settings, so that every rank and
every restart makes the same one; reading a sample draws no random number, so that a resumed run sees what it would have
seen; and `__init__` stays cheap, because every rank and every loader worker runs it. Slow preparation (unpacking,
tokenising) belongs in a script that runs before the job, not in here.
"""

from importlib.metadata import distribution

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.utils.data import TensorDataset

IMAGE_SHAPE = (1, 8, 8)  # channels, height, width
CLASSES = 10


class DataSettings(BaseModel, extra="forbid"):
    """What to train on."""

    val_fraction: float = Field(default=0.2, gt=0, lt=1, description="share of the images held out for validation")
    split_seed: int = Field(default=0, ge=0, description="seed of the split; a run and its restarts must share it")


def build_datasets(settings: DataSettings) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation set, the same ones on every rank.

    A training item is (image, label), a validation item (image, label, index): image is float32 [1, 8, 8] in [-1, 1],
    label and index are int64 scalars. The index names the sample whichever rank evaluates it; see `evaluate.py`.
    """
    images, labels = _load()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.split_seed))
    held_out = max(1, round(settings.val_fraction * len(images)))
    val, train = order[:held_out], order[held_out:]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[val], labels[val], torch.arange(held_out)),
    )


def _load() -> tuple[Tensor, Tensor]:
    """Return all images, float32 [1797, 1, 8, 8] in [-1, 1], and their labels, int64 [1797]."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # importing it takes seconds
    table = torch.from_numpy(np.loadtxt(str(file), dtype=np.float32, delimiter=","))  # [1797, 65], last the digit
    return table[:, :-1].reshape(-1, *IMAGE_SHAPE) / 8 - 1, table[:, -1].long()
