"""What a checkpoint of a rendered project refuses to hold, and how it says so; without ranks."""

from __future__ import annotations

import enum
import io
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def storable(render: Callable[..., Path]) -> Iterator[ModuleType]:
    source = render({"package": "stored"}, name="stored") / "src"
    sys.path.insert(0, str(source))
    from stored.ddp import storable  # type: ignore[import-not-found]

    yield storable
    sys.path.remove(str(source))


@dataclass
class Options:
    width: int = 3


class Color(enum.Enum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind", "advice"),
    [
        (Namespace(width=3), "argparse.Namespace", "vars(...)"),
        (Options(), "Options", "dataclasses.asdict(...)"),
        (Path("data"), "PosixPath", "str(...)"),
        (Color.RED, "Color", ".value"),
        (Point(1, 2), "Point", "what it is made of"),
        (lambda: 0, "function", "what it is made of"),
        (frozenset([1]), "frozenset", "what it is made of"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_key(
    storable: ModuleType, value: Any, kind: str, advice: str
) -> None:
    states = {"options": {"args": [1, {"deep": value}], "step": 3}}
    refused = storable.refusal({}, states)
    assert "options.state_dict()['args'][1]['deep'] is of type " in refused.problem
    assert kind in refused.problem
    assert advice in refused.remedy
    assert type(refused.error()).__name__ == "ConfigError"


def test_numpy_is_refused(storable: ModuleType) -> None:
    numpy = pytest.importorskip("numpy")
    assert ".item()" in storable.refusal({}, {"options": {"loss": numpy.float64(1)}}).remedy
    assert "from_numpy" in storable.refusal({}, {"options": {"seen": numpy.zeros(3)}}).remedy


def test_what_this_torch_loads_is_taken(storable: ModuleType) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
    own: dict[Any, Any] = {"counts": Counter("aab"), "set": {1, 2}, "order": OrderedDict(a=1), "none": None}
    own |= {("a", 1): b"x", "shape": torch.Size([1]), "type": torch.float32, "device": torch.device("cpu")}
    own["itself"] = own
    objects = {"model": network, "optimizer": optimizer}
    states = {name: item.state_dict() for name, item in objects.items()}
    states |= {"scheduler": scheduler.state_dict(), "own": own}
    assert storable.refusal(objects, states) is None
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_what_the_user_allows_is_taken(storable: ModuleType) -> None:
    with torch.serialization.safe_globals([Options]):
        assert storable.refusal({}, {"options": {"args": Options()}}) is None


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_enough_wherever_it_stands(
    storable: ModuleType, kind: torch.dtype, bad: float
) -> None:
    layer = torch.nn.Linear(33, 65).to(kind)
    layer.bias = torch.nn.Parameter(torch.empty(0, dtype=kind))  # of nothing, all is finite
    assert storable.refusal({"model": layer}, {}) is None
    for place in (0, 31, 32 * 33 + 7, -1):
        with torch.no_grad():
            layer.weight.flatten()[place] = bad
            assert storable.refusal({"model": layer}, {}).problem.startswith("model.weight is not finite")
            layer.weight.flatten()[place] = 0


def test_only_what_is_trained_must_be_finite(storable: ModuleType) -> None:
    network = torch.nn.Linear(2, 2)
    network.register_buffer("mask", torch.full((2, 2), float("-inf")))
    network.frozen = torch.nn.Parameter(torch.full((2,), float("-inf")), requires_grad=False)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    objects = {"model": network, "optimizer": optimizer}
    assert storable.refusal(objects, {}) is None
    optimizer.state[network.weight]["exp_avg_sq"][0, 0] = float("inf")
    refused = storable.refusal(objects, {})
    assert "exp_avg_sq of parameter 0 in optimizer is not finite" in refused.problem
    assert type(refused.error()).__name__ == "NonFinite"
    with torch.no_grad():
        network.bias[0] = float("nan")
    assert "model.bias, exp_avg_sq of parameter 0 in optimizer is not finite" in storable.refusal(objects, {}).problem


def test_a_file_that_cannot_be_loaded_is_told_in_the_same_words(storable: ModuleType, tmp_path: Path) -> None:
    torch.save({"options": {"args": Namespace(width=3)}}, tmp_path / "state.pt")
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        torch.load(tmp_path / "state.pt", weights_only=True)
    error = storable.not_loadable(tmp_path / "state.pt", caught.value)
    assert "of type argparse.Namespace" in str(error)
    assert "add_safe_globals([argparse.Namespace])" in str(error)


def test_whatever_of_torch_has_a_state_is_filled(storable: ModuleType) -> None:
    """A moving average and schedulers live in torch.optim, and are no optimisers."""
    from stored.ddp.restore import fill, parameter_orders

    def objects() -> dict[str, Any]:
        torch.manual_seed(0)
        network = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        return {
            "model": network,
            "optimizer": optimizer,
            "average": torch.optim.swa_utils.AveragedModel(network),
            "swa": torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
            "scaler": torch.amp.GradScaler("cpu"),
        }

    trained = objects()
    trained["model"](torch.ones(1, 2)).sum().backward()
    trained["optimizer"].step()
    trained["average"].update_parameters(trained["model"])
    trained["cosine"].step()
    saved = {name: item.state_dict() for name, item in trained.items()}
    fresh = objects()
    fill(fresh, saved, Path("step_1"), parameter_orders(trained))
    for name, item in fresh.items():
        assert repr(item.state_dict()) == repr(saved[name]), name
    fill(objects(), saved, Path("step_1"))  # by a release that did not record the order


def test_states_of_any_layout_are_compared_and_end_no_run(storable: ModuleType) -> None:
    dense = torch.eye(3)
    values = {
        "empty": torch.empty(0),
        "empty complex": torch.empty(0, 2, dtype=torch.complex64),
        "sparse": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
        "meta": dense.to("meta"),
        "dense": dense,
    }
    words = dict(storable._leaves(values, "mine"))
    assert len(words) == len(values)
    assert words != dict(storable._leaves(values | {"dense": 2 * dense}, "mine"))


def test_steps_are_numbers_not_texts(storable: ModuleType, tmp_path: Path) -> None:
    from stored.ddp.best import checkpoints

    names = ["step_00000020", "step_00000020.999", "step_00000020.1000", "step_99999999", "step_100000000"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == names
