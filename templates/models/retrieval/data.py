"""The data: the handwritten digits that scikit-learn ships, 1797 real images of 8x8 pixels. Nothing is downloaded.

An identity is what two images of the same thing share: here a digit, elsewhere a person, a product, a place. Training
sees some of the identities. Validation has held-out images of these and of unseen ones, divided as usual in retrieval
into queries and a gallery to search. Few identities teach little about new ones, so in training a turned or mirrored
digit is an identity of its own (as in Santoro et al. 2016, arXiv:1605.06065): 7 digits make 56.

To train on your own images, set the two constants below and let `build_datasets` return your own pair of map-style
datasets with the same items; labels are any whole numbers. Keep three habits: the split depends on nothing but the
settings, so that every rank and every restart makes the same one; reading a sample draws no random number, so that a
resumed run sees what it would have seen; and `__init__` stays cheap, because every rank and every loader worker runs
it. Slow preparation (unpacking, cropping) belongs in a script that runs before the job, not in here.
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

    unseen: int = Field(default=3, ge=0, le=CLASSES - 2, description="digits, the last ones, that are only validated")
    val_fraction: float = Field(default=0.3, gt=0, lt=1, description="share of each digit's images for validation")
    query_fraction: float = Field(default=0.3, gt=0, lt=1, description="share of queries among these")
    split_seed: int = Field(default=0, ge=0, description="seed of the split; a run and its restarts must share it")


def build_datasets(settings: DataSettings) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation set, the same ones on every rank.

    A training item is (image, label): float32 [1, 8, 8] in [-1, 1] and an int64 scalar. A validation item has three
    scalars more: index (int64, each different, below 2**32: it breaks ties), is_query (bool; all others are the
    gallery) and unseen (bool; no training image has this label).
    """
    images, labels = _load()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.split_seed))
    held_out = max(2, round(settings.val_fraction * len(images)))  # a query and something to find
    val, train = order[:held_out], order[held_out:]
    first_unseen = CLASSES - settings.unseen
    train = train[labels[train] < first_unseen]
    index = torch.arange(held_out)
    is_query = index < min(held_out - 1, max(1, round(settings.query_fraction * held_out)))
    return (
        TensorDataset(*_turned(images[train], labels[train])),
        TensorDataset(images[val], labels[val], index, is_query, labels[val] >= first_unseen),
    )


def _turned(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return square images [N, C, S, S] in all 8 ways to turn and mirror them, [8 * N, C, S, S], and their labels."""
    ways = [torch.rot90(image, turns, (2, 3)) for image in (images, images.flip(3)) for turns in range(4)]
    return torch.cat(ways), torch.cat([labels + CLASSES * way for way in range(len(ways))])


def _load() -> tuple[Tensor, Tensor]:
    """Return all images, float32 [1797, 1, 8, 8] in [-1, 1], and their labels, int64 [1797]."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # importing it takes seconds
    table = torch.from_numpy(np.loadtxt(str(file), dtype=np.float32, delimiter=","))  # [1797, 65], last the digit
    return table[:, :-1].reshape(-1, *IMAGE_SHAPE) / 8 - 1, table[:, -1].long()
