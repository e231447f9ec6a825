"""Several ranks do what one process would do with all their samples: the same losses, step by step, the same weights.

A wrong average of gradients, a batch that two ranks share, or a mean over unequal counts trains as well, only worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from conftest import QUICK, Launch
from test_train import final_state
from torch.utils.data import DataLoader

from digits.config import Settings
from digits.data import build_datasets
from digits.ddp.clocks import Clocks
from digits.ddp.loading.shards import GlobalOrder
from digits.ddp.rng import random_state, restore_random_state, seed_generators
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import Place
from digits.ddp.start.settings import load
from digits.model import build_model, training_loss
from digits.train import highest_rates, set_learning_rate

CPU = torch.device("cpu")
# Small batches for speed, and so many that an epoch ends, and with it a smaller batch, in the middle of a step.
STEPS = ["--train.steps", "5", "--log.every_steps", "1", "--train.warmup_steps", "2", "--train.precision", "fp32"]


def batches_of(rank: int, world_size: int, settings: Settings) -> Iterator[Any]:
    """What the loader of this rank would read, epoch after epoch."""
    place = Place("none", rank, rank, world_size, world_size, "n1", "127.0.0.1", 1, 0, False)
    job = Job(place, Clocks(), torch.distributed.HashStore(), ("n1",) * world_size)
    data, _ = build_datasets(settings.data)
    lengths, size, seed = getattr(data, "lengths", None), settings.train.batch_size, settings.run.seed
    length = len(data)  # type: ignore[arg-type, unused-ignore]
    order = GlobalOrder(length, job, seed=seed, shuffle=True, uneven="pad", lengths=lengths, batch=size)
    loader: DataLoader[Any] = DataLoader(data, size, sampler=order, collate_fn=getattr(data, "collate", None))
    for epoch in count():
        order.set_epoch(epoch)
        yield from loader


def one_process(arguments: Sequence[str], world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of plain PyTorch, without DDP, over the samples that `world_size` ranks read."""
    settings, _ = load(Settings, arguments, strict_variables=False)
    seed_generators(settings.run.seed)
    network = build_model(settings.model)
    options, losses = settings.train, []
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    rates = highest_rates(optimizer)
    readers = [batches_of(rank, world_size, settings) for rank in range(world_size)]
    randomness = []
    for rank in range(world_size):
        seed_generators(settings.run.seed + 1 + rank)
        randomness.append(random_state(CPU))
    for step in range(options.steps):
        total, number = torch.zeros(()), torch.zeros(())
        for _ in range(options.accumulate):
            parts = [next(reader) for reader in readers]
            for rank, part in enumerate(parts):
                restore_random_state(randomness[rank], CPU)
                loss, terms = training_loss(network, part)
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                randomness[rank] = random_state(CPU)
                total, number = total + loss.detach(), number + terms
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad /= number
        torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip_norm)
        set_learning_rate(optimizer, rates, settings, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / number).item())
    return losses, network.state_dict()


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 2)])
def test_ranks_together_are_one_process(launch: Launch, ranks: int, accumulate: int) -> None:
    arguments = [*QUICK, *STEPS, "--train.accumulate", str(accumulate)]
    run = launch(*arguments, ranks=ranks)
    assert run.code == 0, run.output
    losses, weights = one_process(arguments, ranks)
    assert [row["loss"] for row in run.metrics if "loss" in row] == pytest.approx(losses, rel=1e-4)
    trained = final_state(run.run_dir)["objects"]["model"]
    for name, weight in weights.items():
        # Adam divides by the root of squares: where a gradient is next to nothing, its last bit moves the weight.
        close = torch.isclose(trained[name], weight, rtol=1e-3, atol=2e-4)
        assert close.float().mean() > 0.999, name
