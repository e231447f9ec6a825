"""Rules for what each rank does by itself: stopping early, trying again, starting other processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .devices import INIT
from .module import Call, Exit, Function, dotted, keyword, names_in, shown
from .samplers import SAMPLER, reduces

EARLY = re.compile(
    r"early_?stop(?:ping|per|ped)?|patience|no_?improve\w*|(?:num_)?bad_epochs|epochs_(?:without|no)_\w+|not_improved\w*",
    re.IGNORECASE,
)
BEST = re.compile(r"best|min_|max_|delta|threshold|patience|epoch|step", re.IGNORECASE)
RETRIES = {"tenacity.retry", "retrying.retry", "retry.retry", "backoff.on_exception", "backoff.on_predicate"}
SPAWN = {"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"}
SETS_RANK = re.compile(r"environ(?:\.setdefault\(|\[)\s*['\"]RANK['\"]\s*(?:\]\s*=[^=]|,)|environ\.update|putenv")
BROAD = {"Exception", "BaseException", "RuntimeError", "OSError", "TimeoutError", "DistBackendError", "DistError"}


NOTICES = re.compile(
    r"exitcode|is_alive|sentinel|connection\.wait|terminate\(|join\(timeout|SpawnContext|error_?(?:handler|queue)"
    r"|SimpleQueue",
    re.IGNORECASE,
)


def early_stops(context: Context, function: Function) -> Iterator[Found]:
    """Yield early stopping by a value of the rank's own part of the data, which no collective has shared."""
    if not context.plain(function.module):
        return
    for test, place, _ in function.tests:
        leave = next((e for e in function.exits if e.node in test.body and e.kind in ("break", "return")), None)
        words = {name for name in names_in(test.test) if EARLY.search(name)}
        if leave is None or not words or not place.loops or context.ranks.partial_place(function, place):
            continue
        loop = place.loops[-1] if leave.kind == "break" else place.loops[0]
        if not context.together(function, loop) or context.agreed(function, names_in(test.test)):
            continue
        metric = next(
            (name for name in _measured(function, test, loop) if _is_local(context, function, name, loop)), ""
        )
        if metric:
            yield _stopped(function, test, leave, metric)


def _stopped(function: Function, test: ast.If, leave: Exit, metric: str) -> Found:
    message = (
        f"`{metric}` is measured on this rank's part of the data, so ranks run out of patience at different epochs: the"
        " first to leave the loop lets the others wait in their next backward until the timeout"
    )
    fix = f"average `{metric}` over all ranks (`all_reduce`) before it is compared, and {leave.kind} on all alike"
    return Found("DDP115", function.module, test, message, fix)


def _measured(function: Function, test: ast.If, loop: ast.stmt) -> list[str]:
    """Return the names that a counter of bad epochs, or an object that counts them, goes by."""
    found: list[str] = []
    roots = {dotted(part) for part in ast.walk(test.test) if isinstance(part, (ast.Name, ast.Attribute))}
    for call in function.calls:
        owner = dotted(call.node.func)
        given = loop in call.place.loops and (owner in roots or owner.rpartition(".")[0] in roots - {""})
        if given and call.node.args and EARLY.search(owner):
            found += [dotted(arg) for arg in call.node.args[:1] if dotted(arg)]
    for name in roots:
        for assignment in function.assignments.get(name, ()):
            for guard in assignment.place.guards:
                if loop in assignment.place.loops and isinstance(guard.test, ast.Compare):
                    found += sorted(n for n in names_in(guard.test) if not BEST.search(n))
    return found


def _is_local(context: Context, function: Function, name: str, loop: ast.stmt, depth: int = 0) -> bool:
    """Tell whether a value surely comes from data of this rank alone: of a loader with a distributed sampler."""
    for assignment in function.assignments.get(name, ()):
        value = assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)
        if loop not in assignment.place.loops or value is None:
            continue
        for part in ast.walk(value):
            call = next((c for c in function.calls if c.node is part), None)
            target = context.program.called(call) if call is not None else None
            if call is None or target is None:
                continue
            given = {dotted(arg) for arg in (*call.node.args, *(word.value for word in call.node.keywords))}
            if not reduces(context, target) and any(_is_shared_out(function, one) for one in given):
                return True
        inner = [one for one in assignment.place.loops if one is not loop and isinstance(one, ast.For)]
        if any(_is_shared_out(function, dotted(part)) for one in inner for part in ast.walk(one.iter)):
            return True
        if depth < 3 and any(
            _is_local(context, function, other, loop, depth + 1) for other in names_in(value) - {name, "item"}
        ):
            return True
    return False


def _is_shared_out(function: Function, loader: str) -> bool:
    """Tell whether a loader of this function has a distributed sampler."""
    for assignment in function.assignments.get(loader, ()) if loader else ():
        value = assignment.value
        given = keyword(value, "sampler") if isinstance(value, ast.Call) else None
        if given is None:
            continue
        made = [given, *(a.value for a in function.assignments.get(dotted(given), ()) if a.value is not None)]
        if any(isinstance(one, ast.Call) and dotted(one.func).rpartition(".")[2] == SAMPLER for one in made):
            return True
    return False


def retries(context: Context, function: Function) -> Iterator[Found]:
    """Yield collectives that are tried again after an exception: the other ranks have called them once."""
    for node, place in function.tries:
        if not place.loops or not tries_again(node, place.loops[-1]):
            continue
        step = next((c for c in function.calls if (node, "body") in c.place.tries and _surely_meets(context, c)), None)
        if step is not None and context.ranks.partial(step) is None:
            yield _tried_again(context, function, step)
    decorators = [] if isinstance(function.node, ast.Module) else function.node.decorator_list
    for decorator in decorators:
        name = function.module.full_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
        step = next((c for c in function.calls if _surely_meets(context, c)), None) if name in RETRIES else None
        if step is not None:
            yield _tried_again(context, function, step)


def tries_again(node: ast.Try, loop: ast.stmt) -> bool:
    """Tell whether a `try` is left when it succeeds, and is come to again when it fails."""
    counted = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "range"
    endless = isinstance(loop, ast.While)
    ends = [*node.body, *node.orelse]
    leaves = any(isinstance(statement, (ast.Break, ast.Return)) for statement in ends)
    if not ((counted or endless) and leaves):
        return False
    for handler in node.handlers:
        types = names_in(handler.type) if handler.type is not None else {"Exception"}
        if types & BROAD and not any(isinstance(s, (ast.Raise, ast.Return, ast.Break)) for s in handler.body):
            return True
    return False


def _surely_meets(context: Context, call: Call) -> bool:
    """Tell whether a call is a collective and little else: memory for a loop of steps runs out on all ranks alike."""
    target = context.program.called(call)
    short = target is None or not target.loops
    return short and any(effect.sure and effect.kind != "forward" for effect in context.effects.of(call))


def _tried_again(context: Context, function: Function, step: Call) -> Found:
    what = context.effects.of(step)[0].words()
    message = (
        f"a rank that fails here calls {what} again, and the others do not: its second call pairs with their next"
        " collective, or waits until the timeout"
    )
    fix = f"try again what can fail by itself (a read, a download) before `{shown(step.node, 40)}`, and let that fail"
    return Found("DDP116", function.module, step.node, message, fix)


def spawns(context: Context, function: Function) -> Iterator[Found]:
    """Yield processes that are started by a process which is a rank itself, as torchrun starts it."""
    for call in function.calls:
        if call.name not in SPAWN or context.ranks.alone(function, call.place.guards):
            continue
        reason = _is_rank_already(function, call) or _same_rank(context, function, call)
        if reason:
            message = (
                f"{reason}, so this file is started by torchrun, once a GPU; each of those processes starts a set of"
                " processes here, several have the same rank, and all wait in init_process_group for 30 minutes"
            )
            worker = shown(call.node.args[0], 30) if call.node.args else "the function"
            fix = f"call `{worker}` itself with the local rank, and leave starting to torchrun; or start it by python"
            yield Found("DDP117", function.module, call.node, message, fix)


def _is_rank_already(function: Function, call: Call) -> str:
    """Return what shows that a function is run by a rank before it starts others."""
    guards = {(id(guard.test), guard.holds) for guard in call.place.guards}
    for assignment in (one for assigned in function.assignments.values() for one in assigned):
        ours = all((id(guard.test), guard.holds) in guards for guard in assignment.place.guards)
        if assignment.value is None or not ours or assignment.order > call.order:
            continue
        if any(_reads_variable(part, "LOCAL_RANK") for part in ast.walk(assignment.value)):
            return f"line {function.module.position(assignment.node.lineno)[1]} needs LOCAL_RANK"
    for other in function.calls:
        ours = all((id(guard.test), guard.holds) in guards for guard in other.place.guards)
        if other.name == INIT and ours and other.order < call.order:
            return f"line {function.module.position(other.node.lineno)[1]} joins a process group"
    return ""


def _reads_variable(node: ast.AST, name: str) -> bool:
    """Tell whether an expression is `os.environ[NAME]`, which fails where nothing has set it."""
    return (
        isinstance(node, ast.Subscript)
        and dotted(node.value) in ("os.environ", "environ")
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == name
    )


def _same_rank(context: Context, function: Function, call: Call) -> str:
    """Return why all processes that are started have the rank of the one that starts them."""
    target = context.program.lookup(function.module, dotted(call.node.args[0])) if call.node.args else None
    if not isinstance(target, Function):
        return ""
    init = next((c for c in target.calls if c.name == INIT), None)
    if init is None or keyword(init.node, "rank") is not None or keyword(init.node, "init_method") is not None:
        return ""
    if len(init.node.args) > 1 or any(word.arg is None for word in init.node.keywords):
        return ""
    if context.says(function.module, SETS_RANK):
        return ""
    return f"`{target.name}` takes its rank from the environment (init_process_group without rank=)"


def joined(context: Context, function: Function) -> Iterator[Found]:
    """Yield ranks that are started as processes and waited for one after the other: a death is not noticed."""
    if not _starts(function) or NOTICES.search(ast.unparse(function.node)):
        return
    for call in function.calls:
        if call.last != "join" or call.node.args or call.node.keywords or not call.place.loops:
            continue
        loop = call.place.loops[-1]
        owner = dotted(call.node.func).rpartition(".")[0]
        if not (isinstance(loop, ast.For) and dotted(loop.target) == owner):
            continue
        start = next((c for c in _starts(function) if _joins_group(context, c)), None)
        if start is not None:
            message = (
                "the ranks are waited for one after the other: if one dies, nothing ends the others, which wait for it"
                " in their next collective, and this process waits for them"
            )
            worker = shown(keyword(start.node, "target") or start.node, 30)
            fix = f"start them with torch.multiprocessing.spawn({worker}, ...), which ends all when one dies"
            yield Found("DDP632", function.module, call.node, message, fix)
            return


def _starts(function: Function) -> list[Call]:
    return [c for c in function.calls if c.last == "Process" and keyword(c.node, "target") is not None]


def _joins_group(context: Context, call: Call) -> bool:
    """Tell whether what a process runs makes the group, itself or in a function that it calls."""
    target = keyword(call.node, "target")
    found = context.program.lookup(call.function.module, dotted(target)) if target is not None else None
    waiting = [found] if isinstance(found, Function) else []
    seen: set[int] = set()
    while waiting and len(seen) < 30:
        here = waiting.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if any(c.name == INIT for c in here.calls):
            return True
        waiting += [t for c in here.calls if (t := context.program.called(c)) is not None]
    return False


RULES = (joined, retries, spawns)
OF_RANKS = (early_stops,)  # only where several ranks run the file
