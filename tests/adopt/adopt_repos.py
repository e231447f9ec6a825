"""Small repositories as people have them, to be adopted."""

from __future__ import annotations

import subprocess
from pathlib import Path

FLAT = {
    "README.md": "# mnist\n",
    ".gitignore": "__pycache__/\nenv/\nruns/\n",
    "model.py": """\
import torch


def build():
    return torch.nn.Linear(8, 1)


def train_set():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 8, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
""",
    "train.py": '''\
"""Trains with DDP."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import model as zoo

os.environ["NCCL_TIMEOUT"] = "1800"


def evaluate(model, data):
    with torch.no_grad():
        return sum(torch.nn.functional.mse_loss(model(x), y).item() for x, y in data) / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = zoo.train_set()
    model = DDP(zoo.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            print(epoch, evaluate(model.module, loader))
            torch.save(model.module.state_dict(), "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
''',
}

# The same script, changed as the advice for it says.
FLAT_CHANGED = '''\
"""Trains with DDP."""
import argparse

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import model as zoo
from mnist.ddp import StopRequested, batches, checkpoint, make_loader, on_rank0, phase, step_done
from mnist.ddp.session import session
from mnist.ddp.variables import read_variables


def evaluate(model, data):
    with torch.no_grad():
        return sum(torch.nn.functional.mse_loss(model(x), y).item() for x, y in data) / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    ddp, rows = read_variables()
    with session(ddp.run, ddp.clocks, ddp.log, ddp.preempt, rows) as run:
        data = zoo.train_set()
        network = zoo.build().to(run.job.device)
        model = DDP(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        loader = make_loader(data, run.job, ddp.loader, batch_size=16)
        state = {"model": network, "optimizer": optimizer}
        at = {"step": 0, "epoch": 0} | (checkpoint.load(run.job, run.dir, state) or {})
        step_done(at["step"], at["epoch"])
        try:
            for epoch in range(at["epoch"], args.epochs):
                for x, y in batches(loader, run.job, epoch):
                    run.agreement.poll(at["step"])
                    optimizer.zero_grad()
                    with phase("forward"):
                        loss = torch.nn.functional.mse_loss(model(x), y)
                    with phase("backward"):
                        loss.backward()
                    with phase("optim"):
                        optimizer.step()
                    at["step"] += 1
                    step_done(at["step"], epoch)
                at["epoch"] = epoch + 1
                samples = [data[index] for index in range(16)]
                on_rank0(run.job, "evaluate", lambda progress: print("loss", evaluate(network, samples), flush=True))
                checkpoint.save(run.job, run.dir, at, state, keep=ddp.checkpoint.keep)
        except StopRequested:
            checkpoint.save(run.job, run.dir, at, state, keep=ddp.checkpoint.keep, must=True)
            raise


if __name__ == "__main__":
    main()
'''

SRC = {
    "pyproject.toml": '[build-system]\nrequires = ["hatchling"]\n\n[project]\nname = "Vision-Lab"\nversion = "1"\n',
    "src/vision_lab/__init__.py": "",
    "src/vision_lab/distributed.py": """\
import torch.distributed as dist


def start():
    dist.init_process_group(backend="nccl")
""",
    "src/vision_lab/train.py": """\
from torch.nn.parallel import DistributedDataParallel

from . import distributed


def main():
    distributed.start()
    DistributedDataParallel(None, find_unused_parameters=True)


if __name__ == "__main__":
    main()
""",
    "configs/train.yaml": "lr: 0.1\nclocks: nonsense\nrun: [not, ours]\n",
    "scripts/clean.py": "import torch.distributed as dist\n",
}

# With its own tests, pytest's settings, line endings, and files that are no Python.
OWN_TESTS = {
    "pyproject.toml": '[project]\nname = "own"\n\n[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n',
    ".gitattributes": "*.bin binary\n",
    ".gitignore": "*.env\nbuild\n",
    "tests/__init__.py": "",
    "tests/conftest.py": "QUICK = 'mine'\n",
    "tests/test_loader.py": "from .conftest import QUICK\n\n\ndef test_mine():\n    assert QUICK == 'mine'\n",
    "main.py": "print('hello')\n",
    "broken.py": "import torch\nprint 'python 2'\n",
}


def make(directory: Path, files: dict[str, str]) -> Path:
    """Write a repository with one commit."""
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "Ours"]):
        subprocess.run(["git", *command], cwd=directory, check=True)
    return directory
