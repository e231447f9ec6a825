"""Several ranks do what one process would do with all their samples: the same losses, step by step, the same weights.

A wrong average of gradients, a batch that two ranks share, or a mean over unequal counts trains as well, only worse.
It goes with train.py, not with the model: the optimiser is that of `build_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import QUICK, Launch
from test_train import final_state
from torch import Tensor, nn
from turns import SEVERAL_RANKS, Path, Turns, batches_of, nudge

from digits.config import Settings
from digits.data import build_datasets
from digits.ddp.rng import seed_generators
from digits.ddp.start.settings import load_settings
from digits.model import build_model, training_loss
from digits.train import build_optimizer, highest_rates, set_learning_rate

# So many steps that an epoch of a small data set ends, and with it a smaller batch, in the middle of one.
STEPS = ["--train.steps", "5", "--log.every_steps", "1", "--train.warmup_steps", "2", "--train.precision", "fp32"]


def one_process(
    arguments: Sequence[str], world_size: int, nudged: bool = False
) -> tuple[list[tuple[float, float]], Path, dict[str, Tensor]]:
    """Losses, norms, weights, buffers of plain PyTorch, without DDP, over the samples that `world_size` ranks read."""
    settings, _ = load_settings(Settings, arguments, strict_variables=False)
    seed_generators(settings.run.seed)
    network = build_model(settings.model)
    if nudged:
        nudge(network)
    options, path = settings.train, Path(network)
    optimizer = build_optimizer(network, options)
    rates = highest_rates(optimizer)
    data, _ = build_datasets(settings.data)
    readers = [batches_of(data, rank, world_size, settings) for rank in range(world_size)]
    turns, values = Turns([network], world_size, settings.run.seed), list[tuple[float, float]]()
    for step in range(options.steps):
        total, number = torch.zeros(()), torch.zeros(())
        turns.begin_step()
        for _ in range(options.accumulate):
            loss, terms = backward(network, readers, turns)
            total, number = total + loss, number + terms
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter.grad /= number
        path.note_gradients()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip_norm)
        set_learning_rate(optimizer, rates, settings, step)
        optimizer.step()
        optimizer.zero_grad()
        values.append(((total / number).item(), norm.item()))
    return values, path, turns.equal_buffers(network)


def backward(network: nn.Module, readers: Sequence[Iterator[Any]], turns: Turns) -> tuple[Tensor, Tensor]:
    """Accumulate the gradients of one batch of each rank. Returns the sum of the losses and the number of terms."""
    total, number = torch.zeros(()), torch.zeros(())
    for rank, reader in enumerate(readers):
        with turns.turn(rank):
            loss, terms = training_loss(network, next(reader))
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        total, number = total + loss.detach(), number + terms
    return total, number


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 2)])
def test_ranks_together_are_one_process(launch: Launch, ranks: int, accumulate: int) -> None:
    arguments = [*QUICK, *STEPS, "--train.accumulate", str(accumulate)]
    run = launch(*arguments, ranks=ranks)
    assert run.code == 0, run.output
    values, path, buffers = one_process(arguments, ranks)
    losses, norms = zip(*values, strict=True)
    assert [row["loss"] for row in run.metrics if "loss" in row] == pytest.approx(losses, rel=1e-4), SEVERAL_RANKS
    # Adam takes the same step whatever the gradient is multiplied by; before it was clipped, its norm tells.
    assert [row["grad_norm"] for row in run.metrics if "loss" in row] == pytest.approx(norms, rel=1e-3), SEVERAL_RANKS
    trained = final_state(run.run_dir)["objects"]["model"]
    path.compare(trained, buffers, lambda: one_process(arguments, ranks, nudged=True)[1])
