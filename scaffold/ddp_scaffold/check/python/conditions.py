"""What is known where a value has come: conditions on names that hold there, `split == "val"`, and not `training`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .module import Call, Function, Guard, argument, default_of, dotted

KEY = "[*]"  # stands for the key under which something is kept
UNKNOWN = object()
OF_SETTINGS = re.compile(r"(?!self\.)\w+(?:\.\w+)+")


@dataclass(frozen=True)
class Fact:
    """A condition that holds, or does not: `subject == value`, `value in subject`, or `subject` itself.

    Or one of several holds (`any`): then the value is facts of each.
    """

    subject: str
    test: str  # ==, has, in, true, any
    value: object
    holds: bool


def facts_of(guards: Iterable[Guard]) -> tuple[Fact, ...]:
    """Return what conditions say of names, as far as they compare them with constants, and none of which rank it is."""
    facts = (fact for guard in guards for fact in _of_test(guard.test, guard.holds))
    return tuple(fact for fact in facts if "rank" not in fact.subject.lower() or fact.value in (-1, None))


def _of_test(test: ast.expr, holds: bool) -> list[Fact]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _of_test(test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        surely = holds is isinstance(test.op, ast.And)  # all parts of `a and b` hold, none of `not (a or b)`
        parts = [tuple(_of_test(one, holds)) for one in test.values]
        if surely:
            return [fact for part in parts for fact in part]
        return [Fact("", "any", tuple(parts), True)] if all(parts) else []
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_comparison(test.left, test.ops[0], test.comparators[0], holds)
    return [Fact(dotted(test) or ast.unparse(test), "true", True, holds)]


def _of_comparison(left: ast.expr, op: ast.cmpop, right: ast.expr, holds: bool) -> list[Fact]:
    if isinstance(op, (ast.NotEq, ast.IsNot, ast.NotIn)):
        holds = not holds
    if isinstance(op, (ast.In, ast.NotIn)):
        if isinstance(left, ast.Constant) and dotted(right):
            return [Fact(dotted(right), "has", left.value, holds)]
        if isinstance(right, (ast.Tuple, ast.List, ast.Set)) and dotted(left):
            values = tuple(one.value for one in right.elts if isinstance(one, ast.Constant))
            return [Fact(dotted(left), "in", values, holds)] if len(values) == len(right.elts) else []
        return [Fact(ast.unparse(ast.Compare(left, [ast.In()], [right])), "true", True, holds)]
    if isinstance(left, ast.Constant):
        left, right = right, left
    if isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)) and isinstance(right, ast.Constant) and dotted(left):
        return [Fact(dotted(left), "==", right.value, holds)]
    return []  # of sizes


def contradict(first: Iterable[Fact], second: Iterable[Fact]) -> bool:
    """Tell whether two sets of facts cannot hold at the same time."""
    mine, others = list(first), list(second)
    if any(_against(one, other) for one in mine for other in others if one.subject and one.subject == other.subject):
        return True
    several = [(one, others) for one in mine if one.test == "any"] + [
        (one, mine) for one in others if one.test == "any"
    ]
    return any(all(contradict(part, known) for part in one.value) for one, known in several)  # type: ignore[attr-defined]


def _against(one: Fact, other: Fact) -> bool:
    if (one.test, one.value) == (other.test, other.value):
        return one.holds is not other.holds
    for known, asked in ((one, other), (other, one)):
        value = _value(known)
        if value is not UNKNOWN:
            return _answer(asked, value) is not asked.holds
    return False


def _value(fact: Fact) -> object:
    """Return the only value that a name can have."""
    return fact.value if fact.test == "==" and fact.holds else UNKNOWN


def _answer(fact: Fact, value: object) -> bool:
    if fact.test == "==":
        return value == fact.value
    if fact.test == "in":
        return value in fact.value  # type: ignore[operator]  # a tuple
    if fact.test == "has":
        return isinstance(value, str) and isinstance(fact.value, str) and fact.value in value
    return bool(value)


def entering(call: Call, target: Function, facts: Sequence[Fact] = ()) -> tuple[Fact, ...]:
    """Return what is known of the parameters of a function that a call reaches: constants, and what `facts` say."""
    node, found = call.node, list[Fact]()
    unclear = any(word.arg is None for word in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
    for name in target.parameters:
        if name in ("self", "cls") or name in target.assignments:
            continue
        given = argument(call, target, name)
        if given is None and not unclear:
            given = default_of(target, name)
        if isinstance(given, ast.Constant):
            found.append(Fact(name, "==", given.value, True))
        elif given is not None and (written := dotted(given)):
            found += [replace(fact, subject=name) for fact in facts if fact.subject == written]
    return (*found, *of_objects(facts))


def leaving(call: Call, target: Function, facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return what facts of the parameters of a function say of what a call gives it."""
    found = list[Fact]()
    for fact in facts:
        given = argument(call, target, fact.subject) if fact.subject in target.parameters else None
        if given is not None and dotted(given):
            found.append(replace(fact, subject=dotted(given)))
        elif fact.subject == KEY:
            found.append(fact)
    return (*found, *of_objects(facts))


def of_objects(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Return the facts that hold in functions of other objects too: of settings, `args.eval`."""
    return tuple(fact for fact in facts if OF_SETTINGS.fullmatch(fact.subject))


def about_key(facts: Iterable[Fact], written: str) -> tuple[Fact, ...]:
    """Return facts with what they say of a name as said of the key."""
    return tuple(replace(fact, subject=KEY) if fact.subject == written else fact for fact in facts)


def of_key(facts: Iterable[Fact], name: str) -> tuple[Fact, ...]:
    """Return facts with what they say of the key as said of a name."""
    return tuple(replace(fact, subject=name) if fact.subject == KEY else fact for fact in facts)
