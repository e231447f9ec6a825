"""What train.py expects of your data, model, evaluation and pictures, whatever they are.

These tests know them only by the names that train.py imports, so they stay when the example goes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import QUICK
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from turns import CPU, job_of

from digits.config import Settings
from digits.data import build_datasets
from digits.ddp import Job, batches, load_settings, make_loader, seed_generators
from digits.ddp.rng import random_state, restore_random_state
from digits.evaluate import METRIC, evaluate
from digits.sample import draw
from digits.train import Batch, Learner

SETTINGS, _ = load_settings(Settings, QUICK, strict_variables=False)
MOST = 5000  # samples of a data set that are looked at, in equal distances


@pytest.fixture
def job() -> Iterator[Job]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield replace(job_of(0, 1), control=dist.group.WORLD)
    dist.destroy_process_group()


def begin(job: Job) -> tuple[Learner, Any, Any]:
    """Learner, training and validation data, made like those of a run."""
    seed_generators(SETTINGS.run.seed)
    learner = Learner(SETTINGS, job)
    train, val = build_datasets(SETTINGS.data)
    seed_generators(SETTINGS.run.seed + 1)
    return learner, train, val


def training_batches(data: Any, job: Job, size: int) -> Iterator[Batch]:
    loader: DataLoader[Any] = make_loader(data, job, SETTINGS.loader, batch_size=size, seed=SETTINGS.run.seed)
    return iter(batches(loader, job))


def networks_of(learner: Learner) -> dict[str, nn.Module]:
    """What is trained, by its name in a checkpoint."""
    objects = learner.checkpoint_objects().items()
    return {name: part for name, part in objects if isinstance(part, nn.Module) and name != "average"}


def test_gradients_reach_every_parameter_that_is_trained(job: Job) -> None:
    """DDP waits for ever for a gradient that never comes."""
    learner, train, _ = begin(job)
    reached: set[int] = set()

    def note(parameter: nn.Parameter) -> None:
        parameter.register_hook(lambda _: reached.add(id(parameter)))

    for network in networks_of(learner).values():
        for parameter in network.parameters():
            if parameter.requires_grad:
                note(parameter)
    learner.train_step(0, islice(training_batches(train, job, 8), 1))
    wrappers = [part for part in vars(learner).values() if isinstance(part, DistributedDataParallel)]
    assert wrappers, "nothing of Learner is in DDP"
    for wrapper in wrappers:
        trained = {name: id(each) for name, each in wrapper.module.named_parameters() if each.requires_grad}
        missing = [name for name, number in trained.items() if number not in reached]
        if wrapper.find_unused_parameters or wrapper.static_graph:  # which allow that a step leaves some out
            assert len(missing) < len(trained)
        else:
            assert missing == [], "let the loss depend on them, or freeze them: requires_grad_(False)"


def test_a_step_changes_weights_and_leaves_no_gradient(job: Job) -> None:
    """A gradient that is left would be part of the next step's."""
    learner, train, _ = begin(job)
    networks = list(networks_of(learner).values())
    before = [[parameter.detach().clone() for parameter in network.parameters()] for network in networks]
    values = learner.train_step(0, islice(training_batches(train, job, 8), 1))
    assert math.isfinite(values["loss"])
    for network, weights in zip(networks, before, strict=True):
        assert not all(map(torch.equal, network.parameters(), weights))
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in network.parameters())


def smallest_batch(data: Any) -> int:
    """Samples in the last batch of an epoch, at the fewest, on 1 to 8 ranks; of a stream, whose end nobody knows, 1."""
    if isinstance(data, IterableDataset):
        return 1
    size = SETTINGS.train.batch_size
    shares = [-(-len(data) // ranks) for ranks in range(1, 9)]
    return min(share % size or size for share in shares)


def test_the_last_batch_of_an_epoch_can_be_trained_on_however_small(job: Job) -> None:
    """Often it is a single sample. make_loader(..., full=True) in train.py leaves out what is smaller than the rest."""
    learner, train, _ = begin(job)
    smallest = training_batches(train, job, smallest_batch(train))
    assert math.isfinite(learner.train_step(0, islice(smallest, 1))["loss"])


def test_a_step_repeats_from_the_same_random_state(job: Job) -> None:
    """A resumed run goes on from the random state of the checkpoint: whatever draws elsewhere makes it another one."""
    found = []
    for _ in range(2):
        learner, train, _ = begin(job)
        feed = training_batches(train, job, 4)
        found.append([learner.train_step(step, [next(feed)])["loss"].item() for step in range(2)])
    assert found[0] == found[1]


def content(sample: Any) -> bytes:
    """What tells samples apart: all parts but single numbers, such as labels and indices, if there are others."""
    parts = list(sample.values()) if isinstance(sample, dict) else sample
    if isinstance(parts, (tuple, list)):
        large = [part for part in parts if getattr(part, "ndim", 1) > 0 and not isinstance(part, (int, float))]
        parts = [part.tolist() if isinstance(part, torch.Tensor) else part for part in large or parts]
    return pickle.dumps(parts)


def some_of(data: Any) -> list[bytes]:
    if isinstance(data, IterableDataset):
        return [content(sample) for sample in islice(data, MOST)]
    return [content(data[index]) for index in range(0, len(data), -(-len(data) // MOST))]


def test_the_split_repeats_and_its_halves_do_not_overlap() -> None:
    """Each rank and each restart makes it anew; a few equal samples are in the nature of some data."""
    halves = []
    for _ in range(2):
        seed_generators(SETTINGS.run.seed)
        halves.append([some_of(data) for data in build_datasets(SETTINGS.data)])
    assert halves[0] == halves[1]
    train, val = map(set, halves[0])
    assert len(train & val) <= 0.1 * len(val)


def test_evaluation_repeats_and_pictures_appear_and_both_restore_the_mode(job: Job, tmp_path: Path) -> None:
    """Random numbers may be drawn, from the generators whose state a checkpoint holds."""
    learner, _, val = begin(job)
    network, size = learner.eval_network, SETTINGS.eval.batch_size
    loader: DataLoader[Any] = make_loader(val, job, SETTINGS.loader, batch_size=size, train=False)
    modes, state = [part.training for part in network.modules()], random_state(CPU)
    found = evaluate(network, batches(loader, job), job, SETTINGS.eval, lambda: None)
    assert math.isfinite(found[METRIC])
    restore_random_state(state, CPU)
    assert evaluate(network, batches(loader, job), job, SETTINGS.eval, lambda: None) == found
    draw(network, val, SETTINGS.sample, CPU, lambda _: None, tmp_path / "samples" / "step_00000001")
    assert list((tmp_path / "samples").glob("step_00000001.*"))
    assert [part.training for part in network.modules()] == modes
