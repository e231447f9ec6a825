"""What people have reported as named wrongly or vaguely, in their own lines; reports_words.yaml has the sources."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from digits.config import Settings
from digits.ddp import gather, phase, progress, step_done, total
from digits.ddp.session import Session


class Network(nn.Module):
    """Prompts are for samples with boxes only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.prompts, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, boxes: bool) -> Tensor:
        h: Tensor = self.body(x)
        if boxes:
            h = h + self.prompts(h)
        out: Tensor = self.head(h)
        return out


def make(run: Session) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Network().to(run.job.device))


def step_of(run: Session, model: nn.Module, step: int, boxes: bool = True) -> None:
    """One step as in train.py: forward, backward, a sum over the ranks."""
    run.agreement.poll(step)
    with phase("forward"):
        loss = model(torch.ones(4, 64, device=run.job.device), boxes).sum()
    with phase("backward"):
        loss.backward()
    with phase("agree"):
        dist.all_reduce(torch.zeros(2, device=run.job.device))
    with phase("optim"):
        model.zero_grad(set_to_none=True)
    step_done(step + 1, 0)


def helper(run: Session, step: int) -> None:
    if run.job.rank == 0 and step == 5:
        deeper()


def deeper() -> None:
    dist.barrier()


def barrier_below_a_rank_test(_settings: Settings, run: Session) -> None:
    """A barrier two calls below `if rank == 0`."""
    model = make(run)
    for step in range(8):
        helper(run, step)
        step_of(run, model, step)


def stops_alone(_settings: Settings, run: Session) -> None:
    """The metric is looked at on rank 0, and so is whether it is enough."""
    model = make(run)
    for step in range(8):
        if run.job.rank == 0 and step == 5:
            break
        step_of(run, model, step)


def early_return(_settings: Settings, run: Session) -> None:
    """One rank leaves an evaluation before all gather their results."""
    model = make(run)
    for step in range(8):
        step_of(run, model, step)
        if step == 4 and run.job.rank != 1:
            dist.all_gather_object([None] * run.job.world_size, {"rank": run.job.rank})


def decision_of_one(_settings: Settings, run: Session) -> None:
    """Rank 0 alone asks all, on the control group."""
    model = make(run)
    for step in range(8):
        if run.job.rank == 0 and step == 5:
            gather(run.job, step)
        step_of(run, model, step)


def frozen_on_one(_settings: Settings, run: Session) -> None:
    """A layer is frozen on rank 1 only, while DDP waits for its gradients."""
    model = make(run)
    for step in range(12):
        if run.job.rank == 1 and step == 7:
            model.module.body.requires_grad_(False)
        step_of(run, model, step)


def unused_on_one(_settings: Settings, run: Session) -> None:
    """A batch of rank 1 has no boxes."""
    model = make(run)
    for step in range(12):
        step_of(run, model, step, boxes=not (run.job.rank == 1 and step == 7))


def slow_evaluation(settings: Settings, run: Session) -> None:
    """An evaluation that takes longer on rank 1 than a collective may take, and says that it moves on."""
    step_done(1, 0)
    with phase("eval"):
        for _ in range(40):
            time.sleep(settings.clocks.collective_s / 30 if run.job.rank == 1 else 0.01)
            progress()
    print(f"all {total(run.job, torch.ones(1)).item():.0f} ranks went on", flush=True)


def slow_before_a_collective(settings: Settings, run: Session) -> None:
    """The same before a collective of the training group, whose clock nothing can stop."""
    step_done(1, 0)
    with phase("eval"):
        for _ in range(80):
            time.sleep(settings.clocks.collective_s / 30 if run.job.rank == 1 else 0.01)
            progress()
    dist.all_reduce(torch.ones(1))


def leaves(_settings: Settings, run: Session) -> None:
    """A process ends itself without an error."""
    model = make(run)
    for step in range(12):
        if run.job.rank == 1 and step == 7:
            os._exit(0)
        step_of(run, model, step)
