"""The data, to be replaced by your own. Here: 569 tumours measured under a microscope, which scikit-learn ships.

train.py calls `build_datasets` once on every rank, before the first step. The contract:
- It returns two data sets, equal on every rank and after every restart: split with a generator of your own, since the
  default one differs between ranks. No collectives and no slow preparation: that is for a script before the job.
- Validation is map-style (`__len__`, `__getitem__`), training that or an IterableDataset. A sample is a tuple or dict
  of tensors, and a batch the same stacked, [N, ...]; for samples of unequal shapes, give the data set an attribute
  `collate(samples)`, and `lengths`, a number a sample: then the samples of a step are about equally long on all ranks.
  An order of your own, in the place of a sampler, is an argument of `make_loader` in train.py.
- What a sample draws at random, it draws from the default generators of torch, numpy or random: then a resumed run
  reads what it would have read, with workers if `loader.seed_samples` is on. In `training_loss`, augmentation of whole
  batches needs neither. An exception ends the job, and the report names rank, worker and sample.
"""

from importlib.metadata import distribution

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch.utils.data import TensorDataset

FEATURES = 30  # mean, error and largest value of ten measures of the cell nuclei


class DataSettings(BaseModel, extra="forbid"):
    """What to train on."""

    val_fraction: float = Field(default=0.2, gt=0, lt=1, description="share of the tumours held out for validation")
    split_seed: int = Field(default=0, ge=0, description="seed of the split; a run and its restarts must share it")


def build_datasets(settings: DataSettings) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation set. An item is (features, malignant), float32 [30] and [], 0 or 1."""
    # From a file of scikit-learn: importing it takes seconds, on every rank.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/breast_cancer.csv")
    table = torch.from_numpy(np.loadtxt(str(file), delimiter=",", skiprows=1)).float()  # [569, 31]; last is 1 if benign
    features, malignant = table[:, :-1], 1 - table[:, -1]
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(settings.split_seed))
    held_out = max(1, round(settings.val_fraction * len(features)))
    val, train = order[:held_out], order[held_out:]
    features = (features - features[train].mean(dim=0)) / features[train].std(dim=0)
    return TensorDataset(features[train], malignant[train]), TensorDataset(features[val], malignant[val])
