"""Several ranks do what one process would do with all their samples: the same losses, step by step, the same weights.

A wrong average of gradients, a batch that two ranks share, or a network that learns in the other one's half of the step
trains as well, only worse. It goes with train.py, not with the models: networks, losses and optimisers are `Learner`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from conftest import QUICK, Launch
from test_train import final_state
from torch import nn
from turns import SEVERAL_RANKS, Path, Turns, batches_of, job_of, nudge

from {{ package }}.config import Settings
from {{ package }}.data import build_datasets
from {{ package }}.ddp.rng import seed_generators
from {{ package }}.ddp.start.settings import load_settings
from {{ package }}.train import Batch, Learner, Loss, set_learning_rate

STEPS = ["--train.steps", "5", "--log.every_steps", "1", "--train.warmup_steps", "2", "--train.precision", "fp32"]


class Unwrapped(nn.Module):
    """Stands for a DDP wrapper: the network inside, and nothing else."""

    def __init__(self, network: nn.Module, compile: bool = False) -> None:
        super().__init__()
        self.module = network

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def one_process(
    arguments: Sequence[str], world_size: int, nudged: bool = False
) -> tuple[list[tuple[float, float]], dict[str, tuple[Path, Any]]]:
    """Losses and norms of both halves of every step, and weights and buffers, over what `world_size` ranks read.

    Without DDP. Nothing is frozen here: each half of a step computes all gradients and uses its own.
    """
    settings, _ = load_settings(Settings, arguments, strict_variables=False)
    seed_generators(settings.run.seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("{{ package }}.train.wrap", Unwrapped)
        learner = Learner(settings, job_of(0, 1))
    options, networks = settings.train, {"model": learner.network, "discriminator": learner.discriminator}
    for network in networks.values() if nudged else ():
        nudge(network)
    paths = {name: Path(network) for name, network in networks.items()}
    data, _ = build_datasets(settings.data)
    readers = [batches_of(data, rank, world_size, settings) for rank in range(world_size)]
    turns, values = Turns(list(networks.values()), world_size, settings.run.seed), list[tuple[float, float]]()

    def half(loss_of: Loss, path: Path, parts: Sequence[Sequence[Batch]]) -> tuple[float, float]:
        """Leave the mean gradient of all batches in this network only, clipped; returns mean loss and norm."""
        total, number = torch.zeros(()), torch.zeros(())
        turns.begin_step()
        for place in range(options.accumulate):
            for rank, batches in enumerate(parts):
                with turns.turn(rank):
                    loss, terms = loss_of(batches[place])
                    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                total, number = total + loss.detach(), number + terms
        own = [(parameter, parameter.grad) for parameter in path.network.parameters()]
        for network in networks.values():
            network.zero_grad()
        for parameter, gradient in own:
            parameter.grad = None if gradient is None else gradient / number
        path.note_gradients()
        norm = torch.nn.utils.clip_grad_norm_(path.network.parameters(), options.clip_norm)
        return (total / number).item(), norm.item()

    for step in range(options.steps):
        parts = []
        for rank, reader in enumerate(readers):
            with turns.turn(rank):
                parts.append([next(reader) for _ in range(options.accumulate)])
        set_learning_rate(learner.d_optimizer, learner.d_rates, settings, step)
        values.append(half(learner.discriminator_loss, paths["discriminator"], parts))
        learner.d_optimizer.step()
        set_learning_rate(learner.optimizer, learner.rates, settings, step)
        values.append(half(learner.generator_loss, paths["model"], parts))
        learner.optimizer.step()
    return values, {name: (path, turns.equal_buffers(path.network)) for name, path in paths.items()}


def batch_size(ranks: int, batches: int) -> int:
    """Of the settings; or up to five times that, if then an epoch, and with it a smaller batch, ends within a step."""
    settings, _ = load_settings(Settings, [*QUICK, *STEPS], strict_variables=False)
    share, usual = len(build_datasets(settings.data)[0]) / ranks, settings.train.batch_size
    enough = round(share / (batches - 2.5))
    return enough if usual < enough <= 5 * usual else usual


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 2)])
def test_ranks_together_are_one_process(launch: Launch, ranks: int, accumulate: int) -> None:
    arguments = [*QUICK, *STEPS, "--train.accumulate", str(accumulate)]
    arguments += ["--train.batch_size", str(batch_size(ranks, 5 * accumulate))]
    run = launch(*arguments, ranks=ranks)
    assert run.code == 0, run.output
    values, ends = one_process(arguments, ranks)
    losses, norms = zip(*values, strict=True)
    rows = [row for row in run.metrics if "loss" in row]
    assert [row[name] for row in rows for name in ("d_loss", "loss")] == pytest.approx(losses, rel=1e-4), SEVERAL_RANKS
    # Adam takes the same step whatever the gradient is multiplied by; before it was clipped, its norm tells.
    found = [row[name] for row in rows for name in ("d_grad_norm", "grad_norm")]
    assert found == pytest.approx(norms, rel=1e-3), SEVERAL_RANKS
    trained = final_state(run.run_dir)["objects"]

    def again(name: str) -> Path:
        return one_process(arguments, ranks, nudged=True)[1][name][0]

    for name, (path, buffers) in ends.items():
        path.compare(trained[name], buffers, partial(again, name))
