"""Rules for files that every rank writes: results, lists and logs that are there once and are opened by all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .everywhere import OWN, is_started, on_every_rank, ranks_run, starts_ranks
from .module import Call, Function, argument, arguments_of, dotted, is_constant, keyword, names_in, shown
from .saves import RENAMES, saved_by_all

SETTINGS = re.compile(r"(?:args?|opts?|cfg|configs?|conf|hps?|hparams|params?|flags|para|settings|C|FLAGS|CONFIG)")
CHOSEN = re.compile(r"log|save|write|verbose|main|master|print|rank|primary|leader|dump|gpu|dist", re.IGNORECASE)
SAVES = {"numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt"}
JOINS = {"os.path.join", "str", "os.path.abspath", "os.path.realpath", "os.path.dirname", "os.path.expanduser"}
JOINS |= {"pathlib.Path", "os.fspath", "os.path.basename", "os.path.normpath"}
NAMES_NEWEST = re.compile(r"(?:last|latest|newest)\w*(?:\.\w+)?|checkpoint(?:\.txt|\.json)?", re.IGNORECASE)
EXISTS = re.compile(r"exists\(|isfile\(|is_file\(")
ONE_FIRST = re.compile(r"main_process_first|local_main_first|FileLock|rank_zero_first|distributed_zero_first")
MAX_DEPTH = 4


def by_all(context: Context, function: Function) -> Iterator[Found]:
    """Yield a file that every rank opens to write, by a name that is the same on all."""
    if not ranks_run(context, function):
        return
    for call in function.calls:
        path, mode = _written(call)
        if path is None or (mode.startswith("a") and _is_kept(function, call)):
            continue
        if context.ranks.partial_place(function, call.place) or not _undecided_by_rank(context, call):
            continue
        if not on_every_rank(context, call, 0) or not _all_callers(context, function, 0):
            continue
        if not _is_same(context, function, path, call, 0) or saved_by_all(context, call) is not None:
            continue  # the latter is a finding of its own
        does = "adds to" if mode.startswith("a") else "writes"
        then = (
            "each line is there once a rank, and lines of several ranks run into each other"
            if mode.startswith("a")
            else "each truncates what another has written, and one that reads it finds a part"
        )
        message = f"every rank {does} `{shown(path, 40)}`, one file for all: {then}"
        fix = f"call `{shown(call.node.func, 40)}` on rank 0 only, or put the rank into the name"
        yield Found("DDP631", function.module, call.node, message, fix)


def _is_kept(function: Function, call: Call) -> bool:
    """Tell whether a file is opened to be written later, perhaps by rank 0 alone: `self.log = open(path, "a")`."""
    return any(a.value is call.node and "." in a.target for found in function.assignments.values() for a in found)


def _written(call: Call) -> tuple[ast.expr | None, str]:
    """Return the path that a call opens to write, and how."""
    given = call.node.args
    if call.name == "open" and given:
        mode = given[1] if len(given) > 1 else keyword(call.node, "mode")
    elif call.last == "open" and isinstance(call.node.func, ast.Attribute) and len(given) == 1:
        mode, given = given[0], [call.node.func.value]
    elif (call.name in SAVES and len(given) > 1) or (call.last in ("to_csv", "savefig") and given):
        return given[0], "w"
    else:
        return None, ""
    text = str(mode.value) if isinstance(mode, ast.Constant) else ""
    return (given[0], text) if text[:1] in ("w", "a", "x") else (None, "")


def _undecided_by_rank(context: Context, call: Call) -> bool:
    """Tell whether nothing around a call may be a decision by the rank: a flag such as `self.log`, a context."""
    if any(re.search(r"rank|main|master|first|zero", ast.unparse(one).lower()) for one in call.place.withs):
        return False
    if any(part == "except" for _, part in call.place.tries):
        return False
    for guard in call.place.guards:
        text = ast.unparse(guard.test)
        if "__name__" in text:
            continue
        if EXISTS.search(text):  # a finding of its own
            return False
        option = SETTINGS.fullmatch(dotted(guard.test).partition(".")[0]) is not None
        option = option or _is_given_option(context, call.function, guard.test)
        if CHOSEN.search(text) and not (option and not re.search(r"rank|main|master|gpu|local", text)):
            return False
    return True


def _is_given_option(context: Context, function: Function, test: ast.expr) -> bool:
    """Tell whether all callers give an option such as `args.save_list` for a parameter that is tested."""
    name = dotted(test)
    if name not in function.parameters:
        return False
    given = [argument(site, function, name) for site in context.program.sites.get(id(function), ())]
    return bool(given) and all(
        value is not None and "." in dotted(value) and SETTINGS.fullmatch(dotted(value).partition(".")[0])
        for value in given
    )


def _all_callers(context: Context, function: Function, depth: int) -> bool:
    """Tell whether all ranks call a function: over one way at least on which nothing may ask for the rank."""
    if depth > MAX_DEPTH:
        return False
    if is_started(context, function):
        return True
    sites = context.program.sites.get(id(function), ())
    if not sites:
        named = len(re.findall(rf"\b{re.escape(function.name)}\b", function.module.file.text)) > 1
        begins = isinstance(function.node, ast.Module) or named
        return begins and (context.run_by_ranks(function) or context.joins_group(function.module))
    return any(
        context.ranks.partial(site) is None
        and _undecided_by_rank(context, site)
        and site.function is not function
        and not any(starts_ranks(c) for c in site.function.calls)  # what starts the ranks is none
        and _all_callers(context, site.function, depth + 1)
        for site in sites
    )


def _is_same(context: Context, function: Function, node: ast.expr, call: Call, depth: int) -> bool:
    """Tell whether a path is made of constants and settings only, and so is one and the same on all ranks."""
    if depth > 2 * MAX_DEPTH:
        return False
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.JoinedStr):
        parts = [p.value for p in node.values if isinstance(p, ast.FormattedValue)]
        return all(_is_same(context, function, part, call, depth + 1) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div, ast.Mod)):
        return all(_is_same(context, function, side, call, depth + 1) for side in (node.left, node.right))
    if isinstance(node, ast.Tuple):
        return all(_is_same(context, function, one, call, depth + 1) for one in node.elts)
    if isinstance(node, ast.Call):
        made = function.module.full_name(node.func)
        formats = isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "joinpath", "with_suffix")
        owner = [node.func.value] if formats and isinstance(node.func, ast.Attribute) else []
        inner = [*owner, *arguments_of(node)]
        return (made in JOINS or formats) and all(_is_same(context, function, one, call, depth + 1) for one in inner)
    name = dotted(node)
    if not name or OWN.search(name):
        return False
    return _is_same_name(context, function, name, call, depth)


def _is_same_name(context: Context, function: Function, name: str, call: Call, depth: int) -> bool:
    first, _, rest = name.partition(".")
    if rest and (SETTINGS.fullmatch(first) or (first == "self" and SETTINGS.fullmatch(rest.partition(".")[0]))):
        last = name.rpartition(".")[2]
        changed = re.compile(rf"\.{re.escape(last)}\b\s*\+?=[^=\n]*(?:rank|gpu|time\.|now\(|getpid|uuid|random)")
        return "." in name and not context.says(function.module, changed)
    if name == "__file__":
        return True
    if name in function.parameters and name not in function.assignments:
        sites = context.program.sites.get(id(function), ())
        given = [(site, argument(site, function, name)) for site in sites]
        return bool(given) and all(
            value is not None and _is_same(context, site.function, value, site, depth + 1) for site, value in given
        )
    assigned = context.program.assigned(function, name)
    return bool(assigned) and all(
        (one.value is not None and _is_same(context, function, one.value, call, depth + 1))
        or (isinstance(one.node, ast.For) and isinstance(one.node.iter, ast.Call) and _counts(one.node.iter))
        for one in assigned
    )


def _counts(node: ast.Call) -> bool:
    return dotted(node.func) == "range" and not any(OWN.search(name) for name in names_in(node))


def prepared(context: Context, function: Function) -> Iterator[Found]:
    """Yield data that every rank prepares for itself with `datasets` of Hugging Face, all of it."""
    if not ranks_run(context, function) or not _imports_datasets(function):
        return
    for call in function.calls:
        maps = call.last == "map" and keyword(call.node, "num_proc") is not None
        if not maps or context.ranks.partial_place(function, call.place) or not _undecided_by_rank(context, call):
            continue
        if context.says(function.module, ONE_FIRST) or not _all_callers(context, function, 0):
            continue
        message = (
            f"every rank runs `{shown(call.node.func, 40)}` over all samples, with num_proc processes each: the same"
            " work is done once a rank at the same time, and the CPUs of the node are shared"
        )
        fix = "prepare the data before the job, or on rank 0 first while the others wait, and load it from its cache"
        yield Found("DDP614", function.module, call.node, message, fix)
        return


def _imports_datasets(function: Function) -> bool:
    return any(written.partition(".")[0] == "datasets" for written, _ in function.module.relative.values())


def pointers(context: Context, function: Function) -> Iterator[Found]:
    """Yield a file that names the newest checkpoint, and is overwritten in place: a kill leaves it empty."""
    if not context.plain(function.module) or any(c.name in RENAMES for c in function.calls):
        return
    for call in function.calls:
        path, mode = _written(call)
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
OF_RANKS = (by_all, pointers, prepared)  # only where several ranks run the file
