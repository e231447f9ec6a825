"""What ranks compare before step 1, without a second rank: what the rows say, and what they cost."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def part(render: Callable[..., Path]) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of a rendered project's plumbing."""
    source = str(render({"package": "comparing"}, name="comparing") / "src")
    sys.path.insert(0, source)
    yield lambda name: importlib.import_module(f"comparing.ddp.{name}")
    sys.path.remove(source)


def network(**buffers: Any) -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.1))
    for name, values in buffers.items():
        module.register_buffer(name, torch.tensor(values))
    return module


def test_a_layout_says_what_ddp_does_not_look_at(part: Callable[[str], ModuleType]) -> None:
    layout = part("same.layout").layout
    model, other = network(table=[1.0, 2.0]), network(table=[1.0, 3.0])
    rows = layout(model)
    assert rows["parameter 0.weight"] == "float32[2, 3]"
    assert rows["buffer 1.running_mean"] == "float32[2]"
    assert rows["module 2"] == "Dropout(p=0.1, inplace=False)"
    assert "values of buffer 1.running_mean" not in rows
    assert [name for name in rows if rows[name] != layout(other)[name]] == ["values of buffer table"]
    other[0].weight.requires_grad_(False)
    other[2].eval()
    changed = {name: row for name, row in layout(other).items() if rows[name] != row and "buffer" not in name}
    assert changed == {"parameter 0.weight": "float32[2, 3], frozen", "training of 2": "False"}


def test_what_ddp_was_told_to_ignore_may_differ(part: Callable[[str], ModuleType]) -> None:
    model = network(counts=[1, 2])
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["counts", "0.bias"])
    assert not [name for name in part("same.layout").layout(model) if "counts" in name or "0.bias" in name]


def test_attributes_of_a_rank_may_differ_and_lists_of_names_may_not(part: Callable[[str], ModuleType]) -> None:
    model = network()
    model.rank, model.kinds, model.scale = 3, ["full", "sliding"], 0.5
    assert part("same.layout").layout(model)["attribute kinds"] == "['full', 'sliding']"
    assert ("scale", "0.5") in list(part("same.layout")._plain_attributes(model))
    assert "rank" not in dict(part("same.layout")._plain_attributes(model))


def test_ten_thousand_parameters_take_less_than_a_second(part: Callable[[str], ModuleType]) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(5000)])
    began = time.process_time()  # of this process: other load does not count
    rows = part("same.layout").layout(model)
    part("same.rows").digest([*rows, *rows.values()])
    assert time.process_time() - began < 1
    assert sum(name.startswith("parameter") for name in rows) == 10_000


def test_a_sample_is_told_by_what_it_holds(part: Callable[[str], ModuleType]) -> None:
    parts_of = part("loading.parts").parts_of
    sample = {"image": torch.ones(2, 2), "label": 7, "words": ["a", "b"], "more": (None, {"c", "a", "b"}, object())}
    found = parts_of(sample)
    assert found["['image']"].startswith("float32[2, 2] [1, 1, 1, 1] (checksum ")
    assert found["['label']"] == "7"
    assert found["['words']"] == "['a', 'b']"
    assert found["['more'][1]"] == "['a', 'b', 'c']"
    assert found["['more'][2]"] == "object"
    assert found == parts_of({**sample, "more": (None, {"b", "c", "a"}, object())})
    assert found != parts_of({**sample, "image": torch.ones(2, 2).double()})
    assert "0x" not in str(found)


def test_generators_are_found_where_data_sets_keep_them(part: Callable[[str], ModuleType]) -> None:
    import random

    numbers = torch.utils.data.TensorDataset(torch.arange(4))
    numbers.noise, numbers.system = random.Random(0), random.SystemRandom()
    numbers.torch = torch.Generator()
    both = torch.utils.data.ConcatDataset([torch.utils.data.Subset(numbers, [0, 1])])
    found = {where: kind for where, (kind, _) in part("loading.draws").generators(both, "Both")}
    inner = "Both.datasets[0].dataset"
    assert found == {f"{inner}.noise": "random.Random", f"{inner}.torch": "torch.Generator"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "int64", "bool", "complex64", "uint8"])
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (5000, 3)])
def test_a_checksum_sees_every_bit(part: Callable[[str], ModuleType], kind: str, shape: tuple[int, ...]) -> None:
    checksum = part("trace.drift").checksum
    tensor = (torch.rand(shape) * 10).to(getattr(torch, kind))
    changed = tensor.clone()
    assert checksum([tensor, torch.ones(3)]) == checksum([changed, torch.ones(3)])
    plain = torch.view_as_real(changed) if changed.is_complex() else changed
    plain.view(-1).view(torch.uint8)[-1] ^= 1
    assert checksum([tensor, torch.ones(3)]) != checksum([changed, torch.ones(3)])


def test_a_checksum_tells_tensors_and_layouts_apart(part: Callable[[str], ModuleType]) -> None:
    checksum = part("trace.drift").checksum
    first, second = torch.rand(3), torch.rand(3)
    assert checksum([first, second]) != checksum([second, first])
    image = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    before = checksum([image])
    image[0, 0, 0, 0] += 1
    assert checksum([image]) != before
    assert checksum([]) == 0
    odd = torch.rand(9).bfloat16()[1:5]  # begins in the middle of four bytes
    assert checksum([odd]) == checksum([odd.clone()])


def test_replicas_on_a_gpu_are_summed_at_every_fourth_agreement_and_told_at_the_next(
    part: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    drift = part("trace.drift")
    begun: list[int] = []
    monkeypatch.setattr(drift, "_begin", lambda replicas, step: begun.append(step) or f"digest of step {step}")
    on_gpu = drift.Drift(SimpleNamespace(device=torch.device("cuda", 0)))
    told = [on_gpu.digest(step) for step in range(9)]
    assert begun == [0, 4, 8]  # each pass takes a GPU's time
    assert [step for step in range(9) if told[step]] == [1, 5]
    assert told[5] == "digest of step 4"
    assert on_gpu.digest(9, now=True) == "digest of step 9"  # the last of a run is never one from before
    on_cpu = drift.Drift(SimpleNamespace(device=torch.device("cpu")))
    assert [on_cpu.digest(step) for step in (1, 2)] == ["digest of step 1", "digest of step 2"]
