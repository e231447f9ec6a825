"""The parts of ddp/ by themselves, in one process: what is refused, what is computed, what is judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from digits.ddp import faults, guard
from digits.ddp.checkpoint import Position
from digits.ddp.clocks import Clocks
from digits.ddp.errors import ConfigError
from digits.ddp.loading.shards import GlobalOrder
from digits.ddp.metrics import clip_gradients, gradient_norm, step_if_finite
from digits.ddp.preflight.__main__ import PreflightSettings as Settings
from digits.ddp.rank_state import RankState
from digits.ddp.report import outcome, report
from digits.ddp.restore import fill, parameter_orders
from digits.ddp.saving.snapshot import Frozen, freeze
from digits.ddp.start import launcher
from digits.ddp.start.groups import Job, choose_device
from digits.ddp.start.settings import load_settings, settings_table
from digits.ddp.trace import heartbeat
from digits.ddp.watch.slow_ranks import stragglers
from digits.ddp.watch.verdict import judge


@pytest.mark.parametrize(
    "wrong",
    [{"loader_s": 180}, {"stall_s": 300}, {"collective_s": 1800}, {"silent_s": 2}, {"init_s": 0}, {"unknown": 1}],
)
def test_clocks_that_ring_in_the_wrong_order_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Clocks(**wrong)


def test_the_launcher_is_found_and_what_is_half_set_is_refused() -> None:
    assert launcher.detect({}).launcher == "none"
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "n1", "MASTER_PORT": "29400"}
    assert launcher.detect(torchrun | address).rank == 3
    slurm = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    slurm["SLURM_STEP_TASKS_PER_NODE"] = "2(x2)"
    assert launcher.detect(slurm | address).local_world_size == 2
    # In a batch script without srun, a plain process must not take itself for one rank of many.
    assert launcher.detect({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}).world_size == 1
    # SkyPilot runs a command on each node, and starts no ranks.
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    assert launcher.detect(sky | torchrun | address).launcher == "torchrun"
    assert launcher.detect(sky | {"SKYPILOT_NUM_NODES": "1"}).launcher == "none"
    out_of_range, no_number = {"RANK": "4"}, {"LOCAL_RANK": "x"}
    for wrong in ({"RANK": "1"}, sky, torchrun, torchrun | address | out_of_range, torchrun | address | no_number):
        with pytest.raises(ConfigError):
            launcher.detect(wrong)


def test_settings_say_who_set_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("loader: {workers: 1, prefetch: 2, batch_mb: 3}")
    monkeypatch.setenv("DDP_LOADER__WORKERS", "10")
    monkeypatch.setenv("DDP_LOADER__PREFETCH", "20")
    monkeypatch.setenv("DDP_SCAFFOLD_TEMPLATE", "/somewhere")  # for the generator, and no mistake here
    settings, origin = load_settings(Settings, ["--config", str(file), "--loader.workers", "100"])
    rows = {name: (value, who) for name, value, who in settings_table(settings, origin)}
    assert rows["loader.workers"] == ("100", "command line")
    assert rows["loader.prefetch"] == ("20", "DDP_LOADER__PREFETCH")
    assert rows["loader.batch_mb"] == ("3.0", str(file))
    assert rows["loader.uneven"][1] == "default"


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--loader.workers", "many"], {}, "loader.workers"),
        (["--loader.workerz", "3"], {}, "workerz"),
        ([], {"DDP_CLOCKS__STAL_S": "3"}, "DDP_CLOCKS__STAL_S"),
        (["--config", "missing.yaml"], {}, "missing.yaml"),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str],
    variables: dict[str, str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # away from configs/train.yaml
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DDP_RUN__ID", "first")
    with pytest.raises(SystemExit) as ended:
        load_settings(Settings, arguments)
    assert ended.value.code == 78
    assert named in capfd.readouterr().err
    outcome = json.loads((tmp_path / "runs/first/outcome.json").read_text())
    assert (outcome["kind"], outcome["restart"]) == ("bad_settings", False)
    assert named in outcome["reason"]


@pytest.mark.parametrize("length", [11, 12, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_make_equal_steps_and_together_see_every_sample(length: int, world_size: int) -> None:
    def shards(uneven: str, epoch: int = 0, start: int = 0) -> list[list[int]]:
        ranks = [cast(Job, SimpleNamespace(rank=rank, world_size=world_size)) for rank in range(world_size)]
        orders = [GlobalOrder(length, rank, seed=1, shuffle=True, uneven=uneven) for rank in ranks]
        for order in orders:
            order.set_epoch(epoch, start)
        read = [list(order) for order in orders]
        assert [len(shard) for shard in read] == [order.share(start) for order in orders]
        return read

    padded = shards("pad")
    assert len({len(shard) for shard in padded}) == 1
    assert {index for shard in padded for index in shard} == set(range(length))
    assert len({len(shard) for shard in shards("drop")}) == 1
    assert sorted(index for shard in shards("keep") for index in shard) == list(range(length))
    assert shards("pad", epoch=1) != padded, "each epoch has its own order"
    assert shards("pad", start=world_size) == [shard[1:] for shard in padded], "a resumed run goes on where it stopped"
    assert len({len(shard) for shard in shards("pad", start=2)}) == 1, "also when another world size began the epoch"


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=0.1, fused=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        partial(torch.optim.RMSprop, lr=0.1),
    ],
    ids=["AdamW", "SGD", "RMSprop"],
)
def test_a_step_with_a_nan_gradient_changes_nothing(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    skipped = []
    nan = torch.tensor([1.0, float("nan"), 1.0])
    for gradient in (nan, torch.ones(3), nan, torch.full((3,), 100.0)):
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        own = gradient_norm([weight])
        norm = clip_gradients([weight], 2.0, 1.0, own)
        assert torch.equal(norm, 2 * own) or not own.isfinite()
        skipped.append(int(step_if_finite(optimizer, norm)))
        assert torch.equal(before, weight) == bool(skipped[-1])
        assert weight.isfinite().all()
    assert skipped == [1, 0, 1, 0]
    assert weight.grad is not None
    assert weight.grad.norm() == pytest.approx(1.0, abs=1e-4), "clipped"


def state(rank: int, phase: str, collectives: int, **other: Any) -> RankState:
    given: dict[str, Any] = {"decisions": 3, "open_collectives": -1, "python_collectives": 4, "step": 5, "idle_s": 9.0}
    given["waits_in"] = "run_backward" if phase == "backward" else ""
    return RankState(rank, f"n{rank // 2}", phase, collectives=collectives, **given | other)


def test_a_state_arrives_as_it_was_sent() -> None:
    sent = RankState(1, "n0", "forward", step=3, idle_s=0.5, phase_seconds={"data": 1.0}, lost_peers=True)
    asked = replace(sent, recent=((7, "all_reduce", "a.py:1"),), unfinished=((7, "nccl:all_reduce", "started"),))
    asked = replace(asked, without_gradient=("head.bias",), reached=(3, 1, "forward"), pid=9, news=2, ended={2: ""})
    assert [RankState.from_json(each.to_json()) for each in (sent, asked)] == [sent, asked]
    later = sent.to_json().replace("{", '{"added_later": 1, ', 1)
    assert RankState.from_json(later) == sent, "what another release adds is left out"


def test_a_heartbeat_that_cannot_be_read_costs_its_row_and_no_report(tmp_path: Path) -> None:
    outcome.begin(tmp_path, 0, 1)
    (tmp_path / "heartbeats/rank0.json").write_text("{}")
    assert report.write(tmp_path)
    assert "## Ranks" not in (tmp_path / "report.md").read_text()


def test_gpus_that_are_named_and_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(ConfigError, match="0,0"):
        choose_device(launcher.detect({}), "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert choose_device(launcher.detect({}), "auto").type == "cpu"


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    with pytest.raises(ConfigError, match="does not fit the model"):
        fill({"model": large}, {"model": small.state_dict()}, tmp_path)
    fill({"model": small}, {"model": small.state_dict(), "scaler": {}}, tmp_path)
    assert "scaler, which is switched off" in caplog.text


def test_what_a_checkpoint_will_hold_is_not_changed_by_training() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    frozen = freeze({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "own": {"seen": [1]}})
    assert isinstance(frozen, Frozen), frozen
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(frozen.state["model"]["weight"], before)
    assert not torch.equal(model.weight, before)
    assert frozen.state["optimizer"]["state"] == {}
    assert frozen.state["own"] == {"seen": [1]}


def test_an_optimiser_with_its_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model(torch.ones(1, 2)).sum().backward()
    (before := torch.optim.AdamW(model.parameters())).step()
    saved, orders = {"optimizer": before.state_dict()}, parameter_orders({"model": model, "optimizer": before})
    fill({"model": model, "optimizer": before}, saved, tmp_path, orders)
    swapped = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters(), *model[1].parameters()])
    with pytest.raises(ConfigError, match=r"place 2 is 2\.weight in the one, and 1\.weight in the other"):
        fill({"model": model, "optimizer": swapped}, saved, tmp_path, orders)
    fill({"optimizer": swapped}, saved, tmp_path)  # an older checkpoint: the shapes agree
    with pytest.raises(ConfigError, match="exp_avg of place 0"):
        fill({"optimizer": torch.optim.AdamW(reversed(list(model.parameters())))}, saved, tmp_path)


def test_a_gpu_that_has_not_started_what_the_others_have_started_is_named() -> None:
    """The states are those of PyTorch's flight recorder, with TORCH_NCCL_ENABLE_TIMING=1."""
    nccl = [state(rank, "agree", 8, open_collectives=1, waits_in="synchronize") for rank in range(3)]
    for rank, progress in enumerate(("started", "scheduled", "started")):
        nccl[rank] = replace(nccl[rank], unfinished=((8, "nccl:all_reduce", progress),))
    found = judge(nccl, [])
    assert (found.kind, found.first_ranks) == ("missing_rank", [1])
    assert "has not started collective 8 (nccl:all_reduce) on its GPU" in found.reason
    # Without start events nothing can be told apart.
    nccl = [replace(each, unfinished=((8, "nccl:all_reduce", "scheduled"),)) for each in nccl]
    assert judge(nccl, []).first_ranks is None


def test_a_rank_that_moves_on_is_slow_and_not_stuck() -> None:
    waiting = state(0, "agree", 8, idle_s=100.0, waits_in="all_reduce")
    found = judge([waiting, state(1, "eval", 7, idle_s=2.0)], [])
    assert (found.kind, found.first_ranks) == ("straggler", [1])
    assert "slow, not stuck" in found.reason
    assert judge([waiting, state(1, "eval", 7, idle_s=90.0)], []).kind == "missing_rank"


def test_the_waiting_ranks_are_not_blamed() -> None:
    waiting = [state(rank, "backward", 8) for rank in range(3)]
    assert judge([*waiting, state(3, "forward", 7)], []).first_ranks == [3]
    assert judge([*waiting, state(3, "data", 8)], []).first_ranks == [3]
    assert judge([*waiting, state(3, "backward", 8)], []).first_ranks is None, "an honest unknown"
    assert judge([*waiting, state(3, "forward", 7)], [1]).first_ranks == [1], "a silent rank comes first"
    assert judge([*waiting, state(3, "agree", 8, decisions=2)], []).first_ranks == [3], "it has not come to a decision"
    assert judge([state(0, "guard:sample", 8), state(1, "wait:sample", 8)], []).kind == "rank0_work"
    assert judge([state(0, "data", 8)], []).first_ranks == [0], "alone, there is no other to blame"
    victim, culprit = state(2, "backward", 7), state(3, "forward", 6)
    assert judge([*waiting[:2], victim, culprit], []).first_ranks == [3], "who is behind and waits is a victim, too"
    busy = [state(0, "backward", 8), state(1, "forward", 8), state(2, "forward", 7)]
    assert judge(busy, []).first_ranks == [2], "of two that wait for nobody, the one that is behind"
    past = state(1, "agree", 8, without_gradient=("head.bias",))
    found = judge([state(0, "backward", 8), past], [])
    assert (found.kind, found.first_ranks) == ("divergent_control_flow", [1])
    assert "without a gradient for head.bias" in found.reason
    gpus = [
        replace(each, open_collectives=1, reached=(5, place, phase))
        for each, place, phase in zip(waiting, (1, 1, 0), "bbf", strict=True)
    ]
    assert judge(gpus, []).first_ranks == [2], "its GPU has not come to backward"
    moving = state(1, "forward", 8, idle_s=0.1)
    assert judge([state(0, "wait:sample", 8), moving], []).first_ranks is None, "a rank that moves is not to blame"


def test_a_straggler_is_told_by_its_own_phases_only() -> None:
    before = [state(rank, "data", 0, phase_seconds={"data": 0.0, "backward": 0.0}) for rank in range(3)]
    spent = [{"data": 1.0, "backward": 9.0}, {"data": 1.1, "backward": 9.0}, {"data": 9.0, "backward": 1.0}]
    lines = stragglers(before, [state(rank, "data", 0, phase_seconds=spent[rank]) for rank in range(3)])
    assert len(lines) == 1
    assert "rank 2 (n1)" in lines[0]
    assert "in data" in lines[0]


def test_an_exception_leaves_no_phase_behind_and_says_where_it_came_from() -> None:
    before = heartbeat.beat.phase

    def read() -> None:
        with heartbeat.phase("eval"):
            try:
                with heartbeat.phase("data"):
                    raise KeyError("a sample")
            except KeyError as error:
                assert heartbeat.beat.phase == "eval", "user code that goes on is in the phase around it again"
                raise ValueError("no such file") from error

    with pytest.raises(ValueError, match="no such file") as caught:
        read()
    assert heartbeat.beat.phase == before
    heartbeat.end_with(caught.value)
    assert heartbeat.beat.phase == "data", "the report names where it began"
    heartbeat.beat.phase = before


def test_a_position_has_the_names_of_all_releases_in_a_checkpoint() -> None:
    counters = {"step": 7, "epoch": 1, "used": 96, "begun": 32, "evaluated": 5, "sampled": 0, "saved": 5}
    position = Position.of(counters)
    assert (position.samples, position.global_batch) == (96, 32)
    assert position.counters() == counters
    position.move({"epoch": 2, "used": 0, "begun": 64})
    assert (position.step, position.epoch, position.samples, position.global_batch) == (7, 2, 0, 64)


def test_a_collective_inside_the_guard_raises_and_names_the_line() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        line = rf"inside guard:sample at .*{Path(__file__).name}:\d+"
        with guard.no_collectives("sample"), pytest.raises(RuntimeError, match=line):
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))  # and works again afterwards
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrong", ["melt@rank=1", "raise@rank=x", "raise@node=1", "raise@rank"])
def test_an_unknown_fault_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="DDP_FAULTS"):
        faults.parse(wrong)
