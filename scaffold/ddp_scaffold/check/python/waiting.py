"""Rules for work of one rank for which the others wait: evaluation, sampling, clustering, preparing the data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .effects import without_gradients
from .module import Call, Function, Guard, dotted, shown

MODEL = re.compile(
    r"(?:.*_)?(?:model|net|generator|encoder|decoder|unet|pipe|pipeline|diffusion|ema)(?:_.*)?", re.IGNORECASE
)
LENGTHY = {"sampling", "sample", "generate", "inference", "fid", "pesq", "beam"}
NO_FORWARD = {"parameters", "named_parameters", "state_dict", "load_state_dict", "eval", "train", "modules", "buffers"}
FITS = {"fit", "fit_transform", "fit_predict", "train"}
FITTED = re.compile(
    r"faiss\.|umap\.|hdbscan\.|sklearn\.(?:cluster|manifold|linear_model|svm|neighbors|mixture|ensemble|decomposition)"
)
HEAVY_NAMES = re.compile(
    r"tarfile\..*extractall|zipfile\..*extractall|shutil\.(?:copytree|unpack_archive)|datasets\.load_dataset"
    r"|huggingface_hub\.snapshot_download|(?:.*\.)?download_and_(?:unzip|extract)\w*|gdown\.\w+|urllib\.request\.urlretrieve|scipy\.cluster\.vq\.kmeans2?"
)
PREPARES = re.compile(
    r"(?:^|_)(?:tokeni[sz]e|pre_?process|prepare|build|extract|convert|encode|compute|make|create)_(?:\w+_)?"
    r"(?:data(?:set)?s?|corpus|features?|vocab(?:ulary)?|index(?:es)?|cache|lmdb|memmap|shards|embeddings|clusters)$"
    r"|^convert_\w+_to_features$"
)
DATA = re.compile(r"load|data|batch|test|val|reader|split|image|file|clip|video|sample|query|gallery")
CACHES = re.compile(r"^load_and_cache_\w+")  # as in the examples of transformers
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
    """Yield evaluation and sampling on rank 0 alone within a loop, while the others go on to the next collective."""
    if not context.plain(function.module):
        return
    seen: set[int] = set()
    yield from _long_loops(context, function, seen)
    for call in function.calls:
        found = context.ranks.partial(call) if call.place.guards or _is_decorated(function) else None
        if found is None or found[1] != "first" or id(found[0].test) in seen or _meets(context, call):
            continue
        target = context.program.called(call)
        words = set(call.last.lower().split("_"))
        if target is None or not (words & LONG or _evaluates(context, target, 0)):
            continue
        if _loops_on(target) and _runs_model(context, target) and _is_in_training(context, function, found[0]):
            seen.add(id(found[0].test))
            direct = bool(call.place.loops) and not found[0].early
            lengthy = bool(words & LENGTHY) or (direct and _lengthy(context, target))
            lengthy = lengthy and not _has_timeout(context, function)
            yield _waited_for(function, call.node, f"runs `{call.last}`, which loops over data", call.last, lengthy)


def _has_timeout(context: Context, function: Function) -> bool:
    """Tell whether the group was given a timeout: then somebody has thought of how long others may wait."""
    inits = context.calls_in_component(function.module, "init_process_group")
    return any(word.arg == "timeout" for call in inits for word in call.node.keywords)


def _is_decorated(function: Function) -> bool:
    return not isinstance(function.node, ast.Module) and bool(function.node.decorator_list)


def _evaluates(context: Context, function: Function, depth: int) -> bool:
    """Tell whether a function runs a model without gradients in a loop, itself or in what it calls once."""
    quiet = any(call.last == "eval" for call in function.calls)
    for call in function.calls:
        named = any(MODEL.fullmatch(part) for part in dotted(call.node.func).split("."))
        over = [loop for loop in call.place.loops if not _is_cut(loop) and DATA.search(_head(loop))]
        if over and (quiet or without_gradients(call)) and (named or call.last in ("generate", "sample", "infer")):
            return True
        target = context.program.called(call)
        if target is not None and depth < 2 and not call.place.loops and _evaluates(context, target, depth + 1):
            return True
    return False


def _head(loop: ast.stmt) -> str:
    return ast.unparse(loop.iter).lower() if isinstance(loop, (ast.For, ast.AsyncFor)) else ""


def _is_in_training(context: Context, function: Function, guard: Guard, depth: int = 0) -> bool:
    """Tell whether the condition of the rank stands in a loop in which all ranks train, here or where it is called."""
    place = next((place for test, place, _ in function.tests if test.test is guard.test), None)
    if place is not None and place.loops:
        return context.together(function, place.loops[0])
    return _is_called_in_training(context, function, 0)


def _is_called_in_training(context: Context, function: Function, depth: int) -> bool:
    for site in context.program.sites.get(id(function), ()):
        if site.function is function or context.ranks.partial(site) is not None:
            continue
        if site.place.loops and context.together(site.function, site.place.loops[0]):
            return True
        if not site.place.loops and depth < 2 and _is_called_in_training(context, site.function, depth + 1):
            return True
    return False


def _meets(context: Context, call: Call) -> bool:
    """Tell whether a call is a step of all ranks, a finding of its own; a forward pass in no_grad() is none."""
    return any(effect.kind != "forward" or not effect.quiet for effect in context.effects.of(call))


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
        if call.last not in NO_FORWARD and any(MODEL.fullmatch(part) for part in dotted(call.node.func).split(".")):
            return True
        target = context.program.called(call)
        if target is not None and depth < 3 and _runs_model(context, target, depth + 1):
            return True
    return False


def _long_loops(context: Context, function: Function, seen: set[int]) -> Iterator[Found]:
    """Yield loops over a loader that only rank 0 runs within a loop of all ranks."""
    for loop, place in function.loops:
        if not isinstance(loop, ast.For) or _is_cut(loop) or not _over_data(function, loop):
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
        if "." not in dotted(call.node.func) or call.last in ("forward", "generate", "sample")
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
        found = context.ranks.partial(call) if call.place.guards else None
        if found is None or found[1] != "first" or found[0].early or id(found[0].test) in seen:
            continue
        heavy = _heavy(context, call)
        wait = _waits_next(context, call, found[0]) if heavy else None
        if heavy is None or wait is None:
            continue
        seen.add(id(found[0].test))
        line = function.module.position(wait.node.lineno)[1]
        message = (
            f"{context.ranks.words(*found)} runs {heavy}, minutes for much data; the others wait for it in"
            f" `{shown(wait.node.func, 40)}` (line {line}), GPUs idle, and the job dies if it takes longer than the"
            " timeout (10 minutes with nccl)"
        )
        fix = (
            f"do `{shown(call.node.func, 40)}` before the job, share it out over the ranks, or wait for it outside of"
            " the training group (a store, or a gloo group with a timeout of its own)"
        )
        yield Found("DDP410", function.module, call.node, message, fix)


def first_rank_first(context: Context, function: Function) -> Iterator[Found]:
    """Yield data that rank 0 prepares between the barrier of the others and its own: they wait there meanwhile."""
    if id(function.module) not in context.distributed:
        return
    for call in function.calls:
        before = barriers_around(context, call)
        heavy = _heavy(context, call) if before is not None else None
        if before is None or (heavy is None and not CACHES.search(call.last)):
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


def _heavy(context: Context, call: Call, depth: int = 0) -> str | None:
    """Return what a call does that takes minutes, in words, or None."""
    if HEAVY_NAMES.fullmatch(call.name):
        return f"`{shown(call.node.func, 40)}`"
    owner = dotted(call.node.func).rpartition(".")[0]
    if call.last in FITS and owner:
        for assignment in context.program.assigned(call.function, owner):
            value = assignment.value
            made = call.function.module.full_name(value.func) if isinstance(value, ast.Call) else ""
            if FITTED.match(made):
                return f"`{shown(call.node.func, 40)}`"
    target = context.program.called(call)
    if target is None or depth > 3 or target is call.function:
        return None
    if PREPARES.search(call.last) and not any(context.effects.of(c) for c in target.calls) and _loops_on(target):
        return f"`{call.last}`"
    inner = next((heavy for c in target.calls if (heavy := _heavy(context, c, depth + 1)) is not None), None)
    return f"{inner} (in `{target.name}`)" if inner is not None and depth == 0 else inner


def _waits_next(context: Context, call: Call, guard: Guard) -> Call | None:
    """Return the collective to which all ranks come next, where those wait that do not pass the guard."""
    place = next((place for test, place, _ in call.function.tests if test.test is guard.test), None)
    if place is None:
        return None
    for other in call.function.calls:
        if other.order < call.order or any(g.test is guard.test for g in other.place.guards):
            continue
        if other.place.loops[: len(place.loops)] != place.loops:
            return None
        if context.goes_backward(other):
            return None
        if any(effect.kind == "collective" for effect in context.effects.of(other)):
            return other if context.ranks.partial(other) is None else None
    return None


RULES = ()
OF_RANKS = (long_work, heavy_work, first_rank_first)  # only where several ranks run the file
