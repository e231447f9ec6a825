"""Rules for what every rank does although one should: workers, logs, a look for the checkpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .checkpoints import paths, saved
from .context import Context, Found
from .effects import walk_body
from .module import Call, Function, Guard, argument, arguments_of, dotted, is_constant, keyword, names_in, shown
from .saves import BY_LAUNCHER, NODES, PATH
from .stops import SPAWN
from .waiting import barriers_around

OWN = re.compile(r"rank|local|gpu|pid|host|node|worker|tmp|temp", re.IGNORECASE)
CPUS = re.compile(r"(?:os|multiprocessing|mp|psutil)\.cpu_count|len\(os\.sched_getaffinity")
WRITERS = {"EventsWriter", "SummaryWriter", "wandb.init", "logging.FileHandler"}
STARTERS = ("spawn", "start_processes", "Process")
RESUMES = re.compile(r"resum\w*['\"]?\]?$")
PROGRESS = re.compile(r"epoch|step|iter", re.IGNORECASE)
FROM_LAUNCHER = re.compile(r"init_process_group\(\s*(?:backend\s*=\s*)?[\"']\w+[\"']\s*(?:,\s*timeout=[^\n]*)?\)")
LOCAL_RANK = re.compile(r"environ(?:\.get)?[\[(]\s*[\"']LOCAL_RANK")


def ranks_run(context: Context, function: Function) -> bool:
    """Tell whether the ranks run a function: they make data sets, too, and what starts them runs before they do."""
    if not context.plain(function.module) or any(call.name in SPAWN for call in function.calls):
        return False
    owner = function.of_class
    makes_data = function.name == "__init__" and owner is not None and any("Dataset" in base for base in owner.bases)
    return makes_data or context.run_by_ranks(function)


def on_every_rank(context: Context, call: Call, depth: int) -> bool:
    """Tell whether a call stands under no condition of the rank, nor do the calls by which it is reached."""
    found = context.ranks.partial(call)
    if found is not None and not _in_both_branches(call, found[0]):
        return False
    if context.ranks.alone(call.function, call.place.guards):
        return False
    if any(re.search(r"main_process_first|first|lock", ast.unparse(one).lower()) for one in call.place.withs):
        return False
    if isinstance(call.function.node, ast.Module) and not context.run_by_ranks(call.function):
        return False  # a program of one process, which has a function in common with the ranks
    if barriers_around(context, call) is not None:
        return False
    if context.is_spawned(call.function):
        return True
    sites = context.program.sites.get(id(call.function), ())
    if depth > 3 or not sites or is_started(context, call.function):
        return True
    of_ranks = [site for site in sites if context.run_by_ranks(site.function)] or sites
    return any(not _before_ranks(site) and on_every_rank(context, site, depth + 1) for site in of_ranks)


def _in_both_branches(call: Call, guard: Guard) -> bool:
    """Tell whether the other ranks make the same call: `if rank == 0: found = train() else: train()`."""
    text = dotted(call.node.func)
    return any(
        dotted(other.node.func) == text
        and any(g.test is guard.test and g.holds != guard.holds and not g.early for g in other.place.guards)
        for other in call.function.calls
        if text and not guard.early
    )


def _before_ranks(site: Call) -> bool:
    """Tell whether a call stands before the start of the ranks, in the process that starts them."""
    return any(starts_ranks(c) and c.order > site.order for c in site.function.calls)


def starts_ranks(call: Call) -> bool:
    """Tell whether a call starts the ranks as processes."""
    return call.name in SPAWN or (call.last == "Process" and keyword(call.node, "target") is not None)


def is_started(context: Context, function: Function) -> bool:
    """Tell whether a function is what mp.spawn or a process runs."""
    calls = [c for last in STARTERS for c in context.calls_in_component(function.module, last) if starts_ranks(c)]
    given = [c.node.args[0] if c.name in SPAWN and c.node.args else keyword(c.node, "target") for c in calls]
    return any(one is not None and dotted(one).rpartition(".")[2] == function.name for one in given)


def workers(context: Context, function: Function) -> Iterator[Found]:
    """Yield loaders of each rank that take as many workers as the node has CPUs."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        given = keyword(call.node, "num_workers") if call.last == "DataLoader" else None
        size = _size_of_pool(call)
        if size is not None and ranks_run(context, function) and on_every_rank(context, call, 0):
            given = size
        if given is None:
            continue
        values = [given, *(a.value for a in context.program.assigned(function, dotted(given)) if dotted(given))]
        value = next((v for v in values if isinstance(v, ast.Call) and CPUS.match(ast.unparse(v))), None)
        if value is not None:
            message = (
                f"every rank starts `{shown(value)}` workers, so n ranks of a node start n times as many processes as"
                " it has CPUs: they take turns, and all ranks wait for the slowest"
            )
            fix = f"divide it by the ranks of a node: `{shown(value)} // torch.cuda.device_count()`"
            yield Found("DDP411", function.module, call.node, message, fix)


def _size_of_pool(call: Call) -> ast.expr | None:
    """Return how many processes a pool has, where that is given; without, it has as many as there are CPUs."""
    if call.last not in ("Pool", "ProcessPoolExecutor"):
        return None
    given = call.node.args[0] if call.node.args else None
    return given or keyword(call.node, "processes") or keyword(call.node, "max_workers")


def logs(context: Context, function: Function) -> Iterator[Found]:
    """Yield TensorBoard and W&B runs that every rank opens, into one folder."""
    if not ranks_run(context, function):
        return
    for call in function.calls:
        named = call.last if call.last in ("SummaryWriter", "EventsWriter") else call.name
        if named not in WRITERS and not (_appends(call) and _is_called(context, function)):
            continue
        if any("rank" in ast.unparse(guard.test).lower() for guard in call.place.guards):
            continue
        if not on_every_rank(context, call, 0) or _in_choice(context, call):
            continue
        words = {name for value in arguments_of(call.node) for name in names_in(value)}
        for name in sorted(words):
            for assignment in context.program.assigned(function, name):
                words |= names_in(assignment.value) if assignment.value is not None else set()
        words |= _given_by_callers(context, function, words)
        text = " ".join(ast.unparse(value) for value in arguments_of(call.node))
        if (
            _switched_off(context, call)
            or any(OWN.search(word) for word in words)
            or OWN.search(text)
            or (call.name != "open" and keyword(call.node, "mode") is not None)
        ):
            continue
        message = (
            f"every rank opens `{shown(call.node, 40)}`: all ranks write into one file or run, and each line or step is"
            " there as often as there are ranks"
        )
        fix = f"call `{shown(call.node.func)}` where the rank is 0, and None elsewhere"
        yield Found("DDP613", function.module, call.node, message, fix)


def _is_called(context: Context, function: Function) -> bool:
    """Tell whether a function surely runs: it is the program, or something calls it."""
    return isinstance(function.node, ast.Module) or bool(context.program.sites.get(id(function)))


def _appends(call: Call) -> bool:
    """Tell whether a call is `open(path, "a")`."""
    mode = call.node.args[1] if len(call.node.args) > 1 else keyword(call.node, "mode")
    return call.name == "open" and isinstance(mode, ast.Constant) and str(mode.value) in ("a", "a+", "at")


def _given_by_callers(context: Context, function: Function, names: set[str]) -> set[str]:
    """Return the names in what callers give for those of the names that are parameters."""
    found: set[str] = set()
    for site in context.program.sites.get(id(function), ()):
        for name in names & set(function.parameters) - {"self", "cls"}:
            value = argument(site, function, name)
            given = names_in(value) if value is not None else set()
            made = (a.value for one in given for a in context.program.assigned(site.function, one))
            found |= given.union(*(names_in(value) for value in made if value is not None))
    return found


def _switched_off(context: Context, call: Call) -> bool:
    """Tell whether a setting under which a call stands is made of the rank elsewhere."""
    for guard in call.place.guards:
        last = dotted(guard.test).rpartition(".")[2]
        if last and context.says(
            call.function.module, re.compile(rf"\b{last}['\"]?\]?\s*=[^=\n]*(?:rank|main|master)")
        ):
            return True
    return False


def _in_choice(context: Context, call: Call) -> bool:
    """Tell whether a class makes it for whoever makes an object: that may be rank 0 only."""
    sites = context.program.sites.get(id(call.function), ())
    return call.function.name == "__init__" and all(_is_chosen(site) for site in sites)


def _is_chosen(call: Call) -> bool:
    """Tell whether a call stands under a test of a name, `if format == "tensorboard"`."""
    parts = (part for guard in call.place.guards for part in ast.walk(guard.test))
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)


def resumes(context: Context, function: Function) -> Iterator[Found]:
    """Yield a run that goes on, or begins, by each rank's own look for its checkpoint, on several nodes."""
    if not context.plain(function.module) or not context.run_by_ranks(function):
        return
    for test, place, _ in function.tests:
        values = [test.test, *(v for name in sorted(names_in(test.test)) for v in _values(function, name))]
        looks = [n for value in values for n in ast.walk(value) if isinstance(n, ast.Call) and _looks(n)]
        if len(looks) != 1 or any(context.ranks.guard(function, guard) for guard in place.guards):
            continue
        path = looks[0].args[0] if looks[0].args else getattr(looks[0].func, "value", None)
        if path is None or not _has_nodes(context, function):
            continue
        if _is_option(context, function, path) and not _is_own(context, function, looks[0], path):
            continue
        inner = [c for c in function.calls if any(g.test is test.test for g in c.place.guards)]
        chooses = _names_resume(test)
        if not chooses and (not any(_loads(context, c) for c in inner) or not _goes_on(context, function, test)):
            continue
        message = (
            f"each rank looks for `{shown(path, 40)}` itself: on a node that does not see the file that rank 0 has"
            " written, ranks begin anew while the others go on, and their steps do not meet"
        )
        fix = "let rank 0 look, and broadcast what it has found to all ranks"
        yield Found("DDP611", function.module, looks[0], message, fix)
        return
    yield from _found_by_helper(context, function)
    yield from _remembered(context, function)
    yield from _missing_files(context, function)


def _has_nodes(context: Context, function: Function) -> bool:
    """Tell whether a program may run on several nodes: it tells their ranks apart, or a launcher gives it its rank."""
    if any(context.says_near(function.module, pattern) for pattern in (NODES, BY_LAUNCHER)):
        return True
    return all(context.says_near(function.module, pattern) for pattern in (FROM_LAUNCHER, LOCAL_RANK))


def _remembered(context: Context, function: Function) -> Iterator[Found]:
    """Yield `resuming = os.path.isfile(path)`: what each rank has seen itself decides where it begins."""
    if "resum" not in function.module.file.text:
        return
    if not _has_nodes(context, function):
        return
    for statement in getattr(function.node, "body", ()):
        for part in walk_body(statement):
            if not isinstance(part, ast.Assign) or not RESUMES.search(ast.unparse(part.targets[0])):
                continue
            value = part.value.test if isinstance(part.value, ast.IfExp) else part.value
            if isinstance(value, ast.Call) and _looks(value):
                message = (
                    f"each rank looks for `{shown(value, 40)}` itself, while rank 0 may be writing it: on a node that"
                    " does not see it, ranks begin anew while the others go on, and their steps do not meet"
                )
                fix = "let rank 0 look, and broadcast what it has found to all ranks"
                yield Found("DDP611", function.module, value, message, fix)
                return


def _found_by_helper(context: Context, function: Function) -> Iterator[Found]:
    """Yield a load of what a function has found which looks for the newest checkpoint, if it has found one."""
    if not _has_nodes(context, function):
        return
    for test, place, _ in function.tests:
        name = dotted(test.test.left if isinstance(test.test, ast.Compare) else test.test)
        finds = [v for v in _values(function, name) if isinstance(v, ast.Call)] if name else []
        find = next((c for c in function.calls if c.node in finds and _looks_within(context, c)), None)
        if find is None or any(context.ranks.guard(function, guard) for guard in (*place.guards, *find.place.guards)):
            continue
        inner = [c for c in function.calls if any(g.test is test.test for g in c.place.guards)]
        inner = [c for c in inner if context.ranks.partial(c) is None]
        if any(_loads(context, c) for c in inner) or _names_resume(test):
            message = (
                f"each rank looks for its checkpoint itself, in `{find.last}`: on a node that does not see the file"
                " that rank 0 has written, ranks begin anew while the others go on, and their steps do not meet"
            )
            fix = f"call `{shown(find.node.func)}` on rank 0, and broadcast what it has found to all ranks"
            yield Found("DDP611", function.module, find.node, message, fix)
            return


def _looks_within(context: Context, call: Call) -> bool:
    """Tell whether a function of these files looks for a checkpoint, and returns its path, or nothing."""
    target = context.program.called(call)
    if target is None or not PATH.search(f"{target.name} {ast.unparse(call.node)}"):
        return False
    returned = [e.node.value for e in target.exits if isinstance(e.node, ast.Return)]
    nothing = any(value is None or is_constant(value, None) or is_constant(value, "") for value in returned)
    looks = any(c.last in ("glob", "listdir", "iterdir", "scandir") or _looks(c.node) for c in target.calls)
    return looks and nothing and not any(context.effects.of(c) for c in target.calls)


def _missing_files(context: Context, function: Function) -> Iterator[Found]:
    """Yield `except FileNotFoundError` around a load after which training begins anew."""
    for node, place in function.tries:
        caught = [h for h in node.handlers if h.type is not None and "FileNotFoundError" in names_in(h.type)]
        inner = [c for c in function.calls if (node, "body") in c.place.tries]
        load = next((c for c in inner if _loads(context, c)), None)
        if not caught or load is None or any(context.ranks.guard(function, guard) for guard in place.guards):
            continue
        ends = any(isinstance(part, ast.Raise) for part in ast.walk(caught[0]))
        goes_on = any(
            c.last in ("backward", "train", "fit", "train_epoch") for c in function.calls if c.order > load.order
        )
        if ends or not goes_on or not _has_nodes(context, function):
            continue
        message = (
            f"a rank that does not find the file of `{shown(load.node.func, 40)}` begins anew, while those that see it"
            " go on: their steps do not meet"
        )
        yield Found("DDP611", function.module, load.node, message, "let rank 0 look, and broadcast what it has found")


def _names_resume(test: ast.If) -> bool:
    """Tell whether the body of a test sets the file from which the run goes on: `args.resume = last`."""
    targets = [t for s in test.body for p in ast.walk(s) if isinstance(p, ast.Assign) for t in p.targets]
    return any(re.search(r"resume|checkpoint_path|ckpt_path", dotted(target).rpartition(".")[2]) for target in targets)


def _values(function: Function, name: str) -> list[ast.expr]:
    return [a.value for a in function.assignments.get(name, ()) if a.value is not None]


def _loads(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call loads a file of torch, itself or in a function of these files."""
    if call.name in ("torch.load", "json.load", "pickle.load"):
        return True
    target = context.program.called(call)
    return target is not None and depth < 2 and any(_loads(context, c, depth + 1) for c in target.calls)


def _looks(node: ast.Call) -> bool:
    return (node.func.attr if isinstance(node.func, ast.Attribute) else "") in (
        *("exists", "isfile", "is_file", "isdir", "is_dir"),
    )


def _is_option(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a path is what the user gives: `args.resume`; a parameter counts too, its callers may give that."""
    if isinstance(node, ast.Name):
        if node.id in function.parameters:
            return True
        values = [a.value for a in context.program.assigned(function, node.id) if a.value is not None]
        return not values or any(_is_option(context, function, value) for value in values if dotted(value) != node.id)
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return False
    last = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node.slice)
    return not re.search(r"out|save|log|work|exp|run", last.lower())  # the folder of the run is no choice of a file


def _is_own(context: Context, function: Function, look: ast.Call, path: ast.expr) -> bool:
    """Tell whether a path that is given is that of the run's own checkpoint: the program names it, or saves it there.

    What a user gives to go on from is another file than the one that is written.
    """
    at = next((call for call in function.calls if call.node is look), None)
    text = ast.unparse(path)
    if at is None or not PATH.search(text) or re.search(r"pretrain|resum|weight|init|test", text):
        return False
    name = dotted(path).rpartition(".")[2]
    if name in function.parameters:
        read = paths(context, at, path)
        return bool(read) and all(one.last and not re.search(r"[*?]", one.last) for one in read)
    written = (one for other in function.module.functions for call in other.calls if (one := saved(context, call)))
    return "." in dotted(path) and any(ast.unparse(one.path) == text for one in written)


def _goes_on(context: Context, function: Function, test: ast.If) -> bool:
    """Tell whether a counter of epochs or steps gets its value in a branch of a test, or in a function called there."""
    body = {id(part) for statement in (*test.body, *test.orelse) for part in ast.walk(statement)}
    called = [context.program.called(c) for c in function.calls if id(c.node) in body and PATH.search(c.last)]
    return (
        any(
            PROGRESS.search(name) and any(id(a.node) in body for a in assigned)
            for name, assigned in function.assignments.items()
        )
        or any(
            name.startswith("self.") and PROGRESS.search(name)
            for one in called
            for name in (one.assignments if one is not None else ())
        )
        or any(id(c.node) in body and _restores_optimizer(context, c) for c in function.calls)
    )


def _restores_optimizer(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call loads the state of an optimizer, itself or in a function of these files."""
    if call.last == "load_state_dict":
        return "optim" in dotted(call.node.func).lower()
    target = context.program.called(call)
    return target is not None and depth < 2 and any(_restores_optimizer(context, c, depth + 1) for c in target.calls)


RULES = ()
OF_RANKS = (workers, logs, resumes)  # only where several ranks run the file
