"""The one place that changes `ProcessGroup`: what every collective from Python goes through, however it was imported.

Who wants to know of collectives, or to stop them, registers a handler; the newest is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch.distributed as dist

# The method's name, its group, and what makes the call when it is given the arguments; then these.
Handler = Callable[..., Any]

_BEGINNINGS = ("all", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "monitored")
COLLECTIVES = [name for name in vars(dist.ProcessGroup) if name.lstrip("_").startswith(_BEGINNINGS)]
_handlers: list[Handler] = []


def handle(handler: Handler) -> None:
    """From now on every collective calls `handler(name, group, make, *arguments, **options)`.

    It returns what the caller gets: that of `make(*arguments, **options)`, which asks the older handlers and then makes
    the call. DDP's own collectives come from C++, and are not seen here. Costs a microsecond a call.
    """
    if handler not in _handlers:
        _handlers.append(handler)
    for name in COLLECTIVES:
        method = vars(dist.ProcessGroup)[name]
        if not hasattr(method, "handled"):
            setattr(dist.ProcessGroup, name, _handled(name, method))


def leave(handler: Handler) -> None:
    """Call `handler` no more."""
    _handlers.remove(handler)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Inside, every collective calls `handler`: see `handle`."""
    handle(handler)
    try:
        yield
    finally:
        leave(handler)


def _handled(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def handled(group: Any, *arguments: Any, **options: Any) -> Any:
        make: Callable[..., Any] = partial(method, group)
        for handler in tuple(_handlers):
            make = partial(handler, name, group, make)
        return make(*arguments, **options)

    handled.handled = True  # type: ignore[attr-defined]
    return handled
