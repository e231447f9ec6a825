"""Rules for wrong results: ranks that read the same, gradients that are not reduced, models that differ."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from .context import Context, Found, wraps_ddp
from .effects import is_generator
from .flow import places_of, places_of_name
from .module import (
    Call,
    Class,
    Function,
    Guard,
    Module,
    Place,
    argument,
    arguments_of,
    default_of,
    dotted,
    is_constant,
    keyword,
    names_in,
    shown,
)
from .ranks import COUNT

TRAIN = re.compile(r"(?:^|_)tra?i?n(?:ing)?(?:_|$)|^(?:data_?)?loader$", re.IGNORECASE)
HANDED_ON = re.compile(
    r"\.set_epoch\b(?!\s*\()|getattr\([^()]*[\"']set_epoch|sampler\.epoch\s*\+?=[^=]"
)  # as a value: `begin = sampler.set_epoch`; or the attribute behind it
HELD_OUT = re.compile(
    r"(?:^|_)(?:val|valid|validation|test|testing|eval|evaluation|dev)(?:_|$|set|data|sampler|loader)", re.IGNORECASE
)
OF_TEST = re.compile(
    r"\b(?:val|valid|validation|test|testing|eval|evaluation|dev)\b"
)  # of a condition: `split == "test"`
COCO = re.compile("COCOeval|CocoEvaluator|COCOEvaluator")
TOGETHER = re.compile(
    r"torchmetrics|accelerate|evaluate\.load|ignite|all_gather|gather_object|gather_for|(?:dist|distributed|comm)\.gather"
    r"|sync_dist"
)
WRITTEN = re.compile(r"pickle\.dump|np\.save|json\.dump")  # results of each rank, which something else may merge
EVALUATES = re.compile(r"(?:^|_)(?:validate|evaluate)(?:_|$)", re.IGNORECASE)
SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed", "set_random_seed", "fix_seed"}
# Of a class that is made like DistributedSampler: `indices += indices[: total - len(indices)]`.
PADS = re.compile(r"(\w+) (?:\+= \1\[|= \1 \+ \1\[)|\.extend\((\w+)\[:")
JOINS = re.compile(r"reduc|gather|agree|consensus|synchronize_|(?:^|_)sync(?!_?b|hronize$)", re.IGNORECASE)
TEXTS = re.compile(r"split\(|basename|listdir|glob|keys\(\)|names?\b|paths?\b|files?\b|phoneme|caption|words?\b|video")
NUMBERS = re.compile(r"\bint\(|tolist\(|range\(")
SEVERAL = re.compile(r"\bdist|distribut|ddp|rank|world|gpu|parallel|multi", re.IGNORECASE)
SHARED = (
    "rank",
    "shard",
    "split",
    "iterable",
    "world",
    "distributed",
    "subset",
    "stream",
    "wds.",
    "webdata",
    "resampl",
)
PADDING = re.compile(r"pad|repeat|even")
LOADER, SAMPLER = "torch.utils.data.DataLoader", "DistributedSampler"
REDUCTIONS = {
    *("all_reduce", "all_gather", "all_gather_object", "gather", "gather_object", "reduce", "all_gather_into_tensor"),
}


def loaders(context: Context, function: Function) -> Iterator[Found]:
    """Yield training loaders without a sampler that shares the samples out among the ranks."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if call.last != "DataLoader" or not call.name.startswith(("torch.", "DataLoader")):
            continue
        name = _assigned(function, call)
        if keyword(call.node, "sampler") or keyword(call.node, "batch_sampler") or len(call.node.args) > 3:
            continue
        if any(word.arg is None for word in call.node.keywords) or context.ranks.partial(call) is not None:
            continue
        tests = [ast.unparse(guard.test) for guard in call.place.guards]
        if HELD_OUT.search(name) or any(SEVERAL.search(test) or OF_TEST.search(test) for test in tests):
            continue
        if shares_itself(context, function, call) or not _is_of_samples(context, function, call):
            continue
        if not loader_comes_to(context, function, call, _trained_by_ranks):
            continue
        message = (
            f"every rank reads all samples of {f'`{name}`' if name else 'this loader'}: an epoch on n ranks reads each"
            " sample n times, and the ranks' gradients come from the same data instead of n parts of it"
        )
        dataset = shown(call.node.args[0] if call.node.args else keyword(call.node, "dataset") or call.node, 30)
        fix = f"give it sampler=DistributedSampler({dataset}) and no shuffle, and call set_epoch at each epoch"
        yield Found("DDP201", function.module, call.node, message, fix)


End = Callable[[Context, Function, Callable[[ast.expr], bool]], bool]


def comes_to(context: Context, function: Function, name: str, end: End) -> bool:
    """Tell whether what a variable holds comes to an `end`: here, in what it is given to, or where it is returned."""
    return bool(name) and any(end(context, *place) for place in places_of_name(context.program, function, name))


def loader_comes_to(context: Context, function: Function, loader: Call, end: End) -> bool:
    """Tell whether a loader comes to an `end`, under its name or as what a function returns."""
    return any(end(context, *place) for place in places_of(context.program, function, loader.node))


def _trained_on(context: Context, function: Function, holds: Callable[[ast.expr], bool]) -> bool:
    """Tell whether a function loops over something with a backward pass in the loop."""
    loops = loops_over(function, holds)
    inner = [c for c in function.calls if loops & set(c.place.loops)] if loops else []
    return any(c.last == "backward" or "scaler" in c.last or _trains(context, c) for c in inner)


def _reduced_on(context: Context, function: Function, holds: Callable[[ast.expr], bool]) -> bool:
    """Tell whether a function loops over something without a backward pass, and takes the ranks' results together."""
    loops = loops_over(function, holds)
    if not loops or COCO.search(function.module.file.text) or any(_keeps_by_index(loop) for loop in loops):
        return False
    trains = any(c.last == "backward" and loops & set(c.place.loops) for c in function.calls)
    return not trains and context.run_by_ranks(function) and reduces(context, function)


def _is_of_samples(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a loader draws samples by number: it shuffles, or its data set's class is here and no stream."""
    if is_constant(keyword(call.node, "shuffle"), True):
        return True
    dataset = call.node.args[0] if call.node.args else keyword(call.node, "dataset")
    made = context.program.objects.of_value(function, dataset) or []
    return bool(made) and all("__getitem__" in one.methods and not _mentions_rank(one) for one in made)


def _trained_by_ranks(context: Context, function: Function, holds: Callable[[ast.expr], bool]) -> bool:
    """Tell whether a function of several ranks, and not one of a single process, trains on something."""
    if not _trained_on(context, function, holds) or not context.run_by_ranks(function):
        return False
    programs = context.programs_with(function.module)
    return any(wraps_ddp(module) for files in programs for module in files)


def loops_over(function: Function, holds: Callable[[ast.expr], bool]) -> set[ast.stmt]:
    """Return the loops of a function over something, also those in which each turn asks it for the next batch."""
    loops: set[ast.stmt] = {x for x, _ in function.loops if isinstance(x, ast.For) and holds(x.iter)}
    for call in function.calls:
        if call.last != "next" or not call.place.loops:
            continue
        given = call.node.args[0] if call.node.args else getattr(call.node.func, "value", None)
        if given is not None and holds(given):
            loops.add(call.place.loops[-1])
    return loops


def _keeps_by_index(loop: ast.stmt) -> bool:
    """Tell whether results are put at the sample's own place, so that one that comes twice is kept once."""
    target = loop.target if isinstance(loop, ast.For) else ast.Tuple([])
    given = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    if any(isinstance(part, ast.Attribute) and part.attr in ("index_copy_", "index_add_") for part in ast.walk(loop)):
        return True
    return any(
        isinstance(target, ast.Subscript) and given & names_in(target.slice)
        for statement in ast.walk(loop)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    )


def reduces(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function takes results of the ranks together, itself or in what it calls."""
    for call in function.calls:
        if call.last in REDUCTIONS:
            return True
        target = context.program.called(call)
        if target is not None and depth < 4 and reduces(context, target, depth + 1):
            return True
    return False


def _names(node: ast.expr) -> set[str]:
    return {dotted(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))}


def shares_itself(context: Context, function: Function, call: Call) -> bool:
    """Tell whether the data set may share its samples out, or the loader is given to what does."""
    dataset = call.node.args[0] if call.node.args else keyword(call.node, "dataset")
    if dataset is None or not any(m.functions and context.plain(m) for m in (function.module,)):
        return True
    values = [dataset, *(a.value for a in context.program.assigned(function, dotted(dataset)) if a.value is not None)]
    text = " ".join(ast.unparse(value) for value in values).lower()
    if any(word in text for word in SHARED):
        return True
    for value in values:
        if isinstance(value, ast.Call) and dotted(value.func):
            made = context.program.lookup(function.module, dotted(value.func))
            if isinstance(made, Class) and (any("Iterable" in base for base in made.bases) or _mentions_rank(made)):
                return True
    reused = {"prepare", "setup_dataloaders", "to_distributed", "DataLoaderShard", "Subset"}
    names = {c.last for f in function.module.functions for c in f.calls}
    return bool(names & reused) or not context.calls_in_component(function.module, "backward")


def _mentions_rank(made: Class) -> bool:
    return any("rank" in name or "world_size" in name for name in names_in(made.node))


def _assigned(function: Function, call: Call) -> str:
    """Return the name that the result of a call gets, also in `x = call() if several else None`."""
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            value = assignment.value
            if value is call.node or (isinstance(value, ast.IfExp) and call.node in (value.body, value.orelse)):
                return name
    return ""


def samplers(context: Context, function: Function) -> Iterator[Found]:
    """Yield samplers of training that never hear of the epoch, and those of validation that repeat samples."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if not call.last.lower().endswith("sampler") or not is_sampler(context, function, call):
            continue
        name = _assigned(function, call)
        loaders = list(_loaders_with(context, function, call))
        if _is_held_out(function, call, name, loaders):
            yield from _of_validation(context, function, call, name, loaders)
            continue
        training = TRAIN.search(name.rpartition(".")[2]) or any(_says_training(guard) for guard in call.place.guards)
        if not training and _evaluates(context, function, call, loaders):
            yield _padded(function, call, f"the sampler `{name}`" if name else "this sampler")
        if _may_shuffle(context, function, call) and _never_told(context, function, call, loaders):
            named = f"`{name}`" if name else "this sampler"
            message = f"nothing calls set_epoch on {named}, so every epoch has the same order on every rank"
            fix = f"call `{name or 'loader.sampler'}.set_epoch(epoch)` at the beginning of each epoch"
            yield Found("DDP202", function.module, call.node, message, fix)


def _says_training(guard: Guard) -> bool:
    """Tell whether a condition says that something is made for training: `is_training`, `split == "train"`."""
    words = {*names_in(guard.test), *(str(p.value) for p in ast.walk(guard.test) if isinstance(p, ast.Constant))}
    negated = any(isinstance(part, (ast.Not, ast.NotEq)) for part in ast.walk(guard.test))
    return guard.holds is not negated and any("train" in word.lower() for word in words)


def is_sampler(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a call makes torch's DistributedSampler, or one of these files that is made like it and pads."""
    made = context.program.lookup(function.module, dotted(call.node.func)) if dotted(call.node.func) else None
    if any(PADDING.search(word.arg or "") and is_constant(word.value, False) for word in call.node.keywords):
        return False
    if isinstance(made, Class):
        return any(base.endswith("Sampler") for base in made.bases) and bool(PADS.search(ast.unparse(made.node)))
    name = call.name
    if name.startswith("timm.") and call.last in ("OrderedDistributedSampler", "RepeatAugSampler"):
        return True
    if name in function.assignments:  # another name for it: `train_sampler = DistributedSampler`
        values = [a.value for a in function.assignments[name]]
        name = function.module.full_name(values[0]) if len(values) == 1 and values[0] is not None else name
    return name.rpartition(".")[2] == SAMPLER and (name.startswith("torch.") or name == SAMPLER)


def _is_held_out(function: Function, call: Call, name: str, loaders: Sequence[tuple[Function, Call]]) -> bool:
    """Tell whether a sampler is one of a validation, by its name, its data set's or that of its loaders."""
    words = [name.rpartition(".")[2], *(part for arg in call.node.args[:1] for part in names_in(arg))]
    words += [part for arg in [keyword(call.node, "dataset")] if arg is not None for part in names_in(arg)]
    if TRAIN.search(words[0]):
        return False
    named = [_assigned(where, loader).rpartition(".")[2] for where, loader in loaders]
    return any(HELD_OUT.search(word) for word in words) or (bool(named) and all(HELD_OUT.search(n) for n in named))


def _of_validation(
    context: Context, function: Function, call: Call, name: str, loaders: Sequence[tuple[Function, Call]]
) -> Iterator[Found]:
    """Yield a sampler of validation whose repeated samples are counted, or whose parts nothing takes together."""
    if context.ranks.alone(function, call.place.guards) or _warns(function):
        return
    whole = [(where, loader) for where, loader in loaders if not _leaves_out(loader)]
    if any(loader_comes_to(context, where, loader, _reduced_on) for where, loader in whole):
        if not is_constant(keyword(call.node, "drop_last"), True):
            yield _padded(function, call, f"`{name}`" if name else "the sampler")
    elif any(loader_comes_to(context, where, loader, _measured_alone) for where, loader in loaders):
        yield _of_one_part(function, call, name)


def _leaves_out(loader: Call) -> bool:
    """Tell whether a loader leaves out the last batch, and with it what the sampler has repeated."""
    size = loader.node.args[1] if len(loader.node.args) > 1 else keyword(loader.node, "batch_size")
    one = is_constant(size or ast.Constant(1), 1)
    return is_constant(keyword(loader.node, "drop_last"), True) and not one


def _never_told(context: Context, function: Function, call: Call, loaders: Sequence[tuple[Function, Call]]) -> bool:
    """Tell whether a program that trains over epochs with a sampler has no set_epoch in any of its files."""
    if HELD_OUT.search(function.name):
        return False
    evaluated = any(loader_comes_to(context, where, loader, _evaluated_alone) for where, loader in loaders)
    trains: set[int] = set()  # the files of the loops

    def noted(context: Context, user: Function, holds: Callable[[ast.expr], bool]) -> bool:
        if _trained_on(context, user, holds):
            trains.add(id(user.module))
        return False

    for where, loader in loaders:
        loader_comes_to(context, where, loader, noted)
    if evaluated and not trains:
        return False
    if not _tells(context, context.in_component(function.module)):
        return any(_epochs(module) for module in context.in_component(function.module))
    return any(
        not _tells(context, files) and any(_epochs(module) for module in files)
        for files in context.programs_with(function.module)
        if trains & {id(module) for module in files} and any(wraps_ddp(module) for module in files)
    )


def _tells(context: Context, files: Sequence[Module]) -> bool:
    """Tell whether one of these files calls set_epoch, or hands it on."""
    ids = {id(module) for module in files}
    calls = context.calls_in_component(files[0], "set_epoch")
    return any(id(c.function.module) in ids for c in calls) or any(HANDED_ON.search(m.file.text) for m in files)


def _evaluated_alone(context: Context, function: Function, holds: Callable[[ast.expr], bool]) -> bool:
    """Tell whether a function loops over something without a backward pass."""
    loops = loops_over(function, holds)
    return bool(loops) and not is_generator(function) and not _trained_on(context, function, holds)


def _padded(function: Function, call: Call, name: str) -> Found:
    message = (
        f"{name} pads the set to a multiple of the number of ranks by repeating samples,"
        " and the metrics of the ranks, taken together, count those twice"
    )
    fix = "cut what was repeated before computing the metric, or give each rank range(rank, n, world_size)"
    return Found("DDP212", function.module, call.node, message, fix)


def _of_one_part(function: Function, call: Call, name: str) -> Found:
    message = (
        f"`{name or 'the sampler'}` gives each rank a part of the validation set, and nothing takes the ranks' results"
        " together: what is printed, or decides which weights are the best, was measured on one rank's part"
    )
    fix = "sum the counts over all ranks (`all_reduce`) before the metric, or let every rank read the whole set"
    return Found("DDP215", function.module, call.node, message, fix)


def _taken_elsewhere(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a caller may take the ranks' results together, or a library that the files name."""
    if not depth and _writes_results(context, function):
        return True
    if TOGETHER.search(function.module.file.text) or any(JOINS.search(c.last) for c in function.calls):
        return True
    for site in context.program.sites.get(id(function), ()):
        behind = [c for c in site.function.calls if c.order > site.order]
        trained = {c.place.loops[-1:] for c in behind if c.last == "backward"}
        for call in behind:
            if call.place.loops[-1:] not in trained and (call.last in REDUCTIONS or _calls_reduction(context, call)):
                return True
        if depth < 3 and _taken_elsewhere(context, site.function, depth + 1):
            return True
    return False


def _writes_results(context: Context, function: Function) -> bool:
    """Tell whether a function, or one that it calls, writes results into files, of a rank or of a sample each."""
    if WRITTEN.search(ast.unparse(function.node)):
        return True
    helpers = [context.program.called(call) for call in function.calls]
    return any(_writes(call) for one in (function, *helpers) if one is not None for call in one.calls)


def _writes(call: Call) -> bool:
    mode = keyword(call.node, "mode") or (call.node.args[1] if len(call.node.args) > 1 else None)
    return call.name == "open" and isinstance(mode, ast.Constant) and str(mode.value).startswith("w")


def _calls_reduction(context: Context, call: Call) -> bool:
    target = context.program.called(call)
    return target is not None and target is not call.function and reduces(context, target)


def _measured_alone(context: Context, function: Function, holds: Callable[[ast.expr], bool]) -> bool:
    """Tell whether a function evaluates something, and leaves the results to each rank."""
    loops = loops_over(function, holds)
    trains = any(c.last in ("backward", "step") and loops & set(c.place.loops) for c in function.calls)
    evaluates = any(c.last == "eval" for c in function.calls) or HELD_OUT.search(function.name)
    if not loops or trains or not (evaluates or EVALUATES.search(function.name)) or reduces(context, function):
        return False
    if COCO.search(function.module.file.text):
        return False
    return context.run_by_ranks(function) and not _taken_elsewhere(context, function)


def _evaluates(context: Context, function: Function, call: Call, loaders: Sequence[tuple[Function, Call]]) -> bool:
    """Tell whether a sampler whose name does not tell is one of a loader that a validation counts over all ranks."""
    if is_constant(keyword(call.node, "drop_last"), True) or context.ranks.alone(function, call.place.guards):
        return False
    if _warns(function):
        return False
    return any(
        loader_comes_to(context, where, loader, _counted_on) for where, loader in loaders if not _leaves_out(loader)
    )


def _counted_on(context: Context, function: Function, holds: Callable[[ast.expr], bool]) -> bool:
    """Tell whether a function evaluates something, as its name says, and takes the ranks' results together."""
    return bool(HELD_OUT.search(function.name) or EVALUATES.search(function.name)) and _reduced_on(
        context, function, holds
    )


def _loaders_with(context: Context, function: Function, sampler: Call) -> Iterator[tuple[Function, Call]]:
    """Yield the loaders that are given a sampler, each with the function in which it is made."""
    seen: set[int] = set()
    for where, holds in places_of(context.program, function, sampler.node):
        for call in where.calls:
            if not call.last.endswith("Loader") or id(call) in seen:
                continue
            given = keyword(call.node, "sampler") or keyword(call.node, "batch_sampler")
            given = given or (call.node.args[3] if len(call.node.args) > 3 else None)
            if given is None or not holds(given):
                continue
            if isinstance(given, ast.IfExp) and not {"distributed", "ddp"} & names_in(given.test):
                continue  # which of two it is given is not known
            seen.add(id(call))
            yield where, call


def _warns(function: Function) -> bool:
    """Tell whether a function tests if the size of a set is a multiple of something, and so knows of it."""
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and "len" in names_in(part.left)
        for test, _, _ in function.tests
        for part in ast.walk(test.test)
    )


def _may_shuffle(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a sampler shuffles, as far as its call and those of the helper that makes it tell."""
    shuffle = keyword(call.node, "shuffle")
    if shuffle is None and len(call.node.args) > 3:
        shuffle = call.node.args[3]
    if shuffle is None or is_constant(shuffle, True):
        return True
    if is_constant(shuffle, False):
        return False
    name = dotted(shuffle)
    if name not in function.parameters:
        return True
    default = default_of(function, name)
    sites = context.program.sites.get(id(function), ())
    given = [argument(site, function, name) or default for site in sites]
    return any(value is not None and not is_constant(value, False) for value in given)


def _epochs(module: Module) -> bool:
    """Tell whether a file loops over epochs."""
    return any(
        _yields_again(loop)
        or (
            isinstance(loop, ast.For)
            and ("epoch" in f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower() or _endless(loop, place))
        )
        for function in module.functions
        for loop, place in function.loops
    )


def _endless(loop: ast.For, place: Place) -> bool:
    """Tell whether a loop goes over data again and again: `while True: for batch in loader:`."""
    around = place.loops[-1] if place.loops else None
    return isinstance(around, ast.While) and re.search(r"load|data", ast.unparse(loop.iter).lower()) is not None


def _yields_again(loop: ast.stmt) -> bool:
    """Tell whether a loop without end gives out a loader again and again: `while True: yield from loader`."""
    if not (isinstance(loop, ast.While) and is_constant(loop.test, True)):
        return False
    given = [s.value.value for s in loop.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.YieldFrom)]
    return any(re.search(r"load|data", ast.unparse(one).lower()) for one in given)


def steps_of_some(context: Context, function: Function) -> Iterator[Found]:
    """Yield steps of an optimizer or a scheduler that only some ranks make: learning rates or weights drift apart."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        owner = dotted(call.node.func).rpartition(".")[0].lower()
        if call.last != "step" or not re.search(r"optim|sched|^opt$", owner) or not call.place.guards:
            continue
        found = context.ranks.partial(call)
        if found is None or found[0].early or not context.run_by_ranks(function):
            continue
        others = (c for c in function.calls if c is not call and dotted(c.node.func) == dotted(call.node.func))
        if any(any(g.test is found[0].test and g.holds != found[0].holds for g in c.place.guards) for c in others):
            continue
        what = "learning rates of the ranks differ" if "sched" in owner else "weights of the ranks differ"
        ranks = "some ranks" if found[1] == "some" else context.ranks.words(*found)
        message = f"`{shown(call.node.func)}` runs on {ranks}: from then on the {what}"
        fix = f"call `{shown(call.node.func)}` on every rank, outside of `if {shown(found[0].test, 40)}`"
        yield Found("DDP222", function.module, call.node, message, fix)


def past_ddp(context: Context, function: Function) -> Iterator[Found]:
    """Yield a loss that is computed past DDP, so that no gradient of it is reduced."""
    if not context.plain(function.module):
        return
    backward = {dotted(c.node.func).rpartition(".")[0] for c in function.calls if c.last == "backward"}
    backward |= {n for c in function.calls if c.last == "scale" for a in c.node.args[:1] for n in [dotted(a)] if n}
    if not backward - {""}:
        return
    forwards = [c for c in function.calls if (e := context.effects.direct(c)) is not None and e.kind == "forward"]
    for call in function.calls:
        text = dotted(call.node.func)
        owner, _, rest = text.partition(".module")
        past = bool(rest or text.endswith(".module")) and (not rest or rest.startswith(".")) and bool(call.node.args)
        inner = not past and _wrapped_name(context, function, call) is not None
        if not (past or inner) or rest.rpartition(".")[2] in QUIET or any(_no_grad(w) for w in call.place.withs):
            continue
        wrapper = owner if past else _wrapped_name(context, function, call)
        if past and not (context.effects.is_ddp(function, owner)):
            continue
        loops = call.place.loops[-1:]
        if any(loops == f.place.loops[-1:] for f in forwards) or not _leads_to(function, call, backward):
            continue
        message = (
            f"this loss does not go through `{wrapper}`, the model in DDP, so backward reduces no gradient: each rank"
            " trains weights of its own, and the ranks drift apart in silence"
        )
        fix = f"compute it with `{wrapper}(...)`; put what `{shown(call.node.func)}` does into the model's forward"
        yield Found("DDP204", function.module, call.node, message, fix)


QUIET = {"parameters", "state_dict", "eval", "train", "load_state_dict", "named_parameters", "modules", "zero_grad"}


def _no_grad(context_expression: ast.expr) -> bool:
    return any(name in ("no_grad", "inference_mode") for name in names_in(context_expression))


def _wrapped_name(context: Context, function: Function, call: Call) -> str | None:
    """Return `ddp_model` where a call is of `model` and the function says `ddp_model = DDP(model)` before."""
    text = dotted(call.node.func)
    if not text or not call.node.args:
        return None
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            wrap = context.effects.wrap_of(function, assignment)
            if wrap is None or name == text or not wrap.args or assignment.order > call.order:
                continue
            if dotted(wrap.args[0]) == text and not assignment.place.guards and call.place.loops:
                return name
    return None


def _leads_to(function: Function, call: Call, backward: set[str]) -> bool:
    """Tell whether the result of a call gets, at once or over other names, into a loss of which backward is called."""
    names: set[str] = set()
    for _ in range(4):
        for name, assigned in function.assignments.items():
            for assignment in assigned:
                value = assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)
                if value is None or assignment.place.loops[-1:] != call.place.loops[-1:]:
                    continue
                if any(part is call.node for part in ast.walk(value)) or names & names_in(value):
                    names.add(name)
        if names & backward:
            return True
    return False


def reduced_losses(context: Context, function: Function) -> Iterator[Found]:
    """Yield a loss that is averaged over the ranks before backward: its gradient is divided once more by DDP.

    all_reduce changes the value in place and is not recorded by autograd; the division by the number of ranks is.
    """
    if not context.plain(function.module):
        return
    backward = {dotted(c.node.func).rpartition(".")[0] for c in function.calls if c.last == "backward"}
    backward |= {n for c in function.calls if c.last == "scale" for a in c.node.args[:1] for n in [dotted(a)] if n}
    backward -= {""}
    for call in function.calls if backward else ():
        if call.name == "torch.distributed.all_reduce" and call.node.args:
            name = dotted(call.node.args[0])
            reduced = name if name and _divided(function, name, call) else ""
        else:
            reduced = _averaged_by(context, function, call)
        if reduced and _reaches(function, reduced, backward, call):
            message = (
                f"`{reduced}` is divided by the number of ranks and then goes into backward, where DDP averages the"
                " gradients itself: the gradient of this part is too small by the number of ranks"
            )
            fix = f"reduce a copy for the log, `{reduced}.detach().clone()`, and leave `{reduced}` to backward as it is"
            yield Found("DDP214", function.module, call.node, message, fix)


def _has_twin(context: Context, call: Call) -> bool:
    """Tell whether the other ranks come to the same step elsewhere in the function."""
    text = ast.unparse(call.node.func)
    return any(c is not call and ast.unparse(c.node.func) == text for c in call.function.calls)


def _around(context: Context, call: Call) -> list[Call]:
    """Return what all ranks call in the loop around a call."""
    loop = call.place.loops[-1]
    return [c for c in call.function.calls if loop in c.place.loops and context.ranks.partial(c) is None]


def _trains(context: Context, call: Call, depth: int = 0) -> bool:
    target = context.program.called(call)
    if target is None or depth > 3 or target is call.function:
        return False
    return any(c.last == "backward" or _trains(context, c, depth + 1) for c in target.calls)


def own_gradient(context: Context, function: Function) -> Iterator[Found]:
    """Yield a gather of torch.autograd.Function whose backward pass takes this rank's part of this rank's gradient."""
    owner = function.of_class
    if function.name != "backward" or owner is None or not any(base.endswith("Function") for base in owner.bases):
        return
    forward = owner.methods.get("forward")
    gathers = [c for c in forward.calls if c.name.startswith("torch.distributed.all_gather")] if forward else []
    if not gathers or any(context.effects.of(c) for c in function.calls) or not context.plain(function.module):
        return
    parts = [part for part in ast.walk(function.node) if isinstance(part, ast.Subscript)]
    own = next((part for part in parts if "rank" in ast.unparse(part.slice)), None)
    if own is not None:
        message = (
            f"`{shown(own, 40)}` is this rank's own loss's gradient for its own part: what the other ranks' losses say"
            " about this part is dropped, and DDP divides the rest by the number of ranks"
        )
        fix = (
            "sum the gradients over the ranks first (`all_reduce` in backward), or use torch.distributed.nn.functional"
        )
        yield Found("DDP622", function.module, own, message, fix)


def _divided(function: Function, name: str, call: Call) -> bool:
    """Tell whether a tensor, and not its data, is divided by the number of ranks behind a call."""
    for other in function.calls:
        text = dotted(other.node.func)
        if text == f"{name}.div_" and other.order > call.order and any(_counts(a) for a in other.node.args[:1]):
            return True
    for assignment in function.assignments.get(name, ()):
        statement = assignment.node
        if assignment.order < call.order or assignment.place.loops != call.place.loops:
            continue
        if isinstance(statement, ast.AugAssign):
            return isinstance(statement.op, ast.Div) and _counts(statement.value)
        return assignment.value is not None and _divides(assignment.value, name)
    return False


def _divides(value: ast.expr, name: str) -> bool:
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Div)
        and dotted(part.left) == name
        and _counts(part.right)
        for part in ast.walk(value)
    )


def _counts(node: ast.expr) -> bool:
    """Tell whether an expression is the number of ranks."""
    return any(COUNT.fullmatch(name) or name in ("get_world_size", "word_size") for name in names_in(node))


def _averaged_by(context: Context, function: Function, call: Call) -> str:
    """Return the name that gets what a helper returns which averages its argument over the ranks, with gradients."""
    target = context.program.called(call)
    if target is None or not call.node.args or not (name := _assigned(function, call)):
        return ""
    if any(no_gradients in ast.unparse(target.node) for no_gradients in ("detach", ".data", "no_grad", ".item")):
        return ""
    made = {dotted(c.node.args[0]) for c in target.calls if c.name == "torch.distributed.all_reduce" and c.node.args}
    own = set(target.parameters[:1]) | {
        assigned.target
        for found in target.assignments.values()
        for assigned in found
        if isinstance(assigned.value, ast.Call) and dotted(assigned.value.func) == f"{target.parameters[0]}.clone"
    }
    for reduce in target.calls:
        if reduce.name == "torch.distributed.all_reduce" and (one := dotted(reduce.node.args[0])) in own & made:
            returned = [e.node.value for e in target.exits if isinstance(e.node, ast.Return) and e.node.value]
            if _divided(target, one, reduce) and any(dotted(value) == one for value in returned):
                return name
            if any(_divides(value, one) for value in returned):
                return name
    return ""


def _reaches(function: Function, name: str, backward: set[str], call: Call) -> bool:
    """Tell whether a value gets into a loss of which backward is called behind a call, with its gradient."""
    names, order = {name}, call.order
    if name in backward and any(
        c.order > order for c in function.calls if c.last in ("backward", "scale") and name in names_in(c.node)
    ):
        return not _made_anew(function, name, order)
    found = [a for assigned in function.assignments.values() for a in assigned if a.order > order]
    for assignment in sorted(found, key=lambda a: a.order):
        value = assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)
        if value is None or assignment.place.loops != call.place.loops or QUIETED & names_in(value):
            continue
        if names & _names(value) and not isinstance(value, ast.Call):
            names.add(assignment.target)
    return bool((names - {name}) & backward)


def _made_anew(function: Function, name: str, order: int) -> bool:
    return any(
        a.order > order and a.value is not None and name not in names_in(a.value)
        for a in function.assignments.get(name, ())
    )


STEPPED = re.compile(r"\w*(?:optim|sched)\w*|opt|lr_sched\w*", re.IGNORECASE)
QUIETED = {"detach", "item", "data", "no_grad", "cpu", "numpy"}


def no_sync(context: Context, function: Function) -> Iterator[Found]:
    """Yield no_sync() around a step of the optimizer, and around backward without its forward pass."""
    blocks: dict[int, tuple[ast.expr, list[Call]]] = {}
    for call in function.calls:
        for entered in call.place.withs:
            if isinstance(entered, ast.Call) and getattr(entered.func, "attr", "") == "no_sync" and not entered.args:
                blocks.setdefault(id(entered), (entered, []))[1].append(call)
    for entered, calls in blocks.values():
        owner = (
            dotted(entered.func.value)
            if isinstance(entered, ast.Call) and isinstance(entered.func, ast.Attribute)
            else ""
        )
        step = next((c for c in calls if c.last == "step" and _is_optimizer(context, c)), None)
        if step is not None and not any(guard.test for guard in step.place.guards[-1:]):
            message = (
                "inside of no_sync() gradients are not reduced, so this step applies each rank's own gradients,"
                " and the weights of the ranks drift apart"
            )
            fix = f"run the last backward and `{shown(step.node.func)}` behind `with {shown(entered)}`, not in it"
            yield Found("DDP213", function.module, step.node, message, fix)
            continue
        backward = next((c for c in calls if c.last == "backward"), None)
        forward_inside = any(dotted(c.node.func) in (owner, f"{owner}.forward") for c in calls)
        before = [c for c in function.calls if dotted(c.node.func) == owner and backward and c.order < backward.order]
        if backward is not None and before and not forward_inside and len(calls) <= 2:
            message = "DDP decides in the forward pass whether to reduce: this backward reduces in spite of no_sync()"
            fix = f"put the call of `{owner}` into `with {shown(entered)}` as well"
            yield Found("DDP409", function.module, backward.node, message, fix)


def _is_optimizer(context: Context, call: Call) -> bool:
    return bool(re.search(r"optim|^opt$|scaler", dotted(call.node.func).rpartition(".")[0].lower()))


def orders(context: Context, function: Function) -> Iterator[Found]:
    """Yield orders that differ between ranks: of a shuffle that nothing seeds, of a set that makes modules."""
    yield from _sets(context, function)
    yield from _own_order(context, function)
    yield from _texts_of_set(context, function)
    if not context.plain(function.module):
        return
    for call in function.calls:
        truly = call.name.startswith("random.SystemRandom") or (
            call.last == "shuffle"
            and isinstance(call.node.func, ast.Attribute)
            and isinstance(call.node.func.value, ast.Call)
            and "SystemRandom" in ast.unparse(call.node.func)
        )
        plain = call.name in (
            "random.shuffle",
            "numpy.random.shuffle",
            "numpy.random.permutation",
            "torch.randperm",
            "torch.utils.data.random_split",
            "random.sample",
        )
        if not (truly or plain) or keyword(call.node, "generator") is not None or not _in_data(function):
            continue
        if not truly and any(context.calls_in_component(function.module, last) for last in SEEDS):
            continue
        if truly and call.last != "shuffle":
            continue
        if not context.calls_in_component(function.module, SAMPLER):
            continue
        message = (
            f"`{shown(call.node, 40)}` gives another order on every rank: the sampler shares out positions, so some"
            " samples are read by several ranks and others by none"
        )
        fix = "use a generator with a seed that all ranks have, for example random.Random(seed).shuffle(...)"
        yield Found("DDP207", function.module, call.node, message, fix)


def _own_order(context: Context, function: Function) -> Iterator[Found]:
    """Yield an order that a sampler draws from the generator of each rank, and then shares out by position."""
    owner = function.of_class
    if function.name != "__iter__" or owner is None or not any(base.endswith("Sampler") for base in owner.bases):
        return
    if not context.plain(function.module) or not {"rank", "num_replicas"} & names_in(function.node):
        return
    named = re.compile(rf"\b{owner.name}\b")
    if sum(len(named.findall(text)) for text in context.texts) < 2:
        return  # nothing makes one
    seeds = (c for last in SEEDS for c in context.calls_in_component(function.module, last))
    if any(c.name.startswith("torch.") or "." not in c.name for c in seeds):
        return
    for call in function.calls:
        if call.name == "torch.randperm" and keyword(call.node, "generator") is None:
            message = (
                f"`{shown(call.node, 40)}` draws from the generator of the rank, which nothing seeds: each rank has"
                " another order and takes its part of that, so some samples are read by several ranks, others by none"
            )
            fix = f"give it a generator with a seed that all ranks have, `{shown(call.node.func)}(..., generator=g)`"
            yield Found("DDP207", function.module, call.node, message, fix)


def _texts_of_set(context: Context, function: Function) -> Iterator[Found]:
    """Yield samples or classes in the order of a set of texts, which each process hashes in another way."""
    if not (_in_data(function) and any("set" in c.last for c in function.calls) and context.plain(function.module)):
        return
    if not context.calls_in_component(function.module, SAMPLER):
        return
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            value = assignment.value
            listed = isinstance(value, ast.Call) and dotted(value.func) in ("list", "tuple") and len(value.args) == 1
            if not listed or value is None or not _is_set_of_texts(value.args[0]):  # type: ignore[attr-defined]
                continue
            if _sorted_behind(function, name, assignment.order) or not _makes_order(function, name):
                continue
            message = (
                f"the order of a set of texts differs from process to process, and so does that of `{name}`: the"
                " same number means another sample or class on each rank"
            )
            fix = f"write `sorted(...)` instead of `{dotted(value.func)}(...)`"  # type: ignore[attr-defined]
            yield Found("DDP207", function.module, value, message, fix)


def _is_set_of_texts(node: ast.expr) -> bool:
    """Tell whether an expression is a set, of texts as far as its names tell."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub)):
        node = node.left
    made = isinstance(node, ast.Call) and dotted(node.func) == "set" and bool(node.args)
    text = ast.unparse(node)
    return (made or isinstance(node, ast.SetComp)) and bool(TEXTS.search(text)) and not NUMBERS.search(text)


def _sorted_behind(function: Function, name: str, order: int) -> bool:
    behind = (c for c in function.calls if c.order >= order)
    return any(
        dotted(c.node.func) == f"{name}.sort" or (c.last == "sorted" and c.node.args and dotted(c.node.args[0]) == name)
        for c in behind
    )


def _makes_order(function: Function, name: str) -> bool:
    """Tell whether an object keeps a list, or a loop over it fills what the object keeps."""
    if name.startswith("self."):
        return True
    loops = [loop for loop, _ in function.loops if isinstance(loop, ast.For) and name in _names(loop.iter)]
    parts = (part for loop in loops for part in ast.walk(loop))
    return any(isinstance(part, ast.Attribute) and dotted(part).startswith("self.") for part in parts)


def _in_data(function: Function) -> bool:
    """Tell whether a function makes a data set: the constructor of one, or a function that is called so."""
    if function.of_class is not None:
        bases = " ".join([*function.of_class.bases, function.of_class.name])
        return re.search("Dataset|ImageFolder|DatasetFolder", bases) is not None and function.name == "__init__"
    return bool(re.search(r"data|split|loader", function.name.lower())) or any(
        c.last == SAMPLER for c in function.calls
    )


def _sets(context: Context, function: Function) -> Iterator[Found]:
    makes = ("register_buffer", "register_parameter", "add_module", "register_module", "setattr")
    for loop, _ in function.loops:
        if not isinstance(loop, ast.For) or not _unordered(loop.iter):
            continue
        inner = [c for c in function.calls if loop in c.place.loops and c.last in makes]
        if inner and function.of_class is not None:
            yield _set_found(function, loop.iter, inner[0].last)
    for call in function.calls:
        if call.name not in (
            "torch.nn.ModuleDict",
            "torch.nn.ModuleList",
            "torch.nn.ParameterDict",
            "torch.nn.Sequential",
        ):
            continue
        for part in ast.walk(call.node):
            if isinstance(part, ast.comprehension) and _unordered(part.iter):
                yield _set_found(function, part.iter, call.last)


def _set_found(function: Function, node: ast.expr, what: str) -> Found:
    message = (
        f"the order of a set of texts differs from process to process, and {what} takes it over: DDP pairs parameters"
        " and buffers by position, so ranks exchange the wrong tensors"
    )
    inner = (
        node.args[0] if isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple") and node.args else node
    )
    return Found("DDP208", function.module, node, message, f"write `sorted({shown(inner, 40)})`")


def _unordered(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple", "enumerate") and node.args:
        return _unordered(node.args[0])
    if isinstance(node, (ast.Set, ast.SetComp)):
        numbers = isinstance(node, ast.Set) and all(
            isinstance(e, ast.Constant) and type(e.value) is int for e in node.elts
        )
        return not numbers
    return isinstance(node, ast.Call) and dotted(node.func) in ("set", "frozenset") and not _of_numbers(node)


def _of_numbers(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.args[0], ast.Call) and dotted(node.args[0].func) == "range"


def worker_seeds(context: Context, function: Function) -> Iterator[Found]:
    """Yield seeds that the workers of all ranks share, and a generator that a data set makes once for all of them."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        loader = call.last == "DataLoader" or call.name.endswith("DataLoader.__init__")
        given = keyword(call.node, "worker_init_fn") if loader else None
        if given is None or context.ranks.partial_place(function, call.place):
            continue
        if (same := _of_rank_alone(context, function, call, given)) is not None:
            if not HELD_OUT.search(_assigned(function, call)):
                yield same
            continue
        given, bound = without_partial(context, function, given)
        target = context.program.lookup(function.module, dotted(given)) if dotted(given) else None
        if target is None and dotted(given) in function.inner:
            target = function.inner[dotted(given)]
        if any(re.search(r"rank|time|pid|epoch", name) for value in bound for name in names_in(value)):
            continue
        body = target.node if isinstance(target, Function) else given if isinstance(given, ast.Lambda) else None
        seed = next((n for n in ast.walk(body) if _seeds(n)), None) if body is not None else None
        if seed is None or body is None:
            continue
        text = ast.unparse(body).lower()
        if any(
            word in text
            for word in ("rank", "initial_seed", "get_state", "worker_info.seed", ".seed +", "time", "urandom")
        ):
            continue
        if not _constant_seed(seed, target if isinstance(target, Function) else None):
            continue
        message = "worker k of every rank gets the same seed here, so all ranks draw the same augmentations"
        fix = "seed from torch.initial_seed() and the rank, or leave worker_init_fn out: PyTorch seeds workers itself"
        yield Found("DDP205", function.module, call.node, message, fix)


def _of_rank_alone(context: Context, function: Function, call: Call, given: ast.expr) -> Found | None:
    """Return the finding of `partial(seed_worker, rank=rank)`, where the function does not use the worker's number."""
    if not isinstance(given, ast.Call) or not given.args or dotted(given.func).rpartition(".")[2] != "partial":
        return None
    target = context.program.lookup(function.module, dotted(given.args[0])) if dotted(given.args[0]) else None
    workers = keyword(call.node, "num_workers")
    if not isinstance(target, Function) or not target.parameters or is_constant(workers, 1) or is_constant(workers, 0):
        return None
    words = names_in(target.node)
    seeds = any(_seeds(node) for node in ast.walk(target.node))
    if not seeds or target.parameters[0] in words or words & {"initial_seed", "get_worker_info", "get_state", "time"}:
        return None
    message = (
        f"`{target.name}` does not use `{target.parameters[0]}`: all workers of a rank draw the same augmentations, and"
        " draw them again in each epoch"
    )
    fix = "seed from torch.initial_seed(), which differs by rank and worker, or leave worker_init_fn out"
    return Found("DDP205", function.module, call.node, message, fix)


def without_partial(context: Context, function: Function, node: ast.expr) -> tuple[ast.expr, list[ast.expr]]:
    """Return `f` and its bound values for `partial(f, seed=1)`, also where a variable holds that."""
    values = [a.value for a in context.program.assigned(function, dotted(node))] if dotted(node) else [node]
    made = values[0] if len(values) == 1 else None
    if isinstance(made, ast.Call) and context.program.is_partial(function, made) and made.args:
        return made.args[0], arguments_of(made)[1:]
    return node, []


def _seeds(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func).endswith((".seed", ".manual_seed")) and bool(node.args)


def _constant_seed(seed: ast.AST, target: Function | None) -> bool:
    """Tell whether a seed is made of numbers and the worker's number alone."""
    names = {part.id for part in ast.walk(seed) if isinstance(part, ast.Name)}
    own = set(target.parameters) if target else names
    roots = {dotted(seed.func).partition(".")[0]} if isinstance(seed, ast.Call) else set()
    return names - roots <= own


def generators(context: Context, function: Function) -> Iterator[Found]:
    """Yield generators with a fixed seed that a data set draws from: each worker of each rank repeats its draws."""
    owner = function.of_class
    if function.name != "__init__" or owner is None or not any(base.endswith("Dataset") for base in owner.bases):
        return
    item = owner.methods.get("__getitem__")
    if item is None or id(function.module) not in context.distributed:
        return
    for name, assigned in function.assignments.items():
        value = assigned[0].value
        if not (name.startswith("self.") and isinstance(value, ast.Call) and value.args):
            continue
        made = function.module.full_name(value.func)
        if made not in ("numpy.random.default_rng", "random.Random", "numpy.random.RandomState"):
            continue
        draws = [c for c in item.calls if dotted(c.node.func).startswith(f"{name}.")]
        used = any(not any(isinstance(loop, ast.While) for loop in c.place.loops) for c in draws)  # not for a retry
        if used and isinstance(value.args[0], ast.Constant):
            message = (
                f"every worker of every rank has a copy of `{name}` with this seed, so they all draw the same numbers"
            )
            fix = (
                f"make `{name}` in each worker, from torch.initial_seed() and the rank, or draw from the sample's index"
            )
            yield Found("DDP206", function.module, value, message, fix)


RULES = (no_sync, orders, generators)
OF_RANKS = (
    steps_of_some,
    loaders,
    samplers,
    past_ddp,
    reduced_losses,
    worker_seeds,
    own_gradient,
)  # only where several ranks run the file
