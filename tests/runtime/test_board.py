"""What ranks tell each other through the store: no request may wait for a key that a dead rank has never set."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def part(render: Callable[..., Path]) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of a rendered project's plumbing."""
    source = str(render({"package": "boarding"}, name="boarding") / "src")
    sys.path.insert(0, source)
    yield lambda name: importlib.import_module(f"boarding.ddp.{name}")
    sys.path.remove(source)


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> Any:
    """HashStore is used by one process, TCPStore by several. A request that waits fails after two seconds."""
    limit = timedelta(seconds=2)
    made = dist.HashStore() if request.param == "hash" else dist.TCPStore("127.0.0.1", 0, None, True, limit)
    made.set_timeout(limit)
    return dist.PrefixStore("attempt0", made)


def test_missing_keys_are_none_in_every_part_of_a_request(part: Callable[[str], ModuleType], store: Any) -> None:
    board = part("start.board")
    size = 2 * board.PART + 3
    for rank in range(0, size, 2):
        store.set(f"beat/{rank}", str(rank))
    expected = [str(rank).encode() if rank % 2 == 0 else None for rank in range(size)]
    assert board.values(store, [f"beat/{rank}" for rank in range(size)]) == expected
    assert board.values(store, []) == []


def test_news_are_numbered_and_the_same_news_is_not_told_twice(part: Callable[[str], ModuleType], store: Any) -> None:
    board = part("start.board")
    assert [board.post(store, text) for text in ("diagnose 1 7", "verdict", "bye", "verdict")] == [1, 2, 3, 2]
    assert store.get("news/2") == b"verdict"


def test_who_does_not_answer_is_silent_and_keeps_its_last_state(part: Callable[[str], ModuleType], store: Any) -> None:
    board = part("start.board")
    for rank, news in ((0, 2), (1, 1), (3, 3)):  # rank 1 has not heard of news 2, rank 2 has never said a word
        store.set(f"state/{rank}", json.dumps({"rank": rank, "host": "a", "phase": "data", "news": news}))
    found, silent = board.answers(store, 2, ["a", "a", "b", "b"], wait_s=0.2, pause_s=0.05)
    assert silent == [1, 2]
    assert [state.phase for state in found] == ["data", "data", "init", "data"]
    assert (found[2].rank, found[2].host) == (2, "b")


@pytest.mark.parametrize("answered", [True, False])
def test_a_beat_that_stands_still_is_noticed(
    part: Callable[[str], ModuleType], store: Any, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    board, clocks = part("start.board"), part("clocks").Clocks(silent_s=15, beat_s=1)
    interval = clocks.beat_s if answered else 5.0  # large jobs beat without an answer most of the time
    now = 100.0
    monkeypatch.setattr(board.time, "monotonic", lambda: now)
    beats = board.Beats(store, range(1, 4), clocks.silent_s)
    noticed = []
    for number in range(1, 6):
        board.send_beat(store, 1, number, interval, clocks)
        if number < 3:
            board.send_beat(store, 2, number, interval, clocks)  # and rank 3 never comes
        noticed.append(beats.silent())
        now += 10
    assert noticed == [[], [], [3], [2, 3], [2, 3]]


def test_large_jobs_beat_less_often_but_in_time(part: Callable[[str], ModuleType]) -> None:
    board, clocks = part("start.board"), part("clocks").Clocks()
    intervals = [board.beat_interval(size, clocks) for size in (2, 512, 1024, 4096, 100_000)]
    assert intervals[:2] == [clocks.beat_s] * 2
    assert intervals == sorted(intervals)
    assert intervals[-1] <= clocks.silent_s / 3
