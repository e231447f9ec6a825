"""Rules for what makes ranks wait for each other for ever: what only some reach, and how some leave alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from .context import Context, Found, part_of_try
from .effects import Effect, walk_body
from .module import Call, Exit, Function, Guard, dotted, is_constant, names_in, shown
from .program import FOREIGN
from .ranks import Who
from .stops import tries_again

OF_KIND = {
    "forward": "DDP103",
    "group": "DDP112",
    "sharded save": "DDP111",
    "sharded load": "DDP111",
    "metric": "DDP113",
}
CLOCKS = {"time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now", "datetime.now"}
FINITE = {"isnan", "isinf", "isfinite"}
CATCHES = {"Exception", "BaseException", "RuntimeError", "OutOfMemoryError", "CudaError", "AcceleratorError"}
MODEL = re.compile(
    r"(?:.*_)?(?:model|net|generator|encoder|decoder|unet|pipe|pipeline|diffusion|ema)(?:_.*)?", re.IGNORECASE
)
READS = {"load", "load_state_dict", "open", "read", "print", "join", "restart_from_checkpoint", "import_module", "get"}
KNOWN_OWNERS = {"torch", "os", "sys", "time", "json", "np", "numpy", "shutil"}
ANSWERS = ("generate", "serve", "worker", "run", "listen", "loop", "wait", "follow")  # of ranks that work for rank 0
LENGTHY = {"sampling", "sample", "generate", "inference", "fid", "pesq", "beam"}
LONG = {"evaluate", "evaluation", "validate", "validation", "sampling", "generate", "inference", "eval", "fid"}


def lonely(context: Context, function: Function) -> Iterator[Found]:
    """Yield what all ranks must do together, where only some come."""
    reached: list[tuple[Call, Effect, Guard, Who]] = []
    for call in function.calls:
        if (found := context.ranks.partial(call)) is None:
            continue
        if (found[1] == "others" and _serves(context, call)) or _ends_job(function, found[0]):
            continue
        for effect in context.effects.of(call):
            if effect.name.endswith("barrier") and _met_later(function, found[0]):
                continue
            if effect.kind != "forward" or _waits(context, call, effect, found[0]):
                reached.append((call, effect, *found))
    seen: set[tuple[int, str]] = set()
    for call, effect, guard, who in reached:
        name = effect.name.rpartition(".")[2]
        paired = any(
            other[1].name.rpartition(".")[2] == name and other[2] is not guard and _complement(guard, who, *other[2:])
            for other in reached
        )
        key = (id(guard.test), name)
        if paired or key in seen or _other_branch(context, function, guard, name):
            continue
        seen.add(key)
        told = _lonely(context, function, call, effect, guard, who)
        doubt = context.doubts.of(call, effect, guard, who) or _elsewhere(context, call, guard, who, reached)
        yield replace(told, rule="DDP606", message=f"{told.message}; not decided: {doubt}") if doubt else told


Reached = tuple[Call, Effect, Guard, Who]


def _elsewhere(context: Context, call: Call, guard: Guard, who: Who, reached: list[Reached]) -> str:
    """Return what the other ranks may do meanwhile, if that is not known: they may come to the same collective."""
    function = call.function
    for other, _, theirs, whose in reached:
        if other is not call and theirs.test is not guard.test and _complement(guard, who, theirs, whose):
            return f"whether the other ranks come to `{shown(other.node, 40)}`"
    if not is_used(context, function):
        return f"what calls `{function.name}`"
    for other in function.calls:
        opposite = any(g.test is guard.test and g.holds != guard.holds and not g.early for g in other.place.guards)
        if opposite and not _is_known(context, other):
            return f"what the other ranks do in `{shown(other.node, 40)}`"
    left = _leaving(function, guard)
    if left is not None and not guard.early and any(_behind(context, function, call, left)):
        return f"whether the other ranks come to what stands behind line {function.module.position(left.lineno)[1]}"
    return ""


def is_used(context: Context, function: Function) -> bool:
    """Tell whether a function may be called: its name stands somewhere, or files that are not here may import it."""
    if isinstance(function.node, ast.Module) or function.name.startswith("__") or function.node.decorator_list:
        return True
    module = function.module
    closed = module.runs_itself or any(module in context.program.imports_of(m) for m in context.program.modules)
    return not closed or context.is_named(function.name)


def _is_known(context: Context, call: Call) -> bool:
    """Tell whether it is known that a call is no collective, or one that was looked into."""
    if context.program.called(call) is not None or "." not in call.name:
        return True
    first = call.name.partition(".")[0]
    return (
        first in KNOWN_OWNERS or first in FOREIGN or bool(re.search(r"log|writer|print|bar|timer", call.name.lower()))
    )


def _leaving(function: Function, guard: Guard) -> ast.stmt | None:
    """Return the statement by which the branch that a guard opens leaves the function or the turn of a loop."""
    for test, _, _ in function.tests:
        if test.test is guard.test:
            body = test.body if guard.holds else test.orelse
            return body[-1] if body and isinstance(body[-1], (ast.Return, ast.Continue, ast.Break)) else None
    return None


def _behind(context: Context, function: Function, call: Call, left: ast.stmt) -> Iterator[bool]:
    for other in function.calls:
        if other.order > call.order and other.node.lineno > left.lineno and context.effects.of(other):
            yield True


def _ends_job(function: Function, guard: Guard) -> bool:
    """Tell whether the ranks that leave early fail: then the launcher ends the others."""
    if guard.early != "exit":
        return guard.early == "raise"
    body = next((test.body for test, _, _ in function.tests if test.test is guard.test), [])
    value = getattr(body[-1], "value", None) if body else None
    code = value.args[0] if isinstance(value, ast.Call) and value.args else None
    return code is not None and not is_constant(code, 0)


def _met_later(function: Function, guard: Guard) -> bool:
    """Tell whether ranks return right after a barrier: the others may meet them in theirs, further down."""
    body = next((test.body for test, _, _ in function.tests if test.test is guard.test), [])
    return bool(body) and not guard.early and guard.holds and isinstance(body[-1], ast.Return)


def _serves(context: Context, call: Call) -> bool:
    """Tell whether ranks run a loop without end in which they do what rank 0 asks for, as those of a server do."""
    target = context.program.called(call)
    return target is not None and any(
        isinstance(loop, ast.While) and is_constant(loop.test, True) and context.together(target, loop)
        for loop, _ in target.loops
    )


def _waits(context: Context, call: Call, effect: Effect, guard: Guard) -> bool:
    """Tell whether ranks wait for each other after a forward pass of DDP that only some of them run.

    Without gradients DDP broadcasts the buffers once, and leaves that out at the next forward pass with gradients
    (`require_forward_param_sync` in torch/nn/parallel/distributed.py): the broadcast meets the one of the other ranks'
    next step, unless a collective of another kind comes before it.
    """
    if not context.effects.broadcasts_buffers(call.function, effect.name):
        return False
    if not effect.quiet:
        return True
    loops = next((place.loops for test, place, _ in call.function.tests if test.test is guard.test), call.place.loops)
    follows = _next_together(context, call, loops)
    sites = context.program.sites.get(id(call.function), ())
    if follows is None and not loops and len(sites) == 1:
        follows = _next_together(context, sites[0], sites[0].place.loops)
    return follows is not None and follows.kind != "forward"


def _next_together(context: Context, call: Call, loops: tuple[ast.stmt, ...]) -> Effect | None:
    """Return what all ranks do together after a call: behind it in the same loop, then at the loop's next turn."""
    within = [c for c in call.function.calls if c.place.loops[: len(loops)] == loops]
    later = [c for c in within if c.order > call.order]
    for other in (*later, *(within if loops else ())):
        if context.ranks.partial(other) is not None:
            continue
        if (forward := context.effects.forward_through(other)) is not None:
            return forward
        if effects := context.effects.of(other):
            return effects[0]
    return None


def _other_branch(context: Context, function: Function, guard: Guard, name: str) -> bool:
    """Tell whether the ranks in the other branch of an `if` do the same, or what is not known."""
    for other in function.calls:
        opposite = any(g.test is guard.test and g.holds != guard.holds and not g.early for g in other.place.guards)
        if not opposite or guard.early:
            continue
        if any(effect.name.rpartition(".")[2] == name for effect in context.effects.of(other)):
            return True
        text = dotted(other.node.func)
        plain = other.name.partition(".")[0] in KNOWN_OWNERS or "log" in text.lower() or "." not in text
        if not plain and context.program.called(other) is None and other.last.startswith(ANSWERS):
            return True
    return False


def _complement(guard: Guard, who: Who, other: Guard, other_who: Who) -> bool:
    """Tell whether those who do not pass `guard` may pass `other`."""
    return who != other_who or (guard.test is other.test and guard.holds != other.holds) or who == "some"


def _lonely(context: Context, function: Function, call: Call, effect: Effect, guard: Guard, who: Who) -> Found:
    ranks, what = context.ranks.words(guard, who), effect.words()
    test = shown(guard.test, 50)
    if effect.kind == "forward":
        message = (
            f"{ranks} runs {what}, which DDP makes a step of all ranks: it broadcasts the buffers first"
            " and reduces gradients after; the others are in another step, and all wait until the timeout"
        )
        fix = f"give the wrapped model instead, `{effect.name}.module`, or run `{shown(call.node.func)}` on every rank"
        return Found("DDP103", function.module, call.node, message, fix)
    if guard.early:
        left = {
            "return": "returned",
            "continue": "gone on to the next turn",
            "raise": "raised",
            "break": "left the loop",
        }
        message = (
            f"{ranks} reaches {what}: the others have {left.get(guard.early, 'exited')} at the `if` in line"
            f" {function.module.position(guard.line)[1]}, so those that come wait until the timeout"
        )
        fix = f"call `{shown(call.node.func)}` before ranks leave in line {function.module.position(guard.line)[1]}"
        return Found(OF_KIND.get(effect.kind, "DDP102"), function.module, call.node, message, fix)
    under = f"`{test}`" if not test.startswith("rank == 0") or guard.holds else f"the inverse of `{test}`"
    message = (
        f"{ranks} reaches {what}: it waits for the other ranks until the timeout, or pairs with another call of theirs"
    )
    fix = f"take `{shown(call.node.func)}` out of {under}, so that every rank calls it"
    return Found(OF_KIND.get(effect.kind, "DDP101"), function.module, call.node, message, fix)


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
    """Yield loops that are left by a flag which is set on some ranks only, and which no collective has shared."""
    for test, place, order in function.tests:
        name = dotted(test.test)
        leaves = [e for e in function.exits if e.node in test.body and e.kind in ("break", "return")]
        if not name or not leaves or not place.loops or name in function.parameters:
            continue
        assigned = function.assignments.get(name, [])
        set_by = [
            (a, guard, who)
            for a in assigned
            for guard in a.place.guards
            if (who := context.ranks.guard(function, guard)) is not None and a.order < order
        ]
        free = [a for a in assigned if all(a is not one for one, _, _ in set_by)]
        constant = all(isinstance(a.value, ast.Constant) for a in free)
        given = any(name in names_in(argument) for c in function.calls for argument in _arguments(c.node))
        if not (set_by and free and constant) or given or len({who for _, _, who in set_by}) > 1:
            continue
        if place.loops and context.together(function, place.loops[-1]):
            _, guard, who = set_by[0]
            ranks = context.ranks.words(guard, who)
            line = function.module.position(set_by[0][0].node.lineno)[1]
            message = (
                f"{ranks} sets `{name}` (line {line}), so only there the loop ends; the others wait in the next step"
            )
            fix = f"share `{name}` before this test: broadcast it from rank 0 to all ranks"
            yield Found("DDP104", function.module, leaves[0].node, message, fix)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def decisions(context: Context, function: Function) -> Iterator[Found]:
    """Yield tests of a rank's own data, clock or files that skip or end a step of all ranks."""
    if id(function.module) not in context.distributed:
        return
    for test, place, order in function.tests:
        leaves = _leaves_of(function, test)
        if leaves is None or not place.loops or context.ranks.alone(function, place.guards):
            continue
        if any(context.ranks.guard(function, guard) for guard in place.guards):
            continue
        loop = place.loops[-1] if leaves.kind in ("break", "continue") else place.loops[0]
        if not context.together(function, loop):
            continue
        if context.agreed(function, names_in(test.test)):
            continue
        found = _unreduced(function, test.test, loop, leaves, order) or _clock(function, test.test, leaves)
        found = found or _file(function, test.test, leaves)
        if found is not None:
            rule, reason = found
            until = " until the launcher ends them (srun does not by default)" if leaves.kind == "exit" else ""
            message = (
                f"{reason}; that rank leaves the step alone, and the others wait for it in the next collective{until}"
            )
            fix = f"reduce the decision `{shown(test.test, 40)}` over all ranks (`all_reduce` with MAX) before the `if`"
            yield Found(rule, function.module, test, message, fix)


def _leaves_of(function: Function, test: ast.If) -> Exit | None:
    last = test.body[-1]
    return next((e for e in function.exits if e.node is last and e.kind != "raise"), None)


def _unreduced(function: Function, test: ast.expr, loop: ast.stmt, leaves: Exit, order: int) -> tuple[str, str] | None:
    """Return why a test depends on this rank's batch, if it does."""
    if not any(c.last == "backward" and loop in c.place.loops for c in function.calls) or _same_everywhere(test):
        return None
    finite = [n for n in ast.walk(test) if isinstance(n, ast.Call) and _last(n) in FINITE]
    if finite and not any("grad" in name or "norm" in name for name in names_in(test)):
        names = names_in(test)
        made = [a.value for n in names for a in function.assignments.get(n, ()) if a.value is not None]
        if not any("clip_grad" in ast.unparse(value) for value in made):
            return "DDP105", f"`{shown(test, 40)}` looks at the loss of one rank"
    if leaves.kind not in ("continue", "break") or not isinstance(loop, (ast.For, ast.AsyncFor)):
        return None
    backward = [c.order for c in function.calls if c.last == "backward" and loop in c.place.loops]
    if min(backward) < order or not (_of_batch(function, loop) & names_in(test)):
        return None
    return "DDP105", f"`{shown(test, 40)}` looks at the batch of one rank"


def _same_everywhere(test: ast.expr) -> bool:
    """Tell whether a test asks for types, keys or sizes of a batch, which are the same on all ranks."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and _last(node) in ("isinstance", "hasattr", "callable", "issubclass"):
            return True
        if isinstance(node, ast.Compare):
            right = node.comparators[0]
            zero = isinstance(right, ast.Constant) and right.value in (0, None)
            sized = {"shape", "size", "len", "batch_size"} & names_in(node)
            if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops) or (sized and not zero):
                return True
    return False


def _of_batch(function: Function, loop: ast.For | ast.AsyncFor) -> set[str]:
    """Return the names that hold this rank's batch in a loop over a loader; the index of enumerate is none."""
    source = loop.iter
    target: ast.expr = loop.target
    if isinstance(source, ast.Call) and _last(source) == "enumerate" and source.args:
        source = source.args[0]
        target = target.elts[-1] if isinstance(target, ast.Tuple) else target
    if not any(word in ast.unparse(source).lower() for word in ("loader", "dataset", "batches")):
        return set()
    found = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            value = assignment.value
            if loop not in assignment.place.loops or value is None or isinstance(value, ast.Call):
                continue
            if found & names_in(value) and not {"shape", "size", "len"} & names_in(value):
                found.add(name)
    return found


def _clock(function: Function, test: ast.expr, leaves: Exit) -> tuple[str, str] | None:
    names = [part.id for part in ast.walk(test) if isinstance(part, ast.Name)]
    made = [a.value for n in names for a in function.assignments.get(n, ()) if a.value is not None]
    reads = [node for node in (test, *made) if any(c in ast.unparse(node) for c in CLOCKS)]
    looks = isinstance(test, (ast.Compare, ast.BoolOp)) and reads and leaves.kind != "continue"
    return ("DDP107", f"`{shown(test, 40)}` reads the clock of each rank, and no two read the same") if looks else None


def _file(function: Function, test: ast.expr, leaves: Exit) -> tuple[str, str] | None:
    exists = any(isinstance(n, ast.Call) and _last(n) in ("exists", "isfile", "is_file") for n in ast.walk(test))
    if not exists or leaves.kind == "continue":
        return None
    return "DDP108", f"`{shown(test, 40)}` looks at the file system, where ranks see a new file at different times"


def _last(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def clocked_loops(context: Context, function: Function) -> Iterator[Found]:
    """Yield `while time.time() < end:` around steps of all ranks."""
    for loop, _ in function.loops:
        if not (isinstance(loop, ast.While) and any(clock in ast.unparse(loop.test) for clock in CLOCKS)):
            continue
        steps = [c for c in function.calls if loop in c.place.loops and context.ranks.partial(c) is None]
        meets = any(c.last == "backward" or any(e.kind != "forward" for e in context.effects.of(c)) for c in steps)
        if id(function.module) in context.distributed and meets:
            message = (
                f"`{shown(loop.test, 40)}` reads the clock of each rank: one does a step more than another,"
                " and waits in it for the ranks that have left"
            )
            fix = "let rank 0 read the clock and broadcast its decision at each turn, or count steps"
            yield Found("DDP107", function.module, loop, message, fix)


def swallowed(context: Context, function: Function) -> Iterator[Found]:
    """Yield handlers that go on after an exception in a step of all ranks."""
    if id(function.module) not in context.distributed:
        return
    for node, place in function.tries:
        inner = [c for c in function.calls if (node, "body") in c.place.tries]
        step = next((c for c in inner if c.last == "backward" or _steps(context, inner, c)), None)
        if (
            step is None
            or not place.loops
            or _only_timed(function, place.loops[-1], step)
            or (step.last != "backward" and tries_again(node, place.loops[-1]))  # a finding of its own
            or any(context.ranks.guard(function, guard) for guard in place.guards)
        ):
            continue
        for handler in node.handlers:
            types = names_in(handler.type) if handler.type is not None else {"Exception"}
            ends = any(
                isinstance(n, ast.Raise) or (isinstance(n, ast.Call) and _last(n) in ("exit", "_exit", "abort", "kill"))
                for statement in handler.body
                for n in walk_body(statement)
            )
            if ends or not types & CATCHES:
                continue
            caught = shown(handler.type) if handler.type is not None else "every exception"
            message = (
                f"the rank that fails in `{shown(step.node.func, 40)}` catches {caught} and goes on alone;"
                " the others wait in that step's collectives until the timeout"
            )
            fix = (
                "let the exception end the process (the launcher ends the others), or agree on the skip before the step"
            )
            yield Found("DDP106", function.module, handler, message, fix)


def _steps(context: Context, inner: list[Call], call: Call) -> bool:
    """Tell whether ranks may fail alone around a call: in a forward or backward pass, or if nothing else is tried."""
    effects = context.effects.of(call)
    target = context.program.called(call)
    deep = target is not None and any(c.last == "backward" for c in target.calls)
    return bool(effects) and (deep or len(inner) == 1 or any(effect.kind == "forward" for effect in effects))


def _only_timed(function: Function, loop: ast.stmt, step: Call) -> bool:
    """Tell whether a backward pass is one of a profiler or a test: no data are looped over, and no step follows it."""
    if step.last != "backward":
        return False
    data = isinstance(loop, (ast.For, ast.AsyncFor)) and re.search(
        r"load|data|batch|train", ast.unparse(loop.iter).lower()
    )
    return not data and not any(c.last in ("step", "zero_grad") and loop in c.place.loops for c in function.calls)


def error_paths(context: Context, function: Function) -> Iterator[Found]:
    """Yield collectives in except and finally, where ranks come that have failed."""
    for call in function.calls:
        part = part_of_try(call.place)
        if not part or context.ranks.partial(call) is not None or not _may_fail_alone(context, function, call):
            continue
        effects = context.effects.of(call)
        if effects and effects[0].kind != "forward" and not _answered(function, call) and _tells(function, call):
            continue
        if effects and effects[0].kind != "forward" and not _answered(function, call):
            when = "only the rank that failed comes here" if part == "except" else "a rank that failed comes here alone"
            message = f"{when}, and waits in {effects[0].words()} for the others until the timeout"
            fix = f"delete `{shown(call.node, 40)}` from `{part}`, or move it behind the `try`, where all ranks come"
            doubt = "" if _fails_in_a_step(context, function, call) else "whether one rank alone can fail there"
            doubt = doubt or effects[0].doubt or context.doubts.of_place(call)
            if doubt:
                yield Found("DDP606", function.module, call.node, f"{message}; not decided: {doubt}", fix)
            else:
                yield Found("DDP114", function.module, call.node, message, fix)
        elif call.name == "torch.distributed.destroy_process_group" and part == "except":
            message = (
                "destroying the group after an exception hides which rank failed: the others report a lost connection"
            )
            fix = "leave with the exception, without destroy_process_group"
            yield Found("DDP604", function.module, call.node, message, fix)


def _may_fail_alone(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a step of all ranks stands in the `try`: a file that is not there, all of them miss together."""
    for node, part in call.place.tries:
        if part == "finally":
            return True
        if part != "except" or not _catches_failures(node, call):
            continue
        for other in function.calls:
            if any(inner is node and where == "body" for inner, where in other.place.tries) and not _reads(other):
                return True
    return False


def _fails_in_a_step(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a step of all ranks stands in the body of the `try` itself: a backward pass, or a collective."""
    outer = {id(node) for node, part in call.place.tries if part in ("except", "finally")}
    for other in function.calls:
        if any(id(node) in outer and part == "body" for node, part in other.place.tries):
            effects = context.effects.of(other)
            if other.last == "backward" or any(effect.sure for effect in effects):
                return True
    return False


def _tells(function: Function, call: Call) -> bool:
    """Tell whether a collective shares out whether a rank has failed: that is what it is there for."""
    names = {name for arg in _arguments(call.node) for name in names_in(arg)}
    words = re.compile(r"fail|error|exc|status|ok$|success|flag|stop", re.IGNORECASE)
    return any(words.search(name) for name in names)


def _catches_failures(node: ast.Try, call: Call) -> bool:
    """Tell whether the handler that a call is in is for failures, and not for an empty queue or the end of data."""
    for handler in node.handlers:
        if any(part is call.node for statement in handler.body for part in ast.walk(statement)):
            types = names_in(handler.type) if handler.type is not None else {"Exception"}
            return any(name in CATCHES or name.endswith("Error") or name == "KeyboardInterrupt" for name in types)
    return False


def _reads(call: Call) -> bool:
    return call.last in READS or call.name.startswith(("os.", "pathlib.", "json."))


def _answered(function: Function, call: Call) -> bool:
    """Tell whether the same is called where nothing fails: then ranks come to it either way, once."""
    outer = {id(node) for node, part in call.place.tries if part == "except"}
    return any(
        other.name == call.name
        and any(id(node) in outer and part in ("body", "else") for node, part in other.place.tries)
        for other in function.calls
    )


def handlers(context: Context, function: Function) -> Iterator[Found]:
    """Yield signal handlers that call a collective, or save: the signal comes in the middle of any step."""
    for call in function.calls:
        if call.name != "signal.signal" or len(call.node.args) < 2:
            continue
        handler = ast.Call(func=call.node.args[1], args=[], keywords=[])
        target = context.program.resolve(Call(handler, dotted(call.node.args[1]), call.place, function, call.order))
        if target is None:
            continue
        effects = context.effects.inside(target)
        saves = [
            c
            for c in target.calls
            if c.name == "torch.save" or re.fullmatch(r"save_(?:checkpoint|model|state)", c.last)
        ]
        if effects or saves:
            what = effects[0].words() if effects else f"`{shown(saves[0].node.func)}`"
            message = (
                f"the handler `{target.name}` runs {what} wherever the signal finds the rank, even in the middle of"
                " another collective or save: ranks then wait for each other, or write half a step"
            )
            fix = (
                f"let `{target.name}` only set a flag; at the end of a step, agree on it over all ranks and save there"
            )
            yield Found("DDP109", function.module, call.node, message, fix)


def long_work(context: Context, function: Function) -> Iterator[Found]:
    """Yield evaluation and sampling on rank 0 alone within a loop, while the others go on to the next collective."""
    if not context.plain(function.module):
        return
    timeouts = context.calls_in_component(function.module, "init_process_group")
    if any(word.arg == "timeout" for call in timeouts for word in call.node.keywords):
        return
    seen: set[int] = set()
    yield from _long_loops(context, function, seen)
    for call in function.calls:
        found = context.ranks.partial(call) if call.place.guards and call.place.loops else None
        if found is None or found[1] != "first" or id(found[0].test) in seen or context.effects.of(call):
            continue
        target = context.program.called(call)
        words = set(call.last.split("_"))
        if target is None:
            continue
        long = words & LONG and _loops_on(target) and _runs_model(context, target)
        if long and context.together(function, call.place.loops[0]):
            seen.add(id(found[0].test))
            lengthy = bool(words & LENGTHY) or _lengthy(context, target)
            yield _waited_for(function, call.node, f"runs `{call.last}`, which loops over data", call.last, lengthy)


def _loops_on(function: Function) -> bool:
    """Tell whether a function has a loop that goes on to the end of its data."""
    return any(not _is_cut(loop) for loop, _ in function.loops)


def _is_cut(loop: ast.stmt) -> bool:
    """Tell whether a loop ends after one turn or some, by a `break` in it or in an `if` of it."""
    body = getattr(loop, "body", ())
    inner = [part for statement in body if isinstance(statement, ast.If) for part in statement.body]
    return any(isinstance(statement, ast.Break) for statement in (*body, *inner))


def _runs_model(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function, or one that it calls, runs a model: metrics of what is there already take seconds."""
    if context.effects.called_parameters(function):
        return True
    for call in function.calls:
        if any(MODEL.fullmatch(part) for part in dotted(call.node.func).split(".")):
            return True
        target = context.program.called(call)
        if target is not None and depth < 3 and _runs_model(context, target, depth + 1):
            return True
    return False


def _long_loops(context: Context, function: Function, seen: set[int]) -> Iterator[Found]:
    """Yield loops over a loader that only rank 0 runs within a loop of all ranks."""
    for loop, place in function.loops:
        if not (isinstance(loop, ast.For) and place.loops and "loader" in ast.unparse(loop.iter).lower()):
            continue
        if _is_cut(loop):
            continue
        guard = next((g for g in place.guards if context.ranks.guard(function, g) == "first"), None)
        guard = None if context.ranks.alone(function, place.guards) else guard
        if guard is None or id(guard.test) in seen or not context.together(function, place.loops[0]):
            continue
        seen.add(id(guard.test))
        what = shown(loop.iter, 40)
        lengthy = any(loop in call.place.loops and _is_lengthy(context, call, 0) for call in function.calls)
        yield _waited_for(function, loop, f"goes over `{what}` here", what, lengthy)


def _waited_for(function: Function, node: ast.AST, what: str, name: str, lengthy: bool) -> Found:
    """Return the finding of work on rank 0: a hang where it surely takes long, else idle GPUs."""
    fix = (
        f"share the work of `{name}` over all ranks, or wait for rank 0 outside of the training group"
        " with a deadline of its own (a store, or a gloo group with a timeout)"
    )
    if lengthy:
        message = (
            f"only rank 0 {what}; the others wait for it in the next collective, and after the timeout"
            " (10 minutes with nccl) the job dies"
        )
        return Found("DDP110", function.module, node, message, fix)
    message = (
        f"only rank 0 {what}; the GPUs of all other ranks do nothing meanwhile, and the job dies if it takes longer"
        " than the timeout (10 minutes with nccl)"
    )
    return Found("DDP408", function.module, node, message, fix)


def _lengthy(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function generates, or computes a metric of which each sample takes seconds."""
    return any(_is_lengthy(context, call, depth) for call in function.calls)


def _is_lengthy(context: Context, call: Call, depth: int) -> bool:
    if set(call.last.lower().split("_")) & LENGTHY and "sampler" not in dotted(call.node.func):
        return True
    target = context.program.called(call)
    return target is not None and depth < 3 and _lengthy(context, target, depth + 1)


RULES = (lonely, exits, flags, decisions, clocked_loops, swallowed, error_paths, handlers, long_work)
