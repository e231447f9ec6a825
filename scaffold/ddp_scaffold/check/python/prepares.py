"""Rules for what every rank prepares although one should: downloads, folders, files that are made if absent."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .context import Context, Found
from .everywhere import OWN, on_every_rank
from .module import Call, Function, Guard, arguments_of, dotted, is_constant, keyword, names_in, shown
from .outputs import all_callers, undecided_by_rank, written
from .stops import SPAWN

ALONE = re.compile(r"distributed|world_size|is_initialized|\bddp\b", re.IGNORECASE)
FETCHES = re.compile(
    r"urllib\.request\.urlretrieve|wget\.download|gdown\.download\w*|urlretrieve|shutil\.unpack_archive"
    r"|torch\.hub\.download_url_to_file|torchvision\.datasets\.utils\.download\w+|nltk\.download"
    r"|torch_geometric\.data\.(?:download_url|extract_\w+)|requests\.get|urllib\.request\.urlopen"
)
UNPACKS = re.compile(r"extractall|download_and_extract\w*")
COMMANDS = re.compile(r"\b(?:wget|curl|gdown|unzip|tar|aws s3|gsutil)\b")
GRAPHS = re.compile(r"torch_geometric\.datasets\.\w+|ogb\.\w+\.(?:Pyg|Dgl)?\w*Dataset")
LOOKS = ("exists", "isfile", "is_file", "isdir", "is_dir")
CHECKS = re.compile(r"exist|check|cached|downloaded|processed|prepared|integrity", re.IGNORECASE)
SAVES = ("dump", "save", "savez", "tofile")
RENAMES = {"os.replace", "os.rename"}
# What stands beside a look for a file: whether it is made anew, or is a whole one, or another file.
ANEW = re.compile(
    r"overwrit|force|refresh|rebuild|reload|process|comput|updat|cache|md5|sha|check|integr|valid|size|len\("
    r"|exist|is_?file|is_?dir",
    re.IGNORECASE,
)
OF_PATHS = {
    "os",
    "path",
    "join",
    "self",
    "osp",
    "exists",
    "isfile",
    "isdir",
    "args",
    "format",
    "str",
    "cfg",
    "config",
}
ONE_FIRST = re.compile(r"main_process_first|local_main_first|FileLock|rank_zero_first|distributed_zero_first|filelock")
MAX_DEPTH = 4


def prepare(context: Context, function: Function) -> bool:
    """Tell whether the ranks run a function: also in what makes data or models, which a setting may name."""
    if not context.plain(function.module) or any(call.name in SPAWN for call in function.calls):
        return False
    return _is_maker(function) or context.run_by_ranks(function) or _called_by_maker(context, function, 0)


def _is_maker(function: Function) -> bool:
    """Tell whether a function makes an object of data or of a model."""
    owner = function.of_class
    if owner is None or function.name != "__init__":
        return False
    return "__getitem__" in owner.methods or any(re.search(r"Dataset|Module$", base) for base in owner.bases)


def _called_by_maker(context: Context, function: Function, depth: int) -> bool:
    sites = context.program.sites.get(id(function), ())
    return depth < MAX_DEPTH and any(
        site.function is not function
        and (_is_maker(site.function) or _called_by_maker(context, site.function, depth + 1))
        for site in sites
    )


def _by_all(context: Context, call: Call) -> bool:
    """Tell whether every rank comes to a call, and none is let through first."""
    if not on_every_rank(context, call, 0) or not undecided_by_rank(context, call, absent=True):
        return False
    return not _one_first(context, call.function, 0)


def _one_first(context: Context, function: Function, depth: int) -> bool:
    """Tell whether one rank calls a function, or what calls it, before the others do."""
    sites = context.program.sites.get(id(function), ())
    if depth > MAX_DEPTH:
        return False
    partial = (context.ranks.partial(site) for site in sites)
    return any(found is not None and found[1] == "first" for found in partial) or (
        bool(sites)
        and all(_one_first(context, site.function, depth + 1) for site in sites if site.function is not function)
    )


def absent(context: Context, function: Function, guard: Guard) -> ast.expr | None:
    """Return what is looked for by a condition that holds where it is not there."""
    return _absent(context, function, guard.test, guard.holds, 0)


def _absent(context: Context, function: Function, test: ast.expr, holds: bool, depth: int) -> ast.expr | None:
    if depth > MAX_DEPTH:
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _absent(context, function, test.operand, not holds, depth)
    if isinstance(test, ast.BoolOp):
        sure = isinstance(test.op, ast.And) is holds  # each half holds; else one of them, so it must be a plain one
        if not sure and not all(ANEW.search(ast.unparse(value)) for value in test.values):
            return None
        halves = [value for value in test.values if sure or not isinstance(value, ast.BoolOp)]
        parts = (_absent(context, function, value, holds, depth) for value in halves)
        return next((part for part in parts if part is not None), None)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.Eq)) and _is_false(test.comparators[0]):
        return _absent(context, function, test.left, not holds, depth)  # `os.path.exists(path) is False`
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        wanted = ast.NotIn if holds else ast.In
        listed = re.search(r"listdir\(|glob\(|iterdir\(", ast.unparse(test.comparators[0]))
        return test.left if isinstance(test.ops[0], wanted) and listed else None
    if isinstance(test, ast.Call):
        return None if holds else _looked_for(context, function, test, depth)
    if dotted(test):
        values = [a.value for a in function.assignments.get(dotted(test), ())]
        if len(values) == 1 and values[0] is not None:
            return _absent(context, function, values[0], holds, depth + 1)
    return None


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _looked_for(context: Context, function: Function, test: ast.Call, depth: int) -> ast.expr | None:
    """Return what `os.path.exists(path)`, `path.exists()` and `all(exists(f) for f in files)` look for."""
    last = test.func.attr if isinstance(test.func, ast.Attribute) else getattr(test.func, "id", "")
    if last in LOOKS:
        if test.args:
            return test.args[0]
        return test.func.value if isinstance(test.func, ast.Attribute) else None
    if last in ("all", "any") and test.args and isinstance(test.args[0], (ast.GeneratorExp, ast.ListComp)):
        return _absent(context, function, test.args[0].elt, False, depth + 1)
    if CHECKS.search(last):
        call = next((c for c in function.calls if c.node is test), None)
        target = context.program.called(call) if call is not None else None
        if target is not None and any(c.last in LOOKS for c in target.calls):
            return test
    return None


def folders(context: Context, function: Function) -> Iterator[Found]:
    """Yield folders that every rank makes if it does not see them: all but the first fail."""
    makes = [c for c in function.calls if _makes_folder(c)]
    if not makes or not prepare(context, function):
        return
    for call in makes:
        if not any(absent(context, function, g) is not None for g in call.place.guards) or not _by_all(context, call):
            continue
        words = {name for value in arguments_of(call.node) for name in names_in(value)}
        if any(OWN.search(word) for word in words) or any(p == "body" for _, p in call.place.tries):
            continue
        message = (
            "every rank looks whether the folder is there and makes it if not: ranks that look at the same time all"
            " make it, and all but the first end with FileExistsError"
        )
        yield Found("DDP612", function.module, call.node, message, "give it exist_ok=True, and leave the test out")


def _makes_folder(call: Call) -> bool:
    made = call.name in ("os.makedirs", "os.mkdir") and bool(call.node.args)
    made = made or (call.last == "mkdir" and call.name != "os.mkdir" and isinstance(call.node.func, ast.Attribute))
    positional = call.name == "os.makedirs" and len(call.node.args) > 2  # (name, mode, exist_ok)
    return made and not positional and not is_constant(keyword(call.node, "exist_ok"), True)


@dataclass(frozen=True)
class _Made:
    """What a call fetches or writes: `path` is None for what is fetched."""

    call: Call
    path: ast.expr | None
    fetched: bool


def caches(context: Context, function: Function) -> Iterator[Found]:
    """Yield what every rank makes, or fetches, if it does not see it, as a cache of prepared data."""
    guarded = [c for c in function.calls if any(absent(context, function, g) is not None for g in c.place.guards)]
    if not guarded or not prepare(context, function) or any(c.name in RENAMES for c in function.calls):
        return
    seen: set[int] = set()
    for call in guarded:
        looked = next((g, x) for g in call.place.guards if (x := absent(context, function, g)) is not None)
        if id(looked[0].test) in seen or any(ALONE.search(ast.unparse(g.test)) for g in call.place.guards):
            continue
        made = _made(context, call, 0)
        if made is None or not _by_all(context, call) or not _is_one(context, call, looked[1], made):
            continue
        inside = made.call.function
        if inside is not function and any(absent(context, inside, g) is not None for g in made.call.place.guards):
            continue  # the function looks for it itself, and is told of
        seen.add(id(looked[0].test))
        yield _told(function, call, looked[1], made)


def _told(function: Function, call: Call, looked: ast.expr, made: _Made) -> Found:
    if made.fetched:
        message = (
            f"every rank that does not see the data comes to `{shown(call.node.func)}`, all at the same time: a rank"
            " may read what another one has not finished writing"
        )
        fix = f"call `{function.name or shown(call.node.func)}` before the job, or on one rank of each node first"
        return Found("DDP609", function.module, call.node, message, fix)
    message = (
        f"every rank that does not see `{shown(looked, 40)}` makes it, all at the same time: a rank may read what"
        " another one is writing, and the work is done once a rank"
    )
    fix = "make it before the job, or on one rank, and rename it into its place when it is complete"
    return Found("DDP614", function.module, call.node, message, fix)


def _made(context: Context, call: Call, depth: int) -> _Made | None:
    """Return what a call fetches or writes, itself or in functions of these files."""
    if _fetches(call):
        return _Made(call, None, True)
    path, mode = written(context, call)
    if path is not None and mode[:1] in ("w", "x"):
        return _Made(call, path, False)
    if call.name == "torch.save" and len(call.node.args) > 1:
        return _Made(call, call.node.args[1], False)
    if call.name == "lmdb.open" and call.node.args and not is_constant(keyword(call.node, "readonly"), True):
        return _Made(call, call.node.args[0], False)
    given = next((one for one in call.node.args if re.search(r"path|file|cache", dotted(one).lower())), None)
    if call.last in SAVES and given is not None:
        return _Made(call, given, False)
    target = context.program.called(call)
    if target is None or depth > 1 or target is call.function or any(c.name in RENAMES for c in target.calls):
        return None
    inner = [c for c in target.calls if context.ranks.partial(c) is None and undecided_by_rank(context, c, absent=True)]
    found = [made for c in inner if (made := _made(context, c, depth + 1)) is not None]
    return next((one for one in found if one.fetched), found[0] if found else None)


def _fetches(call: Call) -> bool:
    """Tell whether a call downloads or unpacks something."""
    if call.name in ("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call"):
        return bool(call.node.args) and COMMANDS.search(ast.unparse(call.node.args[0])) is not None
    return FETCHES.fullmatch(call.name) is not None or UNPACKS.fullmatch(call.last) is not None


def _is_one(context: Context, call: Call, looked: ast.expr, made: _Made) -> bool:
    """Tell whether what is made is what was looked for, and is no file of the rank's own."""
    words = {name for value in arguments_of(call.node) for name in names_in(value)}
    if made.path is not None:
        words |= names_in(made.path) | _values_of(context, made.call.function, made.path)
    here = names_in(looked) | _values_of(context, call.function, looked)
    if any(OWN.search(word) for word in {*words, *here}):
        return False
    checked = isinstance(looked, ast.Call) and CHECKS.search(ast.unparse(looked.func)) is not None
    same = made.path is not None and ast.unparse(made.path) == ast.unparse(looked)
    return made.fetched or checked or same or bool((words & here) - OF_PATHS)


def _values_of(context: Context, function: Function, node: ast.expr) -> set[str]:
    found: set[str] = set()
    for part in ast.walk(node):
        name = dotted(part) if isinstance(part, (ast.Name, ast.Attribute)) else ""
        for assignment in context.program.assigned(function, name) if name else ():
            found |= names_in(assignment.value) if assignment.value is not None else set()
    return found


def downloads(context: Context, function: Function) -> Iterator[Found]:
    """Yield data sets that every rank downloads and unpacks into one folder."""
    calls = [c for c in function.calls if is_constant(keyword(c.node, "download"), True) or GRAPHS.fullmatch(c.name)]
    if not calls or not prepare(context, function):
        return
    for call in calls:
        if not on_every_rank(context, call, 0) or not undecided_by_rank(context, call, absent=True):
            continue
        if any(OWN.search(w) for one in arguments_of(call.node) for w in _values_of(context, function, one)):
            continue  # into a folder of the rank's own
        alike = [
            c
            for c in context.calls_in_component(function.module, call.last)
            if (GRAPHS.fullmatch(c.name) or is_constant(keyword(c.node, "download"), True))
            and context.run_by_ranks(c.function)
        ]
        if any(not on_every_rank(context, c, 0) for c in alike) or _one_first(context, function, 0):
            continue  # one rank has been first
        message = (
            f"every rank downloads and unpacks `{call.last}` into the same folder at the same time: a rank may read"
            " what another one has not finished writing, and the download is made once a rank"
        )
        fix = f"call `{shown(call.node.func)}` before the job, or on one rank of each node first"
        yield Found("DDP609", function.module, call.node, message, fix)


def fetched(context: Context, function: Function) -> Iterator[Found]:
    """Yield what every rank fetches into one file, whether it is there or not."""
    calls = [c for c in function.calls if FETCHES.fullmatch(c.name) and not c.name.endswith((".get", ".urlopen"))]
    if not calls or not prepare(context, function):
        return
    for call in calls:
        words = {name for value in arguments_of(call.node) for name in names_in(value)}
        guarded = any(absent(context, function, g) is not None for g in call.place.guards)
        if guarded or any(OWN.search(word) for word in words):
            continue
        if undecided_by_rank(context, call) and all_callers(context, function, 0) and _by_all(context, call):
            message = (
                f"every rank comes to `{shown(call.node.func)}`, all at the same time, and writes one file: a rank may"
                " read what another one has not finished writing"
            )
            fix = f"call `{shown(call.node.func)}` before the job, or on one rank of each node first"
            yield Found("DDP609", function.module, call.node, message, fix)
            return


def graphs(context: Context, function: Function) -> Iterator[Found]:
    """Yield data sets of PyG that download and process themselves: its base class calls both, on every rank."""
    owner = function.of_class
    if owner is None or function.name not in ("process", "download") or not context.plain(function.module):
        return
    if not any(re.search(r"(?:InMemory|^|\.|OnDisk)Dataset$", base) for base in owner.bases):
        return
    if "torch_geometric" not in function.module.file.text:
        return
    sites = [c for c in context.calls_in_component(function.module, owner.name) if not _is_base_call(c)]
    if not sites or any(not _by_all(context, site) for site in sites if context.plain(site.function.module)):
        return
    made = next((m for c in function.calls if (m := _made(context, c, 0)) is not None), None)
    if made is None or not any(context.plain(site.function.module) for site in sites):
        return
    if made.fetched:
        message = (
            f"every rank that makes `{owner.name}` and does not see its files downloads them into one folder, all at"
            " the same time: a rank may read what another one has not finished writing"
        )
    else:
        message = (
            f"every rank that makes `{owner.name}` and does not see what was processed does all of it and writes one"
            " file: a rank may read what another one is writing"
        )
    fix = f"make `{owner.name}` before the job, or on rank 0 first while the others wait"
    at = next((c for c in function.calls if c is made.call), function.calls[0])
    yield Found("DDP609" if made.fetched else "DDP614", function.module, at.node, message, fix)


def _is_base_call(call: Call) -> bool:
    return isinstance(call.node.func, ast.Attribute) and call.last == "__init__"


def prepared(context: Context, function: Function) -> Iterator[Found]:
    """Yield data that every rank prepares for itself with `datasets` of Hugging Face, all of it."""
    if not prepare(context, function) or not _imports_datasets(function):
        return
    for call in function.calls:
        maps = call.last == "map" and keyword(call.node, "num_proc") is not None
        if not maps or context.ranks.partial_place(function, call.place) or not undecided_by_rank(context, call):
            continue
        if context.says(function.module, ONE_FIRST) or not all_callers(context, function, 0):
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


RULES = ()
OF_RANKS = (downloads, fetched, graphs, folders, caches, prepared)  # only where several ranks run the file
