"""Rules for training data that ranks share out by hand: each takes every n-th, and nothing makes the parts equal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .everywhere import on_every_rank
from .module import Call, Class, Function, argument, dotted, is_constant, keyword, names_in, shown, variable_of
from .ranks import COUNT

# Where parts are made equal, or never end, or the ranks may end at different steps.
EQUAL = re.compile(
    r"total_size|num_samples|\bpad|_pad|ceil|drop_|truncat|\bmin\(|repeat|infinit|while True|cycle|\brem\b"
)
JOINS = re.compile(r"\bJoin\(|\.join\(\)|monitored_barrier|\bwith\b[^\n]*\bjoin\b")
OTHER = re.compile(r"eval|test|valid|infer|generat|sampl|metric|predict|search|worker|visual|partition", re.IGNORECASE)
TENSORS = re.compile(r"param|weight|bias|grad|layer|module|batch|indices|col", re.IGNORECASE)
STREAM = re.compile(r"streaming=True|split_dataset_by_node\(|to_iterable_dataset\(")
APART = re.compile(r"group|optim|kernel|model_parallel", re.IGNORECASE)


def unequal_parts(context: Context, function: Function) -> Iterator[Found]:
    """Yield data of which each rank takes every n-th, where the parts may differ by one."""
    if not context.plain(function.module) or isinstance(function.node, ast.Module):
        return
    node = _shared_out(context, function)
    if node is None or OTHER.search(function.name) or APART.search(function.module.file.inside):
        return
    owner = function.of_class.name if function.of_class is not None else ""
    if OTHER.search(owner) or EQUAL.search(ast.unparse(function.node)):
        return
    if context.says(function.module, JOINS) or not context.calls_in_component(function.module, "backward"):
        return
    message = (
        f"each rank takes every n-th (`{shown(node, 40)}`): where the number is no multiple of the number of ranks,"
        " some ranks have one more, and may have a batch more: in its backward pass they wait for the others until the"
        " timeout, or meet the first step of their next epoch"
    )
    fix = "cut what is shared out to a multiple of the number of ranks, or leave it to a DistributedSampler"
    yield Found("DDP641", function.module, node, message, fix)


def shared_twice(context: Context, function: Function) -> Iterator[Found]:
    """Yield a stream of `datasets`, which shares itself out over the workers of a loader, and is shared out again."""
    owner = function.of_class
    if (
        function.name != "__iter__"
        or owner is None
        or not any(base.endswith("IterableDataset") for base in owner.bases)
    ):
        return
    made = owner.methods.get("__init__")
    if made is None or not context.plain(function.module):
        return
    for call in function.calls:
        name = dotted(call.node.args[0]) if call.last == "islice" and len(call.node.args) > 3 else ""
        if not name.startswith("self.") or not any("worker" in ast.unparse(arg) for arg in call.node.args[1:]):
            continue
        given = {dotted(a.value) for a in made.assignments.get(name, ()) if a.value is not None} & set(made.parameters)
        if not any(_is_stream(context, site, made, one) for one in given for site in context.program.sites[id(made)]):
            continue
        message = (
            f"`{name}` is a stream of datasets, which gives each worker of a loader a part of its own; of that part"
            f" `{shown(call.node, 40)}` takes every n-th: with n workers, n - 1 of n samples are read by nobody"
        )
        fix = f"write `iter({name})`: datasets looks for the worker itself"
        yield Found("DDP224", function.module, call.node, message, fix)


def _is_stream(context: Context, site: Call, made: Function, name: str) -> bool:
    """Tell whether a call gives a stream of `datasets` for a parameter."""
    value = argument(site, made, name)
    values = [a.value for a in context.program.assigned(site.function, dotted(value))] if value is not None else []
    texts = [ast.unparse(one) for one in (value, *values) if one is not None]
    return any(STREAM.search(text) for text in texts)


def _shared_out(context: Context, function: Function) -> ast.expr | None:
    """Return the expression by which a rank takes its own part of some data."""
    for test, place, _ in function.tests:
        skips = len(test.body) == 1 and isinstance(test.body[0], ast.Continue) and not test.orelse
        over = place.loops[-1] if place.loops else None
        counted = isinstance(over, ast.For) and isinstance(over.iter, ast.Call) and dotted(over.iter.func) == "range"
        if skips and isinstance(over, ast.For) and not counted and not TENSORS.search(ast.unparse(over.iter)):
            found = next((part for part in ast.walk(test.test) if _is_every_nth(context, function, part)), None)
            if isinstance(found, ast.expr):
                return found
    for assigned in function.assignments.values():
        for value in (a.value for a in assigned):
            if not (isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)):
                continue
            begin, end, step = value.slice.lower, value.slice.upper, value.slice.step
            if begin is None or end is not None or step is None or not _is_count(step):
                continue
            if context.ranks.is_rank(function, begin) and not TENSORS.search(ast.unparse(value.value)):
                return value
    return None


def _is_every_nth(context: Context, function: Function, test: ast.AST) -> bool:
    """Tell whether a test is `k % world_size != rank`, or `k % world_size == rank` within a `not`."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.NotEq))):
        return False
    sides = (test.left, test.comparators[0])
    for left, right in (sides, sides[::-1]):
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and _is_count(left.right):
            return context.ranks.is_rank(function, right)
    return False


def _is_count(node: ast.expr) -> bool:
    """Tell whether an expression is the number of ranks."""
    name = dotted(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    return bool(COUNT.fullmatch(name) or (isinstance(node, ast.Call) and "world_size" in names_in(node)))


def whole_caches(context: Context, function: Function) -> Iterator[Found]:
    """Yield a data set that each rank loads into its memory as a whole, of which its sampler gives it a part.

    `CacheDataset` of MONAI loads and transforms all samples when it is made (or as many as `cache_rate` says).
    """
    if not context.plain(function.module) or "CacheDataset" not in function.module.file.text:
        return
    for call in function.calls:
        name = variable_of(function, call) if _caches_all(context, call) else ""
        if not name or not on_every_rank(context, call, 0):
            continue
        samplers = [c for c in function.calls if c.last == "DistributedSampler"]
        if not any(name in {dotted(one) for one in _values(c.node)} for c in samplers):
            continue
        message = (
            f"every rank loads and transforms all samples of `{name}` and keeps them, while its sampler gives it a part"
            " of them: n ranks of a node read everything n times before the first step, and need n times the memory"
        )
        fix = "cache the rank's own part: partition_dataset of MONAI, and a loader that shuffles within it"
        yield Found("DDP426", function.module, call.node, message, fix)


def _caches_all(context: Context, call: Call) -> bool:
    """Tell whether a call makes a data set that caches all samples when it is made, or one of a class made like it."""
    if not call.last.endswith("CacheDataset") or call.last.startswith("Smart"):
        return False
    if is_constant(keyword(call.node, "cache_rate"), 0.0) or is_constant(keyword(call.node, "runtime_cache"), True):
        return False
    if any(name.startswith("partition") for value in _values(call.node) for name in names_in(value)):
        return False
    made = context.program.lookup(call.function.module, dotted(call.node.func))
    bases = [base for one in context.program.hierarchy(made) for base in one.bases] if isinstance(made, Class) else []
    return call.name.startswith("monai.") or call.name == "CacheDataset" or any("CacheDataset" in one for one in bases)


def _values(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(word.value for word in node.keywords)]


RULES = ()
OF_RANKS = (unequal_parts, shared_twice, whole_caches)  # only where several ranks run the file
