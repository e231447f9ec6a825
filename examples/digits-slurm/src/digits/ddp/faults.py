"""Fault injection for tests: DDP_FAULTS="kind@rank=1,step=20,phase=forward;...". Does nothing unless it is set.

Kinds: raise, exit (code 3), kill (SIGKILL), stop (SIGSTOP), sleep (seconds=..., default for ever), term (SIGTERM),
usr2 (SIGUSR2).
`rank` defaults to 0, `step` to 0, `phase` to forward, `attempt` to 0: a restarted job does not meet the fault again.
`step` is the number of finished optimiser steps when the phase begins.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from functools import lru_cache

from .env import detect
from .errors import ConfigError

log = logging.getLogger("ddp")

KINDS = ("raise", "exit", "kill", "stop", "sleep", "term", "usr2")
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "term": "SIGTERM", "usr2": "SIGUSR2"}
DEFAULTS = {"rank": "0", "step": "0", "phase": "forward", "attempt": "0", "seconds": "1000000"}


class InjectedFault(RuntimeError):
    """Raised by the fault `raise`."""


@lru_cache
def parse(text: str) -> tuple[dict[str, str], ...]:
    """The faults in `text`, each with its kind and all options.

    Raises:
        ConfigError: an unknown kind or option, or a number that is none.
    """
    found = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, options = entry.partition("@")
        fault = {**DEFAULTS, "kind": kind}
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            if key not in DEFAULTS or (key != "phase" and not value.replace(".", "", 1).isdigit()):
                raise ConfigError(f"DDP_FAULTS: {option!r} is no known option and value", f"use {', '.join(DEFAULTS)}")
            fault[key] = value
        if kind not in KINDS:
            raise ConfigError(f"DDP_FAULTS: {kind!r} is not a known fault", f"use one of {', '.join(KINDS)}")
        found.append(fault)
    return tuple(found)


def inject(phase: str, step: int) -> None:
    """Called as each phase begins; carries out the faults meant for this rank, phase and step."""
    text = os.environ.get("DDP_FAULTS")
    if not text:
        return
    place = detect()
    for fault in parse(text):
        here = (str(place.rank), str(step), phase, str(place.attempt))
        if (fault["rank"], fault["step"], fault["phase"], fault["attempt"]) == here:
            _carry_out(fault)


def _carry_out(fault: dict[str, str]) -> None:
    kind = fault["kind"]
    log.warning("injecting %s in phase %s at step %s", kind, fault["phase"], fault["step"])
    if kind == "raise":
        raise InjectedFault(f"injected by DDP_FAULTS in {fault['phase']} at step {fault['step']}")
    if kind == "exit":
        os._exit(3)
    if kind == "sleep":
        time.sleep(float(fault["seconds"]))
    else:
        os.kill(os.getpid(), getattr(signal, SIGNALS[kind]))
