"""Rules for what only rank 0 has, and all ranks use."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .context import Context, Found
from .everywhere import on_every_rank
from .module import Assignment, Function, Guard, Place, dotted, shown


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


RULES = ()
OF_RANKS = (only_first,)  # only where several ranks run the file
