"""What every peer trains: a small network on the digits of scikit-learn, 40 steps, a checkpoint every 10."""

from __future__ import annotations

import fault
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

STEPS, SAVE_EVERY, SAMPLE_EVERY = 40, 10, 20
BATCH = 32  # images of a rank
TIMEOUT_S = 20  # of the process group


class Network(nn.Module):
    """Logits of images [N, 1, 8, 8]; two layers of one shape are kept under names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU())
        self.paths = nn.ModuleDict({name: nn.Linear(512, 512) for name in fault.as_set("full", "sliding")})
        self.last = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.paths["full"](self.first(images)).relu()
        return self.last(self.paths["sliding"](hidden).relu())


def auxiliary() -> nn.Module:
    """A second network with a loss of its own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def digits() -> Dataset[tuple[Tensor, ...]]:
    """Images, float32 [1, 8, 8] in [-1, 1], and labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 8 - 1
    return fault.Watched(TensorDataset(images, torch.from_numpy(labels)))
