"""Where a value goes: the functions in which it can be had, and under which name or part of what.

A loader that is made in a helper comes to a loop as a part of a tuple, an entry of a dict or a list, an attribute of an
object, or over a function that only passes it on. What is known on the way is kept: `run(val_loader, train=False)`.
What is not followed: `**settings`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .conditions import KEY, Fact, about_key, contradict, entering, facts_of, leaving, of_key, of_objects
from .effects import is_generator
from .module import Assignment, Call, Class, Function, argument, dotted
from .program import Program

MAX_PLACES = 80
PASSES_ON = {"iter", "cycle", "tqdm", "enumerate", "list", "trange", "chain"}  # what comes out is still the same data
SIZE = re.compile(r"/\d+\]")
PART = re.compile(r"^\w+|\.\w+|\[[^\]]*\]")
END = 10**9
Rest = Callable[[ast.expr], str | None]  # what has to stand behind an expression for the value: '' where it is it


@dataclass(frozen=True)
class Spot:
    """A value in a function: `text` is how it is written there, `loader`, `self.loader`, `loaders['val']`.

    `lines` are those between which a variable has it: before, and behind, it has another value.
    """

    function: Function
    text: str
    facts: tuple[Fact, ...] = ()
    node: ast.expr | None = None  # the value itself, where it has no name
    lines: tuple[int, int] = (0, END)


@dataclass(frozen=True)
class Held:
    """A test whether an expression has the value of a spot in it."""

    spot: Spot

    def __call__(self, one: ast.expr) -> bool:
        return any(self.is_it(part) for part in ast.walk(one) if isinstance(part, ast.expr))

    def is_it(self, part: ast.expr) -> bool:
        """Tell whether an expression is the value."""
        if self.spot.node is not None:
            return part is self.spot.node
        if not isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
            return False
        return self._is_here(part) and self._pairs(part) is not None

    def rest(self, node: ast.expr) -> str | None:
        """Return '' for the value or an entry of it, `.loader` or `['val']` for what has it as a part."""
        whole = written(node)
        if whole and self.spot.text.startswith((f"{whole}.", f"{whole}[")) and self._is_here(node):
            return self.spot.text.removeprefix(whole)
        while isinstance(node, ast.Subscript) and not self.is_it(node):
            node = node.value
        return "" if self.is_it(node) else None

    def _is_here(self, part: ast.expr) -> bool:
        return self.spot.lines[0] <= part.lineno < self.spot.lines[1]

    def known(self, one: ast.expr) -> tuple[Fact, ...]:
        """Return what is known where an expression has the value: also of the key by which it is looked up."""
        facts = self.spot.facts
        for part in ast.walk(one) if "[" in self.spot.text else ():
            if isinstance(part, ast.Subscript):
                for mine, name in self._pairs(part) or ():
                    given = (Fact(name, "==", ast.literal_eval(mine[1:-1]), True),) if mine != KEY else ()
                    facts = (*of_key(facts, name), *given)
        return facts

    def _pairs(self, part: ast.expr) -> list[tuple[str, str]] | None:
        """Return the keys of the value with the variables that stand for them; None where it is another value."""
        text = self.spot.text
        if "[" not in text:
            return [] if written(part) == text else None
        mine, theirs = PART.findall(text), PART.findall(written(part, open_keys=True))
        if len(mine) != len(theirs):
            return None
        found: list[tuple[str, str]] = []
        for one, other in zip(mine, theirs, strict=True):
            if one == other or one[0] != "[" or other[0] != "[":
                if one != other:
                    return None
            elif other[1] == "?":
                found.append((one, other[2:-1]))
            elif one != KEY or contradict((Fact(KEY, "==", ast.literal_eval(other[1:-1]), True),), self.spot.facts):
                return None
        return found


def places_of(
    program: Program, function: Function, node: ast.expr, facts: tuple[Fact, ...] = ()
) -> Iterator[tuple[Function, Held]]:
    """Yield each function in which the value of an expression can be had, with a test of expressions for it."""
    here = Spot(function, "", facts, node)
    yield from _follow(program, [here, *_from_expression(program, function, node, "", facts)])


def _follow(program: Program, begin: list[Spot]) -> Iterator[tuple[Function, Held]]:
    waiting, seen = list(begin), set[tuple[int, str, int, tuple[Fact, ...], int]]()
    while waiting and len(seen) < MAX_PLACES:
        here = waiting.pop(0)
        here = replace(here, facts=tuple(dict.fromkeys(here.facts)))
        key = (id(here.function), here.text, id(here.node), here.facts, here.lines[0])
        if key in seen:
            continue
        seen.add(key)
        yield here.function, Held(here)
        if here.node is None:
            waiting += _next(program, here)


def written(node: ast.AST, open_keys: bool = False) -> str:
    """Return `a.b['c']` for that expression, and an empty text for what is no name with attributes and fixed keys.

    With `open_keys`, `a[x]` is `a[?x]`.
    """
    rest = ""
    while True:
        if isinstance(node, ast.Attribute):
            rest, node = f".{node.attr}{rest}", node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            rest, node = f"[{node.slice.value!r}]{rest}", node.value
        elif isinstance(node, ast.Subscript) and open_keys and not isinstance(node.slice, ast.Slice):
            rest, node = f"[?{dotted(node.slice)}]{rest}", node.value
        else:
            return f"{node.id}{rest}" if isinstance(node, ast.Name) else ""


def _next(program: Program, here: Spot) -> list[Spot]:
    """Return where a value is to be had next: under another name, in other functions, with those that call this one."""
    function, text, held = here.function, here.text, Held(here)
    found: list[Spot] = []
    first = text.partition(".")[0].partition("[")[0]
    owner = function.of_class or (function.owner.of_class if function.owner else None)
    if first == "self" and owner is not None:
        attribute = PART.findall(text)[1][1:]
        methods = [method for one in program.family(owner) for method in one.methods.values()]
        own = tuple(fact for fact in here.facts if fact.subject == KEY or "." in fact.subject)
        found += [Spot(one, text, own) for one in methods if one is not function and attribute in one.attributes]
        found += _of_objects(program, owner, text.removeprefix("self"), here.facts)
    else:
        found += [Spot(other, text, here.facts) for other in _within(function, first)]
    for assigned in function.assignments.values():
        for assignment in assigned:
            found += _assigned(function, assignment, held.rest, "", here.facts, held)
    for statement in function.entries:
        found += _kept(function, statement, held.rest, "", here.facts)
    for leave in function.exits:
        value = leave.node.value if isinstance(leave.node, ast.Return) else None
        for part in _parts(value, held.rest) if value is not None else ():
            facts = (*here.facts, *facts_of(leave.place.guards))
            if not contradict(here.facts, facts):
                for site in _sites(program, function, facts):
                    given = leaving(site, function, facts)
                    found += _from_expression(program, site.function, site.node, part, given)
    for call in function.calls:
        found += _given(program, call, held.rest, here.facts)
    return found


def _sites(program: Program, function: Function, facts: Sequence[Fact]) -> list[Call]:
    """Return the calls of a function that come to a place where facts hold, as far as what they give tells."""
    sites = program.sites.get(id(function), ())
    return [site for site in sites if not facts or not contradict(entering(site, function), facts)]


def _within(function: Function, name: str) -> list[Function]:
    """Return the functions that use a variable of the one in which they are defined, or of their file."""
    if isinstance(function.node, ast.Module):
        inner = [one for one in function.module.functions if one is not function]
    else:
        inner = list(function.inner.values())
    return [one for one in inner if name not in one.assignments and name not in one.parameters]


def _value(assignment: Assignment) -> ast.expr | None:
    return assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)


def _assigned(
    function: Function,
    assignment: Assignment,
    rest_of: Rest,
    part: str,
    facts: tuple[Fact, ...],
    held: Held | None = None,
) -> list[Spot]:
    """Return the variables that an assignment gives a value, or what has it as a part."""
    if isinstance(assignment.node, (ast.For, ast.AsyncFor)):
        return _entries(function, assignment.node, held) if held is not None else []
    value = _value(assignment)
    parts = _parts(value, rest_of) if value is not None else []
    here = (*facts, *facts_of(assignment.place.guards)) if parts else facts
    if not parts or contradict(facts, here):
        return []
    found: list[Spot] = []
    for inner in parts:
        if assignment.value is not None:
            found.append(_held(function, f"{assignment.target}{inner}{part}", here, assignment))
            continue
        for target in getattr(assignment.node, "targets", ()):
            if isinstance(target, (ast.Tuple, ast.List)):
                found += _unpacked(function, target, inner + part, here, assignment)
    return found


def _entries(function: Function, loop: ast.For | ast.AsyncFor, held: Held) -> list[Spot]:
    """Return the variable of a loop over a dict or a list whose entries are the value: `for loader in loaders`."""
    text, over, target = held.spot.text, loop.iter, loop.target
    while isinstance(over, ast.Call) and (over.args or dotted(over.func).endswith((".items", ".values"))):
        values = isinstance(over.func, ast.Attribute) and over.func.attr in ("items", "values") and not over.args
        over = over.func.value if values and isinstance(over.func, ast.Attribute) else over.args[0]
        if isinstance(target, (ast.Tuple, ast.List)) and target.elts:
            target = target.elts[-1]
    container = text.rpartition("[")[0] if text.endswith("]") else ""
    if not container or written(over) != container or not isinstance(target, ast.Name):
        return []
    return [Spot(function, target.id, held.spot.facts, None, (loop.lineno, (loop.end_lineno or END) + 1))]


def _unpacked(
    function: Function, target: ast.Tuple | ast.List, part: str, facts: tuple[Fact, ...], assignment: Assignment
) -> list[Spot]:
    for number, one in enumerate(target.elts):
        mine = f"[{number}/{len(target.elts)}]"
        if part.startswith(mine) and isinstance(one, (ast.Tuple, ast.List)):
            return _unpacked(function, one, part.removeprefix(mine), facts, assignment)
        if part.startswith(mine) and written(one):
            return [_held(function, written(one) + part.removeprefix(mine), facts, assignment)]
    return []


def _kept(function: Function, statement: ast.Assign, rest_of: Rest, part: str, facts: tuple[Fact, ...]) -> list[Spot]:
    """Return the entries that an assignment gives a value, `loaders["val"] = ...` or `loaders[split] = ...`."""
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript) or not written(target.value):
        return []
    if isinstance(target.slice, ast.Constant):
        place = written(target)
    else:
        place, facts = f"{written(target.value)}{KEY}", about_key(facts, dotted(target.slice))
    return [_held(function, f"{place}{inner}{part}", facts) for inner in _parts(statement.value, rest_of)]


def _held(function: Function, text: str, facts: tuple[Fact, ...] = (), by: Assignment | None = None) -> Spot:
    return Spot(function, SIZE.sub("]", text), facts, None, _lines(function, by) if by is not None else (0, END))


def _lines(function: Function, by: Assignment) -> tuple[int, int]:
    """Return the lines between which a variable has the value of an assignment: until it surely has another one."""
    begin = by.place.loops[0].lineno if by.place.loops else by.node.lineno
    if by.target.startswith("self.") or isinstance(by.node, ast.AugAssign):
        return begin if "." not in by.target else 0, END
    ends = [
        (other.node.end_lineno or other.node.lineno) + 1
        for other in function.assignments.get(by.target, ())
        if other.order > by.order
        and other.place.guards == by.place.guards[: len(other.place.guards)]
        and other.place.loops == by.place.loops[: len(other.place.loops)]
        and not isinstance(other.node, ast.AugAssign)
    ]
    return begin, min(ends, default=END)


def _parts(value: ast.expr, rest_of: Rest) -> list[str]:
    """Return which parts of a value something is: '' for all of it, `[1]`, `['val']`; nothing where it is none."""
    if (whole := rest_of(value)) is not None:
        return [whole]
    if isinstance(value, ast.IfExp):
        return [*_parts(value.body, rest_of), *_parts(value.orelse, rest_of)]
    if isinstance(value, (ast.Tuple, ast.List)):
        size = len(value.elts)  # what is unpacked has as many
        return [f"[{number}/{size}]{rest}" for number, one in enumerate(value.elts) for rest in _parts(one, rest_of)]
    if isinstance(value, ast.Dict):
        pairs = [(k.value, v) for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)]
        return [f"[{key!r}]{rest}" for key, one in pairs for rest in _parts(one, rest_of)]
    if isinstance(value, ast.DictComp):  # of which key is not asked: all that it has is made alike
        return _parts(value.value, rest_of)
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        return _parts(value.elt, rest_of)
    if isinstance(value, ast.Call):
        last = dotted(value.func).rpartition(".")[2]
        inner = [rest for one in value.args for rest in _parts(one, rest_of)]
        if (
            last in PASSES_ON
            or "loader" in last.lower()
            or "prefetch" in last.lower()
            or "infinite" in last.lower()
            or last == "BatchSampler"
        ):
            return inner
        if last == "dict":
            return [f"[{k.arg!r}]{rest}" for k in value.keywords if k.arg for rest in _parts(k.value, rest_of)]
    return []


def _from_expression(
    program: Program, function: Function, node: ast.expr, part: str, facts: tuple[Fact, ...] = (), depth: int = 0
) -> list[Spot]:
    """Return where the value of an expression, or a part of it, goes."""

    def rest_of(one: ast.expr) -> str | None:
        return "" if one is node else None

    found = [Spot(function, "", facts, node)] if not part else []
    for assigned in function.assignments.values():
        for assignment in assigned:
            found += _assigned(function, assignment, rest_of, part, facts)
    for statement in function.entries:
        found += _kept(function, statement, rest_of, part, facts)
    for leave in function.exits:
        value = leave.node.value if isinstance(leave.node, ast.Return) else None
        for inner in _parts(value, rest_of) if value is not None and depth < 4 else ():
            known = (*facts, *facts_of(leave.place.guards))
            for site in _sites(program, function, known):
                given = leaving(site, function, known)
                found += _from_expression(program, site.function, site.node, inner + part, given, depth + 1)
    for call in function.calls if not part else ():
        found += _given(program, call, rest_of, facts, depth)
    return found


def _given(program: Program, call: Call, rest_of: Rest, facts: tuple[Fact, ...] = (), depth: int = 0) -> list[Spot]:
    """Return the parameters of the function that a call gives a value, and the list to which it adds it."""
    given = [*call.node.args, *(word.value for word in call.node.keywords)]
    if all(rest_of(one) is None for one in given):
        return []
    here = (*facts, *facts_of(call.place.guards))
    if contradict(facts, here):
        return []
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) and call.last == "append" else None
    if owner is not None and written(owner):
        return [_held(call.function, f"{written(owner)}{KEY}{rest_of(given[0]) or ''}", here)]
    target = program.called(call)
    if target is None or target is call.function:
        return []
    names = [name for name in target.parameters if name not in ("self", "cls")]
    values = ((name, argument(call, target, name)) for name in names)
    known = entering(call, target, here)
    rests = ((name, rest_of(value)) for name, value in values if value is not None)
    found = [Spot(target, f"{name}{rest}", known) for name, rest in rests if rest is not None]
    if is_generator(target) and depth < 4:  # it gives out the batches of what it is given
        found += _from_expression(program, call.function, call.node, "", facts, depth + 1)
    return found


def _of_objects(program: Program, owner: Class, attribute: str, facts: tuple[Fact, ...]) -> list[Spot]:
    """Return where the attribute of an object goes that a class of these files sets: `Data(args).loader`."""
    made = owner.methods.get("__init__")
    known = tuple(fact for fact in facts if fact.subject == KEY)
    found: list[Spot] = []
    for site in _sites(program, made, facts) if made is not None else ():
        name = next((n for n, a in site.function.assignments.items() if any(one.value is site.node for one in a)), "")
        if name:
            found.append(Spot(site.function, f"{name}{attribute}", (*known, *of_objects(facts))))
        for assigned in site.function.assignments.values():
            for one in assigned:
                value = one.value
                if isinstance(value, ast.Attribute) and value.value is site.node and f".{value.attr}" == attribute:
                    found.append(Spot(site.function, one.target, known))
    return found
