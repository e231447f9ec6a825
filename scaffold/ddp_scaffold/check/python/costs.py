"""Rules for what costs time or does nothing, and for what a reader should know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .context import Context, Found, carries, is_of_gradient
from .devices import INIT
from .effects import without_gradients
from .module import (
    Assignment,
    Call,
    Function,
    Guard,
    Place,
    argument,
    arguments_of,
    dotted,
    is_constant,
    keyword,
    last_of,
    names_in,
    shown,
)
from .ranks import is_off

SYNCHRONIZES = {"torch.cuda.synchronize"}
WAITS = {*SYNCHRONIZES, "torch.cuda.empty_cache"}
FINITE = {"torch.isnan", "torch.isinf", "torch.isfinite"}
CHOICES = re.compile(r"self|(?:.*_)?(?:args?|cfg|config|conf|opts?|hps?|hparams|params|flags|para|[A-Z][A-Z_]+)")
BARRIER = "torch.distributed.barrier"
WRAPS = re.compile("DistributedDataParallel|DDP")
UNSYNCHRONIZED = re.compile(r"no_sync|require_backward_grad_sync")
OPTIMIZER = re.compile(r"optim|^opt$|scaler|solver")
SHOWS = {"print", "format", "info", "set_description", "set_postfix_str"}
LOGGED = {"torch.distributed.all_reduce", "torch.distributed.reduce"}
REDUCES = {f"torch.distributed.{name}" for name in ("all_reduce", "reduce", "all_gather", "broadcast", "gather")}
READ_AT_INIT = ("TORCH_NCCL_", "NCCL_", "TORCH_FR_", "GLOO_", "TORCH_DISTRIBUTED_DEBUG")


def per_step(context: Context, function: Function) -> Iterator[Found]:
    """Yield what makes the CPU wait for the GPU at each step: item() of the loss, here or in a helper; a barrier."""
    if not context.plain(function.module) or (
        isinstance(function.node, ast.Module) and not context.run_by_ranks(function)
    ):
        return
    seen: set[ast.stmt] = set()
    steps = {
        c.place.loops[-1]
        for c in function.calls
        if c.place.loops and (c.last == "backward" or _goes_back(context, c, frozenset()))
    }
    for call in function.calls:
        if not call.place.loops or call.place.loops[-1] not in steps or not _each_step(context, call):
            continue
        loop = call.place.loops[-1]
        if loop not in seen and (found := _first_read(context, function, loop)) is not None:
            seen.add(loop)
            read, ranks = found.call, "on rank 0, for which the others wait" if found.first else "on every rank"
            message = f"`{shown(read.node, 40)}` makes the CPU wait for the GPU at every step, {ranks}"
            tensor = re.sub(r"\.(?:item|cpu|tolist|detach|numpy)(?:\(\))?", "", shown(read.node.func, 40))
            tensor = shown(read.node.args[0], 40) if read.name == "float" else tensor
            tensor = "loss" if read.last in SHOWS else tensor
            fix = f"add `{tensor}.detach()` up on the GPU, and read it every n steps"
            yield Found("DDP401", read.function.module, read.node, message, fix)
        elif call.name in WAITS:
            what = (
                "waits until the GPU has done everything" if call.name in SYNCHRONIZES else "gives memory back to CUDA"
            )
            first = any(context.ranks.guard(function, guard) == "first" for guard in within(call.place))
            ranks = "on rank 0, for which the others wait" if first else "on every rank"
            message = f"`{shown(call.node)}` {what}, at every step, {ranks}: the CPU cannot run ahead"
            yield Found("DDP413", function.module, call.node, message, f"delete `{shown(call.node)}`")
        elif not within(call.place) and context.says(function.module, WRAPS) and _waits_for_all(context, call):
            message = "a barrier at every step makes all ranks wait for the slowest; backward already synchronises them"
            yield Found("DDP406", function.module, call.node, message, f"delete `{shown(call.node)}`")


def _waits_for_all(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call is a barrier, or comes to one in a helper that does not train."""
    if call.name == BARRIER:
        return True
    target = context.program.called(call)
    if target is None or depth > 2 or target is call.function:
        return False
    return any(
        _waits_for_all(context, c, depth + 1)
        and not c.place.loops
        and all(context.ranks.alone(target, [Guard(g.test, not g.holds, g.line)]) for g in c.place.guards)
        for c in target.calls
    )


def _first_read(context: Context, function: Function, loop: ast.stmt) -> Read | None:
    """Return the first call by which each step of a loop reads from the GPU: on every rank, else on rank 0."""
    found: list[Read] = []
    for call in function.calls:
        if _reads_one_of_losses(call, loop):
            found.append(Read(call, False))
        if call.place.loops[-1:] != (loop,) or not _each_step(context, call):
            continue
        if (read := _read_of_loss(context, call, frozenset(), 0)) is not None:
            of_rank = any(context.ranks.guard(function, guard) == "first" for guard in within(call.place))
            found.append(Read(read.call, read.first or of_rank))
    return next((read for read in found if not read.first), found[0] if found else None)


def _reads_one_of_losses(call: Call, loop: ast.stmt) -> bool:
    """Tell whether a call is `value.item()` in `for name, value in losses.items()`, at each turn of a loop."""
    inner = call.place.loops[-1] if call.place.loops[-2:-1] == (loop,) else None
    if not isinstance(inner, ast.For) or any(guard.line >= loop.lineno for guard in call.place.guards):
        return False
    over = inner.iter.func if isinstance(inner.iter, ast.Call) else None
    if not isinstance(over, ast.Attribute) or over.attr not in ("items", "values"):
        return False
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) and call.last == "item" else None
    of_loop = isinstance(owner, ast.Name) and owner.id in names_in(inner.target)
    return of_loop and re.search(r"loss", dotted(over.value), re.IGNORECASE) is not None


def _each_step(context: Context, call: Call) -> bool:
    """Tell whether a call is made at each step: under no condition, or under those of options and of the rank."""
    return all(
        (guard.early != "continue" or _skips_steps(call, guard))  # whoever left otherwise makes no more steps
        if guard.early
        else (_is_choice(guard) and not _seldom(context, call.function, guard, of_rank=True))
        or _of_rank_alone(context, call.function, guard)
        or (
            not _seldom(context, call.function, guard, of_rank=True)
            and (holds_always(context, call.function, guard.test) or _is_turn(call.function, guard.test))
        )
        for guard in within(call.place)
    )


def _skips_steps(call: Call, guard: Guard) -> bool:
    """Tell whether a turn that is left early is no step: backward stands behind the same condition."""
    return any(
        c.last == "backward"
        and c.place.loops[-1:] == call.place.loops[-1:]
        and any(g.test is guard.test for g in c.place.guards)
        for c in call.function.calls
    )


def _of_rank_alone(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a condition asks for the rank, as `if logger:` where only rank 0 has one, and counts nothing."""
    if context.ranks.guard(function, guard) is None:
        return False
    return isinstance(guard.test, (ast.Name, ast.Attribute)) or not _seldom(context, function, guard, of_rank=True)


def within(place: Place) -> list[Guard]:
    """Return the conditions of a place that stand in its innermost loop."""
    return [guard for guard in place.guards if guard.line >= place.loops[-1].lineno]


def _is_choice(guard: Guard) -> bool:
    """Tell whether a condition is an option, which is the same at each step: `args.mask`, `cfg.loss == "l1"`."""
    test = guard.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Compare) and len(test.comparators) == 1 and isinstance(test.comparators[0], ast.Constant):
        fixed = isinstance(test.comparators[0].value, (str, bool, type(None)))
        return fixed and CHOICES.fullmatch(dotted(test.left).partition(".")[0]) is not None
    return CHOICES.fullmatch(dotted(test).partition(".")[0]) is not None


def checks(context: Context, function: Function) -> Iterator[Found]:
    """Yield `if torch.isnan(loss)` at each step: the CPU waits for the answer."""
    if not context.plain(function.module):
        return
    steps = {
        c.place.loops[-1]
        for c in function.calls
        if c.place.loops and (c.last == "backward" or _goes_back(context, c, frozenset()))
    }
    for test, place, _ in function.tests:
        if not place.loops or place.loops[-1] not in steps or any(g.early in ("", "continue") for g in within(place)):
            continue
        for part in ast.walk(test.test):
            named = function.module.full_name(part.func) if isinstance(part, ast.Call) else ""
            if isinstance(part, ast.Call) and named in FINITE and part.args and _is_loss(part.args[0], frozenset()):
                message = f"`if {shown(test.test, 40)}` makes the CPU wait for the GPU at every step, on every rank"
                fix = f"keep `{shown(part, 40)}` on the GPU, and read it every n steps, or let GradScaler skip the step"
                yield Found("DDP401", function.module, part, message, fix)
                break


def accumulation(context: Context, function: Function) -> Iterator[Found]:
    """Yield gradients that are reduced at each backward pass although the optimizer steps at every n-th only."""
    if not context.plain(function.module):
        return
    if context.says(function.module, UNSYNCHRONIZED) or not context.says(function.module, WRAPS):
        return
    for call in function.calls:
        if call.last != "backward" or (call.place.loops and not _each_step(context, call)):
            continue
        loops = call.place.loops[-1:]
        if not loops and any(not _is_choice(guard) for guard in call.place.guards):
            continue
        steps = [
            c
            for c in function.calls
            if c.last == "step" and c.place.loops[-1:] == loops and OPTIMIZER.search(_owner(c))
        ]
        counted = [any(_every_nth(guard) for guard in c.place.guards) for c in steps]
        if (steps and all(counted)) or _steps_behind(call):
            message = (
                "every backward pass reduces the gradients over all ranks, and the optimizer steps at every n-th only:"
                " n - 1 of n reductions are for nothing"
            )
            fix = "run the forward and backward passes of the other turns under the DDP model's no_sync()"
            yield Found("DDP414", function.module, call.node, message, fix)
            return


def _steps_behind(call: Call) -> bool:
    """Tell whether the optimizer steps behind an inner loop of backward passes, within the same loop around both."""
    loops = call.place.loops
    if len(loops) < 2 or _literal(loops[-1]):
        return False
    steps = [c for c in call.function.calls if c.last == "step" and (OPTIMIZER.search(_owner(c)) or _owner(c) == "amp")]
    inner = any(loops[-1] in c.place.loops for c in steps)
    return not inner and any(c.order > call.order and c.place.loops == loops[:-1] for c in steps)


def _literal(loop: ast.stmt) -> bool:
    """Tell whether a loop goes over a few values that are written there: its turns are parts of one step."""
    return isinstance(loop, ast.For) and isinstance(loop.iter, (ast.List, ast.Tuple))


def _is_turn(function: Function, test: ast.expr) -> bool:
    """Tell whether a test asks which of a few written turns this is: `for part in [0, 1]: if part == 0`."""
    name = dotted(test.left) if isinstance(test, ast.Compare) else ""
    return bool(name) and any(_literal(loop) and dotted(loop.target) == name for loop, _ in function.loops)  # type: ignore[attr-defined]


def _owner(call: Call) -> str:
    return dotted(call.node.func).rpartition(".")[0].lower()


def _every_nth(guard: Guard) -> bool:
    test = guard.test
    differs = isinstance(test, ast.BinOp) or (
        isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.NotEq, ast.Gt))
    )
    return guard.holds is not differs and any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Mod)
        and any(re.search(r"acc|grad|iter_size|update|sub_?div", name, re.IGNORECASE) for name in names_in(part.right))
        for part in ast.walk(guard.test)
    )


def values(context: Context, function: Function) -> Iterator[Found]:
    """Yield a collective for each of several values, at each step of training."""
    if not context.plain(function.module):
        return
    yield from _one_by_one(context, function)
    for loop, place in function.loops:
        if not (isinstance(loop, ast.For) and place.loops and not within(place)):
            continue
        several = _several(loop.iter)
        if several is None:
            continue
        trains = any(c.last == "backward" and c.place.loops[-1:] == place.loops[-1:] for c in function.calls)
        inner = next((c for c in function.calls if c.place.loops[-1:] == (loop,) and _reduces(context, c)), None)
        if trains and inner is not None and all(_is_choice(guard) for guard in within(inner.place)):
            message = (
                f"a collective for each value of `{shown(several, 30)}`, at every step: each is a round"
                " trip of all ranks"
            )
            fix = f"stack the values into one tensor and call `{shown(inner.node.func)}` once, or every n steps"
            yield Found("DDP412", function.module, inner.node, message, fix)


def _several(node: ast.expr) -> ast.expr | None:
    """Return what a loop goes over, if that are values of a dict, or names of losses and metrics."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("values", "items"):
        return node.func.value
    if isinstance(node, ast.Call) and dotted(node.func) == "range":
        return node
    named = re.search(r"loss|metric|meter|log|key", dotted(node), re.IGNORECASE)
    return node if dotted(node) and named and not re.search(r"load", dotted(node)) else None


def _reduces(context: Context, call: Call) -> bool:
    """Tell whether a call is a reduction over the ranks, or a helper that does one for what it is given."""
    if call.name in REDUCES:
        return True
    target = context.program.called(call)
    return target is not None and not target.loops and any(c.name in REDUCES for c in target.calls)


def _one_by_one(context: Context, function: Function) -> Iterator[Found]:
    """Yield the first of three and more collectives behind the backward pass of a step, of what is only logged."""
    for back in function.calls:
        if back.last != "backward" or not back.place.loops:
            continue
        loop = back.place.loops[-1]
        later = [
            c
            for c in function.calls
            if c.place.loops[-1:] == (loop,)
            and ((c.order > back.order and c.name in LOGGED and not is_of_gradient(c)) or _is_meter(context, c))
            and _each_step(context, c)
        ]
        if len(later) >= 3:
            message = (
                f"{len(later)} collectives at every step for values that are logged (the last in line"
                f" {function.module.position(later[-1].node.lineno)[1]}): each is a round trip of all ranks"
            )
            fix = f"put the values into one tensor and call `{shown(later[0].node.func)}` once, or every n steps"
            yield Found("DDP412", function.module, later[0].node, message, fix)
            return


def _is_meter(context: Context, call: Call) -> bool:
    """Tell whether a call is `meter.update(value)`, which reduces the value over the ranks each time."""
    return call.last == "update" and any(
        effect.kind == "collective" and effect.name in ("all_reduce", "reduce") for effect in context.effects.of(call)
    )


def gradients(context: Context, function: Function) -> Iterator[Found]:
    """Yield a collective for the gradient of each parameter, where DDP reduces many at once during backward."""
    for call in function.calls:
        if call.name != "torch.distributed.all_reduce" or not is_of_gradient(call) or not call.place.loops:
            continue
        loop = call.place.loops[-1]
        over = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
        if "parameters()" not in over or is_constant(keyword(call.node, "async_op"), True):
            continue
        sites = context.program.sites.get(id(function), ())
        if len(call.place.loops) > 1 or any(site.place.loops for site in sites):
            message = (
                f"each step reduces the gradients one by one, a collective for each of `{shown(loop.iter, 30)}`,"  # type: ignore[attr-defined]
                " and only when the backward pass is over: DDP reduces many at once, while backward goes on"
            )
            fix = "wrap the model in DistributedDataParallel, or reduce one flat tensor of all gradients"
            yield Found("DDP422", function.module, call.node, message, fix)


def in_forward(context: Context, function: Function) -> Iterator[Found]:
    """Yield item() of the loss in the forward pass of a module: that is at every step."""
    owner = function.of_class
    if function.name != "forward" or owner is None or not any(base.endswith("Module") for base in owner.bases):
        return
    for call in function.calls if context.plain(function.module) else ():
        func = call.node.func
        reads = isinstance(func, ast.Attribute) and func.attr == "item" and _is_loss(func.value, frozenset())
        if reads and not call.place.guards:
            message = f"`{shown(call.node, 40)}` makes the CPU wait for the GPU in every forward pass, on every rank"
            fix = f"return `{shown(func.value, 40)}.detach()`, and read it every n steps"  # type: ignore[attr-defined]
            yield Found("DDP401", function.module, call.node, message, fix)
            return


def _goes_back(context: Context, call: Call, seen: frozenset[int]) -> bool:
    """Tell whether a call runs a backward pass in a function of these files, once: not one that loops over steps."""
    target = context.program.called(call)
    if target is None or id(target) in seen or len(seen) > 3 or without_gradients(call):
        return False
    seen = seen | {id(target)}
    return any(
        all(_of_parts(loop) for loop in c.place.loops)
        and not any(_is_declined(call, target, guard) for guard in c.place.guards)
        and (c.last == "backward" or _goes_back(context, c, seen))
        for c in target.calls
    )


def _of_parts(loop: ast.stmt) -> bool:
    """Tell whether a loop goes over the parts of one batch, as accumulation does."""
    text = ast.unparse(loop.iter).lower() if isinstance(loop, ast.For) else ""
    return re.search(r"micro|acc|chunk|sub_?batch", text) is not None


def _is_declined(call: Call, target: Function, guard: Guard) -> bool:
    """Tell whether a call gives False for the parameter that a condition in the function asks for."""
    name = dotted(guard.test)
    if not guard.holds or name not in target.parameters:
        return False
    given = argument(call, target, name)
    return is_constant(given, False) or (given is None and is_off(target, name))


@dataclass(frozen=True)
class Read:
    """A call that reads a tensor from the GPU, and whether rank 0 alone comes to it."""

    call: Call
    first: bool


def _read_of_loss(context: Context, call: Call, given: frozenset[str], depth: int) -> Read | None:
    """Return the call that reads a loss, or what a model has made, from the GPU: this one, or one in a helper."""
    if _reads_tensor(context, call, given):
        return Read(call, False)
    target = context.program.called(call)
    if target is None or target is call.function or depth > 3:
        return None
    tensors = frozenset(
        name
        for name in target.parameters
        if name not in ("self", "cls")
        and (value := argument(call, target, name)) is not None
        and _is_on_gpu(context, call.function, value, given)
        and not _is_number(call.function, value)
    )
    for inner in target.calls:
        first = any(context.ranks.guard(target, guard) == "first" for guard in inner.place.guards)
        if any(_seldom(context, target, guard, of_rank=first) for guard in inner.place.guards):
            continue
        if (read := _read_of_loss(context, inner, tensors, depth + 1)) is not None:
            return Read(read.call, read.first or first)
    return None


def _seldom(context: Context, function: Function, guard: Guard, of_rank: bool = False) -> bool:
    """Tell whether a condition may not hold at each step: one that counts, or is of logging, a type, the rank."""
    parts = guard.test.values if isinstance(guard.test, ast.BoolOp) else [guard.test]
    rest = [part for part in parts if not (guard.holds and holds_always(context, function, part))]
    counts = any(
        isinstance(part, (ast.Lt, ast.Gt, ast.LtE, ast.GtE))
        or (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and "rank" not in ast.unparse(part.left))
        for one in rest
        for part in ast.walk(one)
    )
    rest = [part for part in rest if not _asks_for_tensor(part, guard.holds)]
    text = " ".join(ast.unparse(part) for part in rest)
    words = r"log|print|verbose|debug|every|isinstance|eval|nan|inf|interval|freq|test|profile"
    other = r"" if of_rank else r"|rank|main|master|writer"
    return counts or bool(re.search(words + other, text))


def _asks_for_tensor(test: ast.expr, holds: bool) -> bool:
    """Tell whether a condition is `isinstance(x, torch.Tensor)`, or that something is no number of Python."""
    if not (isinstance(test, ast.Call) and dotted(test.func) == "isinstance" and len(test.args) == 2):
        return False
    return "Tensor" in ast.unparse(test.args[1]) if holds else bool({"float", "int"} & names_in(test.args[1]))


def _is_number(function: Function, node: ast.expr) -> bool:
    """Tell whether a variable is a number of Python already: what `item()` has given."""
    values = [a.value for a in function.assignments.get(dotted(node), ())] if dotted(node) else []
    return bool(values) and all(isinstance(v, ast.Call) and last_of(v) in ("item", "float", "tolist") for v in values)


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
        return all(is_constant(value, 1) for value in values)
    last = name.rpartition(".")[2]
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if not last or not CHOICES.fullmatch(owner):
        return False
    wanted = {f"--{last}", f"--{last.replace('_', '-')}"}
    options = context.calls_in_component(function.module, "add_argument")
    found = [c for c in options if any(isinstance(a, ast.Constant) and a.value in wanted for a in c.node.args)]
    return bool(found) and all(is_constant(keyword(c.node, "default"), 1) for c in found)


def _reads_tensor(context: Context, call: Call, given: frozenset[str]) -> bool:
    """Tell whether a call waits for a tensor on the GPU."""
    func = call.node.func
    if call.last in SHOWS and any(_shows_loss(context, call.function, arg) for arg in arguments_of(call.node)):
        return True
    if call.name == "float" and len(call.node.args) == 1 and dotted(call.node.args[0]):
        return _is_backward(call.function, dotted(call.node.args[0]))
    if not isinstance(func, ast.Attribute) or call.node.args or func.attr not in ("item", "cpu", "tolist"):
        return False
    if _is_loss(func.value, given):
        return True
    return func.attr != "cpu" and _is_on_gpu(context, call.function, func.value, given)


def _shows_loss(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a text is made of a loss on the GPU, whose value has to come to the CPU for that."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # "%.3f" % loss
        return any(_shows_loss(context, function, one) for one in getattr(node.right, "elts", [node.right]))
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return any(_shows_loss(context, function, part) for part in parts)
    if not isinstance(node, ast.Name):
        return False
    if _is_backward(function, node.id):
        return not _is_number(function, node)
    return any(_gives_loss(context, function, a, node.id) for a in function.assignments.get(node.id, ()))


def _gives_loss(context: Context, function: Function, assignment: Assignment, name: str) -> bool:
    """Tell whether a variable gets the tensor with which a function has gone back: `_, loss = step(x)`."""
    value = getattr(assignment.node, "value", None)
    call = next((c for c in function.calls if c.node is value), None)
    target = context.program.called(call) if call is not None else None
    if target is None:
        return False
    part = None
    for one in getattr(assignment.node, "targets", ()):
        names = [dotted(element) for element in one.elts] if isinstance(one, ast.Tuple) else []
        part = names.index(name) if name in names else part
    for leave in target.exits:
        given = leave.node.value if isinstance(leave.node, ast.Return) else None
        if part is not None:
            given = given.elts[part] if isinstance(given, ast.Tuple) and part < len(given.elts) else None
        if isinstance(given, ast.Name) and _is_backward(target, given.id) and not _is_number(target, given):
            return True
    return False


def _is_loss(node: ast.expr, losses: frozenset[str]) -> bool:
    """Tell whether an expression is a loss, by its names, or holds a parameter that is given one."""
    if isinstance(node, ast.Call) and last_of(node) in ("item", "tolist", "float"):
        return False  # a number already
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return "loss" in ast.unparse(node).lower() or bool(names & losses)


def _is_on_gpu(context: Context, function: Function, node: ast.expr, given: frozenset[str]) -> bool:
    """Tell whether an expression is a tensor on the GPU: a loss, or what is made of what was put there."""
    return _is_loss(node, given) or carries(node, context.on_gpu(function) | given)


def _is_backward(function: Function, name: str) -> bool:
    return any(c.last == "backward" and dotted(c.node.func) == f"{name}.backward" for c in function.calls)


def norms(context: Context, function: Function) -> Iterator[Found]:
    """Yield norms that wait for the GPU once a parameter, or move each gradient to the CPU."""
    if id(function.module) not in context.distributed:
        return
    for loop, _ in function.loops:
        if not isinstance(loop, ast.For) or not _over_parameters(loop.iter):
            continue
        calls = [c for c in function.calls if loop in c.place.loops]
        of_gradient = {
            name
            for name, found in function.assignments.items()
            for a in found
            if a.value is not None and loop in a.place.loops and ".grad" in ast.unparse(a.value)
        }
        for call in calls:
            if call.last not in ("item", "cpu") or not isinstance(call.node.func, ast.Attribute):
                continue
            owner = call.node.func.value
            if ".grad" in ast.unparse(owner) or dotted(owner) in of_gradient:
                what = "copies each gradient to the CPU" if call.last == "cpu" else "waits for the GPU once a parameter"
                message = f"this {what}, at each call, while the other ranks wait in the next reduction"
                each = shown(loop.iter, 40).replace("named_parameters", "parameters")
                fix = f"torch.nn.utils.get_total_norm([p.grad for p in {each}]) once, item() every n steps"
                yield Found("DDP403" if call.last == "cpu" else "DDP402", function.module, call.node, message, fix)
                break


def _over_parameters(node: ast.expr) -> bool:
    """Tell whether a loop goes over parameters: `model.parameters()`, `self.master_params`."""
    if isinstance(node, ast.Call):
        return dotted(node.func).rpartition(".")[2] in ("parameters", "named_parameters")
    return re.fullmatch(r"(?:.*_)?param(?:eter)?s", dotted(node).rpartition(".")[2]) is not None


def options(context: Context, function: Function) -> Iterator[Found]:
    """Yield options that cost memory or time at each step."""
    if id(function.module) not in context.distributed:
        return
    backwards = [c for c in function.calls if c.last == "backward"]
    for call in function.calls:
        if call.last == "backward" and is_constant(keyword(call.node, "retain_graph"), True):
            if len(backwards) == 1:
                message = (
                    "retain_graph=True keeps the memory of the forward pass, and nothing goes back through it again"
                )
                yield Found("DDP404", function.module, call.node, message, f"write `{shown(call.node.func)}()`")
        elif call.name in ("torch.autograd.set_detect_anomaly", "torch.autograd.detect_anomaly"):
            off = call.node.args and is_constant(call.node.args[0], False)
            variable = call.node.args and not is_constant(call.node.args[0], True)
            if not off and not variable and not call.place.guards:
                message = "anomaly detection checks every operation of every backward pass, and is several times slower"
                yield Found(
                    "DDP405", function.module, call.node, message, "delete it, or put it under an option for debugging"
                )
    yield from _broadcasts(context, function)


def _broadcasts(context: Context, function: Function) -> Iterator[Found]:
    """Yield broadcasts of all parameters before DDP, which does the same when it wraps the model."""
    wraps = [c for c in function.calls if c.last in ("DistributedDataParallel", "DDP")]
    for loop, _ in function.loops:
        if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and wraps):
            continue
        model = _whole(loop.iter)
        inner = [c for c in function.calls if loop in c.place.loops and c.name == "torch.distributed.broadcast"]
        wrapped = [c for c in wraps if c.node.args and dotted(c.node.args[0]) == model]
        if model and inner and any(c.node.lineno > loop.lineno for c in wrapped):
            message = f"DDP broadcasts the parameters of `{model}` from rank 0 itself, so this sends them all twice"
            yield Found("DDP407", function.module, loop, message, "delete this loop")
    yield from _broadcasts_in_helper(context, function)


def _whole(node: ast.Call) -> str:
    """Return the model over all of which a loop goes: `m.parameters()`, `m.state_dict().values()`; or nothing."""
    while isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        node = node.func.value
    owner, _, last = dotted(node.func).rpartition(".")
    return owner if last in ("parameters", "named_parameters", "state_dict") else ""


def _broadcasts_in_helper(context: Context, function: Function) -> Iterator[Found]:
    """Yield the call of a helper that broadcasts all parameters, of a model that DDP wraps in the same class."""
    for call in function.calls:
        given = call.node.args[0] if len(call.node.args) == 1 else None
        if not isinstance(given, ast.Call) or not dotted(given.func).endswith(".parameters"):
            continue
        target = context.program.called(call)
        if target is None:
            continue
        model = dotted(given.func).rpartition(".")[0]
        loops = [loop for loop, _ in target.loops if isinstance(loop, ast.For)]
        sends = any(
            c.name == "torch.distributed.broadcast" and c.place.loops[-1:] == (loop,)
            for loop in loops
            for c in target.calls
            if dotted(loop.iter) in target.parameters
        )
        owner = function.of_class.methods.values() if function.of_class is not None else [function]
        wraps = (c for f in owner for c in f.calls if c.last in ("DistributedDataParallel", "DDP"))
        if sends and any(c.node.args and dotted(c.node.args[0]) == model for c in wraps):
            message = f"DDP broadcasts the parameters of `{model}` from rank 0 itself, so this sends them all twice"
            yield Found("DDP407", function.module, call.node, message, f"delete `{shown(call.node, 50)}`")


def placebos(context: Context, function: Function) -> Iterator[Found]:
    """Yield a default timeout that is patched where nothing looks, and variables that are set after they are read."""
    for name, found in function.assignments.items():
        if name.rpartition(".")[2] == "_DEFAULT_PG_TIMEOUT" and "." in name:
            message = "torch.distributed has no such attribute, so nothing reads it: the timeout stays what it was"
            fix = "give init_process_group(timeout=...) this value"
            yield Found("DDP501", function.module, found[0].node, message, fix)
    init = next((c for c in function.calls if c.name == INIT), None)
    if init is None or init.place.guards:
        return
    for node in ast.walk(function.node):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)):
            continue
        target = node.targets[0]
        key = target.slice.value if isinstance(target.slice, ast.Constant) else ""
        if function.module.full_name(target.value) != "os.environ" or node.lineno <= init.node.lineno:
            continue
        if isinstance(key, str) and key.startswith(READ_AT_INIT) and key != "NCCL_DEBUG":
            line = function.module.position(init.node.lineno)[1]
            message = f"{key} is read when the group is made, in line {line}: set after it, it changes nothing"
            yield Found(
                "DDP502",
                function.module,
                node,
                message,
                f"set `{key}` before init_process_group, or in the launch script",
            )


def group_per_call(context: Context, function: Function) -> Iterator[Found]:
    """Yield process groups that are made again and again: each holds memory and connections until the end."""
    for call in function.calls:
        if call.name != "torch.distributed.new_group" or context.ranks.partial(call) is not None:
            continue
        if any(c.last == "destroy_process_group" and c.node.args for c in function.calls):
            continue
        counted = [loop for loop in call.place.loops if not _over_ranks(loop)]
        if call.place.loops and not counted:
            continue
        if counted or _called_again(context, function, 0):
            message = "each call makes another group, with communicators that hold memory and connections until the end"
            fix = "make it once, at the start, and give it on"
            yield Found("DDP415", function.module, call.node, message, fix)


def _over_ranks(loop: ast.stmt) -> bool:
    """Tell whether a loop makes one group for each part of the ranks."""
    text = ast.unparse(loop.iter) if isinstance(loop, (ast.For, ast.AsyncFor)) else ""
    return not re.search(r"epoch|step|iter|loader|data|batch", text)


def _called_again(context: Context, function: Function, depth: int) -> bool:
    """Tell whether a function is called in a loop over steps or epochs of training."""
    for site in context.program.sites.get(id(function), ()):
        trains = any(c.last == "backward" and set(c.place.loops) & set(site.place.loops) for c in site.function.calls)
        if site.place.loops and trains:
            return True
        if depth < 3 and site.function is not function and _called_again(context, site.function, depth + 1):
            return True
    return False


def groups(context: Context, function: Function) -> Iterator[Found]:
    """Yield groups that do not have the timeout that the default one was given."""
    inits = context.calls_in_component(function.module, "init_process_group")
    given = next((keyword(c.node, "timeout") for c in inits if keyword(c.node, "timeout") is not None), None)
    for call in function.calls:
        if call.name != "torch.distributed.new_group" or given is None or len(call.node.args) > 1:
            continue
        if keyword(call.node, "timeout") is None and not any(word.arg is None for word in call.node.keywords):
            message = "a new group does not inherit the timeout: its own is 10 minutes with backend nccl, else 30"
            yield Found("DDP605", function.module, call.node, message, f"give it timeout={shown(given, 40)}")


def guards(context: Context, function: Function) -> Iterator[Found]:
    """Yield processes that are started where a module is imported: each of them starts them again."""
    if not isinstance(function.node, ast.Module) or function.module.cells:
        return
    for call in function.calls:
        starts = call.name in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
        if starts and not any("__name__" in ast.unparse(guard.test) for guard in call.place.guards):
            message = "each process that this starts imports this file, and stops there with a RuntimeError"
            yield Found("DDP603", function.module, call.node, message, 'put it under `if __name__ == "__main__":`')


RULES = (in_forward, placebos, group_per_call, groups, guards)
OF_RANKS = (per_step, checks, accumulation, gradients, values, norms, options)  # only where several ranks run the file
