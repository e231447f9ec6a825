"""Small trainings of the shapes that people write, on the CPU, each of one file that is started."""

from __future__ import annotations

MODEL = """\
import os
import time

import torch


class Naps(torch.nn.Dropout):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + self.training
        if os.environ.get("RANK") == "1" and str(self.calls) == os.environ.get("NAP_AT"):
            time.sleep(10000)
        return super().forward(x)


def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), Naps(0.2), torch.nn.Linear(8, 1))


def train_set():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(128, 8, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""

# torchrun; functions for an epoch; a scheduler, AMP, accumulation, a best value; options of torch.distributed.launch.
TORCHRUN = '''\
"""Trains with DDP."""
from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import model as zoo


def train_one_epoch(net, loader, opt, scaler, accumulate, epoch):
    net.train()
    total = 0.0
    for step, (x, y) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(net(x), y)  # of a batch
        scaler.scale(loss / accumulate).backward()
        if step % accumulate == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        total += loss.item()
    return total / step


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    return sum(torch.nn.functional.mse_loss(net(x), y).item() for x, y in loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    assert args.local_rank >= 0, "which GPU?"
    dist.init_process_group("gloo")
    torch.manual_seed(3 + dist.get_rank())
    data = zoo.train_set()
    net = DDP(zoo.build())
    opt = torch.optim.SGD(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    scaler = torch.amp.GradScaler("cpu")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    val_loader = DataLoader(data, batch_size=16)
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(net, loader, opt, scaler, 2, epoch)
        schedule.step()
        best = min(best, evaluate(net.module, val_loader))
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", loss, flush=True)
    total = sum(p.double().sum().item() for p in net.parameters())
    if dist.get_rank() == 0:
        print(f"ended with {total:.12f} best {best:.9f} lr {schedule.get_last_lr()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

# mp.spawn; a class with methods for an epoch and a batch; two spaces.
SPAWN = """\
import os
import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from model import build, train_set


def setup(rank, world_size):
  os.environ["MASTER_ADDR"] = "localhost"
  os.environ["MASTER_PORT"] = "12355"
  init_process_group(backend="gloo", rank=rank, world_size=world_size)


class Trainer:
  def __init__(self, model, optimizer, loader, rank):
    self.rank = rank
    self.model = DDP(model)
    self.optimizer = optimizer
    self.loader = loader
    self.global_step = 0

  def _run_batch(self, x, y):
    self.optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(self.model(x), y)
    loss.backward()
    self.optimizer.step()
    self.global_step += 1

  def _run_epoch(self, epoch):
    self.loader.sampler.set_epoch(epoch)
    for x, y in self.loader:
      self._run_batch(x, y)

  def train(self, epochs):
    for epoch in range(epochs):
      self._run_epoch(epoch)
      if self.rank == 0:
        print("epoch", epoch, flush=True)
    if self.rank == 0:
      print("ended with", self.global_step, flush=True)


def main(rank, world_size, epochs):
  setup(rank, world_size)
  data = train_set()
  model = build()
  optimizer = torch.optim.AdamW(model.parameters())
  loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=world_size, rank=rank))
  Trainer(model, optimizer, loader, rank).train(epochs)
  destroy_process_group()


if __name__ == "__main__":
  import sys
  world_size = torch.cuda.device_count() or 4
  epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 3
  mp.spawn(main, args=(world_size, epochs), nprocs=world_size)
"""

# srun; an address from scontrol; a signal handler; an average of the weights; all in one function.
SRUN = """\
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import model as zoo

STOP = False


def stop(number, frame):
    global STOP
    STOP = True


def run(epochs):
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    nodes = os.environ["SLURM_NODELIST"]
    address = subprocess.getoutput(f"scontrol show hostname {nodes} | head -n1")
    os.environ["MASTER_ADDR"] = address
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    signal.signal(signal.SIGTERM, stop)
    network = zoo.build()
    ema_model = torch.optim.swa_utils.AveragedModel(network)
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters())
    data = zoo.train_set()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=int(os.environ["SLURM_CPUS_PER_TASK"]))
    steps = 0
    for epoch in range(1, epochs + 1):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            ema_model.update_parameters(network)
            steps += 1
        if STOP:
            break
    if rank == 0:
        print("ended with", steps, flush=True)
    dist.destroy_process_group()


run(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
"""

# No functions, and a while loop that draws its batches; text over several lines.
WHILE = '''\
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import model as zoo

steps = 16 * (int(sys.argv[2]) if len(sys.argv) > 2 else 3)
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5 + rank)
inputs, outputs = zoo.train_set().tensors
model = DistributedDataParallel(zoo.build())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iteration = 0
note = """steps
 of a run
"""
while True:
    chosen = torch.randint(128, (4,))
    loss = torch.nn.functional.mse_loss(model(inputs[chosen]), outputs[chosen])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if iteration >= steps:
        break
if rank == 0:
    print(note, "ended with", iteration, sum(p.double().sum().item() for p in model.parameters()), flush=True)
if ddp:
    dist.destroy_process_group()
'''

# One pass over the data, and no epochs.
PASS = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, ConcatDataset
import sys
import model as zoo


def main(times):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = ConcatDataset([zoo.train_set()] * times)
    model = DDP(zoo.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("ended with", loss.item(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
"""

SHAPES = {"torchrun": TORCHRUN, "spawn": SPAWN, "srun": SRUN, "while": WHILE, "pass": PASS}


def files(shape: str) -> dict[str, str]:
    """Return the repository of a shape."""
    return {"train.py": SHAPES[shape], "model.py": MODEL, ".gitignore": "runs/\n__pycache__/\n"}
