"""The moving average of a rendered project: what would evaluate weights that are not averaged is refused by name."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
INPUT = torch.ones(1, 4)


@pytest.fixture(scope="module")
def averages(render: Callable[..., Path]) -> Iterator[ModuleType]:
    source = render({"package": "averaged"}, name="averaged") / "src"
    sys.path.insert(0, str(source))
    from averaged.ddp import averages  # type: ignore[import-not-found]

    yield averages
    sys.path.remove(str(source))


def network() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def patched() -> Any:
    """As libraries do that wrap a forward: the old one is a bound method in the closure of the new one."""
    net = network()
    before = net[2].forward
    net[2].forward = lambda x: 2 * before(x)
    return net


def patched_default() -> Any:
    net = network()
    net[0].forward = lambda x, layer=net[0]: nn.functional.linear(x, layer.weight)
    return net


def hooked() -> Any:
    net = network()
    net[0].register_forward_hook(lambda module, inputs, output: output + net[0].bias)
    return net


def compiled_method() -> Any:
    net = network()
    net[0].run = torch.compile(net[0].forward)
    return net


class Act:
    """A callable object that holds a function, with slots as some libraries have."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


def callable_object() -> Any:
    net = network()
    first = net[0]
    net[1].act = Act(lambda x: first(x))
    return net


def weakly_referenced() -> Any:
    net = network()
    net[1].first = weakref.ref(net[0])
    return net


def cached() -> Any:
    net = network()
    net[1].table = lru_cache(net[0].extra_repr)
    return net


def listed() -> Any:
    net = network()
    weight = net[2].weight
    net.norms = {"last": [partial(max, key=lambda _: weight.norm())]}
    return net


class Scaled(nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.activate = lambda x: x * self.scale

    def forward(self, x: Any) -> Any:
        return self.activate(x)


@pytest.mark.parametrize(
    ("make", "attribute", "part"),
    [
        (patched, "forward of 2 (Linear)", "2"),
        (patched_default, "forward of 0 (Linear)", "0"),
        (hooked, "forward_hooks of 0 (Linear)", "the network"),
        (compiled_method, "run of 0 (Linear)", "0"),
        (listed, "norms of Sequential", "2.weight"),
        (Scaled, "activate of Scaled", "the network"),
        (callable_object, "act of 1 (ReLU)", "0"),
        (weakly_referenced, "first of 1 (ReLU)", "0"),
        (cached, "table of 1 (ReLU)", "0"),
    ],
)
def test_what_holds_on_to_the_network_is_refused(
    averages: ModuleType, make: Callable[[], Any], attribute: str, part: str
) -> None:
    with pytest.raises(Exception, match="evaluates a copy") as refused:
        averages.moving_average(make(), 0.9)
    assert type(refused.value).__name__ == "ConfigError"
    problem, remedy = str(refused.value).split("\n")
    assert f"but {attribute} holds on to {part} itself, whose weights are not averaged" in problem
    assert "make it a method" in remedy


def bound() -> Any:
    net = network()
    net[0].run = net[0].forward
    net.forward = partial(nn.Sequential.forward, net)
    net[0].register_forward_hook(lambda module, inputs, output: output + module.bias)
    return net


def compiled_part() -> Any:
    net = network()
    net[0] = torch.compile(net[0], backend="eager")
    return net


def pairs() -> Any:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 2))
    )


def recurrent() -> Any:
    return nn.Sequential(nn.LSTM(4, 3, num_layers=2))


def attention() -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=lambda x: nn.functional.relu(x) * 2)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.BatchNorm1d(4))


def traced() -> Any:
    return torch.fx.symbolic_trace(network())


def scripted() -> Any:
    return torch.jit.script(network())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("make", [network, bound, compiled_part, pairs, recurrent, attention, traced, scripted])
def test_what_is_copied_along_evaluates_the_averaged_weights(averages: ModuleType, make: Callable[[], Any]) -> None:
    net = make().eval()
    average = averages.moving_average(net, 0.9)
    before = average.module(INPUT)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    first = before[0] if isinstance(before, tuple) else before
    again = average.module(INPUT)
    assert torch.equal(again[0] if isinstance(again, tuple) else again, first), "it has changed with the network"


def old_weight_norm() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 2)))


def computed_buffer() -> Any:
    net = network()
    net[0].register_buffer("twice", 2 * net[0].weight)
    return net


def locked() -> Any:
    net = network()
    net[2].lock = threading.Lock()
    return net


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("make", "attribute", "says", "remedy"),
    [
        (old_weight_norm, "weight of 1 (Linear)", "Only Tensors created explicitly", "torch.nn.utils.parametrizations"),
        (computed_buffer, "twice of 0 (Linear)", "Only Tensors created explicitly", "detach()"),
        (locked, "lock of 2 (Linear)", "TypeError: cannot pickle", "keep what cannot be copied out"),
    ],
)
def test_what_cannot_be_copied_is_named(
    averages: ModuleType, make: Callable[[], Any], attribute: str, says: str, remedy: str
) -> None:
    with pytest.raises(Exception, match="needs a copy") as refused:
        averages.moving_average(make(), 0.9)
    assert type(refused.value).__name__ == "ConfigError"
    problem, what_to_do = str(refused.value).split("\n")
    assert f"{attribute} cannot be copied: " in problem
    assert says in problem
    assert remedy in what_to_do
