"""What samples draw at random: by seed, epoch and index, whoever reads them; and early stopping's count."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_helpers import environment

pytest.importorskip("torch", reason="the projects train")

DRAWS = """
import random, numpy, torch
from digits.ddp.rng import draws_of, random_state

def draw():
    return random.random(), numpy.random.rand(), torch.rand(1).item()

def state():
    found = random_state(torch.device("cpu"))
    return repr([found["python"], found["torch"].tolist(), found["numpy"]])

before, seen = state(), {}
for numbers in ((0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2)):
    with draws_of(*numbers):
        found = draw()
    assert seen.setdefault(numbers, found) == found
    assert state() == before, "the generators are put back"
assert len({value for row in seen.values() for value in row}) == 9, "other numbers, other draws"
try:
    with draws_of(0):
        raise KeyError
except KeyError:
    assert state() == before, "after an exception, too"
"""


def test_draws_follow_from_their_numbers_and_leave_no_trace(render: Callable[..., Path]) -> None:
    project = render({"package": "digits", "model": "custom"})
    ended = subprocess.run(
        [sys.executable, "-c", DRAWS],
        env=environment(PYTHONPATH=str(project / "src")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
