"""Rules for where the ranks meet, and how long they wait there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .effects import walk_body
from .module import Call, Function, dotted, is_constant, keyword, shown

INIT = "torch.distributed.init_process_group"
# What starts the ranks as processes of its own, or shares out what one of them has drawn.
PARENT = re.compile(r"spawn\(|start_processes|\bProcess\(|submitit|subprocess|Popen|ray\.|bcast|broadcast_object")
SEEDS = re.compile(r"\brandom\.seed\(|manual_seed_all_libs|seed_everything|set_seed|setup_seed|fix_seed|init_seed")
DRAWS = re.compile(
    r"uuid\.uuid[14]|tempfile\.(?:mkdtemp|mkstemp|mktemp|NamedTemporaryFile|TemporaryDirectory)"
    r"|(?:numpy\.)?random\.(?:randint|random|choice|randrange|getrandbits|uniform)|secrets\.token_\w+"
)
ASKS_AGAIN = re.compile(r"environ|getenv|is None|exist", re.IGNORECASE)
MAX_DEPTH = 5


def own_places(context: Context, function: Function) -> Iterator[Found]:
    """Yield an address of the group that each rank draws for itself: by a random number, an id, a file's name."""
    if not context.joins_group(function.module) or context.says(function.module, PARENT):
        return
    for node, value in _addresses(context, function):
        drawn = _draw_in(context, function, value, 0)
        if drawn is None:
            continue
        message = (
            f"each rank draws its own `{shown(drawn, 40)}` for the place where all ranks meet: every one waits at"
            " another address, or port, for ranks that never come, until the timeout"
        )
        fix = "take what all ranks have in common, such as the id of the job, or start with torchrun and init_method='env://'"
        yield Found("DDP118", function.module, node, message, fix)
        return


def _addresses(context: Context, function: Function) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield what a function says where the ranks meet: to the group, in MASTER_PORT, in a setting that is one's."""
    for call in function.calls:
        given = keyword(call.node, "init_method") if call.name == INIT else None
        if (
            given is not None
            and context.ranks.partial(call) is None
            and not context.ranks.alone(function, call.place.guards)
        ):
            yield call.node, given
        for word in call.node.keywords:
            if word.arg and not _is_checked(call) and word.arg in _settings(context, function):
                yield call.node, word.value
    if "MASTER_PORT" in function.module.file.text:
        yield from _ports(context, function)
    for name in _settings(context, function):
        for assigned in function.assignments.values():
            for one in assigned:
                alone = context.ranks.partial_place(function, one.place)
                if one.value is not None and "." in one.target and one.target.endswith(f".{name}") and not alone:
                    yield one.node, one.value


def _is_checked(call: Call) -> bool:
    return any(ASKS_AGAIN.search(ast.unparse(guard.test)) for guard in call.place.guards)


def _settings(context: Context, function: Function) -> set[str]:
    """Return the attributes from which the groups of a program have their address: `args.dist_url`."""
    found = set()
    for call in context.calls_in_component(function.module, "init_process_group"):
        given = keyword(call.node, "init_method")
        if isinstance(given, ast.Attribute):
            found.add(given.attr)
    return found


def _ports(context: Context, function: Function) -> Iterator[tuple[ast.AST, ast.expr]]:
    for statement in function.node.body:
        for part in walk_body(statement):
            if isinstance(part, ast.If) and ASKS_AGAIN.search(ast.unparse(part.test)):
                break  # it is so only where the launcher has set nothing
            if isinstance(part, ast.Assign) and any(
                isinstance(target, ast.Subscript) and is_constant(target.slice, "MASTER_PORT")
                for target in part.targets
            ):
                yield part, part.value


def _draw_in(context: Context, function: Function, node: ast.expr, depth: int) -> ast.AST | None:
    """Return the call within an expression, or within what its names stand for, that draws something at random."""
    if depth > MAX_DEPTH:
        return None
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            name = function.module.full_name(part.func)
            if DRAWS.fullmatch(name):
                return None if "random." in name and context.says(function.module, SEEDS) else part
            call = next((c for c in function.calls if c.node is part), None)
            target = context.program.called(call) if call is not None else None
            for leave in target.exits if target is not None else ():
                value = leave.node.value if isinstance(leave.node, ast.Return) else None
                found = (
                    _draw_in(context, target, value, depth + 1) if target is not None and value is not None else None
                )
                if found is not None:
                    return found
        name = dotted(part) if isinstance(part, (ast.Name, ast.Attribute)) else ""
        for assigned in context.program.assigned(function, name) if name else ():
            if (
                assigned.value is None
                or assigned.value is node
                or context.ranks.partial_place(function, assigned.place)
            ):
                continue
            found = _draw_in(context, function, assigned.value, depth + 1)
            if found is not None:
                return found
    return None


RULES = (own_places,)
OF_RANKS = ()
