"""Rules for collectives that only some ranks reach: by a test of the rank, by an exception, in a signal handler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from .context import INIT, Context, Found, part_of_try
from .effects import Effect, walk_body
from .module import Call, Function, Guard, Place, arguments_of, dotted, is_constant, last_of, names_in, shown
from .program import FOREIGN
from .ranks import Who
from .steps import goes_back
from .stops import tries_again

OF_KIND = {
    "forward": "DDP103",
    "group": "DDP112",
    "sharded save": "DDP111",
    "sharded load": "DDP111",
    "metric": "DDP113",
}
LOADERS = re.compile(r"(?:loader|dataset|data|batches)\)*$")  # what a loop over data goes over, at its end
DESTROY = "torch.distributed.destroy_process_group"
CATCHES = {"Exception", "BaseException", "RuntimeError", "OutOfMemoryError", "CudaError", "AcceleratorError"}
EXITS = {"exit", "_exit", "abort", "kill", "quit"}
READS = {"load", "load_state_dict", "open", "read", "print", "join", "restart_from_checkpoint", "import_module", "get"}
KNOWN_OWNERS = {"torch", "os", "sys", "time", "json", "np", "numpy", "shutil"}
ANSWERS = ("generate", "serve", "worker", "run", "listen", "loop", "wait", "follow")  # of ranks that work for rank 0


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
        given = {dotted(arg).rpartition(".")[2] for arg in arguments_of(other.node)} - {""}
        if any(call.last in given for call in function.calls if call.place.guards != other.place.guards):
            return True  # it is given on, to be called there
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


def own_keys(context: Context, function: Function) -> Iterator[Found]:
    """Yield a collective in a loop over the keys of a dict that a loop over data has filled: ranks may have others."""
    if id(function.module) not in context.distributed:
        return
    for loop, place in function.loops:
        over = loop.iter if isinstance(loop, ast.For) else None
        if isinstance(over, ast.Call) and dotted(over.func) in ("sorted", "list") and over.args:
            over = over.args[0]
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr in ("keys", "items"):
            over = over.func.value
        name = dotted(over) if over is not None else ""
        inner = next((c for c in function.calls if loop in c.place.loops and context.effects.direct(c)), None)
        if not name or inner is None or any(context.ranks.guard(function, g) for g in place.guards):
            continue
        filled = _filled_by_data(function, name, loop)
        if filled is None:
            continue
        line = function.module.position(filled.lineno)[1]
        message = (
            f"`{shown(inner.node.func, 40)}` is called once for each key of `{name}`, and each rank puts in the keys"
            f" that its own data have (line {line}): a rank that has seen another number of them waits, or pairs with"
            " another key's value"
        )
        fix = f"make `{name}` with all keys that there may be, on every rank, before the loop over the data"
        yield Found("DDP621", function.module, inner.node, message, fix)


def _filled_by_data(function: Function, name: str, loop: ast.stmt) -> ast.stmt | None:
    """Return the statement by which a loop over data adds keys of its own to a dict that begins empty."""
    made = [a.value for a in function.assignments.get(name, ()) if a.value is not None]
    empty = len(made) == 1 and (
        (isinstance(made[0], ast.Dict) and not made[0].keys)
        or (isinstance(made[0], ast.Call) and last_of(made[0]) in ("defaultdict", "dict", "Counter"))
    )
    for other, _ in function.loops if empty else ():
        if other is loop or not isinstance(other, ast.For) or other.lineno > loop.lineno:
            continue
        if not LOADERS.search(ast.unparse(other.iter).lower()):
            continue
        given = {part.id for part in ast.walk(other.target) if isinstance(part, ast.Name)}
        own = _made_in(other, given)
        for part in walk_body(other):
            if isinstance(part, (ast.Assign, ast.AugAssign)):
                target = part.targets[0] if isinstance(part, ast.Assign) else part.target
                if isinstance(target, ast.Subscript) and dotted(target.value) == name and own & names_in(target.slice):
                    return part
    return None


def _made_in(loop: ast.For, given: set[str]) -> set[str]:
    """Return the names that a loop makes of its own data, at once or over others."""
    found = set(given)
    parts = [part for part in walk_body(loop) if isinstance(part, ast.Assign)]
    for part in sorted(parts, key=lambda one: one.lineno):
        if found & names_in(part.value):
            plain = [t for target in part.targets for t in (getattr(target, "elts", None) or [target])]
            found |= {target.id for target in plain if isinstance(target, ast.Name)}
    return found


def swallowed(context: Context, function: Function) -> Iterator[Found]:
    """Yield handlers that go on after an exception in a step of all ranks."""
    if id(function.module) not in context.distributed:
        return
    for node, place in function.tries:
        inner = [c for c in function.calls if (node, "body") in c.place.tries]
        step = next((c for c in inner if goes_back(context, c) or _steps(context, inner, c)), None)
        around = _loop_around(context, function, place, step) if step is not None else None
        if (
            step is None
            or around is None
            or _only_timed(*around, step)
            or (step.last != "backward" and tries_again(node, around[1]))  # a finding of its own
            or any(context.ranks.guard(function, guard) for guard in place.guards)
        ):
            continue
        for handler in node.handlers:
            types = names_in(handler.type) if handler.type is not None else {"Exception"}
            ends = _ends(handler, context, function)
            tries_it_again = step.last == "backward" and any(
                c.last == "backward" and (node, "except") in c.place.tries for c in function.calls
            )
            if ends or not types & CATCHES or tries_it_again:
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


def _loop_around(context: Context, function: Function, place: Place, step: Call) -> tuple[Function, ast.stmt] | None:
    """Return the loop in which a `try` stands, and its function: also the caller's, of a helper that makes one step."""
    if place.loops:
        return function, place.loops[-1]
    optimizes = any(c.last == "step" and c.order > step.order for c in function.calls)
    sites = [site for site in context.program.sites.get(id(function), ()) if site.place.loops]
    back = any(c.last == "backward" and c.place.tries == step.place.tries for c in function.calls)
    if not back or not optimizes or not sites:
        return None
    return sites[0].function, sites[0].place.loops[-1]


def _ends(handler: ast.ExceptHandler, context: Context | None = None, function: Function | None = None) -> bool:
    """Tell whether a handler ends the process in a way that the launcher sees: not with the exit code of success."""
    body = handler.body
    if context is not None and function is not None:  # what is done in a program of one process alone is left out
        tests = {id(s): s for s in body if isinstance(s, ast.If) and not s.orelse}
        alone = {k for k, s in tests.items() if context.ranks.alone(function, [Guard(s.test, True, s.lineno)])}
        body = [statement for statement in body if id(statement) not in alone]
    parts = [part for statement in body for part in walk_body(statement)]
    exits = [part for part in parts if isinstance(part, ast.Call) and last_of(part) in EXITS]
    fails = any(last_of(part) in ("abort", "kill") or not _succeeds(part) for part in exits)
    return fails or any(isinstance(part, ast.Raise) for part in parts)


def _succeeds(node: ast.Call) -> bool:
    """Tell whether `sys.exit()` and its like end a process with 0."""
    return not node.args or is_constant(node.args[0], 0) or is_constant(node.args[0], None)


def ended_as_done(context: Context, function: Function) -> Iterator[Found]:
    """Yield handlers around all of a training that let a rank which has failed end as if it were done."""
    for node, place in function.tries:
        if place.loops or context.ranks.partial_place(function, place) or _fails_later(function, node):
            continue
        inner = [c for c in function.calls if (node, "body") in c.place.tries and _trains(context, c)]
        sides = {found[1] if (found := context.ranks.partial(c)) else "" for c in inner}
        run = inner[0] if "" in sides or {"first", "others"} <= sides else None
        for handler in node.handlers:
            types = names_in(handler.type) if handler.type is not None else {"Exception"}
            if run is None or not types & CATCHES or _ends(handler) or _hands_on(context, function, handler):
                continue
            caught = shown(handler.type) if handler.type is not None else "every exception"
            message = (
                f"the rank that fails in `{shown(run.node.func, 40)}` catches {caught} and ends with exit code 0, as if"
                " it were done: no launcher ends the others, which wait in their next collective until the timeout"
            )
            fix = "let the exception end the process: `raise` behind what the handler writes"
            yield Found("DDP106", function.module, handler, message, fix)


def _trains(context: Context, call: Call) -> bool:
    """Tell whether a call runs a whole training of several ranks: steps in a loop, in a function of these files."""
    target = context.program.called(call)
    if target is None or not (context.plain(call.function.module) or context.plain(target.module)):
        return False
    return context.goes_backward(call)


def _fails_later(function: Function, node: ast.Try) -> bool:
    """Tell whether a function may fail behind a `try`: by what a handler has noted, for one."""
    last = max((part.end_lineno or 0 for part in node.handlers), default=0)
    return any(
        leave.node.lineno > last and (leave.kind == "raise" or not _is_success(leave.node))
        for leave in function.exits
        if leave.kind in ("raise", "exit", "return")
    )


def _is_success(node: ast.stmt) -> bool:
    """Tell whether a function returns nothing, or a process ends with 0, by a statement."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and last_of(value) in EXITS:
        return _succeeds(value)
    return not isinstance(node, ast.Return) or value is None or is_constant(value, None)


def _hands_on(context: Context, function: Function, handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler returns or notes what has happened, or runs what may do so."""
    for statement in handler.body:
        for part in walk_body(statement):
            noted = isinstance(part, (ast.Assign, ast.AugAssign, ast.AnnAssign))
            if noted or (isinstance(part, ast.Return) and not _is_success(part)):
                return True
            if isinstance(part, ast.Call) and re.search(r"fail|fatal|abort|kill|handle|error_exit|die", last_of(part)):
                return True
            call = next((c for c in function.calls if c.node is part), None)
            target = context.program.called(call) if call is not None else None
            if target is not None and any(leave.kind in ("raise", "exit") for leave in target.exits):
                return True
    return False


def _steps(context: Context, inner: list[Call], call: Call) -> bool:
    """Tell whether ranks may fail alone around a call: in a forward or backward pass, or if nothing else is tried."""
    effects = context.effects.of(call)
    target = context.program.called(call)
    deep = target is not None and any(context.goes_backward(c) for c in target.calls)
    return bool(effects) and (deep or len(inner) == 1 or any(effect.kind == "forward" for effect in effects))


def _only_timed(function: Function, loop: ast.stmt, step: Call) -> bool:
    """Tell whether a backward pass is one of a profiler or a test: no data are looped over, and no step follows it."""
    if step.last != "backward":
        return False
    data = isinstance(loop, (ast.For, ast.AsyncFor)) and re.search(
        r"load|data|batch|train|queue", ast.unparse(loop.iter).lower()
    )
    return not data and not any(c.last in ("step", "zero_grad") and loop in c.place.loops for c in function.calls)


def error_paths(context: Context, function: Function) -> Iterator[Found]:
    """Yield collectives in except and finally, where ranks come that have failed."""
    for call in function.calls:
        part = part_of_try(call.place) if call.place.tries else ""
        if part == "finally" and _destroys(context, call) and _surrounds_steps(context, function, call):
            message = (
                "a rank that fails destroys the group before it ends, while the others are in a collective: they report"
                " a lost connection, which hides which rank failed, or the rank waits here for the others"
            )
            fix = "destroy the group behind the `try`, where no rank has failed"
            yield Found("DDP604", function.module, call.node, message, fix)
            continue
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
        elif call.name == DESTROY and part == "except":
            message = (
                "destroying the group after an exception hides which rank failed: the others report a lost connection"
            )
            fix = "leave with the exception, without destroy_process_group"
            yield Found("DDP604", function.module, call.node, message, fix)


def _destroys(context: Context, call: Call) -> bool:
    """Tell whether a call destroys the group, itself or in a helper."""
    target = context.program.called(call)
    return call.name == DESTROY or (target is not None and any(c.name == DESTROY for c in target.calls))


def _surrounds_steps(context: Context, function: Function, call: Call) -> bool:
    """Tell whether training stands in the body of the `try` whose `finally` a call is in.

    What a process that has made the group itself runs there, without a name that is known, is its work as well.
    """
    if id(function.module) not in context.distributed:
        return False
    outer = {id(node) for node, part in call.place.tries if part == "finally"}
    makes = any(c.last == INIT for c in function.calls)
    for other in function.calls:
        if not any(id(node) in outer and part == "body" for node, part in other.place.tries):
            continue
        target = context.program.called(other)
        unknown = makes and target is None and not dotted(other.node.func)
        steps = target is not None and any(context.goes_backward(c) or c.place.loops for c in target.calls)
        if other.place.loops or steps or unknown:
            return True
    return False


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
            if goes_back(context, other) or any(effect.sure for effect in effects):
                return True
    return False


def _tells(function: Function, call: Call) -> bool:
    """Tell whether a collective shares out whether a rank has failed: that is what it is there for."""
    names = {name for arg in arguments_of(call.node) for name in names_in(arg)}
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


RULES = (lonely, error_paths, handlers, ended_as_done)
OF_RANKS = (swallowed, own_keys)  # only where several ranks run the file
