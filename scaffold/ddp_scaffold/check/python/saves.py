"""Rules for lost work: checkpoints that a kill destroys, all ranks write, nothing can load, a resume guesses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .checkpoints import ENTRIES, LAST, Path, Saved, parts_of, paths, repeats_path, saved
from .context import Context, Found
from .effects import walk_body
from .module import (
    Call,
    Function,
    Guard,
    arguments_of,
    dotted,
    dotted_names,
    is_constant,
    keyword,
    last_of,
    names_in,
    shown,
)
from .origins import values_of

REMOVES = {"os.remove", "os.unlink", "shutil.rmtree"}
COPIES = {"shutil.copyfile", "shutil.copy", "shutil.copy2"}
RENAMES = {"os.replace", "os.rename", "shutil.move"}
STATE = re.compile(r"optim|epoch|step|iteration|scheduler|scaler", re.IGNORECASE)
PATH = re.compile(r"checkpoint|ckpt|resume|snapshot|save", re.IGNORECASE)  # an option that holds a checkpoint's path
RESULTS = re.compile(r"(?:^|/)(?:eval|results?|pred)", re.IGNORECASE)  # a folder of what was measured
NEWEST = re.compile(r"latest|last|ckpt|checkpoint")
# All files that a pattern finds, with how their names begin; and what takes a part of them.
FOUND_BY = re.compile(r"\bglob\(.*?[\"'/]((?:best|latest|last|ckpt|checkpoint|model)[\w.-]*)\*[^\"'/]*[\"']")
IN_ORDER = re.compile(r"sort|\[[^\]]*:[^\]]*\]|\b(?:min|max|len)\(")
PASSING = re.compile(r"best|final|tmp|temp")  # what no run goes on from
LOCAL = re.compile(r"local_?rank|\bgpu\b|slurm_localid")
GLOBAL = re.compile(r"get_rank\(\)|global_rank|world_rank|is_main_process|is_master|\brank == 0|\.rank == 0")
NODES = re.compile(
    r"rank\s*\*\s*(?:args\.)?n?_?gpus?_per_node|node_rank|NODE_RANK|nnodes|num_nodes|SLURM_NNODES|SLURM_NODEID"
    r"|OMPI_COMM_WORLD_RANK|SLURM_PROCID|global_rank|submitit|environ(?:\.get)?[\[(]['\"]RANK['\"]"
)
EVALUATES = re.compile(r"test|eval|infer|demo|predict|visuali[sz]e|sample|data|token|vocab|embed|pretrain", re.I)
BY_LAUNCHER = re.compile(r"init_method\s*=\s*[\"']env://")
ONE_NODE = re.compile(r"mp\.spawn|multiprocessing\.spawn|MASTER_ADDR[\"']\]\s*=")
LOADS = {"load_state_dict", "load_checkpoint", "resume_checkpoint", "resume", "load_model"}


def saved_by_all(context: Context, call: Call) -> ast.expr | None:
    """Return the path to which a call surely writes on all ranks, if it does not tell them apart."""
    path = _written(call)
    if path is None or not _on_all(context, call, 0):
        return None
    words = names_in(path) | _made_of(context, call.function, path)
    return None if any(re.search(r"rank|local|gpu|pid|host", word.lower()) for word in words) else path


def all_ranks(context: Context, function: Function) -> Iterator[Found]:
    """Yield torch.save that surely runs on all ranks, into a path that does not tell them apart."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        path = saved_by_all(context, call)
        if path is None:
            continue
        yield saved_by_each(function, call, path)


def saved_by_each(function: Function, call: Call, path: ast.expr) -> Found:
    """Return the finding of a file that all ranks save."""
    message = (
        f"all ranks write `{shown(path, 40)}` at the same time: each truncates what another has begun,"
        " and whoever reads it, or a kill meanwhile, finds a file that cannot be loaded"
    )
    fix = "write on rank 0 only, to a name beside it, and rename that with os.replace"
    return Found("DDP302", function.module, call.node, message, fix)


def _written(call: Call) -> ast.expr | None:
    """Return the path of `torch.save(x, path)` and of `open(path, "w")`."""
    if call.name == "torch.save":
        return call.node.args[1] if len(call.node.args) > 1 else None
    mode = call.node.args[1] if len(call.node.args) > 1 else keyword(call.node, "mode")
    writes = call.name == "open" and isinstance(mode, ast.Constant) and str(mode.value) in ("w", "wb", "wt", "w+")
    return call.node.args[0] if writes and call.node.args else None


def each_node(context: Context, function: Function) -> Iterator[Found]:
    """Yield torch.save by the first rank of each node, into a path that does not tell the nodes apart."""
    if not context.plain(function.module) or not _has_nodes(context, function):
        return
    seen: set[int] = set()
    for call in function.calls:
        found = context.ranks.partial(call) if call.place.guards else None
        if found is None or found[1] != "first" or id(found[0].test) in seen or found[0].early:
            continue
        if not _is_first_of_node(context, function, found[0].test):
            continue
        told = [g for g in call.place.guards if g is not found[0] or _first_of_node(g.test)]
        if any(GLOBAL.search(ast.unparse(g.test)) for g in told):
            continue
        save = _save_within(context, call)
        if save is None:
            continue
        words = names_in(save.node.args[1]) | {w for a in arguments_of(call.node) for w in names_in(a)}
        words |= _made_of(context, save.function, save.node.args[1])
        if any(re.search(r"rank|host|node|pid|tmp|scratch", word.lower()) for word in words):
            continue
        seen.add(id(found[0].test))
        message = (
            f"`{shown(found[0].test, 50)}` holds on the first rank of each node: on a file system that the nodes share,"
            " they write the same file at the same time, and a reader or a kill finds one that is broken"
        )
        fix = f"call `{shown(call.node.func, 40)}` where `torch.distributed.get_rank() == 0`"
        yield Found("DDP306", function.module, call.node, message, fix)


def _is_first_of_node(context: Context, function: Function, test: ast.expr) -> bool:
    """Tell whether a condition, or what the flag that is tested is made of, is one of the rank within its node."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    flags = [dotted(part) for part in parts if dotted(part)]
    values = [a.value for flag in flags for a in context.program.assigned(function, flag) if a.value is not None]
    return any(_first_of_node(one) for one in (test, *values))


def _first_of_node(test: ast.expr) -> bool:
    """Tell whether a condition is one of the rank within its node: `local_rank == 0`, `rank % gpus_per_node == 0`."""
    for part in ast.walk(test):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and "rank" in ast.unparse(part.left):
            return re.search(r"gpu|node|local", ast.unparse(part.right)) is not None
        if isinstance(part, ast.Compare) and LOCAL.search(ast.unparse(part.left).lower()):
            return len(part.comparators) == 1 and ast.unparse(part.comparators[0]) in ("0", "'0'")
    return "is_local_main" in ast.unparse(test)


def _has_nodes(context: Context, function: Function) -> bool:
    """Tell whether a program may run on several nodes: it tells the rank of all from the local one, or a launcher."""
    if context.says(function.module, NODES):
        return True
    return context.says(function.module, BY_LAUNCHER) and not context.says(function.module, ONE_NODE)


def _save_within(context: Context, call: Call, depth: int = 0) -> Call | None:
    """Return the torch.save that a call makes, itself or in helpers, if no condition of the rank stands around it."""
    if call.name == "torch.save":
        return call if len(call.node.args) > 1 else None
    target = context.program.called(call)
    if target is None or depth > 2:
        return None
    inner = (c for c in target.calls if context.ranks.partial(c) is None)
    return next((save for c in inner if (save := _save_within(context, c, depth + 1)) is not None), None)


def _made_of(context: Context, function: Function, node: ast.expr) -> set[str]:
    found: set[str] = set()
    for name in [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]:
        for assignment in context.program.assigned(function, name):
            found |= names_in(assignment.value) if assignment.value is not None else set()
    return found


def _on_all(context: Context, call: Call, depth: int) -> bool:
    """Tell whether a call is made on every rank, as far as all its callers can be seen."""
    function = call.function
    if depth > 4 or context.ranks.partial(call) is not None:
        return False
    if any(not (_of_numbers(g.test) or _of_type(g.test) or _is_alike(context, function, g)) for g in call.place.guards):
        return False
    begins = isinstance(function.node, ast.Module) or function.name in ENTRIES or context.is_spawned(function)
    if begins and id(function.module) in context.distributed and _joins(context, function):
        return True
    callers = context.program.sites.get(id(function), [])
    return any(_on_all(context, caller, depth + 1) for caller in callers)


def _of_type(test: ast.expr) -> bool:
    """Tell whether a condition asks for the type of a model, which is the same on all ranks."""
    return isinstance(test, ast.Call) and dotted(test.func) == "isinstance"


def _joins(context: Context, function: Function) -> bool:
    makes = {"DistributedDataParallel", "DDP", "init_process_group"}
    return any(c.last in makes for f in function.module.functions for c in f.calls)


def _is_alike(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a condition is an option that is the same on all ranks: behind an exit, or one that nothing sets."""
    if isinstance(guard.test, ast.Call) and dotted(guard.test.func) in ("isinstance", "hasattr"):
        return True
    owner, _, last = dotted(guard.test).rpartition(".")
    if not _is_option(guard.test) or guard.early:
        return _is_option(guard.test)
    names = {f"--{last}", f"--{last.replace('_', '-')}"}
    declared = any(
        isinstance(given, ast.Constant) and given.value in names
        for option in context.calls_in_component(function.module, "add_argument")
        for given in option.node.args
    )
    return declared and not context.says(function.module, re.compile(rf"\b{owner}\.{last}\s*=[^=]"))


def _is_option(test: ast.expr) -> bool:
    """Tell whether a condition is an option such as `args.evaluate`, which is the same on all ranks."""
    name = dotted(test)
    return name.startswith(("args.", "opt.", "cfg.", "config.")) and not re.search(r"rank|gpu|main|master", name)


def _of_numbers(test: ast.expr) -> bool:
    """Tell whether a condition is one of counting, such as `step % 10 == 0` or `loss < best`."""
    if isinstance(test, ast.BoolOp):
        wanted = all if isinstance(test.op, ast.And) else any
        return wanted(_of_numbers(value) for value in test.values)
    if not isinstance(test, ast.Compare):
        return False
    ordered = all(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in test.ops)
    words = {word.lower() for word in names_in(test)}
    if any("rank" in word or "gpu" in word for word in words):
        return False
    return ordered or (isinstance(test.left, ast.BinOp) and isinstance(test.left.op, ast.Mod))


def in_place(context: Context, function: Function) -> Iterator[Found]:
    """Yield checkpoints that overwrite the last one in place: a kill while it is written leaves none."""
    if not context.plain(function.module) or any(
        c.name in RENAMES or (c.last in ("replace", "rename") and len(c.node.args) == 1) for c in function.calls
    ):
        return
    kept = [one for call in function.calls if (one := saved(context, call)) is not None]
    seen: set[int] = set()
    for one in [*kept, *_copied(function, kept)]:
        path = next((p for p in paths(context, one.call, one.path) if _is_overwritten(context, one, p)), None)
        if path is None or one.call.order in seen or not _goes_on_with(context, function, one, path):
            continue
        seen.add(one.call.order)
        message = (
            f"each save overwrites `{shown(one.path, 40)}` in place: a kill while it is written leaves a file"
            " that cannot be loaded, where the next start looks for a checkpoint"
        )
        fix = "write to a name beside it, and put that in its place with os.replace when it is complete"
        yield Found("DDP301", function.module, one.call.node, message, fix)


def _copied(function: Function, kept: list[Saved]) -> list[Saved]:
    """Return the files to which a function copies what it has saved."""
    copies = [c for c in function.calls if c.name in COPIES and len(c.node.args) > 1]
    return [Saved(c, kept[0].state, c.node.args[1]) for c in copies if kept]


def _is_overwritten(context: Context, one: Saved, path: Path) -> bool:
    """Tell whether a path stays the same from save to save, and is none from which no run goes on."""
    if not path.last or PASSING.search(path.last.lower()) or _rewrites(one):
        return False
    return repeats_path(context, one.call, path)


def _rewrites(one: Saved) -> bool:
    """Tell whether a helper changes a file that is there: it loads what it saves."""
    if one.call.place.loops:
        return False
    before = [c for c in one.call.function.calls if c.order < one.call.order and c.node.args]
    loads = [c for c in before if c.last in ("load", "torch_load")]
    names = {ast.unparse(part) for part in ast.walk(one.path) if isinstance(part, ast.Name)}
    return any(not c.place.loops and ast.unparse(c.node.args[0]) in names for c in loads)


def _goes_on_with(context: Context, function: Function, one: Saved, path: Path) -> bool:
    """Tell whether a run goes on with a file: it holds the state of the run, or is called the newest."""
    if _is_state(context, function, one.state) or (LAST.search(path.last) and not RESULTS.search(path.text)):
        return True
    return _is_weights(context, function, one.state) and NEWEST.search(path.text.lower()) is not None


def _is_weights(context: Context, function: Function, node: ast.expr) -> bool:
    return any(
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict"
        for _, value in values_of(context, function, node)
    )


def removed_first(context: Context, function: Function) -> Iterator[Found]:
    """Yield an old checkpoint that is removed before the new one is there."""
    if id(function.module) not in context.distributed:
        return
    removes = [c for c in function.calls if (c.name in REMOVES and c.node.args) or _runs_rm(function, c)]
    for call in removes:
        path = ast.unparse(call.node.args[0])
        later = [
            c
            for c in function.calls
            if c.order > call.order and (c.place.loops, c.place.tries) == (call.place.loops, call.place.tries)
        ]
        link = next(
            (c for c in later if c.name == "os.symlink" and any(ast.unparse(a) == path for a in c.node.args[1:2])), None
        )
        save = next((c for c in later if c.name == "torch.save" and len(c.node.args) > 1), None)
        named = (
            call.name == "os.system"
            or PATH.search(path) is not None
            or _is_checkpoint_path(context, function, call.node.args[0])
        )
        new = link or (save if named else None) or _made_like_found(context, call)
        if new is None or _apart(call, new):
            continue
        message = (
            f"`{shown(call.node.args[0], 40)}` is removed before `{shown(new.node.func)}` in line"
            f" {function.module.position(new.node.lineno)[1]} has made the new one: a kill in between leaves neither"
        )
        fix = "make the new one beside it first, put it in its place with os.replace, and remove the old one then"
        yield Found("DDP307", function.module, call.node, message, fix)


def _made_like_found(context: Context, call: Call) -> Call | None:
    """Return what saves a checkpoint behind a call that removes all those which a pattern finds, `glob("best*")`.

    What removes the oldest of several leaves others: an order, a part or a count of them is no matter of this.
    """
    function, node = call.function, call.node.args[0]
    loops, guards = call.place.loops, call.place.guards
    loop = loops[-1] if loops else None
    if isinstance(node, ast.Subscript) and is_constant(node.slice, 0):
        name = dotted(node.value)
    elif isinstance(loop, ast.For) and dotted(node) and dotted(loop.target) == dotted(node):
        name, loops = dotted(loop.iter), loops[:-1]
    else:
        return None
    before = [a.value for a in function.assignments.get(name, ()) if a.order < call.order and a.value is not None]
    texts = [ast.unparse(value) for value in before]
    pattern = next((m for text in texts if (m := FOUND_BY.search(text))), None)
    if pattern is None or any(IN_ORDER.search(text) for text in texts):
        return None
    for later in function.calls:
        own = [guard for guard in guards if guard not in later.place.guards and dotted(guard.test) != name]
        if later.order < call.order or later.place.loops != loops or own:
            continue
        target = context.program.called(later)
        saves = later.name == "torch.save" or any(c.name == "torch.save" for c in (target.calls if target else ()))
        if saves and ast.unparse(function.node).count(pattern[1]) > 1:
            return later
    return None


def _runs_rm(function: Function, call: Call) -> bool:
    """Tell whether a call is `os.system("rm ...")` of a model or a checkpoint."""
    if call.name != "os.system" or not call.node.args:
        return False
    node = call.node.args[0]
    name = dotted(node)
    before = [a for a in function.assignments.get(name, ()) if a.order < call.order and a.value is not None]
    value = before[-1].value if before else node
    return value is not None and re.match(r"f?['\"]rm .*(?:model|ckpt|checkpoint)", ast.unparse(value)) is not None


def _is_checkpoint_path(context: Context, function: Function, node: ast.expr) -> bool:
    values = context.program.assigned(function, dotted(node)) if dotted(node) else []
    return any(a.value is not None and re.search(r"ckpt|checkpoint|\.pth|\.pt\b", ast.unparse(a.value)) for a in values)


def _apart(call: Call, other: Call) -> bool:
    """Tell whether two calls stand in the two branches of one test."""
    held = {(id(guard.test), guard.holds) for guard in call.place.guards}
    return any((id(guard.test), not guard.holds) in held for guard in other.place.guards)


def _is_state(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether what is saved is the state of a training run: of an optimizer, or that or an epoch in a dict."""
    keys = (key for _, key, _ in parts_of(context, function, node))
    if any(isinstance(key, ast.Constant) and STATE.search(str(key.value)) for key in keys):
        return True
    return isinstance(node, ast.Call) and re.search(r"optim\w*\.state_dict$", dotted(node.func).lower()) is not None


def guesses(context: Context, function: Function) -> Iterator[Found]:
    """Yield resumes that begin again when a checkpoint cannot be loaded, or take the newest file for a complete one."""
    if id(function.module) not in context.distributed:
        return
    for node, _ in function.tries:
        inner = [c for c in function.calls if (node, "body") in c.place.tries]
        load = next(
            (c for c in inner if c.last in LOADS or _loads_checkpoint(function, c) or _loads_within(context, c)), None
        )
        if load is None or any(c.last == "backward" for c in inner) or "pretrain" in function.name:
            continue
        if load.last == "load_state_dict" and re.search("scaler|amp", dotted(load.node.func).lower()):
            continue  # the scale of the loss finds itself again
        for handler in node.handlers:
            types = names_in(handler.type) if handler.type is not None else {"Exception"}
            nodes = [n for statement in handler.body for n in walk_body(statement)]
            ends = any(isinstance(n, (ast.Raise, ast.Continue)) for n in nodes) or (
                any(isinstance(n, ast.Return) for n in nodes) and not _trains_all_the_same(context, function)
            )
            again = any(isinstance(n, ast.Call) and last_of(n) in ("load", load.last, *LOADS) for n in nodes)
            optimizer = load.last == "load_state_dict" and re.search(r"optim|sched", dotted(load.node.func).lower())
            broad = {"Exception", "BaseException", "RuntimeError", *(("ValueError", "KeyError") if optimizer else ())}
            if ends or again or not types & broad:
                continue
            if any(isinstance(n, ast.Call) and dotted(n.func).endswith("exit") for n in nodes):
                continue
            if optimizer:
                yield _anew(function, handler, load)
                continue
            message = (
                f"a rank on which `{shown(load.node.func)}` fails begins again, while the others resume:"
                " steps and weights differ, and the next save overwrites the old work"
            )
            fix = "let the error end the job, or try the checkpoint before it; begin anew only where there is none"
            yield Found("DDP303", function.module, handler, message, fix)
    newest = [call.node for call in function.calls if call.name == "max" and is_newest(call.node)]
    for newer in (*newest, *_last_of_sorted(function)):
        message = "the newest file may be the one whose writing was cut off, and ranks on other nodes may see another"
        fix = "take the newest checkpoint that is complete, chosen on rank 0 and broadcast to all ranks"
        yield Found("DDP304", function.module, newer, message, fix)


def _trains_all_the_same(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a program trains after a helper that loads has returned, whatever that has returned."""
    sites = context.program.sites.get(id(function), ())
    if depth > 2 or EVALUATES.search(function.name) or not sites:
        return False
    return any(
        not site.place.loops
        and site.function is not function
        and not _ends_on(site)
        and (
            any(c.order > site.order and context.goes_backward(c) for c in site.function.calls)
            or (not _tested(site) and _trains_all_the_same(context, site.function, depth + 1))
        )
        for site in sites
    )


def _ends_on(site: Call) -> bool:
    """Tell whether the result of a call is tested, and ends the program: by a raise, an exit, an assert."""
    names = _results(site)
    for test, _, order in site.function.tests:
        if order >= site.order and (names & dotted_names(test.test) or _holds(test.test, site)):
            parts = [part for one in (*test.body, *test.orelse) for part in walk_body(one)]
            if any(
                isinstance(part, ast.Raise) or (isinstance(part, ast.Call) and "exit" in dotted(part.func))
                for part in parts
            ):
                return True
    return any(isinstance(p, ast.Assert) and names & dotted_names(p.test) for p in ast.walk(site.function.node))


def _tested(site: Call) -> bool:
    names = _results(site)
    return any(names & dotted_names(test.test) or _holds(test.test, site) for test, _, _ in site.function.tests)


def _holds(node: ast.expr, site: Call) -> bool:
    return any(part is site.node for part in ast.walk(node))


def _results(site: Call) -> set[str]:
    """Return the names that get what a call returns, or a part of it."""
    return {
        name
        for name, found in site.function.assignments.items()
        for one in found
        if one.value is site.node or getattr(one.node, "value", None) is site.node
    }


def _loads_within(context: Context, call: Call) -> bool:
    """Tell whether a call runs a function of these files that loads a file into a model."""
    target = context.program.called(call)
    if target is None or re.search(r"data|token|vocab|embed", target.name.lower()):
        return False
    return {"torch.load"} <= {c.name for c in target.calls} and any(c.last == "load_state_dict" for c in target.calls)


def _anew(function: Function, handler: ast.ExceptHandler, load: Call) -> Found:
    message = (
        f"where `{shown(load.node.func)}` fails, training goes on with a new state: moments and learning rate begin"
        " again, on each rank by itself, and the run looks as one that was resumed"
    )
    fix = "let the error end the job; begin anew only where the user asks for it"
    return Found("DDP303", function.module, handler, message, fix)


def _loads_checkpoint(function: Function, call: Call) -> bool:
    """Tell whether torch.load reads a checkpoint, and no data: by its names, or by what is done with it."""
    if call.name != "torch.load" or "pretrain" in f"{function.name} {ast.unparse(call.node)}".lower():
        return False
    named = any(PATH.search(name) for value in arguments_of(call.node) for name in names_in(value))
    return named or PATH.search(function.name) is not None or any(c.last in LOADS for c in function.calls)


def _last_of_sorted(function: Function) -> Iterator[ast.Subscript]:
    """Yield `names[-1]` of checkpoints that are listed and sorted by name."""
    listed: dict[str, str] = {
        name: " ".join(ast.unparse(a.value) for a in found if a.value is not None)
        for name, found in function.assignments.items()
        if any(a.value is not None and re.search(r"glob\(|listdir\(|iterdir\(", ast.unparse(a.value)) for a in found)
    }
    if not listed:
        return
    parts = (part for statement in getattr(function.node, "body", ()) for part in walk_body(statement))
    last = [part for part in parts if isinstance(part, ast.Subscript) and ast.unparse(part.slice) == "-1"]
    for part in sorted(last, key=lambda one: one.lineno):
        inner = part.value
        at_once = isinstance(inner, ast.Call) and last_of(inner) in ("sorted", "sort", "natsorted")
        name = dotted(inner.args[0]) if isinstance(inner, ast.Call) and inner.args else dotted(inner)
        text = f"{listed[name]} {function.name}" if name in listed else ""
        ordered = at_once or "sorted(" in text or any(dotted(c.node.func) == f"{name}.sort" for c in function.calls)
        if text and ordered and re.search(r"ckpt|checkpoint|\.pth|\.pt\b|model", text, re.IGNORECASE):
            yield part
            return


def is_newest(node: ast.Call) -> bool:
    """Tell whether a call is like max(glob(...), key=os.path.getctime)."""
    key = keyword(node, "key")
    text = ast.unparse(node)
    newest = key is not None and any(word in ast.unparse(key) for word in ("getctime", "getmtime", "st_mtime"))
    return newest and bool(re.search(r"ckpt|checkpoint|\.pth|\.pt\b|resume|model", text))


RULES = (in_place,)
OF_RANKS = (
    all_ranks,
    each_node,
    removed_first,
    guesses,
)  # only where several ranks run the file
