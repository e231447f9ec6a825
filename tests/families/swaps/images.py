"""A frozen trunk with BatchNorm, a bias that LayerNorm cancels, a part that some steps leave out, augmentation twice.

The data set augments when a sample is read, `training_loss` does on the device; the metric is better if it is higher.
"""

DATA = """
import torch
from pydantic import BaseModel
from torch.utils.data import Dataset


class DataSettings(BaseModel):
    images: int = 480


class Images(Dataset):
    def __init__(self, first, count, augment):
        self.first, self.count, self.augment = first, count, augment

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        number = self.first + index
        image = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(number))
        image[0, :, 0] += 3.0 * (number % 2)
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(1)
        return image, number % 2


def build_datasets(settings):
    return Images(0, settings.images, True), Images(settings.images, 100, False)
"""

MODEL = """
import torch
from pydantic import BaseModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ModelSettings(BaseModel):
    width: int = 16


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.trunk.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.hidden = nn.Linear(8 * width, width)
        self.shift = nn.Parameter(torch.zeros(1))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)
        self.other = nn.Linear(width, 1)

    def forward(self, images):
        features = self.adapter(self.trunk(images)).mean(2).flatten(1)
        hidden = self.norm(self.hidden(features) + self.shift)
        return (self.out if self.training or len(images) > 0 else self.other)(hidden).squeeze(1)


def build_model(settings):
    return Net(settings.width)


def wrap(network, compile=False):
    return DistributedDataParallel(network, find_unused_parameters=True)


def training_loss(model, batch):
    images, labels = batch
    images = torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, images.flip(2), images)
    losses = nn.functional.binary_cross_entropy_with_logits(
        model(images).float(), labels.float(), reduction="none"
    )
    return losses.sum(), torch.ones_like(losses).sum()
"""

EVALUATE = """
import torch
from pydantic import BaseModel

from .ddp import total

METRIC = "val_right"


class EvalSettings(BaseModel):
    every_steps: int = 100
    batch_size: int = 64


def evaluate(model, batches, job, settings, progress):
    sums = torch.zeros(2, device=job.device)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for images, labels in batches:
            right = (model(images.to(job.device)) > 0) == (labels.to(job.device) > 0)
            sums += torch.tensor([float(right.sum()), float(len(right))], device=job.device)
            progress()
    model.train(was_training)
    right, count = total(job, sums).tolist()
    return {METRIC: right / count}
"""

SAMPLE = """
import json
from pydantic import BaseModel


class SampleSettings(BaseModel):
    every_steps: int = 100


def draw(model, dataset, settings, device, progress, path):
    was_training = model.training
    model.eval()
    images, labels = zip(*(dataset[index] for index in range(8)))
    answers = [model(image[None].to(device)).item() for image in images]
    model.train(was_training)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps([answers, labels]))
"""

TRAIN = {"learning_rate": 0.003, "batch_size": 16}
