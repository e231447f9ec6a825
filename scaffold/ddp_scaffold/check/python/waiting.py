"""Rules for work of one rank for which the others wait: evaluation, sampling, clustering, preparing the data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .effects import DDP, without_gradients
from .lasting import MODEL, NO_FORWARD, evaluates, heavy, is_cut, loops_on
from .module import Call, Function, Guard, dotted, shown

LENGTHY = {"sampling", "sample", "generate", "inference", "fid", "pesq", "beam"}
CACHES = re.compile(r"^load_and_cache_\w+")  # as in the examples of transformers
# What is prepared once, and read by all ranks after that.
PREPARED = re.compile(
    r"data|cache|tokeni[sz]e|download|prepare|process|features|corpus|vocab|fetch|unzip|extract", re.IGNORECASE
)
NO_DATA = re.compile(
    r"pretrained|weights|checkpoint|ckpt|state|model|config|barrier|sync|download=|mnist|cifar", re.IGNORECASE
)
LONG = {
    *("test", "val", "valid", "score", "scores", "inception", "testing"),
    "estimate",
    "evaluate",
    "evaluation",
    "validate",
    "validation",
    "sampling",
    "generate",
    "inference",
    "eval",
    "fid",
}


def long_work(context: Context, function: Function) -> Iterator[Found]:
    """Yield evaluation and sampling on rank 0 alone, while the others go on to the next collective."""
    if not context.plain(function.module):
        return
    seen: set[int] = set()
    yield from _long_loops(context, function, seen)
    for call in function.calls:
        found = context.ranks.partial(call) if call.place.guards or _is_decorated(function) else None
        if found is None or found[1] != "first" or id(found[0].test) in seen or _meets(context, call):
            continue
        target = context.program.called(call)
        words = set(re.split(r"[._]", dotted(call.node.func).lower() or call.last.lower()))
        if target is None or context.goes_backward(call) or not _is_long(context, target, bool(words & LONG)):
            continue
        if _is_in_training(context, function, found[0]) or _waits_next(context, call, found[0]):
            seen.add(id(found[0].test))
            direct = bool(call.place.loops) and not found[0].early
            named = set(call.last.lower().split("_"))
            lengthy = bool(named & LENGTHY) or (direct and _lengthy(context, target))
            lengthy = lengthy and not _has_timeout(context, function)
            yield _waited_for(function, call.node, f"runs `{call.last}`, which loops over data", call.last, lengthy)


def _is_long(context: Context, target: Function, named: bool) -> bool:
    """Tell whether a function that rank 0 runs alone evaluates a model: by what it does, or by its name and a loop."""
    return (named and loops_on(target) and _runs_model(context, target)) or evaluates(context, target)


def _has_timeout(context: Context, function: Function) -> bool:
    """Tell whether the group was given a timeout: then somebody has thought of how long others may wait."""
    inits = context.calls_in_component(function.module, "init_process_group")
    return any(word.arg == "timeout" for call in inits for word in call.node.keywords)


def _is_decorated(function: Function) -> bool:
    return not isinstance(function.node, ast.Module) and bool(function.node.decorator_list)


def _is_in_training(context: Context, function: Function, guard: Guard, depth: int = 0) -> bool:
    """Tell whether the condition of the rank stands in a loop in which all ranks train, here or where it is called."""
    place = next((place for test, place, _ in function.tests if test.test is guard.test), None)
    if place is not None and place.loops:
        return _trains_in(context, function, place.loops[0])
    return _is_called_in_training(context, function, 0)


def _is_called_in_training(context: Context, function: Function, depth: int) -> bool:
    """Tell whether a function is called in a loop of training: not where it is a whole training, of several."""
    if _is_whole(context, function):
        return False
    for site in callers(context, function):
        if site.function is function or context.ranks.partial(site) is not None:
            continue
        if site.place.loops and _trains_in(context, site.function, site.place.loops[0]):
            return True
        if not site.place.loops and depth < 4 and _is_called_in_training(context, site.function, depth + 1):
            return True
    return False


def _trains_in(context: Context, function: Function, loop: ast.stmt) -> bool:
    """Tell whether ranks train in a loop, also by a method of an object that a setting makes, such as a registry."""
    if context.together(function, loop):
        return True
    unknown = (c for c in function.calls if loop in c.place.loops and "." in dotted(c.node.func))
    return any(
        any(one.of_class is not None and context.goes_backward(c) for one in meant for c in one.calls)
        for call in unknown
        if len(call.last) > 6 and context.program.called(call) is None and context.ranks.partial(call) is None
        if (meant := context.named(function.module, call.last))
    )


def _is_whole(context: Context, function: Function) -> bool:
    """Tell whether a function has a loop over epochs with a loop over batches in it, here or in what it calls."""
    for call in function.calls:
        if not call.place.loops or not context.goes_backward(call):
            continue
        target = context.program.called(call)
        inner = target is not None and any(c.place.loops and context.goes_backward(c) for c in target.calls)
        if len(call.place.loops) > 1 or inner:
            return True
    return False


def callers(context: Context, function: Function) -> list[Call]:
    """Return the calls of a function; of a method that none is known of, those that its class's relatives have.

    They are calls of the method that it overrides, or of an object of which nobody knows the class, where the method's
    name is one of this family of classes alone.
    """
    found = context.program.sites.get(id(function), [])
    owner = function.of_class
    if found or owner is None or function.name.startswith("__"):
        return list(found)
    family = {id(one): one for one in context.program.family(owner)}
    alike = [one.methods[function.name] for one in family.values() if function.name in one.methods]
    found = [site for one in alike for site in context.program.sites.get(id(one), ())]
    if found or any(id(one.of_class) not in family for one in context.named(function.module, function.name)):
        return found
    unknown = context.calls_in_component(function.module, function.name)
    return [c for c in unknown if "." in dotted(c.node.func) and context.program.called(c) is None]


def _meets(context: Context, call: Call) -> bool:
    """Tell whether a call is a step of all ranks, a finding of its own; a forward pass in no_grad() is none."""
    return any(effect.kind != "forward" or not effect.quiet for effect in context.effects.of(call))


def _runs_model(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function, or one that it calls, runs a model: metrics of what is there already take seconds."""
    if context.effects.called_parameters(function):
        return True
    for call in function.calls:
        if call.last not in NO_FORWARD and any(MODEL.fullmatch(part) for part in dotted(call.node.func).split(".")):
            return True
        target = context.program.called(call)
        if target is not None and depth < 3 and _runs_model(context, target, depth + 1):
            return True
    return False


def _long_loops(context: Context, function: Function, seen: set[int]) -> Iterator[Found]:
    """Yield loops over a loader that only rank 0 runs within a loop of all ranks."""
    for loop, place in function.loops:
        if not isinstance(loop, ast.For) or is_cut(loop) or not _over_data(function, loop):
            continue
        guard = next((g for g in place.guards if context.ranks.guard(function, g) == "first"), None)
        guard = None if context.ranks.alone(function, place.guards) else guard
        if guard is None or id(guard.test) in seen or not _is_in_training(context, function, guard):
            continue
        seen.add(id(guard.test))
        what = shown(loop.iter, 40)
        lengthy = bool(place.loops) and any(
            loop in call.place.loops and _is_lengthy(context, call, 0) for call in function.calls
        )
        lengthy = lengthy and not _has_timeout(context, function)
        yield _waited_for(function, loop, f"goes over `{what}` here", what, lengthy)


def _over_data(function: Function, loop: ast.For) -> bool:
    """Tell whether a loop goes over a loader, or runs a model for each item of something else."""
    if "loader" in ast.unparse(loop.iter).lower():
        return True
    return any(
        loop in call.place.loops and any(MODEL.fullmatch(part) for part in dotted(call.node.func).split("."))
        for call in function.calls
        if "." not in dotted(call.node.func)
        or call.last in ("forward", "generate", "sample")
        or ((call.last == "module" or MODEL.fullmatch(call.last)) and without_gradients(call))
    )


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
        " than the timeout (10 minutes with nccl unless it is given)"
    )
    return Found("DDP408", function.module, node, message, fix)


def _lengthy(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function generates, or computes a metric of which each sample takes seconds."""
    return any(_is_lengthy(context, call, depth) for call in function.calls)


def _is_lengthy(context: Context, call: Call, depth: int) -> bool:
    words = set(call.last.lower().split("_"))
    if words & LENGTHY and "batch" not in words and "sampler" not in dotted(call.node.func):
        return True
    target = context.program.called(call)
    return target is not None and depth < 3 and _lengthy(context, target, depth + 1)


def heavy_work(context: Context, function: Function) -> Iterator[Found]:
    """Yield clustering, fitting and data preparation on rank 0, for which the others wait in a collective."""
    if id(function.module) not in context.distributed:
        return
    seen: set[int] = set()
    for call in function.calls:
        found = context.ranks.partial(call) if call.place.guards or _is_decorated(function) else None
        if found is None or found[1] != "first" or id(found[0].test) in seen:
            continue
        target = context.program.called(call)
        if target is not None and evaluates(context, target):  # a finding of its own
            continue
        place = next((place for test, place, _ in function.tests if test.test is found[0].test), None)
        work = heavy(context, call, place.loops if place is not None else call.place.loops)
        work = work or (_again(call, found[0]) if place is not None and not found[0].early else None)
        wait = _waits_next(context, call, found[0]) if work else None
        if work is None or wait is None:
            continue
        seen.add(id(found[0].test))
        message = (
            f"{context.ranks.words(*found)} runs {work}, minutes for much data; the others wait for it in"
            f" `{shown(wait.node.func, 40)}` ({_line_of(wait, function)}), GPUs idle, and the job dies if it takes"
            " longer than the timeout (10 minutes with nccl)"
        )
        fix = (
            f"do `{shown(call.node.func, 40)}` before the job, share it out over the ranks, or wait for it outside of"
            " the training group (a store, or a gloo group with a timeout of its own)"
        )
        yield Found("DDP410", function.module, call.node, message, fix)


def _again(call: Call, guard: Guard) -> str | None:
    """Return a call in words by which rank 0 prepares data that the others read behind it, by the same call."""
    text = dotted(call.node.func)
    if not text or not PREPARED.search(text) or NO_DATA.search(ast.unparse(call.node)):
        return None
    for other in call.function.calls:
        mine = any(g.test is guard.test and g.holds == guard.holds for g in other.place.guards)
        if other.order > call.order and not mine and dotted(other.node.func) == text:
            between = (c for c in call.function.calls if call.order < c.order < other.order)
            if any("barrier" in c.last or c.last in ("synchronize", "wait_for_everyone") for c in between):
                return f"`{text}`, which the other ranks call only behind it"
    return None


def _line_of(call: Call, function: Function) -> str:
    """Return `line 12` for a call, with its file where that is another one."""
    line = call.function.module.position(call.node.lineno)[1]
    other = call.function.module is not function.module
    return f"{call.function.module.file.path} line {line}" if other else f"line {line}"


def first_rank_first(context: Context, function: Function) -> Iterator[Found]:
    """Yield data that rank 0 prepares between the barrier of the others and its own: they wait there meanwhile."""
    if id(function.module) not in context.distributed:
        return
    for call in function.calls:
        before = barriers_around(context, call)
        # The two barriers say themselves that something takes long: so it may stand further down.
        work = heavy(context, call, call.place.loops, reach=3) if before is not None else None
        if before is None or (work is None and not CACHES.search(call.last)):
            continue
        line = function.module.position(before.node.lineno)[1]
        message = (
            f"rank 0 alone comes to `{shown(call.node.func, 40)}` first, minutes for much data; the others wait for it"
            f" in the barrier of line {line}, GPUs idle, and the job dies if it takes longer than the timeout (10"
            " minutes with nccl)"
        )
        fix = "prepare the data before the job, or wait for it outside of the training group with a deadline of its own"
        yield Found("DDP410", function.module, call.node, message, fix)
        return


def barriers_around(context: Context, call: Call) -> Call | None:
    """Return the barrier in which the other ranks wait until rank 0 has done a call and comes to its own."""
    before = after = None
    if call.last == "barrier" or not any(c.last == "barrier" for c in call.function.calls):
        return None
    for other in call.function.calls:
        found = context.ranks.partial(other) if other.last == "barrier" else None
        if found is None or found[0].early:
            continue
        if other.order < call.order:
            before = other if found[1] == "others" else None
        elif after is None:
            after = found[1]
    return before if after == "first" else None


def _waits_next(context: Context, call: Call, guard: Guard) -> Call | None:
    """Return the step of all ranks that comes next, where those wait that do not pass a guard.

    It stands behind the condition in the same loop, at the next turn of that loop, or in what calls the function.
    """
    tests = call.function.tests
    place = next((place for test, place, _ in tests if test.test is guard.test), None)
    if place is None or guard.early:
        return _waits_above(context, call.function, 0)
    found = _next_step(context, call, place.loops, guard)
    return found if found is not None or place.loops else _waits_above(context, call.function, 0)


def _waits_above(context: Context, function: Function, depth: int) -> Call | None:
    for site in callers(context, function):
        if site.function is function or context.ranks.partial(site) is not None:
            continue
        found = _next_step(context, site, site.place.loops, None)
        if found is None and not site.place.loops and depth < 3:
            found = _waits_above(context, site.function, depth + 1)
        if found is not None:
            return found
    return None


def _next_step(context: Context, call: Call, loops: tuple[ast.stmt, ...], guard: Guard | None) -> Call | None:
    """Return the first collective, backward pass or wrap in DDP of all ranks behind a call, within loops around it."""
    inside = [c for c in call.function.calls if c.place.loops[: len(loops)] == loops and c is not call]
    later = [c for c in inside if c.order >= call.order]
    for other in [*later, *inside] if loops and guard is not None else later:
        if any(guard is not None and g.test is guard.test for g in other.place.guards) or _excludes(call, other):
            continue
        if context.ranks.partial(other) is not None or context.ranks.alone(other.function, other.place.guards):
            continue
        meets = any(effect.kind == "collective" for effect in context.effects.of(other))
        if meets or DDP.fullmatch(other.name) is not None or context.goes_backward(other):
            return other
    return None


def _excludes(call: Call, other: Call) -> bool:
    """Tell whether two calls stand in branches of which a program takes one: the first may end it."""
    mine = {(id(guard.test), guard.holds) for guard in call.place.guards}
    return any((id(guard.test), not guard.holds) in mine for guard in other.place.guards)


RULES = ()
OF_RANKS = (long_work, heavy_work, first_rank_first)  # only where several ranks run the file
