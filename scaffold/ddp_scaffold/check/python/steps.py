"""What a step of training is, and which conditions hold at each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from .context import Context, declines
from .effects import without_gradients
from .module import Call, Function, Guard, Place, argument, dotted, is_constant, keyword, names_in
from .program import COMMON
from .ranks import is_off
from .tensors import is_step_of_scaler

CHOICES = re.compile(r"self|(?:.*_)?(?:args?|cfg|config|conf|opts?|hps?|hparams|params|flags|para|[A-Z][A-Z_]+)")
OPTIMIZER = re.compile(r"optim|^opt$|scaler|solver")
# A method of a trainer that makes one step, by its name: the loop that calls it may be anywhere.
STEP = re.compile(
    r"_?(?:train|training|run|optimi[sz]e|update)_?(?:one_)?(?:step|iter|batch|iteration|parameters|minibatch)"
    r"|(?:one_)?(?:step|iter)_(?:train|fn)|process_batch|fit_batch"
)


def goes_back(context: Context, call: Call) -> bool:
    """Tell whether a call is a backward pass, or makes one step: in a helper, a scaler, a method of some class.

    `Context.goes_backward` is true for a call that makes many, too: it loops over a loader.
    """
    if id(call) not in context.backward_steps:
        found = call.last == "backward" or is_step_of_scaler(call) or _goes_back(context, call, frozenset())
        context.backward_steps[id(call)] = found
    return context.backward_steps[id(call)]


def targets(context: Context, call: Call) -> list[Function]:
    """Return the functions that a call may run: the one that is known, or all methods of a name that tells."""
    target = context.program.runs(call)
    if target is not None:
        meant = (*context.program.overrides(call)[:4], target, *_given(call, target))
        return [one for one in meant if one is not call.function]
    last = call.last
    if not isinstance(call.node.func, ast.Attribute) or last in COMMON or not STEP.fullmatch(last):
        return []
    found = [f for f in context.named(call.function.module, last) if f.of_class is not None and f is not call.function]
    return found[:6]


def _given(call: Call, target: Function) -> list[Function]:
    """Return the functions of a function that it gives to one that calls them: `timed(train_step)`."""
    known = call.function.inner
    inner = {node.id: known[node.id] for node in call.node.args if isinstance(node, ast.Name) and node.id in known}
    if not inner:
        return []
    called = {dotted(c.node.func) for c in target.calls}
    names = [name for name in target.parameters if name in called]
    given = [argument(call, target, name) for name in names]
    return [inner[one.id] for one in given if isinstance(one, ast.Name) and one.id in inner]


def step_loops(context: Context, function: Function) -> set[ast.stmt]:
    """Return the loops of a function of which each turn makes a step."""
    back = [c for c in function.calls if c.place.loops and goes_back(context, c)]
    found = {c.place.loops[-1] for c in back}
    parts = {c.place.loops for c in back if len(c.place.loops) > 1}
    if parts:  # the loop around one over the parts of a step, in which the optimizer makes its own
        steps = {c.place.loops for c in function.calls if c.place.loops and is_step_of_optimizer(c)}
        found |= {loops[-2] for loops in parts if loops[:-1] in steps and loops not in steps}
    return found


def makes_step(context: Context, function: Function) -> bool:
    """Tell whether a function is one step by its name, and no loop that is known calls it."""
    if not STEP.fullmatch(function.name) or context.program.sites.get(id(function)):
        return False
    return any(not c.place.loops and goes_back(context, c) for c in function.calls)


def units(context: Context, function: Function) -> list[ast.stmt | None]:
    """Return the loops of which each turn makes a step; None for a function that is one step itself."""
    loops: list[ast.stmt | None] = [*step_loops(context, function)]
    if loops or not any(not c.place.loops and goes_back(context, c) for c in function.calls):
        return loops
    called = any(site.place.loops for site in context.program.sites.get(id(function), ()))
    return [None] if called or STEP.fullmatch(function.name) else []


def _goes_back(context: Context, call: Call, seen: frozenset[int]) -> bool:
    """Tell whether a call runs a backward pass in a function of these files, once: not one that loops over steps."""
    if len(seen) > 3 or without_gradients(call):
        return False
    for target in targets(context, call):
        if id(target) in seen:
            continue
        inner = seen | {id(target)}
        if any(
            all(_of_parts(loop) for loop in c.place.loops)
            and not any(declines(call, target, guard) for guard in c.place.guards)
            and (c.last == "backward" or is_step_of_scaler(c) or _goes_back(context, c, inner))
            for c in target.calls
        ):
            return True
    return False


def _of_parts(loop: ast.stmt) -> bool:
    """Tell whether a loop goes over the parts of one batch, as accumulation does."""
    text = ast.unparse(loop.iter).lower() if isinstance(loop, ast.For) else ""
    return re.search(r"micro|acc|chunk|sub_?batch", text) is not None


def each_step(context: Context, call: Call, loop: ast.stmt | None = None) -> bool:
    """Tell whether a call is made at each step: under no condition, or under those of options and of the rank."""
    return holds_each_step(context, call.function, within(call.place, loop), call.place.loops[-1:])


def holds_each_step(context: Context, function: Function, guards: Sequence[Guard], loops: Sequence[ast.stmt]) -> bool:
    """Tell whether conditions within a loop let each step through."""
    return all(
        (guard.early != "continue" or _skips_steps(function, loops, guard))  # whoever left otherwise makes no more
        if guard.early
        else (is_choice(guard) and not seldom(context, function, guard, of_rank=True))
        or context.ranks.alone(function, [Guard(guard.test, not guard.holds, guard.line)])  # there are several ranks
        or _of_rank_alone(context, function, guard)
        or (
            not seldom(context, function, guard, of_rank=True)
            and (
                holds_always(context, function, guard.test)
                or is_turn(function, guard.test)
                or _is_the_same(function, guard, loops)
            )
        )
        for guard in guards
    )


def _is_the_same(function: Function, guard: Guard, loops: Sequence[ast.stmt]) -> bool:
    """Tell whether a condition asks for what no step changes: `scaler is not None`, `use_amp`."""
    test = guard.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Call) and dotted(test.func) in ("isinstance", "hasattr") and test.args:
        return isinstance(test.args[0], (ast.Name, ast.Attribute))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        if not isinstance(test.comparators[0].value, (str, bool, type(None))):
            return False
        test = test.left
    name = dotted(test)
    if not name or (guard.holds and test is guard.test and is_off(function, name)):
        return False
    given = function.assignments.get(name, ())
    return not any(loop in one.place.loops for loop in loops for one in given)


def _skips_steps(function: Function, loops: Sequence[ast.stmt], guard: Guard) -> bool:
    """Tell whether a turn that is left early is no step: backward, or the optimizer, is behind the same condition."""
    return any(
        (c.last == "backward" or is_step_of_scaler(c) or is_step_of_optimizer(c))
        and c.place.loops[-1:] == tuple(loops)
        and any(g.test is guard.test for g in c.place.guards)
        for c in function.calls
    )


def is_step_of_optimizer(call: Call) -> bool:
    """Tell whether a call is `optimizer.step()`, or the same of a scaler of gradients."""
    return call.last == "step" and OPTIMIZER.search(dotted(call.node.func).rpartition(".")[0].lower()) is not None


def within(place: Place, loop: ast.stmt | None = None) -> list[Guard]:
    """Return the conditions of a place that stand in its innermost loop, or in the one that is given."""
    if loop is None and not place.loops:
        return list(place.guards)
    first = (loop or place.loops[-1]).lineno
    return [guard for guard in place.guards if guard.line >= first]


def _of_rank_alone(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a condition asks for the rank, as `if logger:` where only rank 0 has one, and counts nothing."""
    if context.ranks.guard(function, guard) is None:
        return False
    return isinstance(guard.test, (ast.Name, ast.Attribute)) or not seldom(context, function, guard, of_rank=True)


def is_choice(guard: Guard) -> bool:
    """Tell whether a condition is an option, the same at each step: `args.mask`, `cfg["loss"] in ("l1", "l2")`."""
    test = guard.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Compare) and len(test.comparators) == 1:
        right = test.comparators[0]
        values = right.elts if isinstance(right, (ast.List, ast.Tuple)) else [right]
        if not all(isinstance(v, ast.Constant) and isinstance(v.value, (str, bool, type(None))) for v in values):
            return False
        test = test.left
    return CHOICES.fullmatch(_settings(test).partition(".")[0]) is not None


def _settings(node: ast.expr) -> str:
    """Return the name of the settings that an expression asks: `self.opt` for `self.opt["train"].get("loss")`."""
    while True:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            node = node.func.value
        else:
            return dotted(node)


def literal(loop: ast.stmt) -> bool:
    """Tell whether a loop goes over a few values that are written there: its turns are parts of one step."""
    return isinstance(loop, ast.For) and isinstance(loop.iter, (ast.List, ast.Tuple))


def is_turn(function: Function, test: ast.expr) -> bool:
    """Tell whether a test asks which of a few written turns this is: `for part in [0, 1]: if part == 0`."""
    name = dotted(test.left) if isinstance(test, ast.Compare) else ""
    return bool(name) and any(literal(loop) and dotted(loop.target) == name for loop, _ in function.loops)  # type: ignore[attr-defined]


def seldom(context: Context, function: Function, guard: Guard, of_rank: bool = False) -> bool:
    """Tell whether a condition may not hold at each step: one that counts, or is of logging, a type, the rank."""
    parts = guard.test.values if isinstance(guard.test, ast.BoolOp) else [guard.test]
    rest = [part for part in parts if not (guard.holds and _is_usual(context, function, part))]
    counts = any(
        isinstance(part, (ast.Lt, ast.Gt, ast.LtE, ast.GtE))
        or (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and "rank" not in ast.unparse(part.left))
        for one in rest
        for part in ast.walk(one)
    )
    rest = [part for part in rest if not _asks_for_tensor(part, guard.holds)]
    text = " ".join(ast.unparse(part) for part in rest)
    if "isfinite" in text and text.startswith("not ") is guard.holds:  # a loss that is none
        return True
    words = r"log|print|verbose|debug|every|isinstance|eval|nan|inf|interval|freq|test|profile"
    other = r"" if of_rank else r"|rank|main|master|writer"
    return counts or bool(re.search(words + other, text))


def _is_usual(context: Context, function: Function, test: ast.expr) -> bool:
    """Tell whether a test holds in training as it usually is."""
    return (
        holds_always(context, function, test)
        or _weighs(context, function, test)
        or _is_on_in_training(context, function, test)
    )


def _is_on_in_training(context: Context, function: Function, test: ast.expr) -> bool:
    """Tell whether a test asks for a flag of an object that its method `train()` sets to True."""
    name = dotted(test)
    if not name.startswith("self.") or function.of_class is None or "train" not in function.of_class.methods:
        return False
    given = function.of_class.methods["train"].assignments.get(name, ())
    return bool(given) and all(is_constant(a.value, True) for a in given)


def _weighs(context: Context, function: Function, test: ast.expr) -> bool:
    """Tell whether a test asks whether a part of the loss counts at all: `self.weight > 0`, `args.alpha != 0`."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Gt, ast.NotEq)) and len(test.ops) == 1):
        return False
    if not (is_constant(test.comparators[0], 0) or is_constant(test.comparators[0], 0.0)):
        return False
    name = _settings(test.left)
    owner, _, last = name.rpartition(".")
    if not last or not CHOICES.fullmatch(owner.partition(".")[0]) or re.search(r"step|iter|epoch|count|num|rank", last):
        return False
    default = context.default_of(function.module, test.left)
    if is_constant(default, 0) or is_constant(default, 0.0):
        return False
    places = context.program.assigned(function, name) if owner == "self" else []
    made = function.of_class.methods.get("__init__") if function.of_class is not None else None
    return not places or (made is not None and all(a in made.assignments.get(name, ()) for a in places))


def _asks_for_tensor(test: ast.expr, holds: bool) -> bool:
    """Tell whether a condition is `isinstance(x, torch.Tensor)`, or that something is no number of Python."""
    if not (isinstance(test, ast.Call) and dotted(test.func) == "isinstance" and len(test.args) == 2):
        return False
    return "Tensor" in ast.unparse(test.args[1]) if holds else bool({"float", "int"} & names_in(test.args[1]))


def holds_always(context: Context, function: Function, test: ast.expr) -> bool:
    """Tell whether a test is `step % n == 0` with an n that is 1 unless the user gives another."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    left = test.left
    counted = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and is_constant(test.comparators[0], 0)
    return counted and isinstance(left, ast.BinOp) and _is_one(context, function, left.right)


def _is_one(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a number is 1: written so, set once, or the default of an option of this name."""
    if isinstance(node, ast.Constant):
        return is_constant(node, 1)
    name = dotted(node)
    values = [a.value for a in context.program.assigned(function, name)] if name else []
    if values:
        told = "exec(open(" in function.module.file.text  # a file of settings sets it again
        return not told and all(is_constant(value, 1) for value in values)
    last = name.rpartition(".")[2]
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if not last or not CHOICES.fullmatch(owner):
        return False
    wanted = {f"--{last}", f"--{last.replace('_', '-')}"}
    options = context.calls_in_component(function.module, "add_argument")
    found = [c for c in options if any(isinstance(a, ast.Constant) and a.value in wanted for a in c.node.args)]
    return bool(found) and all(is_constant(keyword(c.node, "default"), 1) for c in found)
