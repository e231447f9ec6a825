"""What ranks tell each other through the store, with few requests: it may be served by a thread of rank 0, for all.

- beat/R: a counter, changed by rank R every `beat_interval`, at the same moments of the wall clock on all ranks: the
  server takes a batch of requests at a fraction of what single ones cost. Rank 0 reads all, a few read rank 0's.
- news/1, news/2, ...: what all must hear at once: "diagnose ...", "verdict", "bye". Ranks block on the next, none asks.
- state/R: where rank R is (heartbeat.snapshot), published every `heartbeat_s` and in answer to "diagnose".
- verdict: the first one counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from ..clocks import Clocks
from ..polling import poll
from ..rank_state import RankState

PART = 256  # keys of one request


def beat_interval(world_size: int, clocks: Clocks) -> float:
    """Seconds between two beats of a rank: `beat_s`, and more beyond 500 ranks, up to a third of `silent_s`."""
    beat_s = clocks.beat_s
    return beat_s * max(1, min(round(world_size / 500 / beat_s), int(clocks.silent_s / 3 / beat_s)))


def send_beat(store: dist.Store, rank: int, number: int, interval: float, clocks: Clocks) -> None:
    """Change this rank's counter, now and then by a request that is answered, which shows that the store is alive.

    An answer costs the server three times as much: in large jobs only every other `silent_s` brings one.
    """
    every = 1 if interval == clocks.beat_s else round(2 * clocks.silent_s / interval)
    if (number + rank) % every == 0:
        store.add(f"beat/{rank}", 1)
    else:
        store.set(f"beat/{rank}", str(number))


def values(store: dist.Store, keys: list[str], complete: bool = False) -> list[bytes | None]:
    """The values of `keys`, None for those that do not exist. `complete` says that all do, and saves asking.

    Never waits for a key: `multi_get` alone would. In parts, since 4,096 at once cost the server twice as much.
    """
    found: list[bytes | None] = []
    for start in range(0, len(keys), PART):
        part = keys[start : start + PART]
        there = part if complete or store.check(part) else [key for key in part if store.check([key])]
        known = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
        found += [known.get(key) for key in part]
    return found


def may_be_silent(store: dist.Store, rank: int, limit_s: float) -> None:
    """Tell the others that this rank may send no beat for so long; 0 takes it back."""
    store.set(f"silent/{rank}", f"{limit_s:g}")


def allowed_silence(store: dist.Store, rank: int) -> float:
    """Seconds for which this rank has said that it may be silent."""
    key = f"silent/{rank}"
    return float(store.get(key)) if store.check([key]) else 0.0


class Beats:
    """The counters of `ranks`: `silent` names those that stand still for `silent_s` seconds."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], silent_s: float) -> None:
        self._store, self._ranks, self._silent_s = store, ranks, silent_s
        self._keys = [f"beat/{rank}" for rank in ranks]
        self._seen: dict[int, tuple[bytes | None, float]] = {}  # rank -> (its last beat, when it changed)
        self._complete = False  # every one has sent a beat

    def silent(self) -> list[int]:
        """Look once. A rank that has never sent a beat counts from the first look."""
        now, found = time.monotonic(), values(self._store, self._keys, self._complete)
        self._complete = None not in found
        for rank, beat in zip(self._ranks, found, strict=True):
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        still = {rank: now - self._seen[rank][1] for rank in self._ranks}
        quiet = [rank for rank in self._ranks if still[rank] > self._silent_s]
        return [rank for rank in quiet if still[rank] > allowed_silence(self._store, rank)]


def states(store: dist.Store, ranks: Iterable[int]) -> list[RankState]:
    """The last state of those `ranks` that have published one."""
    return [RankState.from_json(text) for text in values(store, [f"state/{rank}" for rank in ranks]) if text]


def answers(
    store: dist.Store, number: int, hosts: Sequence[str], wait_s: float, pause_s: float, dead: Sequence[int] = ()
) -> tuple[list[RankState], list[int]]:
    """The states of all ranks after the news `number`, or their last ones, and the ranks that have not answered.

    Nobody waits for those that are known to be `dead`.
    """
    silent, known = list(range(len(hosts))), dict[int, RankState]()

    def all_answered() -> bool:
        known.update({state.rank: state for state in states(store, silent)})
        silent[:] = [rank for rank in silent if rank not in known or known[rank].news < number]
        return set(silent) <= set(dead)

    poll(all_answered, wait_s, pause_s)
    unheard = (RankState(rank, host, note="no heartbeat yet") for rank, host in enumerate(hosts))
    return [known.get(state.rank, state) for state in unheard], silent


def post(store: dist.Store, text: str) -> int:
    """Make `text` the next news, unless it is news already; returns its number, from 1 on."""
    number = 1
    while store.compare_set(f"news/{number}", "", text).decode() != text:
        number += 1
    return number
