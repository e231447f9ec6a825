"""Rules for what only rank 0 has and all ranks use, and for how the ranks are started."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .devices import INIT
from .everywhere import on_every_rank
from .module import Assignment, Call, Function, Guard, Place, dotted, is_constant, keyword, shown

NOTICES = re.compile(
    r"exitcode|is_alive|sentinel|connection\.wait|terminate\(|join\(timeout|SpawnContext|error_?(?:handler|queue)"
    r"|SimpleQueue",
    re.IGNORECASE,
)


def only_first(context: Context, function: Function) -> Iterator[Found]:
    """Yield a variable that gets its value on rank 0 only, and that all ranks use."""
    if not context.plain(function.module) or isinstance(function.node, ast.Module):
        return
    for name, assigned in function.assignments.items():
        if "." in name or name in function.parameters or not assigned[0].place.guards:
            continue
        guards = [_first(context, function, one) for one in assigned]
        if any(guard is None for guard in guards) or name in _names_of_all(function):
            continue
        use = _use_by_all(context, function, name, assigned)
        if use is None or not _reached_by_all(context, function):
            continue
        line = function.module.position(assigned[0].node.lineno)[1]
        message = (
            f"`{name}` is set on rank 0 only (line {line}): every other rank ends here with a NameError, and rank 0"
            " waits for it in its next collective until the launcher or the timeout ends it"
        )
        test = shown(guards[0].test, 40) if guards[0] else ""
        fix = f"set `{name}` on all ranks, before `if {test}`"
        yield Found("DDP120", function.module, use, message, fix)
        return


def _names_of_all(function: Function) -> set[str]:
    """Return the names that a function may have from elsewhere: global ones, imports, functions in it."""
    found: set[str] = set()
    for part in ast.walk(function.node):
        if isinstance(part, (ast.Global, ast.Nonlocal)):
            found |= set(part.names)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in part.names}
        elif isinstance(part, (ast.comprehension, ast.NamedExpr)):
            found |= {one.id for one in ast.walk(part.target) if isinstance(one, ast.Name)}
        elif isinstance(part, ast.ExceptHandler) and part.name:
            found.add(part.name)
        elif isinstance(part, ast.Delete):
            found |= {dotted(target) for target in part.targets}
        elif isinstance(part, (ast.FunctionDef, ast.Lambda)) and part is not function.node:
            arguments = part.args
            found |= {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return found | set(function.inner)


def _first(context: Context, function: Function, assignment: Assignment) -> Guard | None:
    """Return the condition of rank 0, and of nothing else, under which a variable gets its value."""
    guards = assignment.place.guards
    if context.ranks.alone(function, guards) or isinstance(assignment.node, ast.AugAssign):
        return None
    found = [g for g in guards if not g.early and context.ranks.guard(function, g) == "first"]
    found = [g for g in found if not isinstance(g.test, ast.BoolOp)]
    return found[0] if found else None


def _use_by_all(context: Context, function: Function, name: str, assigned: list[Assignment]) -> ast.AST | None:
    """Return the first place where all ranks surely use a variable: under no condition but those of its value."""
    held = {(id(guard.test), guard.holds) for one in assigned for guard in one.place.guards}
    first = min(one.order for one in assigned)
    last = max(one.node.end_lineno or 0 for one in assigned)
    uses: list[tuple[int, ast.AST, Place]] = [(c.order, c.node, c.place) for c in function.calls]
    uses += [(0, loop.iter, place) for loop, place in function.loops if isinstance(loop, ast.For)]
    for order, node, place in uses:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        behind = order > first if order else node.lineno > last  # type: ignore[attr-defined]  # an expression
        if name not in names or not behind or any(part in ("body", "except") for _, part in place.tries):
            continue
        others = [g for g in place.guards if (id(g.test), g.holds) not in held or _is_first(context, function, g)]
        if others or context.ranks.partial_place(function, place):
            continue
        return node
    return None


def _is_first(context: Context, function: Function, guard: Guard) -> bool:
    return context.ranks.guard(function, guard) is not None


def _reached_by_all(context: Context, function: Function) -> bool:
    """Tell whether every rank surely calls a function: nothing but the program's start, or such functions, call it."""
    sites = context.program.sites.get(id(function), ())
    if not sites:
        return context.run_by_ranks(function) and not context.ranks.decorated(function)
    return all(on_every_rank(context, site, 0) for site in sites) and context.run_by_ranks(function)


def on_gpus_by_gloo(context: Context, function: Function) -> Iterator[Found]:
    """Yield a group of gloo for models on GPUs: each gradient goes through the CPU."""
    if not context.plain(function.module):
        return
    made = context.calls_in_component(function.module, "init_process_group")
    for call in function.calls:
        if call.name != INIT:
            continue
        backends = [c.node.args[0] if c.node.args else keyword(c.node, "backend") for c in made]
        wraps = [
            c for last in ("DistributedDataParallel", "DDP") for c in context.calls_in_component(function.module, last)
        ]
        given = [keyword(c.node, "device_ids") for c in wraps]
        placed = any(isinstance(one, ast.List) and one.elts for one in given) or any(_on_gpu(c) for c in wraps)
        chosen = [context.default_of(function.module, one) if one is not None else None for one in backends]
        if placed and all(is_constant(backend, "gloo") for backend in chosen):
            message = (
                "the models are on GPUs, and gloo copies each gradient to the CPU and sends it over TCP"
                " sockets, at every step: NCCL sends it from GPU to GPU"
            )
            fix = 'write backend="nccl", and make a second group with gloo for objects on the CPU'
            yield Found("DDP420", function.module, call.node, message, fix)


def _on_gpu(call: Call) -> bool:
    """Tell whether a model was moved to a GPU before DDP wraps it: `model.cuda()`."""
    name = dotted(call.node.args[0]) if call.node.args else ""
    moves = (c for c in call.function.calls if c.last == "cuda" and c.order <= call.order)
    return bool(name) and any(dotted(c.node.func) == f"{name}.cuda" for c in moves)


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


RULES = (joined,)
OF_RANKS = (only_first, on_gpus_by_gloo)  # only where several ranks run the file
