"""Rules for what costs time or does nothing, and for what a reader should know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from .context import Context, Found, is_of_gradient
from .devices import INIT
from .module import (
    Call,
    Function,
    Guard,
    argument,
    dotted,
    is_constant,
    keyword,
    last_of,
    names_in,
    shown,
)
from .steps import OPTIMIZER, each_step, goes_back, holds_each_step, is_choice, literal, targets, units, within
from .tensors import MODEL, is_step_of_scaler

WRAPS = re.compile("DistributedDataParallel|DDP")
LOADER = re.compile(r"loader|val_?set|test_?set|batches|_dl\b|dataset")
UNSYNCHRONIZED = re.compile(r"no_sync|require_backward_grad_sync")
ACCUMULATES = re.compile(r"acc|grad|iter_size|update|sub_?div", re.IGNORECASE)
MEASURED = re.compile(r"loss|acc|top|metric|err|prec|score|iou|psnr|norm|kl|mse|prob")
LOGGED = {"torch.distributed.all_reduce", "torch.distributed.reduce"}
REDUCES = {f"torch.distributed.{name}" for name in ("all_reduce", "reduce", "all_gather", "broadcast", "gather")}
READ_AT_INIT = ("TORCH_NCCL_", "NCCL_", "TORCH_FR_", "GLOO_", "TORCH_DISTRIBUTED_DEBUG")


def accumulation(context: Context, function: Function) -> Iterator[Found]:
    """Yield gradients that are reduced at each backward pass although the optimizer steps at every n-th only."""
    if not context.plain(function.module):
        return
    if context.says(function.module, UNSYNCHRONIZED) or not context.says(function.module, WRAPS):
        return
    for call in function.calls:
        of_engine = bool(call.node.args) and call.name != "torch.autograd.backward"  # of DeepSpeed: it counts itself
        own = (call.last == "backward" and not of_engine) or is_step_of_scaler(call)
        if not own and not (call.place.loops and _steps_behind(context, call) and goes_back(context, call)):
            continue
        if _is_counted(context, function, call):
            message = (
                "every backward pass reduces the gradients over all ranks, and the optimizer steps at every n-th only:"
                " n - 1 of n reductions are for nothing"
            )
            fix = "run the forward and backward passes of the other turns under the DDP model's no_sync()"
            if each_turn(context, call):
                yield Found("DDP414", function.module, call.node, message, fix)
                return


def each_turn(context: Context, call: Call) -> bool:
    """Tell whether a backward pass is made at each turn, or at each where gradients are added up at all."""
    guards = [guard for guard in within(call.place) if not _accumulates(guard)]
    if not call.place.loops:
        return all(is_choice(guard) for guard in guards)
    return holds_each_step(context, call.function, guards, call.place.loops[-1:])


def _accumulates(guard: Guard) -> bool:
    """Tell whether a condition is `accumulation_steps > 1`."""
    test = guard.test
    more = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Gt) and is_constant(test.comparators[0], 1)
    return more and guard.holds and any(ACCUMULATES.search(name) for name in names_in(test))


def _is_counted(context: Context, function: Function, call: Call) -> bool:
    """Tell whether the optimizer makes its step at every n-th turn in which a call goes back."""
    if is_step_of_scaler(call):
        update = keyword(call.node, "update_grad")
        return update is not None and _every_nth(Guard(_meaning(function, update), True, call.node.lineno))
    loops = call.place.loops[-1:]
    accumulating = [guard.test for guard in call.place.guards if _accumulates(guard)]
    steps = [
        c for c in function.calls if c.last == "step" and c.place.loops[-1:] == loops and OPTIMIZER.search(_owner(c))
    ]
    if accumulating:  # of the other branch the steps are others
        steps = [c for c in steps if any(g.test is accumulating[0] and g.holds for g in c.place.guards)]
    counted = [any(_every_nth(guard) or _is_counter(function, guard) for guard in c.place.guards) for c in steps]
    return (bool(steps) and all(counted)) or _steps_behind(context, call)


def _meaning(function: Function, node: ast.expr) -> ast.expr:
    """Return what a name was set to, where that is known."""
    values = (
        [a.value for a in function.assignments.get(dotted(node), ()) if a.value is not None] if dotted(node) else []
    )
    return values[0] if len(values) == 1 else node


def _is_counter(function: Function, guard: Guard) -> bool:
    """Tell whether a condition asks for a counter of turns: `turns == steps_per_update`, `n - last >= accumulate`."""
    test = guard.test
    wanted = (ast.Eq, ast.GtE) if guard.holds else (ast.NotEq, ast.Lt)
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], wanted)):
        return False
    if not any(re.search(r"^acc|per_update|update_freq|accum", name) for name in names_in(test.comparators[0])):
        return False
    counts = {part.id for part in ast.walk(test.left) if isinstance(part, ast.Name)}
    added = (a for name in counts for a in function.assignments.get(name, ()))
    return isinstance(test.left, ast.BinOp) or any(isinstance(a.node, ast.AugAssign) for a in added)


def _steps_behind(context: Context, call: Call) -> bool:
    """Tell whether the optimizer steps behind an inner loop of backward passes, within the same loop around both."""
    loops = call.place.loops
    if not loops or literal(loops[-1]):
        return False
    if len(loops) < 2:  # the loop around both may be that of a caller
        sites = context.program.sites.get(id(call.function), ())
        if not any(site.place.loops for site in sites):
            return False
    steps = [c for c in call.function.calls if c.last == "step" and (OPTIMIZER.search(_owner(c)) or _owner(c) == "amp")]
    inner = any(loops[-1] in c.place.loops for c in steps)
    return not inner and any(c.order > call.order and c.place.loops == loops[:-1] for c in steps)


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
        and any(ACCUMULATES.search(name) for name in names_in(part.right))
        for part in ast.walk(guard.test)
    )


def values(context: Context, function: Function) -> Iterator[Found]:
    """Yield a collective for each of several values, at each step of training."""
    if not context.plain(function.module):
        return
    loops = units(context, function)
    for unit in (*loops, *_measuring_loops(context, function, loops)):
        yield from _one_by_one(context, function, unit, trains=unit in loops)
        outer = (unit,) if unit is not None else ()
        outer_loops = [unit] if unit is not None else []
        for loop, place in function.loops:
            if place.loops[-1:] == outer and holds_each_step(context, function, within(place, unit), outer_loops):
                yield from _each_value(context, function, loop, "step" if unit in loops else "batch")
        for call in function.calls:
            if call.place.loops[-1:] != outer or not each_step(context, call, unit) or goes_back(context, call):
                continue
            for target in targets(context, call):
                for loop, place in target.loops:
                    if not place.loops and all(_is_asked_for(context, call, target, guard) for guard in place.guards):
                        yield from _each_value(context, target, loop, "step" if unit in loops else "batch")


def _is_asked_for(context: Context, call: Call, target: Function, guard: Guard) -> bool:
    """Tell whether a call passes a condition of a helper: it gives True, or several ranks do."""
    name = dotted(guard.test)
    given = argument(call, target, name) if name in target.parameters else None
    several = context.ranks.alone(target, [Guard(guard.test, not guard.holds, guard.line)])
    return several or (guard.holds and is_constant(given, True))


def _measuring_loops(context: Context, function: Function, steps: Sequence[ast.stmt | None]) -> list[ast.stmt]:
    """Return the loops over a loader in which a function measures, and goes back nowhere."""
    found = [loop for loop, _ in function.loops if isinstance(loop, ast.For) and _over_loader(function, loop.iter)]
    back = {loop for call in function.calls for loop in call.place.loops if found and goes_back(context, call)}
    return [loop for loop in found if loop not in back and loop not in steps]


def _over_loader(function: Function, node: ast.expr) -> bool:
    """Tell whether a loop goes over a loader by its name, or over a progress bar of one."""
    if LOADER.search(ast.unparse(node)):
        return True
    values = [a.value for name in names_in(node) for a in function.assignments.get(name, ()) if a.value is not None]
    return any(LOADER.search(ast.unparse(value)) for value in values if isinstance(value, ast.Call))


def _each_value(context: Context, function: Function, loop: ast.stmt, step: str) -> Iterator[Found]:
    """Yield a reduction in a loop over values."""
    several = _several(loop.iter) if isinstance(loop, ast.For) else None
    inner = next((c for c in function.calls if c.place.loops[-1:] == (loop,) and _reduces(context, c)), None)
    if several is None or inner is None or not all(is_choice(guard) for guard in within(inner.place)):
        return
    message = (
        f"a collective for each value of `{shown(several, 30)}`, at every {step}: each is a round trip of all ranks"
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


def _one_by_one(context: Context, function: Function, unit: ast.stmt | None, trains: bool) -> Iterator[Found]:
    """Yield the first of two and more collectives of a step, each of one value that is only logged."""
    outer = (unit,) if unit is not None else ()
    around = [c for c in function.calls if (unit in c.place.loops if unit is not None else not c.place.loops)]
    back = [c.order for c in around if goes_back(context, c)]
    if not back and trains:
        return
    back = back or [0]
    step = "step" if trains else "batch"
    later: list[Call] = []
    for call in function.calls:
        if call.place.loops[-1:] != outer or not each_step(context, call, unit):
            continue
        inside = _reductions_in(context, call) if call.order > min(back) else []
        if len(inside) > 1:
            later += inside
        elif _is_meter(context, call) or _is_logged(context, call, min(back)):
            later.append(call)
    if len(later) >= 2:
        message = (
            f"{len(later)} collectives at every {step} for values that are logged (the last in line"
            f" {later[-1].function.module.position(later[-1].node.lineno)[1]}): each is a round trip of all ranks"
        )
        often = "every n steps" if trains else "behind the loop, for the sums"
        fix = f"put the values into one tensor and call `{shown(later[0].node.func)}` once, or {often}"
        yield Found("DDP412", later[0].function.module, later[0].node, message, fix)


def _reductions_in(context: Context, call: Call) -> list[Call]:
    """Return the reductions that a helper makes whenever several processes call it, one behind the other."""
    for target in targets(context, call) if not goes_back(context, call) else ():
        found = [c for c in target.calls if c.name in LOGGED and not c.place.loops and not is_of_gradient(c)]
        several = [
            c
            for c in found
            if all(context.ranks.alone(target, [Guard(g.test, not g.holds, g.line)]) for g in c.place.guards)
        ]
        if len(several) > 1:
            return several
    return []


def _is_logged(context: Context, call: Call, back: int) -> bool:
    """Tell whether a call reduces one value that is only logged: behind the backward pass, or a copy before it."""
    given = [value for value in call.node.args[:1] if not isinstance(value, (ast.List, ast.Dict, ast.Tuple))]
    if not given or is_of_gradient(call):
        return False
    if call.name in LOGGED:
        return call.order > back and not re.search(r"norm|grad", ast.unparse(given[0]))
    if not MEASURED.search(ast.unparse(given[0]).lower()):
        return False
    target = context.program.called(call)
    if target is None and call.last != "reduce_tensor":  # of timm
        return False
    if target is not None and (target.loops or not _makes_one(target)):
        return False
    set_to = [n for n, f in call.function.assignments.items() for a in f if getattr(a.node, "value", None) is call.node]
    return call.order > back or not set(set_to) & names_in(given[0])


def _makes_one(function: Function) -> bool:
    """Tell whether a helper makes one value of those of all ranks: reduces it, or takes the mean of all."""
    gathers = any(c.name == "torch.distributed.all_gather" for c in function.calls)
    takes_mean = gathers and any(c.last in ("mean", "sum") for c in function.calls)
    return takes_mean or any(c.name in LOGGED for c in function.calls)


def _is_meter(context: Context, call: Call) -> bool:
    """Tell whether a call is `meter.update(value)`, which reduces the value over the ranks each time."""
    return call.last == "update" and any(
        effect.kind == "collective" and effect.name in ("all_reduce", "reduce") for effect in context.effects.of(call)
    )


def twice(context: Context, function: Function) -> Iterator[Found]:
    """Yield backward passes through one model before one step of its optimizer: each reduces all gradients."""
    passes = sum(call.last == "backward" for call in function.calls)
    if passes < 2 or not context.plain(function.module) or context.says_near(function.module, UNSYNCHRONIZED):
        return
    for unit in units(context, function):
        outer = (unit,) if unit is not None else ()
        calls = [c for c in function.calls if c.place.loops[-1:] == outer and each_step(context, c, unit)]
        before: tuple[Call, set[str]] | None = None
        since = 0
        for call in calls:
            if call.last in ("step", "zero_grad"):
                before = None
            elif call.last == "backward":
                models = _models_of(function, call, since)
                shared = sorted(models & before[1]) if before is not None else []
                if before is not None and shared and not _others(before[0], call):
                    line = function.module.position(call.node.lineno)[1]
                    message = (
                        f"the gradients of `{shared[0]}` are reduced over all ranks by this backward pass and that of"
                        f" line {line}, before one step of the optimizer: this one is for nothing"
                    )
                    fix = "go back once, from the sum of the losses, or make this pass under no_sync()"
                    yield Found("DDP424", function.module, before[0].node, message, fix)
                    return
                before, since = (call, models), call.order


def _others(first: Call, second: Call) -> bool:
    """Tell whether two backward passes exclude each other: they stand in the two branches of a condition."""
    held = {(id(guard.test), guard.holds) for guard in first.place.guards}
    return any((id(guard.test), not guard.holds) in held for guard in second.place.guards)


def _models_of(function: Function, call: Call, since: int) -> set[str]:
    """Return the models that a function has called for the loss from which a call goes back, since the last one."""
    start = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    waiting, seen, found = [start] if start is not None else [], set[str](), set[str]()
    while waiting:
        for part in ast.walk(waiting.pop()):
            name = dotted(part.func) if isinstance(part, ast.Call) else ""
            last_part = name.rpartition(".")[2]
            if MODEL.fullmatch(last_part) and not last_part[0].isupper():
                found.add(name)
            name = dotted(part) if isinstance(part, (ast.Name, ast.Attribute)) else ""
            if not name or name in seen:
                continue
            seen.add(name)
            before = sorted(
                (a for a in function.assignments.get(name, ()) if a.order < call.order), key=lambda a: a.order
            )
            for one in [a for a in before if a.order > since] or before[-1:]:
                value = one.value if one.value is not None else getattr(one.node, "value", None)
                if value is not None and not (isinstance(value, ast.Call) and last_of(value) in ("detach", "item")):
                    waiting.append(value)
    return found


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
        if model and inner and any(not _changed(function, c, loop) for c in wrapped):
            message = f"DDP broadcasts the parameters of `{model}` from rank 0 itself, so this sends them all twice"
            yield Found("DDP407", function.module, loop, message, "delete this loop")
    yield from _broadcasts_in_helper(context, function)


def _changed(function: Function, wrap: Call, loop: ast.For) -> bool:
    """Tell whether something loads or sets the parameters between the call of DDP and a loop behind it."""
    first, last = wrap.node.lineno, loop.lineno
    return any(first < c.node.lineno < last and re.search(r"load|init|copy_|restore", c.last) for c in function.calls)


def _whole(node: ast.Call) -> str:
    """Return the model over all of which a loop goes: `m.parameters()`, `m.state_dict().values()`; or nothing."""
    while isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        node = node.func.value
    owner, _, last = dotted(node.func).rpartition(".")
    return owner if last in ("parameters", "named_parameters", "state_dict") else ""


def _broadcasts_in_helper(context: Context, function: Function) -> Iterator[Found]:
    """Yield the call of a helper that broadcasts all parameters, of a model that DDP wraps in the same class."""
    for call in function.calls:
        given = call.node.args[0] if call.node.args else None
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


RULES = (placebos, group_per_call, groups, guards)
OF_RANKS = (accumulation, twice, gradients, values, norms, options)  # only where several ranks run the file
