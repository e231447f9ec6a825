"""Rules for ranks that leave alone a loop in which the ranks work together: by the rank, a clock, their own data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .context import Context, Found
from .module import (
    Assignment,
    Call,
    Exit,
    Function,
    Guard,
    Place,
    arguments_of,
    dotted,
    is_constant,
    last_of,
    names_in,
    shown,
)
from .ranks import Who
from .steps import goes_back

CLOCKS = {"time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now", "datetime.now"}
SAME_DATA = {
    "to",
    "cuda",
    "float",
    "long",
    "bool",
    "int",
    "half",
    "any",
    "all",
    "sum",
    "flatten",
    "view",
    "item",
    "detach",
}
FINITE = {"isnan", "isinf", "isfinite"}


def exits(context: Context, function: Function) -> Iterator[Found]:
    """Yield exits that some ranks take out of a loop in which the ranks work together."""
    for leave in function.exits:
        if leave.kind not in ("break", "return", "exit") or not leave.place.loops or not leave.place.guards:
            continue
        if any("Error" in name or name == "NotImplemented" for name in names_in(leave.node)):
            continue  # it is meant to fail
        loop = leave.place.loops[-1] if leave.kind == "break" else leave.place.loops[0]
        found = _partial_exit(context, function, leave, loop)
        if found is None or not context.together(function, loop):
            continue
        guard, who = found
        if any(_never_set(context, function, inner) for inner in leave.place.guards):
            continue
        ranks = context.ranks.words(guard, who)
        message = (
            f"{ranks} leaves the loop of line {function.module.position(loop.lineno)[1]} here;"
            " the others go on in it, and wait in its next collective until the timeout"
        )
        fix = (
            f"decide it on one rank, give the decision to all (`torch.distributed.broadcast`), and {leave.kind} on all,"
            f" outside of `if {shown(guard.test, 40)}`"
        )
        yield Found("DDP104", function.module, leave.node, message, fix)


def _never_set(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a condition is an attribute that is False wherever these files set it."""
    if not (guard.holds and isinstance(guard.test, ast.Attribute)):
        return False
    last = guard.test.attr
    values = [
        a.value
        for module in context.in_component(function.module)
        for other in module.functions
        for name, assigned in other.assignments.items()
        if name.rpartition(".")[2] == last and "." in name
        for a in assigned
    ]
    return bool(values) and all(is_constant(value, False) for value in values)


def _partial_exit(context: Context, function: Function, leave: Exit, loop: ast.stmt) -> tuple[Guard, Who] | None:
    if context.ranks.alone(function, leave.place.guards):
        return None
    for position, guard in enumerate(leave.place.guards):
        who = context.ranks.guard(function, guard)
        if who is None or guard.line < loop.lineno:  # who has left before the loop is not in it
            continue
        opposite = any(
            other.kind == leave.kind
            and len(other.place.guards) > position
            and other.place.guards[position].test is guard.test
            and other.place.guards[position].holds != guard.holds
            for other in function.exits
        )
        return None if opposite else (guard, who)
    return None


def flags(context: Context, function: Function) -> Iterator[Found]:
    """Yield loops that are left by a value that is set on some ranks only, and which no collective has shared."""
    for test, place, order in function.tests:
        leaves = [e for e in function.exits if e.node in test.body and e.kind in ("break", "return")]
        if not leaves or not place.loops or context.ranks.partial_place(function, place):
            continue
        found = _set_on_some(context, function, test.test, order)
        if found is None or found.name in function.parameters:
            continue
        given = any(found.name in names_in(argument) for c in function.calls for argument in arguments_of(c.node))
        if given or not context.together(function, place.loops[-1]):
            continue
        ranks = context.ranks.words(found.guard, found.who)
        where = f"line {found.function.module.position(found.node.lineno)[1]}"
        if found.function.module is not function.module:
            where = f"{found.function.module.file.path} {where}"
        message = (
            f"{ranks} sets `{found.name}` ({where}), so only there the loop ends; the others wait in the next step"
        )
        fix = f"share `{found.name}` before this test: broadcast it from rank 0 to all ranks"
        yield Found("DDP104", function.module, leaves[0].node, message, fix)


@dataclass(frozen=True)
class _Set:
    """Where a value is set on some ranks: a variable, an attribute, or what a function returns."""

    function: Function
    name: str
    node: ast.stmt
    guard: Guard
    who: Who


def _set_on_some(
    context: Context, function: Function, node: ast.expr, order: int | None, depth: int = 0
) -> _Set | None:
    """Return what a condition has in it that is set on some ranks only, by a function or an attribute as well."""
    if depth > 4:
        return None
    if isinstance(node, ast.UnaryOp):
        return _set_on_some(context, function, node.operand, order, depth + 1)
    if isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp)):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        found = (_set_on_some(context, function, part, order, depth + 1) for part in parts)
        return next((one for one in found if one is not None), None)
    if isinstance(node, ast.Call):
        call = next((c for c in function.calls if c.node is node), None)
        target = context.program.called(call) if call is not None else None
        return _returned_on_some(context, target, depth) if target is not None else None
    return _name_on_some(context, function, dotted(node), order, depth) if dotted(node) else None


def _returned_on_some(context: Context, target: Function, depth: int) -> _Set | None:
    """Return what makes a function's answer one of some ranks, where no collective is called in it."""
    if any(effect.kind != "forward" for c in target.calls for effect in context.effects.of(c)):
        return None
    for leave in target.exits:
        value = leave.node.value if isinstance(leave.node, ast.Return) else None
        if value is not None and not context.ranks.partial_place(target, leave.place):
            found = _set_on_some(context, target, value, leave.order, depth + 1)
            if found is not None:
                return found
    return None


def _name_on_some(context: Context, function: Function, name: str, order: int | None, depth: int) -> _Set | None:
    """Return where a variable or an attribute is set on some ranks, if all its other values are constants."""
    mine = function.assignments.get(name, [])
    values = [(function, a) for a in mine]
    if name.startswith("self.") and name.count(".") == 1:
        owners = context.program.with_bases(function)
        values = [(m, a) for owner in owners for m in owner.methods.values() for a in m.assignments.get(name, ())]
        order = None
        if any(name[5:] in names_in(c.node) for m, _ in values for c in m.calls if _shares(context, c)):
            return None
    set_by = [
        _Set(where, name, a.node, guard, who)
        for where, a in values
        for guard in a.place.guards
        if (who := context.ranks.guard(where, guard)) is not None and (order is None or a.order < order)
    ]
    free = [a for _, a in values if all(a.node is not one.node for one in set_by)]
    if not set_by and len(mine) == 1 and mine[0].value is not None and isinstance(mine[0].value, ast.Call):
        shared = any(name in names_in(c.node) for c in function.calls if _shares(context, c))
        return None if shared else _set_on_some(context, function, mine[0].value, order, depth + 1)
    constant = all(isinstance(a.value, ast.Constant) for a in free)
    return set_by[0] if set_by and free and constant and len({one.who for one in set_by}) == 1 else None


def _shares(context: Context, call: Call) -> bool:
    return any(effect.kind != "forward" for effect in context.effects.of(call))


def decisions(context: Context, function: Function) -> Iterator[Found]:
    """Yield tests of a rank's own data, clock or files that skip or end a step of all ranks."""
    if id(function.module) not in context.distributed:
        return
    for test, place, order in function.tests:
        leaves = _leaves_of(function, test)
        if leaves is None or not place.loops or context.ranks.alone(function, place.guards) or _is_joined(place):
            continue
        if any(context.ranks.guard(function, guard) or _asks_for_key(guard.test) for guard in place.guards):
            continue
        loop = place.loops[-1] if leaves.kind in ("break", "continue") else place.loops[0]
        if not context.together(function, loop):
            continue
        if context.agreed(function, names_in(test.test), (place, order)):
            continue
        found = _unreduced(context, function, test.test, loop, leaves, order) or _clock(function, test.test, leaves)
        found = found or _file(function, test.test, leaves)
        if found is not None:
            rule, reason = found
            until = " until the launcher ends them (srun does not by default)" if leaves.kind == "exit" else ""
            message = (
                f"{reason}; that rank leaves the step alone, and the others wait for it in the next collective{until}"
            )
            fix = f"reduce the decision `{shown(test.test, 40)}` over all ranks (`all_reduce` with MAX) before the `if`"
            yield Found(rule, function.module, test, message, fix)


def skipped_backward(context: Context, function: Function) -> Iterator[Found]:
    """Yield `if not isnan(loss): loss.backward()`: a rank whose loss is not finite leaves the reductions out."""
    if id(function.module) not in context.distributed:
        return
    for test, place, order in function.tests:
        finite = [n for n in ast.walk(test.test) if isinstance(n, ast.Call) and last_of(n) in FINITE]
        if not finite or not place.loops or context.agreed(function, names_in(test.test), (place, order)):
            continue
        if _is_joined(place):
            continue
        if any("grad" in name or "norm" in name for name in names_in(test.test)):
            continue
        backward = [c for c in function.calls if goes_back(context, c) and c.place.loops[-1:] == place.loops[-1:]]
        within = [c for c in backward if any(g.test is test.test and not g.early for g in c.place.guards)]
        if not within or len(within) < len(backward) or context.ranks.alone(function, place.guards):
            continue
        sides = {g.holds for c in within for g in c.place.guards if g.test is test.test}
        if len(sides) > 1 or any(context.ranks.guard(function, guard) for guard in place.guards):
            continue
        message = (
            f"`{shown(test.test, 40)}` looks at the loss of one rank; a rank whose loss is not finite does not go"
            " backward, and the others wait for it in the reduction of the gradients"
        )
        fix = f"reduce the decision `{shown(test.test, 40)}` over all ranks (`all_reduce` with MAX) before the `if`"
        yield Found("DDP105", function.module, test, message, fix)


def missing_loss(context: Context, function: Function) -> Iterator[Found]:
    """Yield `if loss is not None: loss.backward()`, where a function returns None for some batches."""
    if id(function.module) not in context.distributed:
        return
    for test, place, order in function.tests:
        name = _not_none(test.test)
        before = [a.value for a in function.assignments.get(name, ()) if a.order < order]
        loss = before[-1] if before else None
        call = next((c for c in function.calls if c.node is loss), None) if name else None
        target = context.program.called(call) if call is not None else None
        if (
            target is None
            or _is_joined(place)
            or not any(
                name in names_in(c.node) and goes_back(context, c) and any(g.test is test.test for g in c.place.guards)
                for c in function.calls
            )
        ):
            continue
        line = _none_for_some(context, target)
        if line is None or any(context.ranks.guard(function, guard) for guard in place.guards):
            continue
        message = (
            f"`{target.name}` returns None for some batches (line {line} there): a rank with such a batch does not go"
            f" backward from `{name}`, and the others wait for it in the reduction of the gradients"
        )
        fix = f"agree on it over all ranks (`all_reduce` with MAX) before the `if`, or go backward from `0 * {name}`"
        yield Found("DDP105", function.module, test, message, fix)


def _is_joined(place: Place) -> bool:
    """Tell whether ranks may make unequal numbers of steps: `with model.join():` lets the others go on without one."""
    return any(isinstance(one, ast.Call) and last_of(one) in ("join", "Join") for one in place.withs)


def _not_none(test: ast.expr) -> str:
    """Return `loss` of `loss is not None`."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and is_constant(test.comparators[0], None):
        return test.left.id if isinstance(test.left, ast.Name) else ""
    return ""


def _none_for_some(context: Context, function: Function) -> int | None:
    """Return the line in which a function settles for None, under a test of what it has computed from a batch."""
    nothing: list[tuple[ast.stmt, Place]] = []
    for leave in function.exits:
        value = leave.node.value if isinstance(leave.node, ast.Return) else None
        if is_constant(value, None):
            nothing.append((leave.node, leave.place))
        elif value is not None:
            set_to = function.assignments.get(dotted(value), ())
            nothing += [(a.node, a.place) for a in set_to if is_constant(a.value, None)]
    for node, place in nothing:
        for guard in place.guards:
            parts = {part.id for part in ast.walk(guard.test) if isinstance(part, ast.Name)} - set(function.parameters)
            values = [a.value for part in parts for a in function.assignments.get(part, ())]
            computed = any(isinstance(value, ast.Call) and last_of(value) not in ("get", "getattr") for value in values)
            if computed and context.ranks.guard(function, guard) is None:
                return function.module.position(node.lineno)[1]
    return None


def _asks_for_key(test: ast.expr) -> bool:
    """Tell whether a test asks for a key in the batch: that may be one of another set, which is not trained on."""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.In)
        and isinstance(test.left, ast.Constant)
        and isinstance(test.left.value, str)
    )


def _leaves_of(function: Function, test: ast.If) -> Exit | None:
    last = test.body[-1]
    return next((e for e in function.exits if e.node is last and e.kind != "raise"), None)


def _unreduced(
    context: Context, function: Function, test: ast.expr, loop: ast.stmt, leaves: Exit, order: int
) -> tuple[str, str] | None:
    """Return why a test depends on this rank's batch, if it does."""
    backward = [c.order for c in function.calls if loop in c.place.loops and goes_back(context, c)]
    if not backward or _same_everywhere(test):
        return None
    finite = [n for n in ast.walk(test) if isinstance(n, ast.Call) and last_of(n) in FINITE]
    if finite and not any("grad" in name or "norm" in name for name in names_in(test)):
        names = names_in(test)
        made = [a.value for n in names for a in function.assignments.get(n, ()) if a.value is not None]
        if not any("clip_grad" in ast.unparse(value) for value in made):
            return "DDP105", f"`{shown(test, 40)}` looks at the loss of one rank"
    if leaves.kind not in ("continue", "break") or not isinstance(loop, (ast.For, ast.AsyncFor)):
        return None
    if _bounds_loss(context, function, test, loop, order):
        return "DDP105", f"`{shown(test, 40)}` looks at the loss of one rank"
    if min(backward) < order or not (_of_batch(function, loop) & names_in(test)):
        return None
    return "DDP105", f"`{shown(test, 40)}` looks at the batch of one rank"


def _bounds_loss(context: Context, function: Function, test: ast.expr, loop: ast.stmt, order: int) -> bool:
    """Tell whether a test holds a loss, of which a backward pass follows, against a bound: `loss > 100`."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq)):
        return False
    left = test.left.func.value if isinstance(test.left, ast.Call) and last_of(test.left) == "item" else test.left  # type: ignore[attr-defined]
    name = dotted(left)
    return bool(name) and any(
        c.order > order and loop in c.place.loops and goes_back(context, c) and _goes_back_from(c, name)
        for c in function.calls
    )


def _goes_back_from(call: Call, name: str) -> bool:
    """Tell whether a call is the backward pass of a variable: `loss.backward()`, `scaler.scale(loss).backward()`.

    A helper that goes backward is given more than a loss: there the name has to tell.
    """
    if call.last != "backward" and "loss" not in name.lower():
        return False
    return name in {dotted(part) for part in ast.walk(call.node) if isinstance(part, (ast.Name, ast.Attribute))}


def _same_everywhere(test: ast.expr) -> bool:
    """Tell whether a test asks for types, keys or sizes of a batch, which are the same on all ranks."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and last_of(node) in ("isinstance", "hasattr", "callable", "issubclass"):
            return True
        if isinstance(node, ast.Compare):
            right = node.comparators[0]
            below = isinstance(node.ops[0], (ast.Lt, ast.GtE))  # less than one is none
            zero = isinstance(right, ast.Constant) and (right.value in (0, None) or (below and right.value == 1))
            sized = {"shape", "size", "len", "batch_size"} & names_in(node)
            if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops) or (sized and not zero):
                return True
    return False


def _of_batch(function: Function, loop: ast.For | ast.AsyncFor) -> set[str]:
    """Return the names that hold this rank's batch in a loop over a loader; the index of enumerate is none."""
    source = loop.iter
    target: ast.expr = loop.target
    if isinstance(source, ast.Call) and last_of(source) in ("enumerate", "log_every") and source.args:
        target = target.elts[-1] if isinstance(target, ast.Tuple) else target
    if not any(word in ast.unparse(source).lower() for word in ("loader", "dataset", "batches")):
        return set()
    found = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    made = [a for assigned in function.assignments.values() for a in assigned if loop in a.place.loops]
    for assignment in sorted(made, key=lambda one: one.order):
        value = assignment.value
        if value is None:
            if _counts(assignment, loop, found):
                found.add(assignment.target)
        elif found & names_in(value) and _is_content(value, found):
            found.add(assignment.target)
    return found


def _is_content(value: ast.expr, batch: set[str]) -> bool:
    """Tell whether a value is made of what is in a batch, and not of its size: `x > 0`, `x.to(device)`, `any(...)`."""
    if isinstance(value, ast.Call):
        last = last_of(value)
        if last in ("any", "all", "sum") and isinstance(value.func, ast.Name) and value.args:
            inner = value.args[0]
            return isinstance(inner, (ast.GeneratorExp, ast.ListComp)) and isinstance(inner.elt, ast.Compare)
        owner = value.func.value if isinstance(value.func, ast.Attribute) else None
        return owner is not None and last in SAME_DATA and bool(batch & names_in(owner)) and _is_content(owner, batch)
    return not {"shape", "size", "len"} & names_in(value)


def _counts(assignment: Assignment, loop: ast.stmt, batch: set[str]) -> bool:
    """Tell whether a statement counts the parts of a batch that meet a condition: `valid += 1` in a loop over it."""
    inner = [one for one in assignment.place.loops if one is not loop and isinstance(one, ast.For)]
    over = [one for one in inner if batch & names_in(one.iter)]
    given = {part.id for one in over for part in ast.walk(one.target) if isinstance(part, ast.Name)}
    asked = any(given & names_in(guard.test) for guard in assignment.place.guards)
    return isinstance(assignment.node, ast.AugAssign) and asked


def _clock(function: Function, test: ast.expr, leaves: Exit) -> tuple[str, str] | None:
    names = [part.id for part in ast.walk(test) if isinstance(part, ast.Name)]
    made = [a.value for n in names for a in function.assignments.get(n, ()) if a.value is not None]
    reads = [node for node in (test, *made) if any(c in ast.unparse(node) for c in CLOCKS)]
    looks = isinstance(test, (ast.Compare, ast.BoolOp)) and reads and leaves.kind != "continue"
    return ("DDP107", f"`{shown(test, 40)}` reads the clock of each rank, and no two read the same") if looks else None


def _file(function: Function, test: ast.expr, leaves: Exit) -> tuple[str, str] | None:
    exists = any(isinstance(n, ast.Call) and last_of(n) in ("exists", "isfile", "is_file") for n in ast.walk(test))
    if not exists or leaves.kind == "continue":
        return None
    return "DDP108", f"`{shown(test, 40)}` looks at the file system, where ranks see a new file at different times"


def clocked_loops(context: Context, function: Function) -> Iterator[Found]:
    """Yield `while time.time() < end:` around steps of all ranks."""
    for loop, _ in function.loops:
        if not (isinstance(loop, ast.While) and any(clock in ast.unparse(loop.test) for clock in CLOCKS)):
            continue
        if not context.run_by_ranks(function):
            continue
        steps = [c for c in function.calls if loop in c.place.loops and context.ranks.partial(c) is None]
        meets = any(goes_back(context, c) or any(e.kind != "forward" for e in context.effects.of(c)) for c in steps)
        if id(function.module) in context.distributed and meets:
            message = (
                f"`{shown(loop.test, 40)}` reads the clock of each rank: one does a step more than another,"
                " and waits in it for the ranks that have left"
            )
            fix = "let rank 0 read the clock and broadcast its decision at each turn, or count steps"
            yield Found("DDP107", function.module, loop, message, fix)


RULES = (exits, flags, clocked_loops)
OF_RANKS = (decisions, skipped_backward, missing_loss)  # only where several ranks run the file
