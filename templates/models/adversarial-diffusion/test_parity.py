"""Several ranks do what one process would do with all their samples: the same losses, step by step, the same weights.

A wrong average of gradients, a batch that two ranks share, or a network that learns in the other one's half of the step
trains as well, only worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from conftest import QUICK, Launch
from test_train import final_state
from torch import Tensor, nn
from torch.utils.data import DataLoader

from {{ package }}.config import Settings
from {{ package }}.data import build_datasets
from {{ package }}.ddp.clocks import Clocks
from {{ package }}.ddp.loading.shards import GlobalOrder
from {{ package }}.ddp.rng import random_state, restore_random_state, seed_generators
from {{ package }}.ddp.start.groups import Job
from {{ package }}.ddp.start.launcher import Place
from {{ package }}.ddp.start.settings import load
from {{ package }}.model import build_model, discriminator_loss, generator_loss
from {{ package }}.train import Loss, highest_rates, set_learning_rate

CPU = torch.device("cpu")
# So few samples that an epoch ends, and with it a smaller batch, in the middle of a step.
STEPS = ["--train.steps", "5", "--log.every_steps", "1", "--train.warmup_steps", "2", "--train.precision", "fp32"]
STEPS += ["--data.val_fraction", "0.8", "--train.batch_size", "50", "--model.channels", "8"]


def batches_of(rank: int, world_size: int, settings: Settings) -> Iterator[Sequence[Tensor]]:
    """What the loader of this rank would read, epoch after epoch."""
    place = Place("none", rank, rank, world_size, world_size, "n1", "127.0.0.1", 1, 0, False)
    job = Job(place, Clocks(), torch.distributed.HashStore(), ("n1",) * world_size)
    data, _ = build_datasets(settings.data)
    seed, size = settings.run.seed, settings.train.batch_size
    order = GlobalOrder(len(data), job, seed=seed, shuffle=True, uneven="pad", batch=size)
    loader: DataLoader[Any] = DataLoader(data, size, sampler=order)
    for epoch in count():
        order.set_epoch(epoch)
        yield from loader


def one_process(arguments: Sequence[str], world_size: int) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    """Both losses of every step, and the final weights, of plain PyTorch over the samples that `world_size` ranks read.

    Nothing is frozen or called in two ways here: each half of a step computes all gradients and uses its own.
    """
    settings, _ = load(Settings, arguments, strict_variables=False)
    seed_generators(settings.run.seed)
    generators, discriminator = build_model(settings.model)
    coarse, refiner, options = generators.coarse, generators.refiner, settings.train
    readers = [batches_of(rank, world_size, settings) for rank in range(world_size)]
    randomness = []
    for rank in range(world_size):
        seed_generators(settings.run.seed + 1 + rank)
        randomness.append(random_state(CPU))

    def half(loss_of: Loss, network: nn.Module, parts: Sequence[Sequence[Sequence[Tensor]]]) -> float:
        """Leave the mean gradient of all batches in `network`, clipped, and none elsewhere; returns the mean loss."""
        total, number = torch.zeros(()), torch.zeros(())
        for batches in parts:
            for rank, batch in enumerate(batches):
                restore_random_state(randomness[rank], CPU)
                loss, terms = loss_of(batch)
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                randomness[rank] = random_state(CPU)
                total, number = total + loss.detach(), number + terms
        kept = [parameter.grad for parameter in network.parameters()]
        for each in (generators, discriminator):
            each.zero_grad()
        for parameter, gradient in zip(network.parameters(), kept, strict=True):
            assert gradient is not None
            parameter.grad = gradient / number
        torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip_norm)
        return (total / number).item()

    def judged(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return discriminator_loss(discriminator, coarse, refiner, batch, settings.model)

    def made(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return generator_loss(discriminator, coarse, refiner, batch, settings.model)

    lr, decay, losses = options.learning_rate, options.weight_decay, []
    optimizer, d_optimizer = (
        torch.optim.AdamW(network.parameters(), rate, betas=(0.5, 0.99), weight_decay=decay)
        for network, rate in ((generators, lr), (discriminator, lr * settings.model.discriminator_rate))
    )
    rates, d_rates = highest_rates(optimizer), highest_rates(d_optimizer)
    for step in range(options.steps):
        parts = [[next(reader) for reader in readers] for _ in range(options.accumulate)]
        set_learning_rate(d_optimizer, d_rates, settings, step)
        losses.append(half(judged, discriminator, parts))
        d_optimizer.step()
        set_learning_rate(optimizer, rates, settings, step)
        losses.append(half(made, generators, parts))
        optimizer.step()
    return losses, {"model": generators.state_dict(), "discriminator": discriminator.state_dict()}


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 2)])
def test_ranks_together_are_one_process(launch: Launch, ranks: int, accumulate: int) -> None:
    arguments = [*QUICK, *STEPS, "--train.accumulate", str(accumulate)]
    run = launch(*arguments, ranks=ranks)
    assert run.code == 0, run.output
    losses, weights = one_process(arguments, ranks)
    logged = [row[name] for row in run.metrics if "loss" in row for name in ("d_loss", "loss")]
    assert logged == pytest.approx(losses, rel=1e-4)
    trained = final_state(run.run_dir)["objects"]
    for network, tensors in weights.items():
        for name, weight in tensors.items():
            # Adam divides by the root of squares: where a gradient is next to nothing, its last bit moves the weight.
            close = torch.isclose(trained[network][name], weight, rtol=1e-3, atol=2e-4)
            assert close.float().mean() > 0.999, (network, name)
