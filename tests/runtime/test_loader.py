"""The loader of a rendered project with several ranks: equal steps over unequal streams; worker faults named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cross_section import every

torch = pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("loader_script.py")


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"}, name="digits")


def torchrun(project: Path, *arguments: str, ranks: int, **variables: str) -> str:
    """The output of the script under torchrun; fails the test with it unless all ranks end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    environment |= {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", str(SCRIPT), *arguments]
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def read(project: Path) -> dict[str, list[Any]]:
    """Scenario -> what each of three ranks has seen."""
    output = torchrun(project, "streams", ranks=3, LOADER_S="60")
    seen: dict[str, list[Any]] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return seen | {"output": [output]}


def samples(ranks: list[list[list[int]]]) -> list[int]:
    return sorted(sample for batches in ranks for batch in batches for sample in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_stream_is_shared_by_all_ranks(read: dict[str, list[Any]], workers: int) -> None:
    padded = read[f"one stream, pad, {workers} workers"]
    assert {len(batches) for batches in padded} == {5}
    assert padded[1][:2] == [[1, 4], [7, 10]], "sample i is for rank i % 3"
    assert samples(padded) == sorted([*range(26), 2]), "each once; rank 2, which had none left, repeats its first"
    dropped = read[f"one stream, drop, {workers} workers"]
    assert {len(batches) for batches in dropped} == {4}
    assert samples(dropped) == list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_a_resumed_stream_goes_on_at_the_right_sample(read: dict[str, list[Any]], uneven: str, workers: int) -> None:
    how = f"{uneven}, {workers} workers"
    for rank, batches in enumerate(read[f"resumed, {how}"]):
        assert batches == read[f"one stream, {how}"][rank][2:]
    other = samples(read[f"resumed from two ranks, {how}"])
    assert other == list(range(8, 26)), "eight samples were used by two ranks; the rest divides by three"
    for rank, batches in enumerate(read[f"own streams resumed, {how}"]):
        assert batches == read[f"own streams, {how}"][rank][1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_unequal_length_make_equally_many_batches(read: dict[str, list[Any]], workers: int) -> None:
    padded = read[f"own streams, pad, {workers} workers"]
    assert {len(batches) for batches in padded} == {6}
    assert set(samples(padded)) == {*range(5), *range(100, 109), *range(200, 212)}, "nothing is left out"
    assert padded[0][3:] == [padded[0][0]] * 3, "the shortest repeats its first batch"
    dropped = read[f"own streams, drop, {workers} workers"]
    assert {len(batches) for batches in dropped} == {2}
    assert len({*samples(dropped)}) == 12, "whole batches only, and none twice"


def test_streams_that_should_be_equal_and_are_not_are_told(read: dict[str, list[Any]]) -> None:
    for uneven, expected in (("pad", 6), ("drop", 3)):
        assert {len(b) for b in read[f"streams that should be equal, {uneven}, 0 workers"]} == {expected}
    assert "the ranks do not read the same stream" in read["output"][0]


def test_evaluation_sees_each_sample_once_and_polls_equally_often(read: dict[str, list[Any]]) -> None:
    assert samples(read["evaluation"]) == [*range(5), *range(100, 109), *range(200, 212)]
    assert read["polls"] == [[7, 7, 7]] * 3


def test_a_stop_in_mid_epoch_comes_at_the_same_step(read: dict[str, list[Any]]) -> None:
    assert len({steps for steps, _ in read["stopped"]}) == 1
    assert {reason for _, reason in read["stopped"]} == {"SIGTERM on rank 1 (n1)"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing for rank 1", r"no batch at all for rank 1 \(n1\)"),
        ("lengths differ", r"number of training samples differs .*rank 2 \(n1\): 22(.|\n)*the same files"),
        ("stream lengths differ", r"number of training samples differs (.|\n)*sharded=True"),
        ("an empty part", r"the stream of training samples is empty on rank 0 \(n1\)"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(read: dict[str, list[Any]], name: str, says: str) -> None:
    assert {kind for kind, _ in read[name]} <= {"uneven_inputs"}
    assert all(re.search(says, text) for _, text in read[name]), read[name]
    assert len(read[name]) == 3


@pytest.fixture(scope="module")
def ordered(project: Path) -> dict[str, list[Any]]:
    """Scenario -> what each of two ranks has seen with an order of the project's own."""
    output = torchrun(project, "orders", ranks=2, LOADER_S="60")
    return dict(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))


def together(ranks: list[list[list[int]]]) -> list[int]:
    """What all ranks have read, global batch by global batch, those of rank 0 first in each."""
    return [sample for step in zip(*ranks, strict=True) for batch in step for sample in batch]


def the_order(epoch: int) -> list[int]:
    return list(torch.randperm(20, generator=torch.Generator().manual_seed(700 + epoch)).tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ranks_together_read_the_order_that_is_given(ordered: dict[str, list[Any]], workers: int) -> None:
    for epoch in range(2):
        seen = ordered[f"epoch {epoch}, {workers} workers"]
        assert [len(batch) for batch in seen[0]] == [3, 3, 3, 1]
        assert together(seen) == the_order(epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_goes_on_at_the_sample_where_it_was(ordered: dict[str, list[Any]], workers: int) -> None:
    for rank, batches in enumerate(ordered[f"resumed, {workers} workers"]):
        assert batches == ordered[f"epoch 1, {workers} workers"][rank][2:]
    assert together(ordered[f"resumed from four ranks, {workers} workers"]) == the_order(1)[8:]


def test_an_order_that_does_not_divide_by_the_ranks(ordered: dict[str, list[Any]]) -> None:
    assert together(ordered["pad"]) == [*range(15), 0]
    assert together(ordered["drop"]) == [*range(14)]
    assert together(ordered["full"]) == [*range(12)]


def test_each_epoch_may_have_another_length_and_is_asked_for_once(ordered: dict[str, list[Any]]) -> None:
    (counters, same), (asked, _) = ordered["endless"], ordered["asked"]
    assert counters == same == [[0, 6], [1, 6], [1, 12], [2, 6], [2, 12], [2, 18], [3, 6]]
    assert asked == [0, 1, 2, 3]
    assert ordered["goes on"] == [counters[3:]] * 2


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (
            "another order",
            "ranks_differ",
            r"rank 0 \(n1\) has 12 samples, 0 1 2 .*rank 1 \(n1\) has 12 samples, 11 10 9",
        ),
        ("a float", "launcher_misconfig", r"order of epoch 0 on rank 0 \(n1\) is torch\.float32 \[12\]"),
        ("too high", "launcher_misconfig", r"on rank 1 \(n1\) has the index 20, and there are 20 samples"),
        ("negative", "launcher_misconfig", r"on rank 0 \(n1\) has the index -1"),
        ("too short", "launcher_misconfig", r"has 5 samples, and one step of all ranks takes 6"),
        (
            "nothing on rank 1",
            "launcher_misconfig",
            r"epoch 0 on rank 1 \(n1\) is a NoneType that cannot be read",
        ),
        ("text", "launcher_misconfig", r"on rank 0 \(n1\) is a list that cannot be read: ValueError: too many dim"),
        (
            "batches of unequal size",
            "launcher_misconfig",
            r"on rank 0 \(n1\) is a list that cannot be read: ValueError",
        ),
        ("numpy's uint64", "launcher_misconfig", r"on rank 0 \(n1\) is a ndarray that cannot be read"),
        ("a tensor of uint64", "launcher_misconfig", r"on rank 0 \(n1\) is a Tensor that cannot be read"),
        ("complex numbers", "launcher_misconfig", r"on rank 0 \(n1\) is a Tensor that cannot be read"),
        ("evaluation", "launcher_misconfig", r"make_loader has an order for evaluation"),
        ("a stream", "launcher_misconfig", r"make_loader has an order for a stream"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused_on_all_ranks(
    ordered: dict[str, list[Any]], name: str, kind: str, says: str
) -> None:
    assert len(ordered[name]) == 2
    for found, text in ordered[name]:
        assert found == kind
        assert re.search(says, text), text
        assert "\n  -> " in text


@pytest.mark.parametrize(
    ("kind", "expected", "says"),
    [
        pytest.param(
            "worker-raise", "rank_exception", r"UNIT \d+ of DATA \(worker 0\): InjectedFault", marks=pytest.mark.slow
        ),
        pytest.param(
            *(
                "worker-hang",
                "dataloader_stalled",
                r"DATA \(worker 0 at UNIT \d+\): DataLoader timed out after 8 seconds",
            ),
            marks=pytest.mark.slow,
        ),
        ("worker-kill", "dataloader_worker_died", r"DATA \(worker 0 at UNIT \d+, signal 9: Killed\)"),
        pytest.param(
            "worker-shm", "shm_exhausted", r"DATA \(worker 0 at UNIT \d+, signal 7: Bus error\)", marks=pytest.mark.slow
        ),
        pytest.param("worker-files", "fd_exhausted", r"DATA \(worker 0 at UNIT \d+", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("data", "start_method"), [("map", "forkserver"), pytest.param("stream", "fork", marks=pytest.mark.slow)]
)
def test_the_worker_at_fault_is_named(
    project: Path, kind: str, expected: str, says: str, data: str, start_method: str
) -> None:
    variables = {"DDP_FAULTS": f"{kind}@step=10", "DATA": data, "START_METHOD": start_method}
    variables["LOADER_S"] = "8" if kind == "worker-hang" else "60"  # the workers' own start counts, too
    output = torchrun(project, "fault", ranks=1, **variables)
    unit, name = ("index", "Squares") if data == "map" else ("sample", "Numbers")
    pattern = says.replace("UNIT", unit).replace("DATA", name)
    found = re.search(rf"(\w+) \| rank 0 \(n1\) could not read {pattern}", output)
    assert found, output
    assert found[1] == expected, output


@pytest.mark.parametrize("start_method", every(2, ["forkserver", "fork"]))
def test_a_worker_that_cannot_hand_over_its_batches_is_named(project: Path, start_method: str) -> None:
    """Its connection ends first, and a moment later the worker itself."""
    output = torchrun(project, "fault", ranks=1, DATA="cannot hand over", START_METHOD=start_method, LOADER_S="60")
    named = r"rank 0 \(n1\) could not read CannotHandOver \(worker 0 at index \d+[^)]*\).*\(fd_exhausted\)"
    assert re.search(rf"^fd_exhausted \| {named}", output, re.M), output
