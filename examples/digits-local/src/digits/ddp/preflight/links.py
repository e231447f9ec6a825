"""Timed and compared transfers: among all ranks, among those of each node, and between pairs, many pairs at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..agree import gather
from ..clocks import seconds
from ..start.findings import Finding
from ..start.groups import Job
from .adapters import carrier, counts

MOST_ROUNDS = 16  # of pairs: each rank then knows so many others
MOST_GROUPS = 32  # nodes with an all_reduce of their own: making a group takes part of a second for every rank
LARGEST, SMALLEST = 64 << 20, 64 << 10  # bytes of one transfer
WANTED_S = 0.1  # of one transfer, which decides on its size
REPEATS = 3

Stage = Callable[[str], None]


@dataclass(frozen=True)
class Link:
    """One measured transfer. `kind`: all, node, ranks (a pair on one node) or nodes (a pair of nodes)."""

    kind: str
    ranks: tuple[int, ...]
    megabytes: float
    gb_s: float  # GB/s of each rank's data; of a pair, in each direction at the same time
    latency_ms: float  # of one number
    carrier: str = ""
    rdma: bool | None = None


def measure(job: Job, stage: Stage) -> tuple[list[Link], list[Finding], bool]:
    """All links, what is wrong with data that arrive, and whether all pairs were measured. Every rank calls it."""
    links, found = [], list[Finding]()
    everyone = tuple(range(job.world_size))
    stage("in an all_reduce of all ranks")
    size = _size(job)
    links.append(_all_reduce(job, "all", everyone, size, None))
    nodes = by_host(job.hosts)
    if 1 < len(nodes) <= MOST_GROUPS:
        for host, ranks in nodes.items():
            if len(ranks) == 1:
                continue
            stage(f"making the group of {host}")
            group = dist.new_group(ranks, timeout=seconds(job.clocks.collective_s))
            if job.rank in ranks:
                stage(f"in an all_reduce of {host}")
                links.append(_all_reduce(job, "node", tuple(ranks), size, group))
    mine = next(ranks for ranks in nodes.values() if job.rank in ranks)
    complete = _pairs(job, "ranks", mine, size, stage, links, found)
    leaders = [ranks[0] for ranks in nodes.values()]
    if job.rank in leaders:
        complete &= _pairs(job, "nodes", leaders, size, stage, links, found)
    stage("waiting for the other ranks to finish their transfers")
    every = gather(job, (links, found, complete))
    # Each measurement once: from the first of its ranks.
    kept = [link for rank, (some, _, _) in enumerate(every) for link in some if link.ranks[0] == rank]
    return kept, [one for _, some, _ in every for one in some], all(whole for *_, whole in every)


def by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each host."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return nodes


def tournament(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds of pairs in which everyone meets everyone once, and nobody two at a time (the circle method)."""
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return rounds


def clock_offsets(job: Job, stage: Stage) -> dict[str, float]:
    """Seconds by which each host's clock is ahead of rank 0's, by the quickest of some round trips. On rank 0 only."""
    offsets = {}
    for host, (rank, *_) in list(by_host(job.hosts).items())[1:]:
        if job.rank not in (0, rank):
            continue
        stage(f"comparing clocks, rank 0 with {job.who(rank)}")
        now, best = torch.zeros(1, dtype=torch.float64), (float("inf"), 0.0)
        for _ in range(REPEATS + 1):
            if job.rank == rank:
                dist.recv(now, 0, group=job.control)
                now[0] = time.time()
                dist.send(now, 0, group=job.control)
                continue
            began = time.time()
            dist.send(now, rank, group=job.control)
            dist.recv(now, rank, group=job.control)
            trip = time.time() - began
            best = min(best, (trip, now.item() - began - trip / 2))
        offsets[host] = best[1]
    return offsets


def _size(job: Job) -> int:
    """Bytes that take about WANTED_S on the slowest link; the same on all ranks."""
    values = torch.ones((1 << 20) // 4, device=job.device)
    took = torch.tensor([_median(job, lambda: dist.all_reduce(values), 1)], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=job.control)
    return max(SMALLEST, min(LARGEST, int(values.nbytes * WANTED_S / took.item()))) // 4 * 4


def _all_reduce(job: Job, kind: str, ranks: tuple[int, ...], size: int, group: dist.ProcessGroup | None) -> Link:
    values = torch.ones(size // 4, device=job.device)
    latency = _median(job, lambda: dist.all_reduce(values[:1], group=group))
    took = _median(job, lambda: dist.all_reduce(values, group=group))
    return Link(kind, ranks, size / (1 << 20), size / took / 1e9, latency * 1e3)


def _pairs(
    job: Job, kind: str, members: Sequence[int], size: int, stage: Stage, links: list[Link], found: list[Finding]
) -> bool:
    """Adds this rank's links with other `members`, and what arrived changed; tells whether it has met all of them."""
    rounds = tournament(members)
    for number, pairs in enumerate(rounds[:MOST_ROUNDS]):
        peer = next((a + b - job.rank for a, b in pairs if job.rank in (a, b)), None)
        if peer is None:
            continue
        stage(f"in a transfer with {job.who(peer)}, round {number + 1} of {min(len(rounds), MOST_ROUNDS)}")
        link, intact = _exchange(job, kind, peer, size)
        links.append(link)
        if not intact:
            what = f"data from {job.who(peer)} arrive changed at {job.who(job.rank)}: the transport is broken"
            remedy = "look at the network or PCIe errors of both; NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 tell which"
            found.append(Finding(what, remedy))
    return len(rounds) <= MOST_ROUNDS


def _exchange(job: Job, kind: str, peer: int, size: int) -> tuple[Link, bool]:
    """Time transfers in both directions at once, and compare what arrives."""
    numbers = torch.arange(size // 4, dtype=torch.int32, device=job.device)
    out, into = numbers + job.rank, torch.zeros_like(numbers)

    def swap(count: int) -> None:
        ops = [dist.P2POp(dist.isend, out[:count], peer), dist.P2POp(dist.irecv, into[:count], peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    latency = _median(job, lambda: swap(1))
    before = counts()
    took = _median(job, lambda: swap(len(out)))
    through, rdma = carrier(before, counts(), size * (REPEATS + 1)) if kind == "nodes" else ("", None)
    ranks = (min(job.rank, peer), max(job.rank, peer))
    link = Link(kind, ranks, size / (1 << 20), size / took / 1e9, latency * 1e3, through, rdma)
    return link, torch.equal(into, numbers + peer)


def _median(job: Job, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of `work`, after a first time that opens connections and meets the others."""
    took = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
