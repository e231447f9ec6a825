"""What train.py and ddp/ expect of your data, model, evaluation and pictures, whatever they are.

These tests know them only by the names that train.py imports, so they stay when the example goes. Each that fails says
why that matters, and what to do.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from digits.evaluate import evaluate
from digits.model import training_loss
from digits.sample import draw
from digits.train import Batch, Learner

SETTINGS, _ = load_settings(Settings, QUICK, strict_variables=False)
MOST = 5000  # samples of a data set that are looked at, in equal distances


@contextmanager
def promise(why: str, do: str) -> Iterator[None]:
    """Let what fails within say why it matters, and what to do."""
    try:
        yield
    except Exception as error:
        found = str(error) or type(error).__name__
        raise AssertionError(f"{found}\n\nWhy it matters: {why}.\nWhat to do: {do}.") from error


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
    with promise("without DDP each rank trains a model of its own", "return DistributedDataParallel(...) in `wrap`"):
        assert wrappers, "nothing of Learner is in DDP"
    do = (
        "let the loss depend on them, freeze them in `build_model` (requires_grad_(False)), or, if each step leaves "
        "out others, pass find_unused_parameters=True in `wrap`"
    )
    for wrapper in wrappers:
        trained = {name: id(each) for name, each in wrapper.module.named_parameters() if each.requires_grad}
        missing = [name for name, number in trained.items() if number not in reached]
        with promise("DDP waits for a gradient of each parameter, and for ever if one never comes", do):
            if wrapper.find_unused_parameters or wrapper.static_graph:  # which allow that a step leaves some out
                assert len(missing) < len(trained), "no parameter got a gradient"
            else:
                assert missing == [], "these parameters got no gradient"


def test_a_step_changes_weights_and_leaves_no_gradient(job: Job) -> None:
    learner, train, _ = begin(job)
    networks = list(networks_of(learner).values())
    before = [[parameter.detach().clone() for parameter in network.parameters()] for network in networks]
    values = learner.train_step(0, islice(training_batches(train, job, 8), 1))
    with promise("with a loss that is not finite a step is skipped, and the run ends after some", "look at the loss"):
        assert math.isfinite(values["loss"]), f"the first loss is {values['loss']}"
    for network, weights in zip(networks, before, strict=True):
        with promise("nothing would be learned", "let the loss depend on the model, whose parameters are optimised"):
            assert not all(map(torch.equal, network.parameters(), weights)), "a step left all weights as they were"
        with promise("a gradient that is left is part of the next step's", "call zero_grad() at the end of a step"):
            assert all(parameter.grad is None or not parameter.grad.any() for parameter in network.parameters())


def test_the_loss_is_a_sum_and_comes_with_the_number_of_its_terms(job: Job) -> None:
    """Eight batches of 4, and the same samples in one batch, have about the same sum: a mean would be an eighth."""
    learner, train, _ = begin(job)
    few, many = (list(islice(training_batches(train, job, size), 32 // size)) for size in (4, 32))
    do = "return losses.sum() and torch.ones_like(losses).sum(), or of a mask; of a mean: loss, loss.new_ones(())"
    with promise("train.py divides the sum of all ranks by the number of all their terms", do), torch.no_grad():
        means = []
        for parts in (few, many):
            pairs = [training_loss(learner.network, part) for part in parts]
            assert all(value.ndim == 0 for pair in pairs for value in pair), "loss or terms are no scalar tensor"
            loss, terms = (sum(float(value) for value in values) for values in zip(*pairs, strict=True))
            assert terms > 0, "a batch has no terms"
            means.append(loss / terms)
        if abs(means[1]) > 1e-12 and math.copysign(1, means[0]) == math.copysign(1, means[1]):
            small, large = (f"{mean:.3g}" for mean in means)
            assert means[0] / means[1] < 4, f"the loss is {small} a term in batches of 4, and {large} in one of 32"


def smallest_batch(data: Any) -> int:
    """Samples in the last batch of an epoch, at the fewest, on 1 to 8 ranks; of a stream, whose end nobody knows, 1."""
    size = SETTINGS.train.batch_size
    if SETTINGS.loader.drop_last:
        return size
    if isinstance(data, IterableDataset):
        return 1
    shares = [-(-len(data) // ranks) for ranks in range(1, 9)]
    return min(share % size or size for share in shares)


def test_the_last_batch_of_an_epoch_can_be_trained_on_however_small(job: Job) -> None:
    learner, train, _ = begin(job)
    samples = smallest_batch(train)
    do = "set loader.drop_last to true in configs/train.yaml: it leaves that batch out. Or let the loss take one sample"
    with promise(f"an epoch may end with a batch of {samples}, and the run with it, hours after its start", do):
        loss = learner.train_step(0, islice(training_batches(train, job, samples), 1))["loss"]
        assert math.isfinite(loss), f"the loss of a batch of {samples} is {loss}"


def test_a_step_repeats_from_the_same_random_state(job: Job) -> None:
    found = []
    for _ in range(2):
        learner, train, _ = begin(job)
        feed = training_batches(train, job, 4)
        found.append([learner.train_step(step, [next(feed)])["loss"].item() for step in range(2)])
    why = "a resumed run goes on from the random state of its checkpoint, and would be another one"
    with promise(why, "draw from the default generators of torch, numpy and random, not from one of your own"):
        assert found[0] == found[1], "from the same random state, two steps had other losses"


def plain(sample: Any) -> Any:
    """The same with lists in the place of tensors and arrays, so that equal samples are equal in bytes."""
    if isinstance(sample, Mapping):
        return {name: plain(part) for name, part in sample.items()}
    if isinstance(sample, (tuple, list)):
        return [plain(part) for part in sample]
    return sample.tolist() if hasattr(sample, "tolist") else sample


def content(sample: Any) -> bytes:
    """What tells samples apart: all parts but single numbers, such as labels and indices, if there are others."""
    parts = list(sample.values()) if isinstance(sample, Mapping) else sample
    if isinstance(parts, (tuple, list)):
        large = [part for part in parts if getattr(part, "ndim", 1) > 0 and not isinstance(part, (int, float))]
        parts = large or parts
    return pickle.dumps(plain(parts))


def some_of(data: Any) -> list[bytes]:
    if isinstance(data, IterableDataset):
        return [content(sample) for sample in islice(data, MOST)]
    return [content(data[index]) for index in range(0, len(data), -(-len(data) // MOST))]


def test_the_split_repeats_and_its_halves_do_not_overlap() -> None:
    halves = []
    for _ in range(2):
        seed_generators(SETTINGS.run.seed)
        halves.append([some_of(data) for data in build_datasets(SETTINGS.data)])
    why = "each rank and each restart makes the data sets anew, and must find the same samples under the same indices"
    with promise(why, "split with a generator of your own and a fixed seed, and sort what a file system lists"):
        assert halves[0] == halves[1], "two calls of build_datasets differ"
    train, val = halves[0]
    with promise("nothing could be trained on, or evaluated", "look at what build_datasets returns"):
        assert train, "the training set is empty"
        assert val, "the validation set is empty"
    both = len(set(train) & set(val)) / len(set(val))
    repeated = 1 - len(set(train)) / len(train)  # by the nature of the data: then some are in both as well
    why = "a model that has seen the validation samples looks better than it is"
    with promise(why, "cut the data into two parts that share no sample, as one permutation does"):
        assert both <= 0.1 + repeated, f"{both:.0%} of the validation samples are training samples"


def numbers(found: Any) -> dict[str, float]:
    """What `evaluate` returned, as metrics are written."""
    do = "return a dict with a name and a number each, the same names every time: {'val_loss': 0.3}"
    with promise("metrics are written as numbers, and looked at over a run", do):
        assert found, "evaluate returned nothing"
        return {str(name): float(value) for name, value in found.items()}


@pytest.mark.skipif(SETTINGS.eval.every_steps == 0, reason="eval.every_steps is 0: nothing is evaluated")
def test_evaluation_repeats_returns_numbers_and_restores_the_mode(job: Job) -> None:
    learner, _, val = begin(job)
    network, size = learner.eval_network, SETTINGS.eval.batch_size
    loader: DataLoader[Any] = make_loader(val, job, SETTINGS.loader, batch_size=size, train=False)
    modes, state = [part.training for part in network.modules()], random_state(CPU)
    found = numbers(evaluate(network, batches(loader, job), job, SETTINGS.eval, lambda: None))
    restore_random_state(state, CPU)
    why = "the number would change from one evaluation to the next without any training"
    with promise(why, "call model.eval(), and draw from torch's default generator or one that you seed in evaluate"):
        again = numbers(evaluate(network, batches(loader, job), job, SETTINGS.eval, lambda: None))
        assert again == pytest.approx(found, rel=1e-6, nan_ok=True), "a second evaluation found something else"
    with promise("training goes on in that mode, without dropout or with it", "put back what model.training was"):
        assert [part.training for part in network.modules()] == modes, "evaluate left another mode behind"


@pytest.mark.skipif(SETTINGS.sample.every_steps == 0, reason="sample.every_steps is 0: no pictures are drawn")
def test_a_picture_appears_and_training_does_not_notice(job: Job, tmp_path: Path) -> None:
    learner, _, val = begin(job)
    network, path = learner.eval_network, tmp_path / "samples" / "step_00000001"
    modes, state = [part.training for part in network.modules()], torch.get_rng_state()
    draw(network, val, SETTINGS.sample, CPU, lambda _: None, path)
    do = "write path.with_suffix('.png'), or another suffix, or set sample.every_steps to 0 in configs/train.yaml"
    with promise("a run is looked at by its pictures", do):
        assert list(path.parent.glob(f"{path.name}.*")), f"draw wrote no {path.name}.* (make path.parent first)"
    with promise("training goes on in that mode, without dropout or with it", "put back what model.training was"):
        assert [part.training for part in network.modules()] == modes, "draw left another mode behind"
    why = "only rank 0 draws, so its next steps would depend on how often"
    with promise(why, "draw from a torch.Generator() of your own, and read samples without a DataLoader, which draws"):
        assert torch.equal(torch.get_rng_state(), state), "draw used torch's default generator"
