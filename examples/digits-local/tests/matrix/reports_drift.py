"""What people have done that makes each rank train a model of its own, or applies what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from digits.config import Settings
from digits.ddp import checkpoint, clip_gradients, phase, step_done, step_if_finite
from digits.ddp.session import Session

STEPS = 400


class Network(nn.Module):
    """A few layers, equal on all ranks, with a buffer that the forward does not change."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.layers(batch) * self.scale
        return found


def train(
    run: Session, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor], each: Callable[[int], object]
) -> None:
    """A plain loop, slow enough for some agreements. `each(step)` runs at the end of each step."""
    torch.manual_seed(1 + run.job.rank)
    for step in range(STEPS):
        run.agreement.poll(step)
        batch = torch.randn(4, 8, device=run.job.device)
        with phase("forward"):
            value = loss(batch)
        with phase("backward"):
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        each(step)
        step_done(step + 1, 0)


def beside_ddp(_settings: Settings, run: Session) -> None:
    """Two networks, each in DDP; the loss of one through `.module` (minimind issue 853)."""
    first, second = (DistributedDataParallel(Network().to(run.job.device)) for _ in range(2))
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-3)
    train(run, optimizer, lambda batch: first(batch).square().mean() + second.module(batch).square().mean(), nothing)


def nothing(_step: int) -> None:
    """No more than the loop itself does."""


def beside_a_wrapper(_settings: Settings, run: Session) -> None:
    """A second module that nobody has wrapped: a projection head, say, with an optimiser of its own."""
    model = DistributedDataParallel(Network().to(run.job.device))
    head = nn.Linear(1, 1).to(run.job.device)
    nn.init.ones_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 1e-3, momentum=0.9)
    train(run, optimizer, lambda batch: head(model(batch)).square().mean(), nothing)


def skipped_step(_settings: Settings, run: Session) -> None:
    """A step that one rank leaves out, since its own loss looked odd."""
    model = DistributedDataParallel(Network().to(run.job.device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    steps = count(1)

    def forget(*_: object) -> None:
        if next(steps) == 20 and run.job.rank == 1:
            optimizer.zero_grad()

    optimizer.register_step_pre_hook(forget)
    train(run, optimizer, lambda batch: model(batch).square().mean(), nothing)


def flipped_bit(_settings: Settings, run: Session) -> None:
    """One bit of one weight changes on rank 1, as in a memory that is not checked."""
    model = DistributedDataParallel(Network().to(run.job.device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def flip(step: int) -> None:
        if step == 20 and run.job.rank == 1:
            model.module.layers[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 12

    train(run, optimizer, lambda batch: model(batch).square().mean(), flip)


def own_rate(_settings: Settings, run: Session) -> None:
    """ReduceLROnPlateau by each rank's own loss."""
    model = DistributedDataParallel(Network().to(run.job.device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def lower(step: int) -> None:
        if step == 20 and run.job.rank == 1:
            optimizer.param_groups[0]["lr"] /= 10

    train(run, optimizer, lambda batch: model(batch).square().mean(), lower)


def eval_on_one_rank(_settings: Settings, run: Session) -> None:
    """model.eval() stays on rank 0 after a validation of its own."""
    model = DistributedDataParallel(Network().to(run.job.device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def validate(step: int) -> None:
        if step == 20 and run.job.rank == 0:
            model.eval()

    train(run, optimizer, lambda batch: model(batch).square().mean(), validate)


def own_buffer(_settings: Settings, run: Session) -> None:
    """A buffer that each rank changes by its own data, while DDP leaves buffers alone."""
    model = DistributedDataParallel(Network().to(run.job.device), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def update(_step: int) -> None:
        model.module.scale.mul_(1 + 0.01 * run.job.rank)

    train(run, optimizer, lambda batch: model(batch).square().mean(), update)


def buffers_on_purpose(_settings: Settings, run: Session) -> None:
    """The same, said to PyTorch: its own list of names to ignore."""
    plain = Network().to(run.job.device)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["scale"])
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def update(_step: int) -> None:
        plain.scale.fill_(run.job.rank)

    train(run, optimizer, lambda batch: model(batch).square().mean(), update)


def probe_on_rank0(_settings: Settings, run: Session) -> None:
    """Rank 0 trains a probe of its own: that is no drift."""
    model = DistributedDataParallel(Network().to(run.job.device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = nn.Linear(2, 1)
    own = torch.optim.SGD(probe.parameters(), 0.1)

    def fit(step: int) -> None:
        if step % 20 == 0 and run.job.rank == 0:
            probe(torch.ones(1, 2)).sum().backward()
            own.step()

    train(run, optimizer, lambda batch: model(batch).square().mean(), fit)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}
for fused in ("Adam", "AdamW", "SGD"):
    options = {"momentum": 0.9} if fused == "SGD" else {}
    OPTIMIZERS[f"fused {fused}"] = lambda weights, name=fused, options=options: getattr(torch.optim, name)(  # type: ignore[misc]
        weights, lr=0.01, fused=True, **options
    )


def nan_gradients(_settings: Settings, run: Session) -> None:
    """NaN gradients on the last rank, with every optimiser (those that torch has; some came with later versions)."""
    for name in ("Muon", "Adafactor"):
        if hasattr(torch.optim, name):
            OPTIMIZERS[name] = getattr(torch.optim, name)
    for name, make in OPTIMIZERS.items():
        weight = nn.Parameter(torch.ones(3, 3, device=run.job.device))
        optimizer = make([weight])
        for step in range(6):
            before = weight.detach().clone()
            weight.grad = torch.full_like(weight, 0.1 * (step + 1))
            bad = step in (0, 3)
            if bad and run.job.rank == run.job.world_size - 1:
                weight.grad[0, 0] = math.nan
            norm = weight.grad.norm() / run.job.world_size
            torch.distributed.all_reduce(norm)
            step_if_finite(optimizer, clip_gradients([weight], 1.0, 1.0, norm))
            assert weight.isfinite().all(), f"{name} applied a NaN at step {step}"
            assert torch.equal(before, weight) == bad, f"{name} did not do as it must at step {step}"
        if run.job.rank == 0:
            print(f"{name} skips", flush=True)


def own_order(_settings: Settings, run: Session) -> None:
    """The optimiser's parameters come from a set: a checkpoint of rank 0 would be put into other places elsewhere."""
    model = DistributedDataParallel(Network().to(run.job.device))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[::-1] if run.job.rank == 1 else parameters, 1e-3)
    train(run, optimizer, lambda batch: model(batch).square().mean(), nothing)


class Buckets:
    """A sampler of the user's own: which samples it has taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.taken = state["taken"]


def own_states(_settings: Settings, run: Session) -> None:
    """An average that only rank 0 updates, and a sampler that is each rank's own: rank 0's are saved."""
    network = Network().to(run.job.device)
    average, buckets = AveragedModel(network), Buckets()
    buckets.taken = [run.job.rank]
    with torch.no_grad():
        next(network.parameters()).add_(1)
    if run.job.rank == 0:
        average.update_parameters(network)
    for step in (1, 2):
        checkpoint.save(run.job, run.dir, {"step": step}, {"average": average, "buckets": buckets}, keep=1)
