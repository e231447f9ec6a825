"""The numbers beside the metrics: where the time of a step goes, operations, and how a run is gone on with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from digits.ddp.meter import Meter, in_words
from digits.ddp.report.speed import speed_rows
from digits.ddp.start.again import line
from digits.ddp.start.arrival import Arrival, precision
from digits.ddp.trace import flops, spent
from digits.ddp.trace.heartbeat import phase


class FakeClock(spent.HostClock):
    """Stands still unless it is set; `done` is the last moment that has been passed, as of a GPU that lags behind."""

    time = 0.0
    done = float("inf")

    def now(self) -> float:
        return self.time

    def passed(self, moment: float) -> bool:
        return moment <= self.done


def a_step(watch: spent.Watch, clock: FakeClock, data: float = 1.0, ranks: float = 3.0) -> None:
    watch.enter("data")
    clock.time += data
    watch.enter("train")
    watch.batch(16)
    watch.enter("forward")
    clock.time += 2
    watch.enter("train")
    watch.enter("backward")
    clock.time += 4
    watch.computed()
    clock.time += ranks
    watch.enter("train")
    watch.step_done()


def test_waiting_is_told_from_work_and_from_what_is_no_part_of_a_step() -> None:
    clock = FakeClock()
    watch = spent.Watch(clock)
    a_step(watch, clock, data=1000.0)  # the first warms up
    assert watch.take().steps == 0
    a_step(watch, clock)
    watch.enter("eval")
    watch.enter("data")
    watch.batch(16)
    clock.time += 100
    watch.enter("eval")
    watch.enter("train")
    watch.enter("agree")  # the others have more to evaluate
    clock.time += 10
    watch.enter("train")
    watch.enter("guard:checkpoint")
    clock.time += 50
    watch.enter("train")
    a_step(watch, clock, data=5.0)
    taken = watch.take()
    assert (taken.steps, taken.samples, taken.batches, taken.seconds) == (2, 32, 2, 24.0)
    assert taken.kinds == {"data": 6.0, "ranks": 6.0, "apart": 110.0, "checkpoint": 50.0}
    assert watch.take().steps == 0


def test_steps_that_the_gpu_has_still_to_make_count_later() -> None:
    clock = FakeClock()
    watch = spent.Watch(clock)
    for _ in range(4):
        a_step(watch, clock)
    clock.done = clock.time - 5  # in the middle of the fourth
    for _ in range(2):
        a_step(watch, clock)
    assert watch.take().steps == 3, "those before were read when they were done"
    assert watch.take().steps == 0
    clock.done = clock.time
    taken = watch.take()
    assert (taken.steps, taken.seconds, taken.kinds["ranks"]) == (2, 20.0, 6.0)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_in_a_backward_the_wait_begins_after_the_work(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[str | None] = []

    class Noting(spent.Watch):
        def _change_to(self, kind: spent.Kind | None) -> None:
            changes.append(kind)
            super()._change_to(kind)

    monkeypatch.setattr(spent, "watch", Noting(FakeClock()))
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, lambda _, bucket: reduced(changes, bucket))
    spent.follow(model)
    spent.watch.step_done()
    with phase("backward"):
        model(torch.ones(2, 4)).sum().backward()
    assert changes == ["reduced", "ranks", None], "the last reduction is asked for, then waited for"


def reduced(changes: list[str | None], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    changes.append("reduced")
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future


def test_the_operations_of_a_linear_layer_are_counted_and_leave_no_trace() -> None:
    model, batch = nn.Linear(32, 16), torch.randn(8, 32)
    random = torch.get_rng_state()
    flops.count([model], lambda: model(batch).sum().backward(), torch.device("cpu"))
    work = flops.of_a_batch()
    # Products of 8 x 32 x 16 in forward and for the weight's gradient, each a multiplication and an addition.
    assert work == flops.Work(2 * 2 * 8 * 32 * 16, None)
    assert torch.equal(torch.get_rng_state(), random)

    def fails() -> None:
        raise NotImplementedError("an operator that cannot be traced")

    flops.count([model], fails, torch.device("cpu"))
    assert flops.of_a_batch() is None, "and the run goes on"


def test_the_shortest_time_is_that_of_the_type_in_use() -> None:
    found, peak = {"aten.mm": 3 * 10**12, "aten.convolution": 10**12}, flops.Peak(100, 50, 10, 1)
    assert flops.least_s(found, peak, torch.bfloat16, False, False) == pytest.approx(0.04)
    assert flops.least_s(found, peak, torch.float16, False, False) == pytest.approx(0.08)
    assert flops.least_s(found, peak, torch.float32, False, False) == pytest.approx(4)
    assert flops.least_s(found, peak, torch.float32, False, True) == pytest.approx(3.1), "PyTorch's default"
    assert flops.least_s(found, flops.Peak(None, 50, None, 1), torch.bfloat16, True, True) is None
    assert all(rate is None or rate > 0 for each in flops.PEAKS.values() for rate in vars(each).values())
    assert all(each.fp16 > (each.tf32 or 0) >= 0 and each.fp16 > (each.fp32 or 0) for each in flops.PEAKS.values())


@pytest.mark.parametrize(
    ("name", "units", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 989.5),
        ("NVIDIA H100 PCIe", 114, 756),
        ("NVIDIA H100 NVL", 132, 835.5),
        ("NVIDIA GH200 480GB", 132, 989.5),
        ("NVIDIA A100-SXM4-40GB", 108, 312),
        ("A100-SXM4-40GB", 108, 312),
        ("NVIDIA L4", 58, 121),
        ("NVIDIA L40", 142, 181.05),
        ("NVIDIA L40S", 142, 362.05),
        ("AMD Instinct MI250X", 110, 191.5),
        ("AMD Instinct MI300X", 304, 1307.4),
        ("AMD Instinct MI300X", 38, None),  # one of 8 partitions
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, None),
        ("NVIDIA H100", 132, None),
        ("NVIDIA A10G", 80, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, None),
        ("AMD Instinct MI250X / MI250", 104, None),
    ],
)
def test_a_gpu_has_its_own_peak_and_not_that_of_a_namesake(name: str, units: int, bf16: float | None) -> None:
    peak = flops.peak_of(name, units)
    assert (peak and peak.bf16) == bf16


def test_tf32_counts_where_torch_may_use_it() -> None:
    matmul: Any = torch.backends.cuda.matmul
    try:
        for precision, products in (("highest", False), ("high", True), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert flops._tf32() == (products, True), precision
        torch.set_float32_matmul_precision("highest")
        if hasattr(matmul, "fp32_precision"):  # torch 2.9 and later
            matmul.fp32_precision = "tf32"
            assert flops._tf32() == (True, True)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_line_has_the_rank_that_waits_most_and_leaves_out_what_is_unknown() -> None:
    meter = Meter(cast(Any, SimpleNamespace(device=torch.device("cpu"))))
    meter._last = spent.Spent(steps=2, samples=64, batches=2, seconds=1.0)
    nan = float("nan")
    numbers = meter.together([[0.5, 0.1, 0.7, 0.0, nan], [0.5, 0.6, 0.2, 2.0, nan]], learning_rate=0.1)
    assert numbers == {
        "step_seconds": 0.5,
        "samples_per_second": 64.0,
        "data_wait_share": 0.6,
        "rank_wait_share": 0.7,
        "checkpoint_seconds": 2.0,
        "learning_rate": 0.1,
    }
    assert in_words(numbers) == "0.5 s a step, 64 samples/s, waits 60% for data, 70% for ranks, 2 s for checkpoints"
    assert meter.together([[nan, nan, nan, 0.0, nan]] * 2, None) == {"checkpoint_seconds": 0.0}
    rows = [{"step": step, "time": 100.0 + step, **numbers} for step in (1, 2, 3)]
    table = {label: values for label, *values in speed_rows(rows, since=102.0)}
    assert table["stood still for checkpoints"][0] == "4 s in all", "of the last start only"
    assert table["samples a second, all ranks"] == ["64", "64"]


def test_bf16_needs_a_gpu_that_has_it_on_every_rank() -> None:
    has, lacks = (Arrival(0, "n1", "m", "", "GPU", (0,), 1, bf16=bf16) for bf16 in (True, False))
    assert precision([has, has]) == "bf16"
    assert precision([has, lacks]) == precision([lacks]) == precision([]) == "fp32"


def test_the_command_that_goes_on_is_what_was_typed_and_resumes() -> None:
    command = ["python", "-m", "mine", "--run.resume", "false", "--run.resume=false", "--note", "a b; rm $HOME"]
    given = {"DDP_TRAIN__STEPS": "5", "DDP_FAULTS": "kill", "DDP_ATTEMPT": "3", "PATH": "/bin", "DDP_RUN__ID": "old"}
    text = line(command, "it's", given, "/my dir")
    assert shlex.split(text) == [
        *("cd", "/my dir", "&&", "DDP_RUN__ID=it's", "DDP_TRAIN__STEPS=5"),
        *("python", "-m", "mine", "--note", "a b; rm $HOME"),
    ]
    assert sys.executable not in text
