"""Where a value goes: the functions in which it can be had, and under which name or part of what.

A loader that is made in a helper comes to a loop as a part of a tuple, an entry of a dict, an attribute of an object,
or over a function that only passes it on. What is not followed: lists that are filled one by one, and `**settings`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .effects import is_generator
from .module import Assignment, Call, Class, Function, Guard, argument, default_of, dotted
from .program import Program

MAX_PLACES = 60
PASSES_ON = {"iter", "cycle", "tqdm", "enumerate", "list", "trange", "chain"}  # what comes out is still the same data
SIZE = re.compile(r"/\d+\]")
Holds = Callable[[ast.expr], bool]


@dataclass(frozen=True)
class Spot:
    """A value in a function: `text` is how it is written there, `loader`, `self.loader`, `loaders['val']`."""

    function: Function
    text: str
    guards: tuple[Guard, ...] = ()  # where it got the value


def places_of(program: Program, function: Function, node: ast.expr) -> Iterator[tuple[Function, Holds]]:
    """Yield each function in which the value of an expression can be had, with a test of expressions for it."""
    yield function, lambda one: any(part is node for part in ast.walk(one))
    yield from _follow(program, _from_expression(program, function, node, ""))


def places_of_name(program: Program, function: Function, name: str) -> Iterator[tuple[Function, Holds]]:
    """Yield each function in which the value of a variable can be had, with a test of expressions for it."""
    yield from _follow(program, [Spot(function, name)])


def _follow(program: Program, begin: list[Spot | tuple[Function, ast.expr]]) -> Iterator[tuple[Function, Holds]]:
    waiting, seen = list(begin), set[tuple[int, str]]()
    while waiting and len(seen) < MAX_PLACES:
        here = waiting.pop(0)
        if isinstance(here, tuple):
            function, node = here
            yield function, lambda one, node=node: any(part is node for part in ast.walk(one))  # type: ignore[misc]
            continue
        key = (id(here.function), here.text)
        if key in seen:
            continue
        seen.add(key)
        yield here.function, lambda one, text=here.text: mentions(one, text)  # type: ignore[misc]
        waiting += _next(program, here)


def mentions(node: ast.expr, text: str) -> bool:
    """Tell whether an expression has a value in it that is written like this."""
    return any(written(part) == text for part in ast.walk(node) if isinstance(part, ast.expr))


def _same(node: ast.expr, text: str) -> bool:
    """Tell whether an expression is a value that is written like this, or an entry of it."""
    while isinstance(node, ast.Subscript) and written(node) != text:
        node = node.value
    return written(node) == text


def written(node: ast.AST) -> str:
    """Return `a.b['c']` for that expression, and an empty text for what is no name with attributes and fixed keys."""
    rest = ""
    while True:
        if isinstance(node, ast.Attribute):
            rest, node = f".{node.attr}{rest}", node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            rest, node = f"[{node.slice.value!r}]{rest}", node.value
        else:
            return f"{node.id}{rest}" if isinstance(node, ast.Name) else ""


def _next(program: Program, here: Spot) -> list[Spot | tuple[Function, ast.expr]]:
    """Return where a value is to be had next: under another name, in other functions, with those that call this one."""
    function, text = here.function, here.text
    found: list[Spot | tuple[Function, ast.expr]] = []
    first = text.partition(".")[0].partition("[")[0]
    owner = function.of_class or (function.owner.of_class if function.owner else None)
    if first == "self" and owner is not None:
        methods = [method for one in program.family(owner) for method in one.methods.values()]
        found += [Spot(method, text, here.guards) for method in methods]
        found += _of_objects(program, owner, text.removeprefix("self"), here.guards)
    else:
        found += [Spot(other, text) for other in _within(function, first)]
    for statement_of in _statements(function, text):
        found += _assigned(function, statement_of, lambda one: _same(one, text), "")
    for leave in function.exits:
        value = leave.node.value if isinstance(leave.node, ast.Return) else None
        if value is not None and mentions(value, text):
            for part in _parts(value, lambda one: _same(one, text)):
                for site in _sites(program, function, (*here.guards, *leave.place.guards)):
                    found += _from_expression(program, site.function, site.node, part)
    for call in function.calls:
        found += _given(program, call, lambda one: _same(one, text))
    return found


def _sites(program: Program, function: Function, guards: Sequence[Guard]) -> list[Call]:
    """Return the calls of a function that come to a place under conditions, as far as what they give tells."""
    sites = program.sites.get(id(function), ())
    return [site for site in sites if not any(_fails(site, function, guard) for guard in guards)]


def _fails(site: Call, function: Function, guard: Guard) -> bool:
    """Tell whether a condition on a parameter does not hold for what a call gives: `train`, `mode == "train"`."""
    test, holds = guard.test, guard.holds
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    wanted: ast.expr | None = None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        holds = holds is isinstance(test.ops[0], ast.Eq)
        wanted, test = test.comparators[0], test.left
    name = dotted(test)
    if name not in function.parameters:
        return False
    value = argument(site, function, name) or default_of(function, name)
    if not isinstance(value, ast.Constant) or not (wanted is None or isinstance(wanted, ast.Constant)):
        return False
    true = bool(value.value) if wanted is None else value.value == wanted.value
    return true is not holds


def _within(function: Function, name: str) -> list[Function]:
    """Return the functions that use a variable of the one in which they are defined, or of their file."""
    if isinstance(function.node, ast.Module):
        inner = [one for one in function.module.functions if one is not function]
    else:
        inner = list(function.inner.values())
    return [one for one in inner if name not in one.assignments and name not in one.parameters]


def _statements(function: Function, text: str) -> list[Assignment]:
    found = [a for assigned in function.assignments.values() for a in assigned]
    return [a for a in found if (value := _value(a)) is not None and mentions(value, text)]


def _value(assignment: Assignment) -> ast.expr | None:
    return assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)


def _assigned(
    function: Function, assignment: Assignment, is_it: Holds, part: str
) -> list[Spot | tuple[Function, ast.expr]]:
    """Return the variables that an assignment gives a value, or what has it as a part."""
    value = _value(assignment)
    if value is None or isinstance(assignment.node, (ast.For, ast.AsyncFor)):
        return []
    found: list[Spot | tuple[Function, ast.expr]] = []
    for inner in _parts(value, is_it):
        if assignment.value is not None:
            found.append(_held(function, f"{assignment.target}{inner}{part}", assignment.place.guards))
            continue
        for target in getattr(assignment.node, "targets", ()):
            found += _unpacked(function, target, inner + part) if isinstance(target, (ast.Tuple, ast.List)) else []
    return found


def _unpacked(function: Function, target: ast.Tuple | ast.List, part: str) -> list[Spot | tuple[Function, ast.expr]]:
    for number, one in enumerate(target.elts):
        mine = f"[{number}/{len(target.elts)}]"
        if part.startswith(mine) and written(one):
            return [_held(function, written(one) + part.removeprefix(mine))]
    return []


def _held(function: Function, text: str, guards: tuple[Guard, ...] = ()) -> Spot:
    return Spot(function, SIZE.sub("]", text), guards)


def _parts(value: ast.expr, is_it: Holds) -> list[str]:
    """Return which parts of a value something is: '' for all of it, `[1]`, `['val']`; nothing where it is none."""
    if is_it(value):
        return [""]
    if isinstance(value, ast.IfExp):
        return [*_parts(value.body, is_it), *_parts(value.orelse, is_it)]
    if isinstance(value, (ast.Tuple, ast.List)):
        size = len(value.elts)  # what is unpacked has as many
        return [f"[{number}/{size}]{rest}" for number, one in enumerate(value.elts) for rest in _parts(one, is_it)]
    if isinstance(value, ast.Dict):
        pairs = [(k.value, v) for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)]
        return [f"[{key!r}]{rest}" for key, one in pairs for rest in _parts(one, is_it)]
    if isinstance(value, ast.DictComp):  # of which key is not asked: all that it has is made alike
        return _parts(value.value, is_it)
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        return _parts(value.elt, is_it)
    if isinstance(value, ast.Call):
        last = dotted(value.func).rpartition(".")[2]
        inner = [rest for one in value.args for rest in _parts(one, is_it)]
        if (
            last in PASSES_ON
            or "loader" in last.lower()
            or "prefetch" in last.lower()
            or "infinite" in last.lower()
            or last == "BatchSampler"
        ):
            return inner
        if last == "dict":
            return [f"[{k.arg!r}]{rest}" for k in value.keywords if k.arg for rest in _parts(k.value, is_it)]
    return []


def _from_expression(
    program: Program, function: Function, node: ast.expr, part: str, depth: int = 0
) -> list[Spot | tuple[Function, ast.expr]]:
    """Return where the value of an expression, or a part of it, goes."""

    def is_it(one: ast.expr) -> bool:
        return one is node

    found: list[Spot | tuple[Function, ast.expr]] = [(function, node)] if not part else []
    for assigned in function.assignments.values():
        for assignment in assigned:
            found += _assigned(function, assignment, is_it, part)
    for statement in _subscript_targets(function):
        found += [
            _held(function, f"{written(statement.targets[0])}{inner}{part}") for inner in _parts(statement.value, is_it)
        ]
    for leave in function.exits:
        value = leave.node.value if isinstance(leave.node, ast.Return) else None
        for inner in _parts(value, is_it) if value is not None and depth < 4 else ():
            for site in _sites(program, function, leave.place.guards):
                found += _from_expression(program, site.function, site.node, inner + part, depth + 1)
    for call in function.calls if not part else ():
        found += _given(program, call, is_it, depth)
    return found


def _subscript_targets(function: Function) -> list[ast.Assign]:
    """Return the assignments to an entry of something, `loaders["val"] = ...`, in a function."""
    body = function.node.body
    found = [one for top in body if not isinstance(top, (ast.FunctionDef, ast.ClassDef)) for one in ast.walk(top)]
    return [
        one
        for one in found
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Subscript) and written(one.targets[0])
    ]


def _given(program: Program, call: Call, is_it: Holds, depth: int = 0) -> list[Spot | tuple[Function, ast.expr]]:
    """Return the parameters of the function that a call gives a value."""
    given = [*call.node.args, *(word.value for word in call.node.keywords)]
    if not any(is_it(one) for one in given):
        return []
    target = program.called(call)
    if target is None or target is call.function:
        return []
    names = [name for name in target.parameters if name not in ("self", "cls")]
    values = ((name, argument(call, target, name)) for name in names)
    found: list[Spot | tuple[Function, ast.expr]] = []
    found += [Spot(target, name) for name, value in values if value is not None and is_it(value)]
    if is_generator(target) and depth < 4:  # it gives out the batches of what it is given
        found += _from_expression(program, call.function, call.node, "", depth + 1)
    return found


def _of_objects(
    program: Program, owner: Class, attribute: str, guards: Sequence[Guard]
) -> list[Spot | tuple[Function, ast.expr]]:
    """Return where the attribute of an object goes that a class of these files sets: `Data(args).loader`."""
    made = owner.methods.get("__init__")
    found: list[Spot | tuple[Function, ast.expr]] = []
    for site in _sites(program, made, guards) if made is not None else ():
        name = next((n for n, a in site.function.assignments.items() if any(one.value is site.node for one in a)), "")
        if name:
            found.append(Spot(site.function, f"{name}{attribute}"))
        for assigned in site.function.assignments.values():
            for one in assigned:
                value = one.value
                if isinstance(value, ast.Attribute) and value.value is site.node and f".{value.attr}" == attribute:
                    found.append(Spot(site.function, one.target))
    return found
