"""The first meeting, on the store: every rank has come, and all believe the same. No process group exists yet."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

import torch.distributed as dist

from ..clocks import Clocks
from ..errors import CONFIG, ConfigError, RunFailed, RunTaken, StopRequested
from ..kinds import Verdict
from ..polling import poll
from ..ranks import named
from . import kinship
from .arrival import Arrival, judge, precision
from .board import post
from .groups import Job, connect_store
from .launcher import Place
from .logs import PRECISION, Rows
from .stop import StopFlags

log = logging.getLogger("ddp")


def rendezvous(
    place: Place, clocks: Clocks, rows: Rows = (), flags: StopFlags | None = None, arrival: Arrival | None = None
) -> Job:
    """Wait on the store until every rank has come, and compare what each believes.

    Rank 0 looks for all others, who compare themselves with rank 0: work that grows with the number of ranks, not with
    its square. Whoever finds something wrong tells all, so that every rank ends at once and with the same words.

    Raises:
        RunFailed: after `clocks.init_s`, naming the ranks that did not come.
        StopRequested: asked to stop meanwhile, by `flags`; here every rank decides for itself.
        ConfigError: two processes claim one rank, world sizes or settings (`rows`) differ, or what each rank says of
            itself (`arrival`) cannot work together.
    """
    store = connect_store(place, clocks, serve=True)
    waiting = Waiting(store, place, clocks, flags)
    here = f"{place.host}, process {os.getpid()}{kinship.started_by()}"
    first = store.compare_set(f"claim/{place.rank}", "", here).decode()
    if first != here:
        tell_all(store, kinship.claimed_twice(place, first, here))

    hello = json.dumps([place.host, place.world_size, arrival and arrival.as_json()])
    others = [_hello(rank) for rank in range(1, place.world_size)]
    settings = {name: value for name, value, _ in rows}
    if place.rank == 0:
        store.set("settings", json.dumps(settings))
        store.set(_hello(0), hello)
        waiting.until(others)
        came = [json.loads(store.get(key)) for key in [_hello(0), *others]]
        hosts = [host for host, _, _ in came]
        arrivals = [Arrival.from_json(each) for _, _, each in came if each]
        _compare(arrivals, hosts, store)
        store.set("precision", precision(arrivals))
        without = [one.rank for one in arrivals if not one.bf16]
        if settings.get(PRECISION) == "auto" and 0 < len(without) < len(arrivals):
            log.warning("%s is fp32 on all ranks: no bf16 on %s", PRECISION, named(without, hosts))
        store.set("hosts", json.dumps(hosts))
    else:
        waiting.until([_hello(0)])
        host, world_size, _ = json.loads(store.get(_hello(0)))
        if world_size != place.world_size:
            problem = (
                f"rank {place.rank} on {place.host} was started for {place.world_size} ranks, "
                f"rank 0 on {host} for {world_size}"
            )
            tell_all(store, ConfigError(problem, "start every node with the same NNODES and processes per node"))
        of_rank0 = json.loads(store.get("settings"))
        if other := [name for name in {**of_rank0, **settings} if of_rank0.get(name) != settings.get(name)]:
            each = ", ".join(f"{name} ({of_rank0.get(name)}, {settings.get(name)})" for name in other[:5])
            problem = f"settings differ between rank 0 on {host} and rank {place.rank} on {place.host}: {each}"
            tell_all(store, ConfigError(problem, "start every rank with the same file, arguments and variables"))
        store.set(_hello(place.rank), hello)  # only now: rank 0 does not begin with a rank that disagrees
        waiting.until(["hosts"])
    agreed = store.get("precision").decode()
    return Job(place, clocks, store, tuple(json.loads(store.get("hosts"))), precision=agreed)


def _compare(arrivals: Sequence[Arrival], hosts: Sequence[str], store: dist.Store) -> None:
    """On rank 0: refuse the first thing that cannot work, and warn of the rest."""
    for finding in judge(arrivals):
        what = (f"{named(finding.ranks, hosts)}: " if finding.ranks else "") + finding.what
        if not finding.warning:
            tell_all(store, ConfigError(what, finding.remedy, finding.kind))
        log.warning("%s\n  -> %s", what, finding.remedy)


def _hello(rank: int) -> str:
    return f"hello/{rank}"


class Waiting:
    """Waits for keys, until `clocks.init_s` after it was made or until somebody has found something wrong."""

    def __init__(self, store: dist.Store, place: Place, clocks: Clocks, flags: StopFlags | None) -> None:
        self._store, self._place, self._flags = store, place, flags
        self._init_s, self._deadline = clocks.init_s, time.monotonic() + clocks.init_s

    def until(self, keys: Sequence[str]) -> None:
        """Return when all `keys` are there."""
        missing, last_word = list(keys), time.monotonic()

        def all_there() -> bool:
            nonlocal last_word
            self._raise_what_is_wrong()
            missing[:] = [key for key in missing if not self._store.check([key])]
            if missing and self._flags and (reason := self._flags.reason()):
                raise StopRequested(f"{reason}, while rank {self._place.rank} waited for the others to start")
            if missing and time.monotonic() - last_word > 10:
                last_word = time.monotonic()
                left = f"{self._deadline - last_word:.0f} s of {self._init_s:g} s"
                log.warning("waiting for ranks %s, for another %s", self._missing(), left)
            return not missing

        if not poll(all_there, self._deadline - time.monotonic(), pause_s=0.1):
            tell_all(self._store, RunFailed(self._problem()))

    def _raise_what_is_wrong(self) -> None:
        if not self._store.check(["wrong"]):
            return
        message = json.loads(self._store.get("wrong"))
        if "config" in message:
            raise (RunTaken if message["taken"] else ConfigError)(*message["config"])
        raise RunFailed(message["failed"])

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._place.world_size) if not self._store.check([_hello(rank)])]

    def _problem(self) -> str:
        missing, size = self._missing(), self._place.world_size
        came = f"{size - len(missing)} of {size} came"
        what = f"ranks {missing} did not start within {self._init_s:g} s ({came})"
        return f"{what}: look at the output of their nodes, or raise clocks.init_s"


def tell_all(store: dist.Store, error: ConfigError | RunFailed) -> NoReturn:
    """Raise here what the others will raise when they look."""
    message: dict[str, object] = {"failed": str(error)}
    if isinstance(error, ConfigError):
        message = {"config": [*str(error).split("\n  -> "), error.kind], "taken": isinstance(error, RunTaken)}
    store.set("wrong", json.dumps(message))
    if isinstance(error, ConfigError):  # some ranks may have begun to train already
        verdict = Verdict(CONFIG, error.kind, str(error), phase="init", step=0)
        store.compare_set("verdict", "", json.dumps(asdict(verdict)))
        post(store, "verdict")
    raise error
