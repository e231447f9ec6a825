"""Rules for what a rank measures: batches that are left out, and a number that is of the last batch alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .everywhere import on_every_rank
from .flow import Held
from .lasting import is_for_trial
from .module import Assignment, Exit, Function, Place, dotted, is_constant, keyword, names_in, shown, variable_of
from .samplers import (
    EVALUATES,
    HELD_OUT,
    SEVERAL,
    TRAIN,
    Loader,
    entry_of,
    goes_backward,
    loader_comes_to,
    loaders_with,
    shares_itself,
    turns_over,
)

MEASURED = re.compile(r"(?:.*_)?(?:loss|acc|accuracy|metric|score|error|err|ppl|iou|miou|psnr|mae|rmse|auc)\d?(?:_.*)?")
BEST = re.compile(r"(?:.*_)?(?:best|lowest|highest)(?:_.*)?|(?:min|max)_(?:.*_)?(?:loss|acc|score|error|metric).*")
# What a sampler leaves out is evaluated apart: `range(len(loader.sampler) * world_size, len(loader.dataset))`.
REST = re.compile(r"len\([\w.]*sampler\)\s*\*|\*\s*len\([\w.]*sampler\)")
ADDS = {"append", "extend", "update", "add", "add_batch", "accumulate", "log", "put"}


def dropped(context: Context, function: Function) -> Iterator[Found]:
    """Yield loaders of validation that leave the last batch of each rank out."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if call.last != "DataLoader" or not is_constant(keyword(call.node, "drop_last"), True):
            continue
        size = call.node.args[1] if len(call.node.args) > 1 else keyword(call.node, "batch_size")
        if size is None or is_constant(size, 1):  # nothing is left out
            continue
        if keyword(call.node, "sampler") is None or context.ranks.alone(function, call.place.guards):
            continue
        name = variable_of(function, call)
        if TRAIN.search(name.rpartition(".")[2]) or TRAIN.search(entry_of(function, call)):
            continue
        if not loader_comes_to(context, Loader(function, call), _evaluated_on):
            continue
        message = (
            f"drop_last leaves up to a batch less one of the validation samples out on each rank{_of(name)}: the metric"
            " is one of a part of the set, and of another part with another number of ranks"
        )
        fix = "write drop_last=False for the validation loader, and weight each batch by its size"
        yield Found("DDP220", function.module, call.node, message, fix)


def dropped_by_sampler(context: Context, function: Function) -> Iterator[Found]:
    """Yield samplers of validation that leave out what does not fill a batch, or a turn of all ranks."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        name = variable_of(function, call)
        if not call.last.endswith("Sampler") or not is_constant(keyword(call.node, "drop_last"), True):
            continue
        if not HELD_OUT.search(name.rpartition(".")[2]) or context.ranks.alone(function, call.place.guards):
            continue
        loaders = loaders_with(context, function, call)
        if REST.search(function.module.file.text):
            continue
        if not any(loader_comes_to(context, loader, _evaluated_on) for loader in loaders):
            continue
        message = (
            f"drop_last leaves samples of the validation out{_of(name)}: the metric is one of a part of the set, and of"
            " another part with another number of ranks"
        )
        fix = "write drop_last=False for the validation, and weight each batch by its size"
        yield Found("DDP220", function.module, call.node, message, fix)


def _of(name: str) -> str:
    return f" (`{name}`)" if name else ""


def _evaluated_on(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether a function evaluates what it loops over, to the end."""
    turns = turns_over(function, holds)
    loops = [loop for loop in turns if isinstance(loop, ast.For) and holds(loop.iter)]
    trains = goes_backward(context, function, turns)
    leaves = any(e.kind == "break" and set(loops) & set(e.place.loops) and _cuts(e) for e in function.exits)
    evaluates = any(c.last == "eval" for c in function.calls)
    named = HELD_OUT.search(function.name) or EVALUATES.search(function.name)
    return bool(loops) and not trains and not leaves and bool(evaluates or named)


def _cuts(leave: Exit) -> bool:
    """Tell whether a loop is left after some turns: not where its own number of steps is reached."""
    tests = [guard.test for guard in leave.place.guards[-1:]]
    if any(map(is_for_trial, tests)):
        return False
    return not any(
        isinstance(test, ast.Compare) and re.search(r"step|len\(|num|total", ast.unparse(test.comparators[0]))
        for test in tests
    )


def on_all(context: Context, function: Function) -> Iterator[Found]:
    """Yield loaders of validation without a sampler, which every rank goes over from beginning to end."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if call.last != "DataLoader" or len(call.node.args) > 3:
            continue
        name = variable_of(function, call)
        if not HELD_OUT.search(name.rpartition(".")[2] or function.name):
            continue
        given = {word.arg for word in call.node.keywords if not is_constant(word.value, None)}
        if given & {None, "sampler", "batch_sampler"} or context.ranks.partial(call) is not None:
            continue
        if any(SEVERAL.search(ast.unparse(guard.test)) for guard in call.place.guards):
            continue
        if shares_itself(context, function, call) or not on_every_rank(context, call, 0):
            continue
        if not context.run_by_ranks(function) or not loader_comes_to(context, Loader(function, call), _all_evaluate):
            continue
        what = f"`{name}`" if name else "what this loader gives"
        message = (
            f"every rank goes over all of {what} and computes the same: n ranks take as long for the validation as"
            " one would"
        )
        fix = "give each rank a part that repeats no sample (`Subset(data, range(rank, n, world_size))`), and reduce"
        yield Found("DDP423", function.module, call.node, message, fix)


def _all_evaluate(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether every rank evaluates what a function loops over."""
    loops = [(loop, place) for loop, place in function.loops if isinstance(loop, ast.For) and holds(loop.iter)]
    if not loops or any(context.ranks.partial_place(function, place) for _, place in loops):
        return False
    if context.ranks.decorated(function) or not _evaluated_on(context, function, holds):
        return False
    sites = context.program.sites.get(id(function), ())
    return not sites or any(on_every_rank(context, site, 0) for site in sites)


def last_batch(context: Context, function: Function) -> Iterator[Found]:
    """Yield a metric that is returned, or decides what is best, and was measured on the last batch of one rank."""
    if not context.plain(function.module):
        return
    loops = {loop: place for loop, place in function.loops if isinstance(loop, ast.For) and _over_batches(loop)}
    if not loops:
        return
    for name, node in (*_decides(function, loops), *_returned(function, loops)):
        loop = _only_in(function, name, loops, node)
        if loop is None or not _of_batch(function, name, loop):
            continue
        message = (
            f"`{name}` is the value of the last batch of the loop in line"
            f" {function.module.position(loop.lineno)[1]}, on each rank of its own: one batch tells what is the best"
        )
        fix = f"add `{name}` up over the batches, and take the mean over all ranks (`all_reduce`)"
        yield Found("DDP223", function.module, node, message, fix)
        return


def _over_batches(loop: ast.For) -> bool:
    return re.search(r"loader|batches", ast.unparse(loop.iter).lower()) is not None


def _decides(function: Function, loops: dict[ast.For, Place]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that are compared with the best so far, behind a loop over batches."""
    for test, place, _ in function.tests:
        if isinstance(test.test, ast.Compare) and not set(place.loops) & set(loops):
            names = {dotted(side) for side in (test.test.left, *test.test.comparators)}
            if any(BEST.fullmatch(name.rpartition(".")[2]) for name in names):
                yield from ((name, test.test) for name in sorted(names) if MEASURED.fullmatch(name))


def _returned(function: Function, loops: dict[ast.For, Place]) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a function of validation returns behind its loop."""
    if not (HELD_OUT.search(function.name) or EVALUATES.search(function.name)):
        return
    for leave in function.exits:
        if not isinstance(leave.node, ast.Return) or leave.node.value is None or set(leave.place.loops) & set(loops):
            continue
        value = leave.node.value
        for part in value.elts if isinstance(value, ast.Tuple) else [value]:
            while isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and not part.args:
                part = part.func.value  # loss.item()
            if MEASURED.fullmatch(dotted(part)):
                yield dotted(part), part


def _only_in(function: Function, name: str, loops: dict[ast.For, Place], use: ast.AST) -> ast.For | None:
    """Return the loop over batches in which a name gets all of its values, each anew."""
    if name in function.parameters:
        return None
    before = [a for a in function.assignments.get(name, ()) if a.node.lineno < getattr(use, "lineno", 0)]
    inside = [a for a in before if a.place.loops and a.place.loops[-1] in loops]
    outside = [a for a in before if a not in inside]
    if not inside or any(not isinstance(a.value, ast.Constant) for a in outside):
        return None
    found = {a.place.loops[-1] for a in inside}
    return found.pop() if len(found) == 1 else None  # type: ignore[return-value]  # a key of loops


def _of_batch(function: Function, name: str, loop: ast.For) -> bool:
    """Tell whether a name is made of one batch alone: of nothing that the loop adds to."""
    if any(isinstance(exit.node, ast.Break) and loop in exit.place.loops for exit in function.exits):
        return False
    batch = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    added = {dotted(c.node.func).rpartition(".")[0] for c in function.calls if c.last in ADDS}
    waiting, seen = [name], set[str]()
    reached = False
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        if here in added:
            return False
        for assignment in function.assignments.get(here, ()):
            if loop not in assignment.place.loops or assignment.node is loop:
                continue
            value = _value(assignment)
            if value is None or isinstance(assignment.node, ast.AugAssign) or here in names_in(value):
                return False  # it is added to
            names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
            reached = reached or bool(names & batch)
            waiting += sorted(names - batch)
    return reached and _starts_with_call(function, name, loop)


def _value(assignment: Assignment) -> ast.expr | None:
    return assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)


def _starts_with_call(function: Function, name: str, loop: ast.For) -> bool:
    """Tell whether a name is what a call returns: of the model or of the loss."""
    values = [_value(a) for a in function.assignments.get(name, ()) if loop in a.place.loops]
    return bool(values) and all(isinstance(value, (ast.Call, ast.BinOp)) for value in values)


def late_epochs(context: Context, function: Function) -> Iterator[Found]:
    """Yield set_epoch within the loop over the loader, which has drawn its order by then."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        loop = call.place.loops[-1] if call.last == "set_epoch" and call.place.loops else None
        if not isinstance(loop, ast.For) or len(call.place.loops) < 2 or not _over_batches(loop):
            continue
        owner = shown(call.node.func, 40).rpartition(".")[0]
        message = (
            f"the loader has drawn its order before this line is reached: `{owner}` hears of each epoch one too late,"
            " so the first two have the same order on every rank"
        )
        fix = f"call `{shown(call.node, 50)}` before the loop in line {function.module.position(loop.lineno)[1]}"
        yield Found("DDP633", function.module, call.node, message, fix)


RULES = ()
OF_RANKS = (dropped, dropped_by_sampler, on_all, last_batch, late_epochs)  # only where several ranks run the file
