"""What is compared and noticed: collectives that differ, steps that become slow, limits, faults that are misspelt."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from digits.ddp import faults
from digits.ddp.clocks import Clocks
from digits.ddp.errors import CheckpointFailed, ConfigError
from digits.ddp.rank_state import Entry, RankState
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import Place
from digits.ddp.trace.collectives import first_difference, keep_ledger, ledger, minority
from digits.ddp.trace.lines import ASKS, of_thread, standing
from digits.ddp.trace.slow_steps import Pace
from digits.ddp.watch.blame import peer_lost, verdict_of
from digits.ddp.watch.siblings import Siblings
from digits.ddp.watch.slow_ranks import compare_ranks
from digits.ddp.watch.verdict import judge


def asked(*whats: str, first: int = 1) -> list[Entry]:
    return [(number, what, f"train.py:{number}") for number, what in enumerate(whats, first)]


def test_the_rank_that_asks_for_something_else_is_named() -> None:
    usual = asked("all_reduce float32[4]", "broadcast int64[1]")
    assert first_difference([usual, usual, usual]) is None
    assert first_difference([usual, usual[:1], usual]) is None, "it has not come to the second yet"
    odd = asked("all_reduce float32[4]", "broadcast int64[2]")
    text, ranks = first_difference([usual, odd, usual]) or ("", None)
    assert ranks == [1]
    assert "rank 1 broadcast int64[2] (train.py:2)" in text
    assert (first_difference([usual, odd]) or ("", [0]))[1] is None, "of two, nobody can say which"


def test_a_minority_needs_a_majority() -> None:
    assert minority([3, 3, 4]) == [2]
    assert minority([3, 4]) is None
    assert minority([3, 3]) is None


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_every_collective_of_the_training_group_is_noted_with_its_line() -> None:
    keep_ledger()
    before = ledger.count
    dist.all_reduce(torch.ones(3))
    dist.all_gather([torch.zeros(2)], torch.ones(2))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    (_, reduce, line), (number, gather, _) = list(ledger.recent)[-2:]
    assert (number, reduce, gather) == (before + 2, "all_reduce float32[3]", "all_gather float32[2]")
    assert line.startswith(f"{Path(__file__).name}:")


@pytest.mark.usefixtures("group")
def test_a_call_that_makes_several_collectives_is_one_by_the_user_s_name_with_all_lines_that_led_there() -> None:
    keep_ledger()
    before = ledger.count

    def helper() -> None:
        dist.all_gather_object([None], "anything")

    for _ in range(2):
        helper()
    (_, _, first), (number, what, second) = list(ledger.recent)[-2:]
    assert (number, what, first) == (before + 2, "all_gather_object", second)
    assert [place.partition(":")[0] for place in first.split(" < ")[:2]] == [Path(__file__).name] * 2
    other = dist.new_group([0])
    dist.barrier(group=other)
    assert (ledger.count, ledger.last[1]) == (before + 2, "the group of rank 0")


def steps(pace: Pace, first: int, count: int, seconds: float, totals: dict[str, float]) -> None:
    for step in range(first, first + count):
        totals["forward"] = totals.get("forward", 0.0) + seconds
        pace.step_done(step, totals)


def test_a_slow_step_and_steps_that_become_slower_are_noticed() -> None:
    pace, totals = Pace(), {"eval": 100.0}
    steps(pace, 1, 100, 0.5, totals)
    assert pace.take_notes() == []
    steps(pace, 101, 1, 9.0, totals)
    assert "step 101 took 9.0 s, 0.5 s is usual; 9.0 s in forward" in pace.take_notes()[0]
    steps(pace, 102, 200, 1.5, totals)
    assert "steps become slower: 0.5 s at first, 1.5 s" in " ".join(pace.take_notes())
    assert pace.take_notes() == []


def test_a_run_with_one_rank_has_no_stragglers() -> None:
    store = dist.HashStore()
    store.set("state/0", json.dumps({"rank": 0, "host": "n0", "phase_s": {"data": 9.0}}))
    lines, states = compare_ranks(store, 1, [])
    assert (lines, len(states)) == ([], 1)
    assert compare_ranks(store, 1, states)[0] == []


def test_the_death_of_a_process_of_this_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # its child stands for a sibling
    place = Place("torchrun", 0, 0, 3, 3, "n0", "", 0, 0, False)
    job, store = Job(place, Clocks(), dist.HashStore(), ("n0", "n0", "n1")), dist.HashStore()
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            store.set("state/1", json.dumps({"rank": 1, "host": "n0", "pid": child.pid}))
            siblings = Siblings(job, store)
            assert siblings.dead() == []
            with monkeypatch.context() as full:  # no more open files: that says nothing of the process
                full.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
                assert siblings.dead() == []
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert siblings.dead() == [1], "nobody has waited for it yet, but it is gone"


def test_limits_of_single_phases() -> None:
    clocks = Clocks(phase_s={"forward": 20}, learn_factor=5)
    assert clocks.stall_limit("forward") == 20
    assert clocks.stall_limit("optim") == clocks.stall_s
    assert clocks.stall_limit("optim", longest=4) == 20, "learnt"
    assert clocks.stall_limit("optim", longest=0.1) == 10, "but never nervous"
    assert clocks.stall_limit("data", longest=0.1) > clocks.loader_s, "the loader's clock knows more"
    for wrong in ({"forwards": 20.0}, {"forward": -1.0}, {"forward": 1e6}, {"data": 30.0}):
        with pytest.raises(ValueError, match=r"clocks\.phase_s"):
            Clocks(phase_s=wrong)
    with pytest.raises(ValueError, match="more than a week"):
        Clocks(init_s=1e12)
    with pytest.raises(ValueError, match="finite number"):
        Clocks(silent_s=float("inf"))


def test_the_user_s_own_errors_are_not_taken_for_a_lost_peer() -> None:
    with pytest.raises(RuntimeError) as mine:
        raise RuntimeError("ffmpeg: Broken pipe")
    assert not peer_lost(mine.value)
    with pytest.raises(RuntimeError) as pytorch_s:
        torch.autograd.backward(torch.ones(1))
    pytorch_s.value.args = ("Connection closed by peer [10.0.0.1]:4711",)
    assert peer_lost(pytorch_s.value)


def test_a_checkpoint_that_could_not_be_written_is_rank_0_s_on_every_rank() -> None:
    """Which writes it: all ranks raise, and the first to say so must not be the one that is named."""
    for rank in (0, 1):
        job = Job(Place("torchrun", rank, 0, 2, 1, f"n{rank + 1}", "", 0, 0, False), Clocks(), Mock(), ("n1", "n2"))
        found = verdict_of(CheckpointFailed("the checkpoint of step 7 could not be written: OSError"), job)
        assert (found.kind, found.first_ranks) == ("checkpoint_failed", [0])
        assert found.reason.startswith("rank 0 (n1): the checkpoint of step 7 could not be written: OSError")


def test_ranks_that_stand_still_in_different_phases_are_told_with_their_lines() -> None:
    waiting: dict[str, Any] = {"waits_in": "all_reduce", "open_collectives": -1, "idle_s": 9.0}
    states = [
        RankState(0, "n1", "backward", step=5, collectives=8, **waiting),
        RankState(1, "n1", "data", step=5, collectives=7, line="data.py:3", idle_s=9.0),
        RankState(2, "n2", "backward", step=5, collectives=8, **waiting),
        RankState(3, "n2", "forward", step=5, collectives=7, line="model.py:8", idle_s=9.0),
    ]
    found = judge(states, [])
    assert found.first_ranks == [1, 3]
    assert "phase data, step 5, at data.py:3, idle for 9 s" in found.reason
    assert "; rank 3 (n2): phase forward, step 5, at model.py:8, idle for 9 s" in found.reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("explode@rank=1", "'explode' is not a known fault"),
        ("kill@rank=one", "'one' is no rank"),
        ("kill@when=1", "'when' is not a known option"),
        ("kill@phase=forwards", "'forwards' is no phase"),
        ("sleep@seconds=-1", "'-1' is no seconds"),
        ("kill@rank", "'' is no rank"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        faults.parse(text)


def test_a_question_on_the_terminal_is_told_from_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    pause, wait = Mock(input=0.5), threading.Event().wait
    with os.fdopen(reading) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        questions = (
            (lambda: input("? "), True),
            (lambda: sys.stdin.readline(), True),
            (lambda: time.sleep(pause.input), False),
        )
        for ask, asks in questions:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            wait(0.2)
            _, where = standing(of_thread(sys._current_frames()[thread.ident or 0]))
            os.write(writing, b"yes\n" if asks else b"")  # first: a thread that reads keeps its file open
            thread.join(5)
            assert not thread.is_alive()
            assert where.startswith(f"{Path(__file__).name}:")
            assert where.endswith(ASKS) == asks
    os.close(writing)
