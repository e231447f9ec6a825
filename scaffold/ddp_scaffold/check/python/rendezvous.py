"""Rules for where the ranks meet, and how long they wait there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .effects import walk_body
from .module import Call, Function, argument, default_of, dotted, is_constant, keyword, shown

INIT = "torch.distributed.init_process_group"
# What starts the ranks as processes of its own, or shares out what one of them has drawn.
PARENT = re.compile(r"spawn\(|start_processes|\bProcess\(|submitit|subprocess|Popen|ray\.|bcast|broadcast_object")
SEEDS = re.compile(r"\brandom\.seed\(|manual_seed_all_libs|seed_everything|set_seed|setup_seed|fix_seed|init_seed")
DRAWS = re.compile(
    r"uuid\.uuid[14]|tempfile\.(?:mkdtemp|mkstemp|mktemp|NamedTemporaryFile|TemporaryDirectory)"
    r"|(?:numpy\.)?random\.(?:randint|random|choice|randrange|getrandbits|uniform)|secrets\.token_\w+"
)
DRAWS_AT_ALL = re.compile(r"uuid|tempfile|rand|secrets")
ASKS_AGAIN = re.compile(r"environ|getenv|is None|exist", re.IGNORECASE)
MAX_DEPTH = 5
HOURS = 3.0  # so many hours of a group's timeout are told of
UNITS = {"weeks": 168.0, "days": 24.0, "hours": 1.0, "minutes": 1 / 60, "seconds": 1 / 3600, "milliseconds": 1 / 3.6e6}
ORDER = ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks")


def own_places(context: Context, function: Function) -> Iterator[Found]:
    """Yield an address of the group that each rank draws for itself: by a random number, an id, a file's name."""
    if not function.calls or not context.calls_in_component(function.module, "init_process_group"):
        return
    if not context.says(function.module, DRAWS_AT_ALL) or context.says(function.module, PARENT):
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
    settings = _settings(context, function)
    for call in function.calls:
        given = keyword(call.node, "init_method") if call.name == INIT else None
        if (
            given is not None
            and context.ranks.partial(call) is None
            and not context.ranks.alone(function, call.place.guards)
        ):
            yield call.node, given
        for word in call.node.keywords:
            if word.arg in settings and not _is_checked(call):
                yield call.node, word.value
    if "MASTER_PORT" in function.module.file.text:
        yield from _ports(context, function)
    for name in settings:
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


def long_timeouts(context: Context, function: Function) -> Iterator[Found]:
    """Yield a group whose collectives may wait for hours: so long all GPUs of a hang are held."""
    for call in function.calls:
        given = keyword(call.node, "timeout") if call.name == INIT else None
        hours = _hours(context, function, given, 0) if given is not None else 0.0
        if hours >= HOURS:
            many = f"{hours / 24:g} days" if hours >= 48 else "a day" if hours == 24 else f"{hours:.3g} hours"
            message = (
                f"the timeout of the group is {many}: when a rank hangs or is gone, the others hold all GPUs of the job"
                " that long in the collective in which they wait, before anything is told"
            )
            fix = "give it minutes, and let ranks wait for long work of one of them elsewhere, as at the store"
            yield Found("DDP616", function.module, call.node, message, fix)


def _hours(context: Context, function: Function, node: ast.expr, depth: int) -> float:
    """Return the hours of a timedelta, where its numbers are known; else 0."""
    if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "timedelta":
        given = dict(zip(ORDER, node.args, strict=False)) | {word.arg or "": word.value for word in node.keywords}
        if any(unit not in UNITS for unit in given):
            return 0.0
        return sum(_number(context, function, value, 0) * UNITS[unit] for unit, value in given.items())
    values = [a.value for a in context.program.assigned(function, dotted(node))] if dotted(node) else []
    if len(values) == 1 and values[0] is not None and depth < MAX_DEPTH:
        return _hours(context, function, values[0], depth + 1)
    found = context.program.constant(function.module, dotted(node)) if dotted(node) and not values else None
    return _hours(context, found[0].body, found[1], depth + 1) if found is not None and depth < MAX_DEPTH else 0.0


def _number(context: Context, function: Function, node: ast.expr, depth: int) -> float:
    """Return the number that is written, that a product of numbers has, or that an option has by default; else 0."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _number(context, function, node.left, depth) * _number(context, function, node.right, depth)
    if depth > MAX_DEPTH or not dotted(node):
        return 0.0
    values = [a.value for a in context.program.assigned(function, dotted(node))]
    if len(values) == 1 and values[0] is not None:
        return _number(context, function, values[0], depth + 1)
    if dotted(node) in function.parameters:
        default = default_of(function, dotted(node))
        sites = context.program.sites.get(id(function), ())
        given = [argument(site, function, dotted(node)) for site in sites]
        return _number(context, function, default, depth + 1) if default is not None and not any(given) else 0.0
    option = context.default_of(function.module, node)
    if option is node:
        found = context.program.constant(function.module, dotted(node))
        return _number(context, found[0].body, found[1], depth + 1) if found is not None else 0.0
    return _number(context, function, option, depth + 1)


RULES = (own_places, long_timeouts)
OF_RANKS = ()
