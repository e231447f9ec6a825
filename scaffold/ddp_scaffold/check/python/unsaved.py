"""A rule for a training run that saves its weights once, when all of it is over."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from .checkpoints import repeats
from .context import Context, Found
from .module import Call, Function, arguments_of, dotted, names_in

EPOCH = re.compile(r"(?:\w*_)?(?:epoch|ep)(?:_?(?:num|idx|i|id|no))?", re.IGNORECASE)
# What may save, by its name alone: a hook, an object of another package, a log of a model.
MAY_SAVE = re.compile(
    r"save|checkpoint|ckpt|snapshot|store|dump|persist|hook|callback|early|stopp|log_model|artifact|^on_|^after_|_end$"
    r"|manager|update_best|is_best|export|write_model",
    re.IGNORECASE,
)
FEW = 3  # so many epochs are a demonstration
MAX_DEPTH = 4


def saved_at_end(context: Context, function: Function) -> Iterator[Found]:
    """Yield torch.save of the weights that comes once, after the last epoch, where nothing in the epochs saves."""
    if not context.plain(function.module) or not function.loops:
        return
    for loop, place in function.loops:
        if not isinstance(loop, ast.For) or place.loops or not _is_of_epochs(context, function, loop):
            continue
        inside = [c for c in function.calls if loop in c.place.loops]
        last = [c for c in inside if _is_last_epoch(loop, c)]
        others = [c for c in inside if c not in last]
        if not any(context.goes_backward(c) for c in others) or any(_may_save(context, c, 0) for c in others):
            continue
        save = next((c for c in (*last, *_behind(context, function, loop)) if _saves_weights(context, c)), None)
        if save is None:
            continue
        message = (
            "the weights are saved once, after the last epoch, and nothing in the epochs saves: whatever ends the run"
            " before (a kill, a failed node, the time limit) takes all of it"
        )
        fix = "save the model, the optimizer and the epoch on rank 0 in each epoch, and go on from there at the start"
        yield Found("DDP325", save.function.module, save.node, message, fix)
        return


def _is_of_epochs(context: Context, function: Function, loop: ast.For) -> bool:
    """Tell whether a loop counts epochs, and more than a few."""
    if not EPOCH.fullmatch(dotted(loop.target)):
        return False
    if any(repeats(context, site) for site in context.program.sites.get(id(function), ())):
        return False  # one part of a longer training
    parts = [part for part in ast.walk(loop.iter) if isinstance(part, ast.Call) and dotted(part.func) == "range"]
    if not parts:
        return False
    end = parts[0].args[1 if len(parts[0].args) > 1 else 0] if parts[0].args else None
    if end is not None and dotted(end):
        values = [a.value for a in context.program.assigned(function, dotted(end))]
        end = values[0] if len(values) == 1 and values[0] is not None else context.default_of(function.module, end)
    return not (isinstance(end, ast.Constant) and isinstance(end.value, int) and end.value <= FEW)


def _is_last_epoch(loop: ast.For, call: Call) -> bool:
    """Tell whether a call stands under `epoch == epochs - 1`."""
    counter = dotted(loop.target)
    held = (g.test for g in call.place.guards if g.holds)
    for test in (part for one in held for part in (one.values if _all_of(one) else [one])):
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
            sides = (test.left, test.comparators[0])
            other = next((side for side in sides if counter not in {dotted(part) for part in ast.walk(side)}), None)
            if other is not None and counter in names_in(test) and re.search("epoch", ast.unparse(other), re.I):
                return not any(isinstance(part, ast.Mod) for part in ast.walk(test))
    return False


def _all_of(test: ast.expr) -> TypeGuard[ast.BoolOp]:
    """Tell whether a condition holds only where all of its parts do: `epoch % 10 == 0 or ...` holds in others, too."""
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)


def _may_save(context: Context, call: Call, depth: int) -> bool:
    """Tell whether a call saves something, or may do so."""
    if MAY_SAVE.search(call.last) or call.name in ("open", "pickle.dump"):
        return True
    target = context.program.runs(call)
    if target is None:
        # What is not known may save where it is given the model: an object of another package.
        given = any(re.search(r"model|net$|state", dotted(one).lower()) for one in arguments_of(call.node))
        return given and "." in call.name and call.name.partition(".")[0] not in ("torch", "nn", "F", "dist", "optim")
    if depth > MAX_DEPTH or target is call.function:
        return False
    return any(_may_save(context, c, depth + 1) for c in target.calls)


def _behind(context: Context, function: Function, loop: ast.For) -> list[Call]:
    """Return the calls that come after a loop, in its function and behind the calls of that."""
    end = loop.end_lineno or loop.lineno
    found = [c for c in function.calls if c.node.lineno > end]
    for site in context.program.sites.get(id(function), ()):
        found += [c for c in site.function.calls if c.order > site.order and site.function is not function]
    return [c for c in found if not c.place.loops]


def _saves_weights(context: Context, call: Call) -> bool:
    """Tell whether a call saves the weights, itself or in a function of these files."""
    if call.name == "torch.save":
        return bool(call.node.args) and bool(
            re.search(r"state|model|net|ckpt|checkpoint", ast.unparse(call.node.args[0]))
        )
    target = context.program.called(call)
    if target is None or "save" not in call.last:
        return False
    named = re.search(r"state|model|ckpt|checkpoint", ast.unparse(call.node)) is not None
    return any(_saves_weights(context, c) or (named and c.name == "torch.save") for c in target.calls)


RULES = ()
OF_RANKS = (saved_at_end,)  # only where several ranks run the file
