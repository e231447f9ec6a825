"""Where a value comes from: over variables, attributes, what callers give, and functions that return it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .context import Context
from .module import Assignment, Call, Function, argument, default_of, dotted

DEPTH = 6
MANY = 64  # values that are looked at behind one


class Value(NamedTuple):
    """An expression, and the function that it stands in."""

    function: Function
    node: ast.expr


def values_of(context: Context, function: Function, node: ast.expr, depth: int = DEPTH) -> list[Value]:
    """Return an expression, and those that its value may come from, in the order in which they are met."""
    found: dict[tuple[int, int], Value] = {}
    waiting = [(Value(function, node), 0)]
    while waiting and len(found) < MANY:
        here, steps = waiting.pop()
        key = (id(here.function), id(here.node))
        if key in found:
            continue
        found[key] = here
        if steps < depth:
            waiting += [(one, steps + 1) for one in reversed(sources(context, *here))]
    return list(found.values())


def sources(context: Context, function: Function, node: ast.expr) -> list[Value]:
    """Return what the value of an expression may be, one step before it; nothing for what is made in it itself."""
    if isinstance(node, ast.IfExp):
        return [Value(function, node.body), Value(function, node.orelse)]
    if isinstance(node, ast.BoolOp):
        parts = node.values if isinstance(node.op, ast.Or) else node.values[-1:]
        return [Value(function, part) for part in parts]
    if isinstance(node, ast.NamedExpr):
        return [Value(function, node.value)]
    if isinstance(node, ast.Call):
        return list(returned(context, function, node))
    name = dotted(node)
    return list(of_name(context, function, name)) if name else []


def of_name(context: Context, function: Function, name: str) -> Iterator[Value]:
    """Yield what a variable, a parameter, or an attribute is set to; an unpacked one by the part that it gets."""
    assigned = assignments_of(context, function, name)
    for where, one in assigned:
        if one.value is None:
            yield from _unpacked(context, where, one)
        elif dotted(one.value) != name:
            yield Value(where, one.value)
    if name in function.parameters:
        yield from given(context, function, name)
    elif not assigned:
        constant = context.program.constant(function.module, name)
        if constant is not None:
            yield Value(constant[0].body, constant[1])


def assignments_of(context: Context, function: Function, name: str) -> list[tuple[Function, Assignment]]:
    """Return where a name is set, each with the function in which that is done; `x.y` by the classes of x, if known."""
    owner, _, last = name.rpartition(".")
    found: list[tuple[Function, Assignment]] = []
    if owner != "self" or not context.program.with_bases(function):
        found = [(_scope_of(function, one, name), one) for one in context.program.assigned(function, name)]
    if not owner:
        return found
    own = owner == "self"
    classes = context.program.with_bases(function) if own else context.program.objects.of_name(function, owner)
    for made in classes or ():
        found += [(m, one) for m in made.methods.values() for one in m.assignments.get(f"self.{last}", ())]
    return found


def _scope_of(function: Function, assignment: Assignment, name: str) -> Function:
    """Return the function in which a variable is set: this one, or one that it is defined in."""
    scope: Function | None = function
    while scope is not None:
        if any(one is assignment for one in scope.assignments.get(name, ())):
            return scope
        scope = scope.owner
    return function


def given(context: Context, function: Function, name: str) -> Iterator[Value]:
    """Yield what callers give for a parameter, and its default where one gives nothing, or none is known."""
    sites = [site for site in context.program.sites.get(id(function), ()) if site.function is not function]
    values = [(site, argument(site, function, name)) for site in sites]
    for site, value in values:
        if value is not None:
            yield Value(site.function, value)
    default = default_of(function, name)
    if default is not None and (not values or any(value is None for _, value in values)):
        yield Value(function, default)


def returned(context: Context, function: Function, node: ast.Call) -> Iterator[Value]:
    """Yield what a function of these files returns to a call; nothing for a class, which makes something new."""
    call = call_of(function, node)
    target = context.program.called(call) if call is not None else None
    if target is not None and target.name != "__init__":
        for one in target.exits:
            if isinstance(one.node, ast.Return) and one.node.value is not None:
                yield Value(target, one.node.value)


def call_of(function: Function, node: ast.Call) -> Call | None:
    """Return the call that an expression of a function is, if it was read as one."""
    return next((call for call in function.calls if call.node is node), None)


def _unpacked(context: Context, function: Function, assignment: Assignment) -> Iterator[Value]:
    """Yield the part of a returned tuple that `a, b = f()` gives to a name."""
    statement = assignment.node
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return
    for target in statement.targets:
        names = [dotted(one) for one in target.elts] if isinstance(target, (ast.Tuple, ast.List)) else []
        if assignment.target not in names:
            continue
        for where, value in returned(context, function, statement.value):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(names):
                yield Value(where, value.elts[names.index(assignment.target)])
