"""Rules for the port where the ranks meet: where it comes from, through variables, options, settings and callers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .context import Context, Found
from .effects import walk_body
from .module import Function, Module, dotted, is_constant, keyword
from .origins import sources

INIT = "torch.distributed.init_process_group"
EPHEMERAL = range(32768, 61000)  # net.ipv4.ip_local_port_range of Linux, unless somebody changed it
FEW = 1000  # of so few ports two jobs soon draw the same
PORT = re.compile(r"[1-9]\d{3,4}")
LOCAL_PORT = re.compile(r"tcp://(?:localhost|127\.0\.0\.1|0\.0\.0\.0):([1-9]\d{3,4})")
ENDS_IN_PORT = re.compile(r":([1-9]\d{3,4})$")
SERVES = re.compile(r"\brun\(|launch\(|serve|http|flask|app\.", re.IGNORECASE)  # a port of a web server
SETTING = re.compile(r"port|url|init|addr", re.IGNORECASE)
DRAWS = re.compile(r"rand|rng|choice|generator|^torch\.", re.IGNORECASE)
DRAWN = {"randint", "randrange", "choice", "random_integers", "integers"}
DEPTH = 6


@dataclass(frozen=True)
class Origin:
    """Where a port comes from: `port` is its number, or None for one that is drawn."""

    module: Module
    node: ast.AST
    port: int | None


def fixed(context: Context, function: Function) -> Iterator[Found]:
    """Yield ports that are written down or drawn, where they are, if they come to the group of the ranks."""
    given = [*_in_environment(function), *_in_calls(function)]
    seen: set[int] = set()
    for node, address in given:
        for origin in _origins(context, function, node, address, 0):
            if id(origin.node) not in seen:
                seen.add(id(origin.node))
                yield _told(origin)


def _told(origin: Origin) -> Found:
    """Return what a port leads to."""
    if origin.port is None:
        message = "The port is drawn without a look whether it is free: rank 0 may find it taken."
        fix = "Let the system choose one: bind port 0 on rank 0, and pass it on."
        return Found("DDP652", origin.module, origin.node, message, fix)
    if origin.port in EPHEMERAL:
        message = f"Port {origin.port} is one that Linux gives to any outgoing connection: rank 0 may find it taken."
        fix = "Use torchrun --standalone on one node, or a port below 32768."
        return Found("DDP652", origin.module, origin.node, message, fix)
    message = f"Port {origin.port} is fixed: a second job on the node of rank 0 finds it taken, or joins the wrong job."
    fix = "Use torchrun --standalone on one node, or make it from the job."
    return Found("DDP651", origin.module, origin.node, message, fix)


def _in_environment(function: Function) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what a function sets MASTER_PORT to."""
    if "MASTER_PORT" not in function.module.file.text:
        return
    lines = _lines_that_name_it(function.module.file.text)
    if function.module.cells:
        lines = ()  # of a notebook, whose lines are counted otherwise
    for statement in function.node.body:
        last = statement.end_lineno or statement.lineno
        if lines and not any(statement.lineno <= line <= last for line in lines):
            continue
        for part in walk_body(statement):
            if isinstance(part, ast.Assign) and any(_is_master_port(target) for target in part.targets):
                yield part.value, False
            elif isinstance(part, ast.Dict):
                pairs = zip(part.keys, part.values, strict=True)
                yield from ((value, False) for key, value in pairs if key is not None and _names_port(key))
    for call in function.calls:
        first = call.node.args[0] if call.node.args else None
        if call.last in ("setdefault", "putenv") and _names_port(first) and len(call.node.args) == 2:
            yield call.node.args[1], False


@lru_cache(maxsize=256)
def _lines_that_name_it(text: str) -> tuple[int, ...]:
    """Return the lines in which the variable stands: a walk over all of a file takes most of the time."""
    return tuple(number for number, line in enumerate(text.split("\n"), 1) if "MASTER_PORT" in line)


def _names_port(node: ast.expr | None) -> bool:
    return is_constant(node, "MASTER_PORT")


def _is_master_port(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and _names_port(target.slice)


def _in_calls(function: Function) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the addresses and the ports that a group or its store is given."""
    for call in function.calls:
        if call.name == INIT:
            given = keyword(call.node, "init_method") or (call.node.args[1] if len(call.node.args) > 1 else None)
        elif call.name == "torch.distributed.TCPStore":
            given = keyword(call.node, "port") or (call.node.args[1] if len(call.node.args) > 1 else None)
        else:
            continue
        if given is not None:
            yield given, call.name == INIT


def _origins(context: Context, function: Function, node: ast.expr, address: bool, depth: int) -> Iterator[Origin]:
    """Yield where a port comes from. `address` says that the expression is all of a URL, and no port alone."""
    module = function.module
    if depth > DEPTH:
        return
    if isinstance(node, ast.Constant):
        yield from _of_constant(module, node, address)
    elif isinstance(node, (ast.JoinedStr, ast.BinOp)):
        yield from _of_text(context, function, node, depth)
    elif isinstance(node, (ast.IfExp, ast.BoolOp)):
        for where, part in sources(context, function, node):
            yield from _origins(context, where, part, address, depth + 1)
    elif isinstance(node, ast.Call):
        yield from _of_call(context, function, node, address, depth)
    elif dotted(node) or isinstance(node, ast.Subscript):
        yield from _of_name(context, function, node, address, depth)


def _of_constant(module: Module, node: ast.Constant, address: bool) -> Iterator[Origin]:
    text = str(node.value) if isinstance(node.value, (str, int)) else ""
    match = LOCAL_PORT.fullmatch(text) if address else PORT.fullmatch(text)
    if match:
        port = int(match[1] if address else match[0])
        if 1024 <= port <= 65535:
            yield Origin(module, node, port)


def _of_text(context: Context, function: Function, node: ast.JoinedStr | ast.BinOp, depth: int) -> Iterator[Origin]:
    """Yield the port at the end of a text that is put together: `f"tcp://{host}:{port}"`, `host + ":29500"`."""
    last: ast.expr
    if isinstance(node, ast.JoinedStr):
        last = node.values[-1] if node.values else node
    elif isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
        last = node.right.elts[-1] if isinstance(node.right, ast.Tuple) and node.right.elts else node.right
    else:
        numbers = any(isinstance(part, ast.Constant) and isinstance(part.value, int) for part in ast.walk(node))
        if numbers or not isinstance(node.op, ast.Add):
            yield from _drawn_within(function, node)
            return
        last = node.right
    if isinstance(last, ast.FormattedValue):
        yield from _origins(context, function, last.value, False, depth + 1)
    elif isinstance(last, ast.Constant):
        match = ENDS_IN_PORT.search(str(last.value)) or PORT.fullmatch(str(last.value))
        if match:
            yield Origin(function.module, node, int(match.group().lstrip(":")))
    else:
        yield from _origins(context, function, last, False, depth + 1)


def _drawn_within(function: Function, node: ast.expr) -> Iterator[Origin]:
    """Yield a sum of which a part is drawn: `12000 + random.randint(0, 100)`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _is_drawn(function, part):
            yield Origin(function.module, node, None)
            return


def _is_drawn(function: Function, node: ast.Call) -> bool:
    """Tell whether a call draws a number from a range that is small, or reaches into what Linux gives away."""
    name = function.module.full_name(node.func)
    if name.rpartition(".")[2] not in DRAWN or not DRAWS.search(name):
        return False
    given = node.args
    if len(given) == 1 and isinstance(given[0], ast.Call) and dotted(given[0].func) == "range":
        given = given[0].args
    bounds = [part.value for part in given if isinstance(part, ast.Constant) and isinstance(part.value, int)]
    if not bounds or len(bounds) != len(given):
        return False
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    return high - low < FEW or high > EPHEMERAL.start


def _of_call(context: Context, function: Function, node: ast.Call, address: bool, depth: int) -> Iterator[Origin]:
    """Yield the port of `str(port)`, `os.environ.get("PORT", 29500)`, a draw, or what a function returns."""
    named = function.module.full_name(node.func)
    if named in ("str", "int") and len(node.args) == 1:
        yield from _origins(context, function, node.args[0], address, depth + 1)
    elif named in ("os.environ.get", "os.getenv", "getattr") and len(node.args) > 1:
        yield from _origins(context, function, node.args[-1], address, depth + 1)
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "format" and node.args:
        yield from _origins(context, function, node.args[-1], False, depth + 1)
    elif _is_drawn(function, node):
        yield Origin(function.module, node, None)
    else:
        for where, value in sources(context, function, node):
            yield from _origins(context, where, value, address, depth + 1)


def _of_name(context: Context, function: Function, node: ast.expr, address: bool, depth: int) -> Iterator[Origin]:
    """Yield the port of a variable, a parameter and what callers give for it, an option, or a setting."""
    before = sources(context, function, node)
    for where, value in before:
        yield from _origins(context, where, value, address, depth + 1)
    unknown = isinstance(node, ast.Name) and not before
    if unknown or dotted(node) in function.parameters or not all(is_constant(value, None) for _, value in before):
        return
    option = context.default_of(function.module, node)
    if option is not node:
        owner = next(
            c.function.module
            for c in context.calls_in_component(function.module, "add_argument")
            if keyword(c.node, "default") is option
        )
        yield from _origins(context, owner.body, option, address, depth + 1)
    else:
        yield from _of_setting(context, function, node, address)


def _of_setting(context: Context, function: Function, node: ast.expr, address: bool) -> Iterator[Origin]:
    """Yield the port that stands behind a name of settings in the text: `port: int = 29500`, `{"port": 29500}`."""
    name = dotted(node).rpartition(".")[2]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    if not SETTING.search(name):
        return
    pattern = re.compile(
        rf"\b{re.escape(name)}(?:[\"']?\]?\s*[:=]|\s*:\s*(?:int|str)\s*=)\s*[\"']?"
        + (LOCAL_PORT.pattern if address else r"([1-9]\d{3,4})")
        + r"\b[\"']?\s*(?:[,)}\n#]|$)"
    )
    for module in context.in_component(function.module):
        match = pattern.search(module.file.text) if name in module.file.text else None
        if match and module.file.kind == "python":
            line = module.file.text.count("\n", 0, match.start(1)) + 1
            if SERVES.search(module.file.text.split("\n")[line - 1]):
                continue
            column = match.start(1) - module.file.text.rfind("\n", 0, match.start(1)) - 1
            yield Origin(module, ast.Pass(lineno=line, col_offset=column), int(match[1]))
            return


RULES = (fixed,)
OF_RANKS = ()
