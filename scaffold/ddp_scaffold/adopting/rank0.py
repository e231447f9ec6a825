"""Which work of existing code runs on the wrong ranks: on rank 0 while the others wait, or on all at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from .code import ENTRIES, Module
from .rules import DIST, Finding

LONG = {"evaluate", "evaluation", "validate", "validation", "sample", "samples", "sampling", "generate", "inference"}
SAVED = {"checkpoint", "checkpoints", "ckpt", "model", "models", "pretrained", "weights", "samples", "images", "state"}
MODELS = re.compile(r"model|diffusion|sampler|pipe|net|ema|generator|decoder", re.IGNORECASE)
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
}
Sites = Mapping[str, Sequence[tuple[Module, ast.Call]]]  # where a function of this name is called


def long_work(module: Module) -> Iterator[Finding]:
    """Yield what takes long on rank 0 alone, and the barrier in which the others wait for it."""
    seen: set[tuple[ast.AST, str]] = set()
    for call, name in module.calls:
        branch, what = module.rank0_if(call), name.rpartition(".")[2]
        if branch is None or (branch, what) in seen or not (_saves(name) or _is_long(call, name)):
            continue
        seen.add((branch, what))
        why = f"only rank 0 does this (line {branch.lineno}); the others wait in a collective, until that times out"
        if _saves(name):
            instead = "checkpoint.save(run.job, run.dir, {'step': step}, {'model': model, 'optimizer': optimizer}, "
            yield call, why, f"on every rank, outside of the `if`: {instead}keep=ddp.checkpoint.keep)"
        else:
            shown = ast.unparse(call) if len(ast.unparse(call)) <= 60 else f"{ast.unparse(call.func)}(...)"
            instead = f"on_rank0(run.job, '{what}', lambda progress: {shown})"
            yield call, why, f"on every rank, outside of the `if`: {instead}; pass model.module, and call progress()"
        yield from _barrier_after(module, branch)


def _barrier_after(module: Module, branch: ast.If) -> Iterator[Finding]:
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(module.parents[branch], block, None)
        if not (isinstance(statements, list) and branch in statements):
            continue
        for statement in statements[statements.index(branch) + 1 :][:2]:
            for call in [n for n in ast.walk(statement) if isinstance(n, ast.Call)]:
                if module.full_name(call.func) == f"{DIST}barrier" and not module.only_rank0(call):
                    why = "the others wait here for rank 0, on the clock of a collective"
                    yield call, why, "delete it: on_rank0 and checkpoint.save wait off that clock"


def lonely_collectives(module: Module) -> Iterator[Finding]:
    """Yield collectives that only rank 0 calls. Where the others call one on their own branch, all is well."""
    calls = [(call, name) for call, name in module.calls if name.startswith(DIST) and _is_collective(call, name)]
    paired = {module.function(call) for call, _ in calls if module.only_others(call)}
    for call, name in calls:
        if module.rank0_if(call) is not None and module.function(call) not in paired:
            what = name.rpartition(".")[2]
            why = f"only rank 0 calls {what}: it waits until the timeout, or meets another collective of the others"
            yield call, why, "take it out of the `if`: every rank must call it"


def saves_everywhere(module: Module, sites: Sites) -> Iterator[Finding]:
    """Yield torch.save that surely runs on all ranks, into a path that does not tell them apart."""
    for call, name in module.calls:
        if name != "torch.save" or not _on_all_ranks(module, call, sites, 0):
            continue
        if any("rank" in part for arg in call.args[1:] for part in re.findall(r"\w+", ast.unparse(arg).lower())):
            continue
        why = "all ranks write this file at the same time, and a kill meanwhile leaves one that cannot be loaded"
        instead = "checkpoint.save(run.job, run.dir, {'step': step}, {'model': model, 'optimizer': optimizer}, "
        yield call, why, f"{instead}keep=ddp.checkpoint.keep): rank 0 writes it aside, then renames it"


def _on_all_ranks(module: Module, node: ast.AST, sites: Sites, depth: int) -> bool:
    function = module.function(node)
    if module.only_rank0(node) or module.only_others(node) or _perhaps_one(module, node) or depth > 3:
        return False
    if function is None or function.name in ENTRIES:
        return True
    if isinstance(module.parents[function], ast.ClassDef) and function.name in ("save", "__call__", "forward"):
        return False  # too common a name to know who calls it
    callers = sites.get(function.name, ())
    return bool(callers) and all(_on_all_ranks(where, call, sites, depth + 1) for where, call in callers)


def _perhaps_one(module: Module, node: ast.AST) -> bool:
    """Tell whether an `if` around it may hold on one rank only, by a name that says nothing: `if self.is_writer:`."""
    for parent, _ in module.above(node):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(parent, (ast.If, ast.IfExp)):
            sides = parent.test.values if isinstance(parent.test, ast.BoolOp) else [parent.test]
            if not all(isinstance(side, ast.Compare) and _of_numbers(side) for side in sides):
                return True
    return False


def _of_numbers(test: ast.Compare) -> bool:
    """Tell whether a comparison is like `step % 10 == 0` or `loss < best`, and not like `unit == 0`."""
    ordered = all(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in test.ops)
    return ordered or (isinstance(test.left, ast.BinOp) and isinstance(test.left.op, ast.Mod))


def _saves(name: str) -> bool:
    last = name.rpartition(".")[2]
    words = set(re.split(r"[_\d]+", last))
    return name == "torch.save" or last in ("save_pretrained", "save_state") or bool("save" in words and words & SAVED)


def _is_long(call: ast.Call, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    if last in ("sample", "samples", "generate"):  # random.sample and distributions are quick
        return bool(MODELS.search(owner)) if owner else bool(call.args)
    return last.startswith("run_eval") or last == "validate" or bool(set(last.split("_")) & LONG)


def _is_collective(call: ast.Call, name: str) -> bool:
    grouped = any(k.arg == "group" for k in call.keywords)
    return name.removeprefix(DIST) in COLLECTIVES and not grouped
