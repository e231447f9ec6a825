"""A perceptron of 30 lines on random numbers, without an annotation; the loss is a mean, and there are no pictures."""

DATA = """
import torch
from pydantic import BaseModel
from torch.utils.data import TensorDataset

class DataSettings(BaseModel):
    samples: int = 1000

def build_datasets(settings):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(settings.samples, 10, generator=generator)
    y = x.sin().sum(1, keepdim=True)
    return TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])
"""

MODEL = """
import torch
from pydantic import BaseModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class ModelSettings(BaseModel):
    width: int = 32

def build_model(settings):
    return nn.Sequential(nn.Linear(10, settings.width), nn.ReLU(), nn.Linear(settings.width, 1))

def wrap(network, compile=False):
    return DistributedDataParallel(torch.compile(network) if compile else network)

def training_loss(model, batch):
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    return loss, torch.ones_like(loss)
"""

EVALUATE = """
import torch
from pydantic import BaseModel
from .ddp import total

class EvalSettings(BaseModel):
    every_steps: int = 100
    batch_size: int = 64

def evaluate(model, batches, job, settings, progress):
    sums = torch.zeros(2, device=job.device)
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            error = model(x.to(job.device)) - y.to(job.device)
            sums += torch.stack([error.square().sum(), torch.tensor(float(len(x)))])
    model.train()
    squares, count = total(job, sums)
    return {"mse": squares / count, "samples": count}
"""

SAMPLE = """
from pydantic import BaseModel

class SampleSettings(BaseModel):
    every_steps: int = 0

def draw(model, dataset, settings, device, progress, path):
    pass
"""

TRAIN = {"learning_rate": 0.003, "batch_size": 32}
