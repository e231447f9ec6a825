"""Rules for files that every rank writes: results, lists and logs that are there once and are opened by all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .everywhere import ranks_run
from .module import Call, Function, dotted, is_constant, keyword, shown
from .outputs import by_all_ranks, is_alike, written
from .saves import RENAMES, saved_by_all, saved_by_each

# How a file is opened: what that does, and what comes of it where every rank does it.
THEN = {
    "a": ("adds to", "each line is there once a rank, and lines of several ranks run into each other"),
    "w": ("writes", "each truncates what another has written, and one that reads it finds a part"),
    "m": ("moves a file to", "the first takes it away, and all others fail"),
}
NAMES_NEWEST = re.compile(r"(?:last|latest|newest)\w*(?:\.\w+)?|checkpoint(?:\.txt|\.json)?", re.IGNORECASE)


def by_all(context: Context, function: Function) -> Iterator[Found]:
    """Yield a file that every rank opens to write, by a name that is the same on all."""
    if not ranks_run(context, function):
        return
    for call in function.calls:
        path, mode = written(context, call)
        state = _saved_to(call)
        path = path or state
        if path is None or (mode.startswith("a") and _is_kept(function, call)):
            continue
        if not by_all_ranks(context, call) or not is_alike(context, function, path):
            continue
        if saved_by_all(context, call) is not None:
            continue  # a finding of its own
        if state is not None:
            yield saved_by_each(function, call, state)
            continue
        does, then = THEN.get(mode[:1], THEN["w"])
        message = f"every rank {does} `{shown(path, 40)}`, one file for all: {then}"
        fix = f"call `{shown(call.node.func, 40)}` on rank 0 only, or put the rank into the name"
        yield Found("DDP631", function.module, call.node, message, fix)


def _saved_to(call: Call) -> ast.expr | None:
    """Return the path to which torch.save writes."""
    if call.name != "torch.save":
        return None
    return call.node.args[1] if len(call.node.args) > 1 else keyword(call.node, "f")


def _is_kept(function: Function, call: Call) -> bool:
    """Tell whether a file is opened to be written later, perhaps by rank 0 alone: `self.log = open(path, "a")`."""
    return any(a.value is call.node and "." in a.target for found in function.assignments.values() for a in found)


def pointers(context: Context, function: Function) -> Iterator[Found]:
    """Yield a file that names the newest checkpoint, and is overwritten in place: a kill leaves it empty."""
    if not context.plain(function.module) or any(c.name in RENAMES for c in function.calls):
        return
    for call in function.calls:
        path, mode = written(context, call)
        if path is None or not mode.startswith("w") or call.name != "open":
            continue
        text, key = _name_at_end(context, function, path)
        if NAMES_NEWEST.fullmatch(text) is None or not _is_read(context, function, text, key):
            continue
        message = (
            f"`{shown(path, 40)}` names the newest checkpoint and is overwritten in place: a kill between its"
            " truncation and its writing leaves it empty, and the next start fails or begins anew"
        )
        fix = "write a name beside it, and put that in its place with os.replace"
        yield Found("DDP301", function.module, call.node, message, fix)


def _name_at_end(context: Context, function: Function, node: ast.expr) -> tuple[str, str]:
    """Return the constant at the end of a path, and the name that holds it, if one does."""
    if isinstance(node, ast.Name):
        assigned = context.program.assigned(function, node.id)
        if len(assigned) != 1 or assigned[0].value is None:
            return "", ""
        node = assigned[0].value
    if isinstance(node, ast.Call) and function.module.full_name(node.func) == "os.path.join" and node.args:
        node = node.args[-1]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
        node = node.right
    if isinstance(node, ast.Constant):
        return str(node.value).lstrip("/"), str(node.value)
    last = dotted(node).rpartition(".")[2]
    if not last or function.of_class is None:
        return "", ""
    for statement in function.of_class.node.body:
        if isinstance(statement, ast.Assign) and any(dotted(target) == last for target in statement.targets):
            return (str(statement.value.value), last) if isinstance(statement.value, ast.Constant) else ("", "")
    return "", ""


def _is_read(context: Context, function: Function, text: str, key: str) -> bool:
    """Tell whether a function of the same file opens the file of that name to read it."""
    for other in function.module.functions:
        for call in other.calls:
            mode = call.node.args[1] if len(call.node.args) > 1 else ast.Constant("r")
            reads = call.name == "open" and call.node.args and is_constant(mode, "r")
            if reads and _name_at_end(context, other, call.node.args[0]) == (text, key):
                return True
    return False


RULES = ()
OF_RANKS = (by_all, pointers)  # only where several ranks run the file
