"""The learning rate of a rendered project, where parameter groups have values of their own; without ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["custom", "adversarial-diffusion"])
def package(render: Callable[..., Path], request: pytest.FixtureRequest) -> Iterator[str]:
    name = "rated_" + request.param.replace("-", "_")
    source = render({"package": name, "model": request.param}, name=name) / "src"
    sys.path.insert(0, str(source))
    yield name
    sys.path.remove(str(source))


def test_groups_keep_their_own_values_also_after_a_resume(package: str) -> None:
    train = importlib.import_module(f"{package}.train")
    config = importlib.import_module(f"{package}.config")
    settings = config.Settings.model_validate({"train": {"steps": 100, "warmup_steps": 9}})

    def optimizer(rate: float) -> Any:
        weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        groups = [{"params": [weight]}, {"params": [bias], "lr": rate / 10, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=rate, weight_decay=0.3 * rate)

    def values(each: Any) -> list[tuple[float, float]]:
        return [(pytest.approx(group["lr"]), group["weight_decay"]) for group in each.param_groups]

    first = optimizer(1.0)
    train.set_learning_rate(first, train.highest_rates(first), settings, 0)  # the first of ten steps of warm-up
    assert values(first) == [(0.1, 0.3), (0.01, 0.0)]

    second = optimizer(2.0)  # another rate and decay in the settings of the next start
    rates = train.highest_rates(second)
    second.load_state_dict(first.state_dict())
    train.set_learning_rate(second, rates, settings, 9)  # the highest
    assert values(second) == [(2.0, 0.6), (0.2, 0.0)]
