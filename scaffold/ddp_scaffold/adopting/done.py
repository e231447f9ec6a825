"""What of the work is done: the places that are left, so that the list is shorter each time it is asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ..check.python.module import Call, Module
from .patch import BATCHES, EPOCHS, SESSION, VALUES, WATCHED, Place
from .shape import Shape

OURS = {BATCHES, WATCHED, EPOCHS, VALUES, "batches", "endless", "polled"}


def has_session(shape: Shape) -> bool:
    """Tell whether the program has a session already."""
    return any(_is_session(call) for function in shape.reached for call in function.calls)


def _is_session(call: Call) -> bool:
    return call.name.endswith((f"ddp.adopted.{SESSION}", "ddp.session.session"))


def left(places: Iterable[Place], shape: Shape) -> Iterator[Place]:
    """Yield the places that still must change; of those that a session makes needless, none."""
    calls = [call for function in shape.reached for call in function.calls]
    session = has_session(shape)
    asks = any(call.last == "poll" and "agreement" in call.name for call in calls)
    asks = asks or any(
        call.name.endswith((f"ddp.adopted.{BATCHES}", "lockstep.polled", "ddp.polled")) for call in calls
    )
    loads = any(call.name.endswith((f"ddp.adopted.{EPOCHS}", "ddp.checkpoint.load")) for call in calls)
    for place in places:
        loop = next((loop for loop in _loops(shape, place.module) if loop.lineno == place.line), None)
        if session and f"{SESSION}():" in place.instead:
            continue
        if loads and (f"{EPOCHS}(" in place.instead or f"{VALUES}(" in place.instead):
            continue
        if f"{BATCHES}(" in place.instead and asks:
            continue
        if f"{BATCHES}(" in place.instead and session:
            yield Place(
                place.module,
                place.line,
                "the session's stop is not asked for here: SIGTERM does nothing",
                place.instead,
            )
            continue
        if f"{WATCHED}(" in place.instead and loop is not None and _is_ours(loop):
            continue
        yield place


def _loops(shape: Shape, module: Module) -> Iterator[ast.For]:
    for function in shape.reached:
        if function.module is module:
            yield from (loop for loop, _ in function.loops if isinstance(loop, ast.For))


def _is_ours(loop: ast.For) -> bool:
    names = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
    return bool({name.removeprefix("adopted_") for name in names} & OURS)
