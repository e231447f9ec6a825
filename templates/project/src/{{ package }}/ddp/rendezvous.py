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

from .board import post
from .clocks import Clocks
from .env import Place
from .errors import CONFIG, ConfigError, RunFailed
from .setup import Dist, connect_store
from .verdict import Verdict

log = logging.getLogger("ddp")


def rendezvous(place: Place, clocks: Clocks) -> Dist:
    """Wait on the store until every rank has come, and compare what each believes.

    Rank 0 looks for all others, who compare themselves with rank 0: work that grows with the number of ranks, not with
    its square. Whoever finds something wrong tells all, so that every rank ends at once and with the same words.

    Raises:
        RunFailed: after `clocks.init_s`, naming the ranks that did not come.
        ConfigError: two processes claim one rank, or the world sizes differ.
    """
    store = connect_store(place, clocks, serve=True)
    deadline = time.monotonic() + clocks.init_s
    here = f"{place.host}, process {os.getpid()}"
    first = store.compare_set(f"claim/{place.rank}", "", here).decode()
    if first != here:
        problem = f"two processes claim rank {place.rank}: one on {first}, one on {here}"
        remedy = "check NODE_RANK, or that no older job still uses this MASTER_ADDR and MASTER_PORT"
        _tell_all(store, ConfigError(problem, remedy))

    hello = json.dumps([place.host, place.world_size])
    others = [_hello(rank) for rank in range(1, place.world_size)]
    if place.rank == 0:
        store.set(_hello(0), hello)
        _wait_for(store, others, place, clocks, deadline)
        store.set("hosts", json.dumps([json.loads(store.get(key))[0] for key in [_hello(0), *others]]))
    else:
        _wait_for(store, [_hello(0)], place, clocks, deadline)
        host, world_size = json.loads(store.get(_hello(0)))
        if world_size != place.world_size:
            problem = (
                f"rank {place.rank} on {place.host} was started for {place.world_size} ranks, "
                f"rank 0 on {host} for {world_size}"
            )
            _tell_all(store, ConfigError(problem, "start every node with the same NNODES and processes per node"))
        store.set(_hello(place.rank), hello)  # only now: rank 0 does not begin with a rank that disagrees
        _wait_for(store, ["hosts"], place, clocks, deadline)
    return Dist(place, clocks, store, tuple(json.loads(store.get("hosts"))))


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _wait_for(store: dist.Store, keys: Sequence[str], place: Place, clocks: Clocks, deadline: float) -> None:
    """Wait until all `keys` are there, or somebody has found something wrong."""
    last_word = time.monotonic()
    while True:
        if store.check(["wrong"]):
            message = json.loads(store.get("wrong"))
            raise ConfigError(*message["config"]) if "config" in message else RunFailed(message["failed"])
        keys = [key for key in keys if not store.check([key])]
        if not keys:
            return
        now = time.monotonic()
        if now > deadline or now - last_word > 10:
            last_word = now
            missing = [rank for rank in range(place.world_size) if not store.check([_hello(rank)])]
            if now > deadline:
                problem = (
                    f"ranks {missing} did not start within {clocks.init_s:g} s ({place.world_size - len(missing)} of "
                    f"{place.world_size} came): look at the output of their nodes, or raise clocks.init_s"
                )
                _tell_all(store, RunFailed(problem))
            log.warning("waiting for ranks %s, for another %.0f s of %g s", missing, deadline - now, clocks.init_s)
        time.sleep(0.1)


def _tell_all(store: dist.Store, error: ConfigError | RunFailed) -> NoReturn:
    """Raise here what the others will raise when they look."""
    message = {"config": error.args[0].split("\n  -> ")} if isinstance(error, ConfigError) else {"failed": str(error)}
    store.set("wrong", json.dumps(message))
    if isinstance(error, ConfigError):  # some ranks may have begun to train already
        verdict = Verdict(CONFIG, error.kind, str(error), phase="init", step=0)
        store.compare_set("verdict", "", json.dumps(asdict(verdict)))
        post(store, "verdict")
    raise error
