"""A trial of everything, a profile, the size of a model, few batches to evaluate, and few warnings."""

from __future__ import annotations

import gzip
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import QUICK, Launch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from digits.config import Settings
from digits.ddp.clocks import Clocks
from digits.ddp.errors import ConfigError, StopRequested
from digits.ddp.loader import LoaderSettings, batches, make_loader
from digits.ddp.metrics import LogSettings
from digits.ddp.profiling import profiled
from digits.ddp.start.board import Beats, may_be_silent
from digits.ddp.start.groups import Job
from digits.ddp.start.settings import load_settings
from digits.ddp.summary import state_bytes, summary
from digits.ddp.trace import slow_steps
from digits.ddp.trace.heartbeat import phase, step_done
from digits.ddp.trace.slow_steps import Pace


def a_rank(rank: int = 0, world_size: int = 1) -> Job:
    place = {"rank": rank, "world_size": world_size, "device": torch.device("cpu"), "who": lambda rank: f"rank {rank}"}
    place |= {"place": SimpleNamespace(launcher="none", local_world_size=1, attempt=0), "clocks": Clocks()}
    return cast(Job, SimpleNamespace(**place, store=dist.HashStore()))


def events(path: Path) -> list[str]:
    """Names of what a trace shows."""
    with gzip.open(path, "rt") as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"]]


def test_a_fast_dev_run_tries_everything_and_leaves_the_run_alone(launch: Launch) -> None:
    run = launch(*QUICK, "--fast-dev-run", "2", "--profile", "1:2", "--train.ema", "0.9", run_id="real")
    assert run.code == 0, run.output
    assert "fast dev run: all of it worked: 2 steps on 2 ranks, evaluation, work of rank 0 (sample), " in run.output
    assert "a checkpoint, resuming from it for 1 more step" in run.output
    assert "model: parameters " in run.output
    assert not run.run_dir.exists(), "the run of that name is another one"
    directory = run.run_dir.parent / "fast-dev-run" / "real"
    assert json.loads((directory / "outcome.json").read_text())["outcome"] == "done"
    assert len(list((directory / "checkpoints").iterdir())) == 2
    assert {"forward", "backward", "optim"} <= set(events(directory / "profile" / "steps1-2.rank0.json.gz"))
    assert "memory of it on each rank: " in (directory / "environment.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--profile", "9:5"], "its end is not after its beginning"),
        (["--profile", "some"], "that is no range of steps"),
        (["--profile", "5:15", "--train.steps", "10"], "the run has 10 steps"),
        (["--profile"], "expected one argument"),
        (["--fast-dev-run", "-1"], "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(Settings, arguments)
    assert ended.value.code == 78
    assert text in capfd.readouterr().err


def test_a_fast_dev_run_is_small_whatever_the_settings_are() -> None:
    settings, origin = load_settings(Settings, ["--run.dir", "elsewhere", "--train.steps", "9", "--fast-dev-run"])
    assert (settings.train.steps, origin["train.steps"]) == (4, "--fast-dev-run")
    assert settings.run.dir == Path("elsewhere/fast-dev-run")
    assert load_settings(Settings, ["--fast-dev-run=0"])[0].run.dir == Path("runs")


def test_few_batches_are_evaluated_of_the_whole_set_and_as_many_on_all_ranks() -> None:
    numbers = TensorDataset(torch.arange(1000))
    seen: list[int] = []
    for rank in (0, 1):
        job, settings = a_rank(rank, 2), LoaderSettings(eval_batches=2)
        loader = make_loader_of(numbers, job, settings)
        found = [batch[0].tolist() for batch in batches(loader, job)]
        assert [len(batch) for batch in found] == [10, 10]
        seen += [number for batch in found for number in batch]
    assert sorted(seen) == list(range(0, 1000, 25)), "evenly spread, each once"
    assert sum(1 for _ in batches(make_loader_of(numbers, a_rank(), LoaderSettings()), a_rank())) == 100


def make_loader_of(numbers: TensorDataset, job: Job, settings: LoaderSettings) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # the ranks of this test do not run at once
        patch.setattr("digits.ddp.loader.same", lambda *_: None)
        return make_loader(numbers, job, settings, batch_size=10, train=False, compare=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    ],
)
def test_the_state_of_an_optimiser_is_known_before_its_first_step(make: Any) -> None:
    network = nn.Linear(30, 7)
    optimizer = make(network.parameters())
    before = state_bytes(optimizer)
    assert not optimizer.state
    network(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    assert before == state_bytes(optimizer)


def test_the_summary_counts_what_is_trained_frozen_shared_and_averaged() -> None:
    network = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    network[1].weight = network[0].weight
    critic = nn.Linear(8, 1, bias=False).requires_grad_(False)
    objects = {"model": torch.compile(network), "critic": critic, "average": AveragedModel(network)}
    first, second = summary(objects | {"optimizer": torch.optim.AdamW(network.parameters())})
    assert first.startswith("model: parameters 80 trained, 8 frozen (model 80, critic 8); 17 numbers in buffers")
    assert "state of AdamW" in second
    assert "their moving average" in second
    assert summary({}) == []
    lazy = summary({"model": nn.LazyLinear(3)})[0]
    assert "2 not made yet" in lazy


def train_to(last: int, error: BaseException, run_dir: Path) -> None:
    """A loop of so many steps, profiled, that ends with `error`."""
    with profiled(a_rank(), run_dir, LogSettings(profile="1:9")):
        for step in range(last + 1):
            with phase("forward"):
                torch.ones(3).add(2)
            step_done(step, 0)
        raise error


def test_a_stop_or_an_error_leaves_what_was_profiled(tmp_path: Path) -> None:
    for number, error in enumerate((StopRequested("enough"), KeyError("own"))):
        with pytest.raises(type(error)):
            train_to(3, error, tmp_path / str(number))
        assert "forward" in events(tmp_path / str(number) / "profile" / "steps1-3.rank0.json.gz")


def test_a_profile_that_is_over_or_of_no_rank_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ddp"):
        logging.getLogger("ddp").propagate = True
        with profiled(a_rank(), tmp_path, LogSettings(profile="1:9")):
            step_done(20, 0)
    assert "step 20 is done already, and log.profile is 1:9" in caplog.text
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(ConfigError, match="names rank 3, and the run has 1"),
        profiled(a_rank(), tmp_path, LogSettings(profile="1:9", profile_ranks="0,3")),
    ):
        pass


def test_a_rank_that_has_said_so_may_be_silent() -> None:
    store = dist.HashStore()
    beats = Beats(store, [1], silent_s=0.001)
    beats.silent()
    time.sleep(0.01)
    assert beats.silent() == [1]
    may_be_silent(store, 1, 60)
    assert beats.silent() == []
    may_be_silent(store, 1, 0)
    assert beats.silent() == [1]


def test_slow_steps_that_always_come_are_counted_and_no_other_ranks_blamed_where_there_are_none() -> None:
    pace, notes, totals = Pace(), list[str](), {"backward": 0.0}
    for step in range(1, 201):
        totals["backward"] += 5.0 if step > 50 and step % 5 == 0 else 0.5
        pace.step_done(step, totals)
        notes += pace.take_notes()
    slow = [note for note in notes if note.startswith("slow step: ")]
    counted = [note for note in notes if note.startswith("slow steps: ")]
    assert len(slow) == slow_steps.SINGLY
    assert [note.split()[2] for note in counted] == ["6", "12", "24"], "of 30"
    assert "of them because of backward" in counted[0]
    assert "other ranks" not in "".join(notes)
