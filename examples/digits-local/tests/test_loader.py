"""The loader by itself: which samples are whose, how many workers fit, and who is named when a batch does not come."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from digits.ddp.clocks import Clocks
from digits.ddp.errors import ConfigError, DataFailed
from digits.ddp.loader import LoaderSettings, batches, endless, make_loader
from digits.ddp.loading import lockstep, workers
from digits.ddp.loading.fetch import loader_failure, next_batch
from digits.ddp.loading.located import Reading
from digits.ddp.loading.lockstep import in_step
from digits.ddp.loading.shards import GlobalOrder, LocatedStream
from digits.ddp.rehearsal import largest_batch
from digits.ddp.start.groups import Job


class Numbers(IterableDataset[Any]):
    """0 to length - 1; like many real ones, it shares its samples out when it finds itself in a worker."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first + 1000 * self.epoch, self.length + 1000 * self.epoch, every))


class Squares(Dataset[torch.Tensor]):
    """A map-style data set, whose sample 13 cannot be read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise ValueError("thirteen")
        return torch.tensor(index**2)


def a_rank(rank: int = 0, world_size: int = 1, loader_s: float = 90) -> Job:
    alone = SimpleNamespace(attempt=0, local_world_size=world_size, launcher="none")
    place = {"rank": rank, "world_size": world_size, "place": alone, "who": lambda rank: f"rank {rank} (n1)"}
    other = {"clocks": Clocks(loader_s=loader_s), "device": torch.device("cpu"), "control": None}
    return cast(Job, SimpleNamespace(**place, **other))


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone; the control group of `a_rank` is the default one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_hand(
    monkeypatch: pytest.MonkeyPatch, length: int, job: Job, count: int, uneven: str, start: int = 0, batch: int = 3
) -> list[list[int]]:
    """The batches of one rank, from `count` workers in turn, as DataLoader takes them."""
    mine: list[list[list[int]]] = []
    for number in range(count):
        monkeypatch.setattr(torch_worker, "_worker_info", SimpleNamespace(id=number, num_workers=count))
        stream = LocatedStream(Numbers(length), job, count, 0, batch, uneven, sharded=False)
        stream.set_epoch(0, start)
        samples = iter(stream)
        mine.append([])
        while chunk := list(islice(samples, batch)):
            mine[-1].append(chunk)
    rounds = max(len(chunks) for chunks in mine)
    return [chunks[turn] for turn in range(rounds) for chunks in mine if turn < len(chunks)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("length", [11, 12, 40])
def test_a_stream_is_shared_out_like_a_map_style_data_set(
    monkeypatch: pytest.MonkeyPatch, length: int, world_size: int, count: int
) -> None:
    ranks = [a_rank(rank, world_size) for rank in range(world_size)]
    for uneven in ("pad", "drop", "keep"):
        shares = [by_hand(monkeypatch, length, job, count, uneven) for job in ranks]
        orders = [GlobalOrder(length, job, seed=0, shuffle=False, uneven=uneven) for job in ranks]
        for share, order in zip(shares, orders, strict=True):
            flat = [sample for chunk in share for sample in chunk]
            kept = length // world_size
            assert flat[:kept] == list(order)[:kept], "the order is the stream's, whatever the number of workers"
            assert len(flat) == len(order)
            assert {len(chunk) for chunk in share[:-1]} <= {3}, "whole batches, but for the last"
        seen = {sample for share in shares for chunk in share for sample in chunk}
        assert uneven == "drop" or seen == set(range(length))
    # A resumed epoch goes on where it stopped, also when another number of ranks began it.
    for start in (world_size * 3, 5, length):
        shares = [by_hand(monkeypatch, length, job, count, "keep", start) for job in ranks]
        seen_again = sorted(sample for share in shares for chunk in share for sample in chunk)
        assert seen_again == list(range(start, length))
    whole = by_hand(monkeypatch, length, ranks[-1], count, "pad")
    assert by_hand(monkeypatch, length, ranks[-1], 1, "pad", world_size * 3) == whole[1:]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.usefixtures("group")
def test_a_stream_through_real_workers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(workers, "room", lambda *_: [(count, "")])
    settings = LoaderSettings(workers=count, start_method="fork")
    job = a_rank()
    loader = make_loader(Numbers(10), job, settings, batch_size=2)
    feed = endless(loader, job, 0, 4)
    got = [(position["epoch"], position["used"], batch.tolist()) for position, batch in islice(feed, 5)]
    assert got[:3] == [(0, 6, [4, 5]), (0, 8, [6, 7]), (0, 10, [8, 9])], "no sample is lost to sharding by worker"
    assert got[3:] == [(1, 2, [1000, 1001]), (1, 4, [1002, 1003])], "set_epoch is called"
    own = make_loader(Numbers(10), job, settings, batch_size=2, sharded=True)
    first, second = ([batch.tolist() for batch in batches(own, job, 0, start)] for start in (0, 4))
    assert second == first[2:], "resumed in its own order"
    assert sorted(sample for batch in first for sample in batch) == list(range(10))


@pytest.mark.parametrize(("uneven", "expected"), [("drop", 2), ("pad", 4), ("keep", 3)])
def test_ranks_that_run_out_earlier(monkeypatch: pytest.MonkeyPatch, uneven: str, expected: int) -> None:
    """This rank has three batches; the others have between two and four."""
    others = iter([(True, True), (True, True), (False, True), (False, True), (False, False)])

    def ask(_job: Job, mine: bool) -> Any:
        everyone, anyone = next(others)
        return lambda: (mine and everyone, mine or anyone)

    monkeypatch.setattr(lockstep, "ask", ask)
    made = list(in_step(a_rank(), iter("abc"), uneven))
    assert [batch for batch, _ in made] == list("abca")[:expected]
    assert [everyone for _, everyone in made][:2] == [True, True]


@pytest.mark.usefixtures("group")
def test_an_empty_stream_is_refused_and_not_read_for_ever() -> None:
    job = a_rank()
    with pytest.raises(ConfigError, match=r"no batch at all for rank 0 \(n1\)") as refused:
        next(endless(make_loader(Numbers(0), job, LoaderSettings(), batch_size=2), job, 0, 0))
    assert refused.value.kind == "uneven_inputs"


def test_workers_fit_a_small_shared_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(workers, "cpus_for_this_process", lambda _place: 64)
    monkeypatch.setattr(workers, "SHM", Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=64 << 20))
    with caplog.at_level(logging.WARNING, "ddp"):
        assert workers.fitting_workers(4, a_rank(), prefetch=2, batch_mb=16) == 1
        assert workers.fitting_workers(4, a_rank(world_size=2), prefetch=2, batch_mb=16) == 0
    assert "loader.workers 4 -> 1: / has 64 MB free" in caplog.text
    caplog.clear()
    assert workers.fitting_workers(4, a_rank(), prefetch=2, batch_mb=1) == 4
    assert workers.fitting_workers(0, a_rank(), prefetch=2, batch_mb=16) == 0
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("DataLoader timed out after 3 seconds", "dataloader_stalled"),
        ("DataLoader worker (pid(s) 12) exited unexpectedly", "dataloader_worker_died"),
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", "dataloader_worker_died"),
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that", "shm_exhausted"),
        ("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device", "shm_exhausted"),
        ("unable to write to file </torch_1_2_3>: No space left on device (28)", "shm_exhausted"),
        ("OSError: [Errno 28] No space left on device: '/data/cache'", "rank_exception"),
        ("FileNotFoundError: '/dev/shm/cache'", "rank_exception"),
        ("OSError: [Errno 24] Too many open files: 'x'", "fd_exhausted"),
        ("received 0 items of ancdata", "fd_exhausted"),
    ],
)
def test_the_cause_is_told_by_the_message(text: str, kind: str) -> None:
    assert loader_failure(text) == kind


@pytest.mark.usefixtures("group")
def test_an_index_that_cannot_be_read_is_named() -> None:
    job = a_rank()
    loader = make_loader(Squares(), job, LoaderSettings(), batch_size=2)
    with pytest.raises(DataFailed, match=r"rank 0 .* could not read index 13 of Squares: ValueError: thirteen"):
        list(batches(loader, job))


def test_a_dead_receiving_thread_is_not_waited_for() -> None:
    """With pinned memory, a thread receives the batches; DataLoader with a timeout does not look at it."""

    class Receiver:
        _pin_memory_thread = SimpleNamespace(is_alive=lambda: False)

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            raise RuntimeError("DataLoader timed out after 2 seconds")

    job = a_rank()
    with pytest.raises(DataFailed, match="the thread that receives batches has ended"):
        next_batch(Receiver(), job, Reading("Squares", "index", job, 2), 0)


def test_a_slow_batch_is_waited_for_and_a_stuck_worker_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader's own timeout is a short look in between; what counts is `clocks.loader_s`."""
    job = a_rank(loader_s=10)
    reading, now = Reading("Squares", "index", job, 1), 0.0
    monkeypatch.setattr("digits.ddp.loading.fetch.time.monotonic", lambda: now)

    class Slow:
        """Times out every two seconds, `times` times."""

        def __init__(self, times: int, moves: bool = False) -> None:
            self.times, self.moves = times, moves

        def __iter__(self) -> Slow:
            return self

        def __next__(self) -> int:
            nonlocal now
            if self.times == 0:
                return 7
            self.times, now = self.times - 1, now + 2
            reading.at += self.moves
            raise RuntimeError("DataLoader timed out after 2 seconds")

    assert next_batch(Slow(4), job, reading, 0) == 7
    with pytest.raises(DataFailed, match="timed out after 10 seconds"):
        next_batch(Slow(5), job, reading, 0)
    assert next_batch(Slow(20, moves=True), job, reading, 100) == 7, "it reads past what the checkpoint has seen"


class Texts(Dataset[torch.Tensor]):
    """Samples of very unequal length, and how to make a batch of them."""

    lengths = [3 + (7919 * index) % 200 for index in range(1003)]  # noqa: RUF012 (never changed)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), index)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_of_a_step_are_about_equally_long_on_all_ranks(group: None, world_size: int) -> None:
    texts, loaders, wasted = Texts(), [], {}
    for rank in range(world_size):
        job, lengths = a_rank(rank, world_size), texts.lengths
        order = GlobalOrder(len(texts), job, seed=1, shuffle=True, uneven="pad", lengths=lengths, batch=8)
        loaders.append(torch.tensor(list(order)).split(8))
    assert len({len(loader) for loader in loaders}) == 1, "the same number of steps"
    seen = torch.cat([part for loader in loaders for part in loader])
    assert set(seen.tolist()) == set(range(len(texts)))
    assert len(seen) - len(texts) < world_size, "nothing twice but the padding of the last step"
    longest = [[max(texts.lengths[index] for index in part) for part in loader] for loader in loaders]
    assert max(max(step) - min(step) for step in zip(*longest, strict=True)) <= 20, "the same work in a step"
    assert longest[0] != sorted(longest[0]), "lengths do not rise through an epoch"
    # Padding: next to none, against about half in batches of random samples.
    for name, batched in (("sorted", loaders[0]), ("random", torch.randperm(len(texts)).split(8))):
        cells = sum(len(part) * max(texts.lengths[index] for index in part) for part in batched)
        wasted[name] = 1 - sum(texts.lengths[index] for part in batched for index in part) / cells
    assert wasted["sorted"] < 0.1 < wasted["random"]


def test_a_data_set_may_make_its_own_batches(group: None) -> None:
    loader = make_loader(Texts(), a_rank(), LoaderSettings(), batch_size=4)
    batch: Any = next(batches(loader, a_rank()))
    assert batch.shape[0] == 4
    assert batch.min() == -1 or len(set((batch >= 0).sum(1).tolist())) == 1
    assert largest_batch(Texts(), 3, torch.zeros(1)).shape == (3, max(Texts.lengths))
    assert largest_batch(Squares(), 3, torch.zeros(1)).tolist() == [0], "the first batch, which is as large as any"


def test_an_epoch_of_unequal_lengths_goes_on_with_another_number_of_ranks(group: None) -> None:
    texts, start = Texts(), 8 * 2 * 20
    two = [
        GlobalOrder(1003, a_rank(rank, 2), seed=1, shuffle=True, uneven="keep", lengths=texts.lengths, batch=8)
        for rank in (0, 1)
    ]
    seen = [index for order in two for index in list(order)[: start // 2]]
    for rank in range(3):
        order = GlobalOrder(1003, a_rank(rank, 3), seed=1, shuffle=True, uneven="keep", lengths=texts.lengths, batch=8)
        order.begun = 16  # as the checkpoint says
        order.set_epoch(0, start)
        seen += list(order)
    assert sorted(seen) == list(range(1003)), "each sample once"


def test_lengths_that_are_not_those_of_the_samples_are_refused(group: None) -> None:
    squares: Any = Squares()
    squares.lengths = [1, 2, 3]
    with pytest.raises(ConfigError, match="1000 samples and 3 lengths"):
        make_loader(squares, a_rank(), LoaderSettings(), batch_size=4)


def test_full_batches_leave_out_the_rest_and_refuse_to_have_none(group: None) -> None:
    for full, settings in ((True, LoaderSettings()), (False, LoaderSettings(drop_last=True))):
        loader = make_loader(Texts(), a_rank(), settings, batch_size=100, full=full)
        assert [len(batch) for batch in batches(loader, a_rank())] == [100] * 10
    evaluated = make_loader(Texts(), a_rank(), LoaderSettings(drop_last=True), batch_size=100, train=False)
    assert sum(len(batch) for batch in batches(evaluated, a_rank())) == len(Texts()), "an evaluation takes all"
    with pytest.raises(ConfigError, match="not even 2000 for each"):
        make_loader(Texts(), a_rank(), LoaderSettings(), batch_size=2000, full=True)
