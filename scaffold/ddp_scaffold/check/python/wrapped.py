"""Names of parameters: what is saved of a model in DDP, `module.`, and loaded into one that is not, or the reverse."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .checkpoints import parts_of, saved
from .context import Context, Found
from .module import Assignment, Call, Function, Module, argument, dotted, is_constant, keyword, shown
from .origins import assignments_of, values_of

DEPTH = 3


def other_names(context: Context, function: Function) -> Iterator[Found]:
    """Yield a model without DDP that gets the state of one with it, or the reverse: no name of a parameter fits."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if call.last != "load_state_dict" or not isinstance(call.node.func, ast.Attribute):
            continue
        if _tried_again(call):
            continue
        key = _key_of(context, call)
        if not key or is_constant(keyword(call.node, "strict"), False) or len(call.node.args) > 1:
            continue
        if any(isinstance(part, ast.Constant) and "module" in str(part.value) for part in ast.walk(function.node)):
            continue  # it looks at the names
        here = _is_wrapped(context, function, call.node.func.value, call.order)
        states = list(_states_under(context, function.module, key)) if here is not None else []
        if not states or any(one is None or there is here for one, there in states):
            continue
        at = states[0][0]
        if at is None:
            continue
        where = f"{at.function.module.file.path} line {at.function.module.position(at.node.lineno)[1]}"
        message = (
            f"`{shown(call.node.func.value, 30)}` is {'' if here else 'not yet '}wrapped in DDP here, and what is saved"
            f" under {key!r} ({where}) is of a model that is{' not' if here else ''}: the names differ by `module.`,"
            " and every rank of a run that goes on ends with a RuntimeError"
        )
        fix = f"save `model.module.state_dict()`, and load it into {'`model.module`' if here else 'the bare model'}"
        yield Found("DDP324", function.module, call.node, message, fix)


def _tried_again(call: Call) -> bool:
    """Tell whether a state is loaded in another way where this fails."""
    tries = {id(one) for one, part in call.place.tries if part == "body"}
    others = (c for c in call.function.calls if c.last == call.last and c is not call)
    return any(id(one) in tries and part == "except" for c in others for one, part in c.place.tries)


def _key_of(context: Context, call: Call) -> str:
    """Return the key under which a checkpoint has what a model is given: `state["model"]`, as it was loaded."""
    given = call.node.args[0] if call.node.args else None
    if not isinstance(given, ast.Subscript) or not isinstance(given.slice, ast.Constant):
        return ""
    name = dotted(given.value)
    assigned = [one for _, one in assignments_of(context, call.function, name)] if name else []
    loaded = [call.function.module.full_name(a.value.func) for a in assigned if isinstance(a.value, ast.Call)]
    return str(given.slice.value) if loaded and len(loaded) == len(assigned) and set(loaded) == {"torch.load"} else ""


def _states_under(context: Context, module: Module, key: str) -> Iterator[tuple[Call | None, bool]]:
    """Yield the calls of state_dict whose result is saved under a key, each with whether the model is in DDP then.

    None is a value under this key of which that is not known.
    """
    number = context.program.component[id(module)]
    for name, calls in context.program.calls_named.items():
        for call in calls if "save" in name.lower() else ():
            one = saved(context, call) if context.program.component[id(call.function.module)] == number else None
            for where, held_under, held in parts_of(context, call.function, one.state) if one is not None else ():
                if held_under is None or not is_constant(held_under, key):
                    continue
                for at, value in values_of(context, where, held):
                    yield from _state(context, at, value)


def _state(context: Context, function: Function, node: ast.expr) -> Iterator[tuple[Call | None, bool]]:
    if isinstance(node, (ast.Name, ast.Attribute, ast.IfExp)):
        return  # what it may be comes as well
    call = next((c for c in function.calls if c.node is node), None)
    func = node.func if isinstance(node, ast.Call) else None
    wrapped = None
    if call is not None and isinstance(func, ast.Attribute) and func.attr == "state_dict":
        wrapped = _is_wrapped(context, function, func.value, call.order)
    yield (None, False) if wrapped is None else (call, wrapped)


def _is_wrapped(context: Context, function: Function, node: ast.expr, order: int, depth: int = 0) -> bool | None:
    """Tell whether a model is in DDP at a place of a function; None is: not known."""
    name = dotted(node)
    if name.endswith(".module"):
        return False
    if not name or depth > DEPTH:
        return None
    found = assignments_of(context, function, name)
    wraps = [(where, a) for where, a in found if context.effects.wrap_of(where, a) is not None]
    if wraps:
        return _behind(context, function, wraps, order)
    if name in function.parameters and name not in function.assignments:
        return _one(
            _is_wrapped(context, site.function, given, site.order, depth + 1)
            for site in context.program.sites.get(id(function), ())
            if (given := argument(site, function, name)) is not None
        )
    return _by_values(context, found, name, depth)


def _by_values(context: Context, found: list[tuple[Function, Assignment]], name: str, depth: int) -> bool | None:
    """Tell whether a model that is not put into DDP under its name is one that is, by what it is set to."""
    answers: list[bool | None] = []
    for where, one in found:
        if one.value is None:
            return None
        if dotted(one.value):
            answers.append(_is_wrapped(context, where, one.value, one.order, depth + 1))
        elif isinstance(one.value, ast.Call):
            made = context.program.objects.of_value(where, one.value)
            moved = isinstance(one.value.func, ast.Attribute) and dotted(one.value.func.value) == name
            if not moved:
                answers.append(False if made and context.effects.wrap(where, name) is None else None)
        else:
            return None
    return _one(answers)


def _behind(context: Context, function: Function, wraps: list[tuple[Function, Assignment]], order: int) -> bool | None:
    """Tell whether a place comes after a model was put into DDP, in the same function or in a method called there."""
    here = [a for where, a in wraps if where is function]
    if here:
        return any(a.order < order for a in here)
    makers = {id(where): where for where, _ in wraps}
    sites = [site for site in context.program.sites.get(id(function), ()) if id(site.function) in makers]
    if sites:
        return _one(any(a.order < site.order for where, a in wraps if where is site.function) for site in sites)
    return True if all(where.name == "__init__" for where in makers.values()) else None


def _one(answers: Iterator[bool | None] | list[bool | None] | Iterator[bool]) -> bool | None:
    """Return the answer that all give, or None where they differ or one is not known."""
    given = set(answers)
    return given.pop() if len(given) == 1 else None


RULES = ()
OF_RANKS = (other_names,)
