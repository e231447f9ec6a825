"""Starts as people have reported them: a rank's children that take its place, GPUs, signals, what is printed."""

from __future__ import annotations

import builtins
import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from digits.config import Settings
from digits.ddp import Progress, checkpoint, on_rank0, phase, rehearse, step_done, total
from digits.ddp.session import Session, session
from digits.ddp.start import arrival


def before_session(function: Callable[[Settings], None]) -> Callable[[Settings, Session], None]:
    """Mark a program that is to run without a session around it."""

    def program(_settings: Settings, _run: Session) -> None:
        raise AssertionError("to be called before a session begins")

    program.before_session = function  # type: ignore[attr-defined]
    return program


@before_session
def spawned(settings: Settings) -> None:
    """Before any session: each process of torchrun's starts as many children as there should be ranks."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.multiprocessing.spawn(child, args=(settings,), nprocs=world_size)


def child(_number: int, settings: Settings) -> None:
    """What mp.spawn calls."""
    with session(settings.run, settings.clocks, settings.log, settings.preempt) as run:
        total(run.job, torch.ones(1))


def spawned_inside(settings: Settings, _run: Session) -> None:
    """The same by ranks that have begun already."""
    torch.multiprocessing.spawn(child, args=(settings,), nprocs=2)


SCRIPT = """
from matrix.programs import main
import sys, torch
from torch.utils.data import DataLoader

def train(settings, run):
    loader = DataLoader(range(8), num_workers=1, multiprocessing_context="spawn")
    for _ in loader:
        run.agreement.poll(0)

import matrix.reports_starts as reports
reports.train = train
main("reports_starts.train", sys.argv[1:])
"""


@before_session
def unguarded(_settings: Settings) -> None:
    """Become a script that begins to train on import."""
    path = Path(os.environ["DDP_RUN__DIR"]) / "reports_starts_unguarded.py"
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(textwrap.dedent(SCRIPT))
    aside.replace(path)
    os.execv(sys.executable, [sys.executable, str(path), *sys.argv[2:]])


@before_session
def one_gpu(settings: Settings) -> None:
    """On a machine without GPUs, ranks that say they have one: what NCCL says of it is not for the CPU."""
    look = arrival.arrive
    sys.modules[session.__module__].arrive = (  # type: ignore[attr-defined]
        lambda place, device: replace(look(place, device), gpu="H200, 1b")
    )
    child(0, settings)


def silenced(_settings: Settings, run: Session) -> None:
    """User code that wants to hear rank 0 only, and of that nothing either."""
    builtins.print = lambda *words, **options: None
    sys.stdout = sys.stderr = io.StringIO()
    logging.basicConfig(force=True)
    logging.disable()
    if run.job.rank == 1:
        raise ValueError("a bug in user code")
    total(run.job, torch.ones(1))


def kills_the_launcher(settings: Settings, run: Session) -> None:
    """torchrun gets a signal that it does not pass on."""
    if run.job.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    for step in range(1000):
        with phase("forward"):
            dist.all_reduce(torch.ones(4))
            time.sleep(0.05)
        step_done(step + 1, 0)


def starts_another(_settings: Settings, run: Session) -> None:
    """While this run is going on, somebody starts it again."""

    def work(_progress: Progress) -> None:
        kept = {name: value for name, value in os.environ.items() if name != "LAUNCH_CLAIM"}
        command = [sys.executable, "-m", "digits.ddp.start.owner", str(run.dir), str(os.getppid())]  # as scripts do
        other = subprocess.run(command, env=kept, check=False)
        print(f"the other start ended with {other.returncode}", flush=True)

    on_rank0(run.job, "start_another", work)


def replaced(_settings: Settings, run: Session) -> None:
    """A chosen weight is assigned to the network that is wrapped already."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = DistributedDataParallel(network)
    network[1].weight = nn.Parameter(torch.ones(1, 4))
    rehearse(run.job, [model], lambda: model(torch.ones(2, 4)).sum().backward())


def around(_settings: Settings, run: Session) -> None:
    """A part of the loss is made of a layer inside the wrapper, of the samples of this rank."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = DistributedDataParallel(network)
    own = float(run.job.rank) * torch.ones(2, 4)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        network[0](own).sum().backward()

    rehearse(run.job, [model], step)


def asks(_settings: Settings, run: Session) -> None:
    """Before the first step is over, one rank waits for an answer that nobody types."""
    step_done(0, 0)
    if run.job.rank == 0:
        reading, _writing = os.pipe()
        sys.stdin = os.fdopen(reading)
        input("wandb: Enter your choice: ")
    total(run.job, torch.ones(1))


def asks_nobody(_settings: Settings, run: Session) -> None:
    """The same in a job, where standard input is empty."""
    if run.job.rank == 0:
        sys.stdin = io.StringIO()
        input("wandb: Enter your choice: ")
    total(run.job, torch.ones(1))


def unordered(_settings: Settings, run: Session) -> None:
    """What the order of a set comes to: another one on each rank."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters[run.job.rank :] + parameters[: run.job.rank])
    checkpoint.load(run.job, run.dir, {"model": network, "optimizer": optimizer})
