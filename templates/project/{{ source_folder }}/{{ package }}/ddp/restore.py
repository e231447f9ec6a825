"""Filling objects from what a checkpoint holds. What does not fit is one line, and not torch's page of names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .errors import ConfigError

log = logging.getLogger("ddp")


class Stateful(Protocol):
    """What can be checkpointed: modules, optimisers, schedulers, scalers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def fill(objects: Mapping[str, Stateful], saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Load each object's state. Says which of them the checkpoint lacks, and which it holds for nobody.

    Raises:
        ConfigError: the state is that of another model or optimiser, on every rank alike.
    """
    for name in objects.keys() & saved.keys():
        try:
            objects[name].load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"{checkpoint} does not fit the {name} of these settings: {why[:200]}{'...' * (len(why) > 200)}",
                "resume with the settings of that run, or begin a new one (another run.id, or run.resume false)",
            ) from error
    if new := sorted(objects.keys() - saved.keys()):  # switched on since
        log.warning("%s holds no %s: that begins anew", checkpoint, ", ".join(new))
    if old := sorted(saved.keys() - objects.keys()):
        log.warning("%s holds %s, which is switched off: dropped", checkpoint, ", ".join(old))
