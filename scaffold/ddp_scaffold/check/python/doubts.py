"""What is not decided about a collective that only some ranks seem to reach: it is hygiene then, with the reason.

A finding is a hang only if nothing has to be assumed: the condition is one of the rank, whatever else stands around it
is met sooner or later, every call on the way means one function that is known, and that function reaches the
collective whenever several processes run. In 166 findings that were read in public code, nearly all that were wrong
had such a gap.
"""

from __future__ import annotations

import ast
import re

from .effects import Effect, Effects
from .module import Call, Function, Guard, dotted, names_in, shown
from .ranks import Ranks, Who, is_off

# Objects that hold what a user has chosen.
OPTIONS = re.compile(
    r"(?:.*_)?(?:args?|cfg|conf|config|configs|opts?|options?|hps?|hparams|flags?|params|settings)", re.IGNORECASE
)
FAILS = ("raise", "exit")
COUNTED = re.compile(r"step|iter|epoch|batch|idx|index|count|best|loss|score|acc|metric|\bi\b|\bn\b", re.IGNORECASE)


class Doubts:
    """Answers what a finding about ranks would have to assume; an empty text is nothing."""

    def __init__(self, ranks: Ranks, effects: Effects) -> None:
        self.ranks, self.effects = ranks, effects

    def of(self, call: Call, effect: Effect, guard: Guard, who: Who) -> str:
        """Return the first thing that is not known about an effect of a call under a guard of the rank."""
        return (
            self._of_condition(call.function, guard, who)
            or self._of_others(call, guard)
            or self._of_buffers(call, effect)
            or ("" if effect.sure else effect.doubt or "whether that is reached")
        )

    def _of_condition(self, function: Function, guard: Guard, who: Who) -> str:
        """Return the part of a condition that is no test of the rank and may never be met."""
        parts = guard.test.values if isinstance(guard.test, ast.BoolOp) else [guard.test]
        tests = [part for part in parts if self.ranks.who(function, part) is not None]
        if who == "some" and not (len(parts) == 1 and self._numbered(function, guard.test)):
            return f"on which ranks `{shown(guard.test, 40)}` holds"
        if any(is_choice(function, part) for part in tests):
            return f"what a caller gives for `{shown(guard.test, 40)}`"
        rest = [part for part in parts if part not in tests and not self._asks_for_several(function, part, guard.holds)]
        return next((f"whether `{shown(part, 40)}` ever holds" for part in rest if is_open(function, part)), "")

    def _numbered(self, function: Function, test: ast.expr) -> bool:
        """Tell whether a test compares the rank with a number."""
        return (
            isinstance(test, ast.Compare)
            and isinstance(test.comparators[0], ast.Constant)
            and self.ranks.is_rank(function, test.left)
        )

    def _asks_for_several(self, function: Function, test: ast.expr, holds: bool) -> bool:
        return self.ranks.alone(function, [Guard(test, not holds, test.lineno)])

    def _of_buffers(self, call: Call, effect: Effect) -> str:
        """Return a forward pass of a model of which it is not known whether DDP broadcasts buffers for it."""
        unknown = effect.kind == "forward" and not self.effects.is_read(call.function, effect.name)
        return f"whether the model in `{effect.name}` has buffers" if unknown else ""

    def of_place(self, call: Call) -> str:
        """Return a condition around a call that may never be met."""
        for guard in call.place.guards:
            if not self._asks_for_several(call.function, guard.test, guard.holds) and is_open(
                call.function, guard.test
            ):
                return f"whether `{shown(guard.test, 40)}` ever {'holds' if guard.holds else 'fails'}"
        return ""

    def _of_others(self, call: Call, guard: Guard) -> str:
        """Return a condition around a call, other than the one of the rank, that may never be met."""
        for other in call.place.guards:
            if other is guard or self._asks_for_several(call.function, other.test, other.holds):
                continue
            if other.early in FAILS:  # who is still here has not failed
                continue
            if other.test is not guard.test and self.ranks.guard(call.function, other) is None:
                parts = other.test.values if isinstance(other.test, ast.BoolOp) else [other.test]
                if any(is_open(call.function, part) for part in parts):
                    return f"whether `{shown(other.test, 40)}` ever {'holds' if other.holds else 'fails'}"
        return ""


def is_choice(function: Function, test: ast.expr) -> bool:
    """Tell whether a test is a parameter that has a default, so that a caller chooses which ranks pass."""
    while isinstance(test, ast.UnaryOp):
        test = test.operand
    name = dotted(test)
    return bool(name) and name in function.parameters and (is_off(function, name) or _has_default(function, name))


def _has_default(function: Function, name: str) -> bool:
    if isinstance(function.node, ast.Module):
        return False
    given = function.node.args
    ordered = [*given.posonlyargs, *given.args]
    with_default = ordered[len(ordered) - len(given.defaults) :]
    with_default += [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    return any(one.arg == name for one in with_default)


def is_open(function: Function, test: ast.expr) -> bool:
    """Tell whether a condition may never be met: an option, a parameter, what is there or not.

    What is counted (`step % 100 == 0`) or compared with a measured number is met sooner or later.
    """
    if isinstance(test, ast.Compare):
        if any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) for part in ast.walk(test)):
            return False
        if any(isinstance(part, ast.Constant) and part.value is None for part in test.comparators):
            return True
        if any(isinstance(op, (ast.In, ast.NotIn)) for op in test.ops):
            return True
        left = dotted(test.left) or ast.unparse(test.left)
        return not COUNTED.search(left.rpartition(".")[2])
    if isinstance(test, ast.UnaryOp):
        return is_open(function, test.operand)
    if isinstance(test, ast.BoolOp):
        return any(is_open(function, value) for value in test.values)
    if isinstance(test, ast.Constant):
        return not test.value
    if isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod):
        return False
    name = dotted(test)
    if not name or name in function.parameters or OPTIONS.fullmatch(name.partition(".")[0]) or "." in name:
        return True
    values = [a.value for a in function.assignments.get(name, ())]
    return not values or any(
        value is None or isinstance(value, ast.Constant) or _mentions_options(value) for value in values
    )


def _mentions_options(value: ast.expr) -> bool:
    return any(OPTIONS.fullmatch(name) for name in names_in(value))
