"""Rules for loaders and samplers: ranks that read the same, orders that stay, samples that count twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .conditions import Fact, contradict, entering, facts_of
from .context import Context, Found, part_of_try, wraps_ddp
from .effects import is_generator
from .flow import Held, places_of
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
    variable_of,
)

TRAIN = re.compile(r"(?:^|_)tra?i?n(?:ing)?(?:_|$)|^(?:data_?)?loader$", re.IGNORECASE)
# As a value: `begin = sampler.set_epoch`; or the attribute behind it.
HANDED_ON = re.compile(r"\.set_epoch\b(?!\s*\()|getattr\([^()]*[\"']set_epoch|sampler\.epoch\s*\+?=[^=]")
HELD_OUT = re.compile(
    r"(?:^|_)(?:val|valid|validation|test|testing|eval|evaluation|dev)(?:_|$|set|data|sampler|loader)", re.IGNORECASE
)
# Of a condition: `split == "test"`.
OF_TEST = re.compile(r"\b(?:val|valid|validation|test|testing|eval|evaluation|dev)\b")
COCO = re.compile("COCOeval|CocoEvaluator|COCOEvaluator")
TOGETHER = re.compile(
    r"torchmetrics|accelerate|evaluate\.load|ignite|all_gather|gather_object|gather_for|(?:dist|distributed|comm)\.gather"
    r"|sync_dist"
)
WRITTEN = re.compile(r"pickle\.dump|np\.save|json\.dump")  # results of each rank, which something else may merge
EVALUATES = re.compile(r"(?:^|_)(?:validate|evaluate)(?:_|$)", re.IGNORECASE)
# Of a class that is made like DistributedSampler: `indices += indices[: total - len(indices)]`.
PADS = re.compile(r"(\w+) (?:\+= \1\[|= \1 \+ \1\[)|\.extend\((\w+)\[:")
JOINS = re.compile(r"reduc|gather|agree|consensus|synchronize_|(?:^|_)sync(?!_?b|hronize$)", re.IGNORECASE)
SEVERAL = re.compile(r"\bdist|distribut|ddp|rank|world|gpu|parallel|multi", re.IGNORECASE)
SHARED = re.compile(r"rank|shard|split|iterable|world|distributed|subset|(?<!down)stream|wds\.|webdata|resampl")
PADDING = re.compile(r"pad|repeat|even")
SAMPLER = "DistributedSampler"
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
        name = variable_of(function, call)
        if keyword(call.node, "sampler") or keyword(call.node, "batch_sampler") or len(call.node.args) > 3:
            continue
        if any(word.arg is None for word in call.node.keywords) or context.ranks.partial(call) is not None:
            continue
        tests = [ast.unparse(guard.test) for guard in call.place.guards]
        if HELD_OUT.search(name) or any(SEVERAL.search(test) or OF_TEST.search(test) for test in tests):
            continue
        if shares_itself(context, function, call) or not _is_of_samples(context, function, call):
            continue
        if _is_other_choice(function, call):
            continue
        if not loader_comes_to(context, Loader(function, call), _trained_by_ranks):
            continue
        message = (
            f"every rank reads all samples of {f'`{name}`' if name else 'this loader'}: an epoch on n ranks reads each"
            " sample n times, and the ranks' gradients come from the same data instead of n parts of it"
        )
        dataset = shown(call.node.args[0] if call.node.args else keyword(call.node, "dataset") or call.node, 30)
        fix = f"give it sampler=DistributedSampler({dataset}) and no shuffle, and call set_epoch at each epoch"
        yield Found("DDP201", function.module, call.node, message, fix)


@dataclass(frozen=True)
class Loader:
    """A loader that is given a sampler, with what is known where it is made."""

    function: Function
    call: Call
    facts: tuple[Fact, ...] = ()


Turns = dict[ast.stmt, tuple[Fact, ...]]
End = Callable[[Context, Function, Held], bool]


def _is_other_choice(function: Function, call: Call) -> bool:
    """Tell whether a setting chooses between this loader and one with a sampler: whether anybody does is not known."""
    others = [c for c in function.calls if c.last == "DataLoader" and keyword(c.node, "sampler") is not None]
    refused = {(id(guard.test), not guard.holds) for other in others for guard in other.place.guards}
    return any((id(guard.test), guard.holds) in refused for guard in call.place.guards)


def loader_comes_to(context: Context, loader: Loader, end: End) -> bool:
    """Tell whether a loader comes to an `end`, under its name or as what a function returns."""
    places = places_of(context.program, loader.function, loader.call.node, loader.facts)
    return any(end(context, *place) for place in places)


def _trained_on(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether a function loops over something with a backward pass in the loop."""
    return goes_backward(context, function, turns_over(function, holds))


def goes_backward(context: Context, function: Function, turns: Turns) -> bool:
    """Tell whether there is a backward pass in a loop, where what is known there does not speak against it."""
    for call in function.calls if turns else ():
        for loop in call.place.loops:
            if loop not in turns or contradict(turns[loop], facts_of(call.place.guards)):
                continue
            if context.goes_backward(call) and _backward_within(context, call, turns[loop]):
                return True
    return False


def _backward_within(context: Context, call: Call, facts: tuple[Fact, ...]) -> bool:
    """Tell whether a call that goes backward does so where facts hold: `self.step(batch, training)` may not."""
    target = context.program.runs(call)
    if target is None or not facts:
        return True
    known = entering(call, target, facts)
    if call.node.func is not None and dotted(call.node.func).startswith("self."):
        known = (*known, *(fact for fact in facts if fact.subject.startswith("self.")))
    return any(not contradict(known, facts_of(inner.place.guards)) for inner in context.backwards(target))


def _reduced_on(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether a function loops over something without a backward pass, and takes the ranks' results together."""
    turns = turns_over(function, holds)
    if not turns or COCO.search(function.module.file.text) or any(_keeps_by_index(loop) for loop in turns):
        return False
    trains = goes_backward(context, function, turns)
    return not trains and context.run_by_ranks(function) and reduces(context, function)


def _is_of_samples(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a loader draws samples by number: it shuffles, or its data set's class is here and no stream."""
    if is_constant(keyword(call.node, "shuffle"), True):
        return True
    dataset = call.node.args[0] if call.node.args else keyword(call.node, "dataset")
    made = context.program.objects.of_value(function, dataset) or []
    return bool(made) and all("__getitem__" in one.methods and not _mentions_rank(one) for one in made)


def _trained_by_ranks(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether a function of several ranks, and not one of a single process, trains on something."""
    if not _trained_on(context, function, holds) or not context.run_by_ranks(function):
        return False
    programs = context.programs_with(function.module)
    return any(wraps_ddp(module) for files in programs for module in files)


def turns_over(function: Function, holds: Held) -> Turns:
    """Return the loops of a function over something, with what is known in them.

    Those count too in which each turn asks it for the next batch.
    """
    found: Turns = {}
    for loop, place in function.loops:
        if isinstance(loop, ast.For) and holds(loop.iter):
            known = holds.known(loop.iter)
            if not contradict(known, facts_of(place.guards)):
                found[loop] = known
    for call in function.calls:
        if call.last != "next" or not call.place.loops:
            continue
        given = call.node.args[0] if call.node.args else getattr(call.node.func, "value", None)
        if given is not None and holds(given) and not contradict(holds.known(given), facts_of(call.place.guards)):
            found.setdefault(call.place.loops[-1], holds.known(given))
    return found


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
    # A function that is given or chosen: `mean = mean_of_ranks if several else mean_of_one`.
    values = [a.value for found in function.assignments.values() for a in found if a.value is not None]
    values = [*values, *(one for call in function.calls for one in arguments_of(call.node))]
    sides = [side for value in values if isinstance(value, ast.IfExp) for side in (value.body, value.orelse)]
    meant = [context.program.lookup(function.module, dotted(side)) for side in sides if dotted(side)]
    return depth < 4 and any(isinstance(one, Function) and reduces(context, one, depth + 1) for one in meant)


def shares_itself(context: Context, function: Function, call: Call) -> bool:
    """Tell whether the data set may share its samples out, or the loader is given to what does."""
    dataset = call.node.args[0] if call.node.args else keyword(call.node, "dataset")
    if dataset is None or not any(m.functions and context.plain(m) for m in (function.module,)):
        return True
    values = [dataset, *(a.value for a in context.program.assigned(function, dotted(dataset)) if a.value is not None)]
    text = " ".join(ast.unparse(value) for value in values).lower()
    if SHARED.search(text):
        return True
    for value in values:
        if isinstance(value, ast.Call) and dotted(value.func):
            made = context.program.lookup(function.module, dotted(value.func))
            if isinstance(made, Class) and (any("Iterable" in base for base in made.bases) or _mentions_rank(made)):
                return True
    reused = {"prepare", "setup_dataloaders", "to_distributed", "DataLoaderShard", "Subset"}
    names = {c.last for f in function.module.functions for c in f.calls}
    return bool(names & reused)


def _mentions_rank(made: Class) -> bool:
    return any("rank" in name or "world_size" in name for name in names_in(made.node))


def samplers(context: Context, function: Function) -> Iterator[Found]:
    """Yield samplers of training that never hear of the epoch, and those of validation that repeat samples."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if not call.last.lower().endswith("sampler") or not is_sampler(context, function, call):
            continue
        name = variable_of(function, call)
        loaders = list(loaders_with(context, function, call))
        training = TRAIN.search(name.rpartition(".")[2]) or any(_says_training(guard) for guard in call.place.guards)
        entries = [entry_of(loader.function, loader.call) for loader in loaders]
        training = training or (bool(entries) and all(TRAIN.search(entry) for entry in entries))
        held_out = _is_held_out(function, call, name, loaders)
        uses = _uses(context, loaders) if not (held_out or training) else set()
        if held_out or "evaluated" in uses:
            yield from _of_validation(context, function, call, name, loaders)
        if held_out or uses == {"evaluated"}:
            continue
        if _may_shuffle(context, function, call) and _never_told(context, function, call, loaders):
            named = f"`{name}`" if name else "this sampler"
            message = f"nothing calls set_epoch on {named}, so every epoch has the same order on every rank"
            fix = f"call `{name or 'loader.sampler'}.set_epoch(epoch)` at the beginning of each epoch"
            yield Found("DDP202", function.module, call.node, message, fix)


def entry_of(function: Function, call: Call) -> str:
    """Return the key of a dict under which a call stands: `{"train": wrap(DataLoader(rows))}`."""
    for part in ast.walk(function.node):
        for key, value in zip(part.keys, part.values, strict=True) if isinstance(part, ast.Dict) else ():
            if isinstance(key, ast.Constant) and any(one is call.node for one in ast.walk(value)):
                return str(key.value)
    return ""


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


def _is_held_out(function: Function, call: Call, name: str, loaders: Sequence[Loader]) -> bool:
    """Tell whether a sampler is one of a validation, by its name, its data set's or that of its loaders."""
    words = [name.rpartition(".")[2], *(part for arg in call.node.args[:1] for part in names_in(arg))]
    words += [part for arg in [keyword(call.node, "dataset")] if arg is not None for part in names_in(arg)]
    if TRAIN.search(words[0]):
        return False
    named = [variable_of(loader.function, loader.call).rpartition(".")[2] for loader in loaders]
    return any(HELD_OUT.search(word) for word in words) or (bool(named) and all(HELD_OUT.search(n) for n in named))


def _of_validation(
    context: Context, function: Function, call: Call, name: str, loaders: Sequence[Loader]
) -> Iterator[Found]:
    """Yield a sampler of validation whose repeated samples are counted, or whose parts nothing takes together."""
    if context.ranks.alone(function, call.place.guards) or _warns(function) or _may_be_of_one(context, function, call):
        return
    whole = [loader for loader in loaders if not _leaves_out(loader.call)]
    if any(loader_comes_to(context, loader, _reduced_on) for loader in whole):
        if not is_constant(keyword(call.node, "drop_last"), True):
            yield _padded(function, call, f"`{name}`" if name else "the sampler")
    elif any(loader_comes_to(context, loader, _measured_alone) for loader in loaders):
        yield _of_one_part(function, call, name)


def _may_be_of_one(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a sampler's callers tell how many share the samples, and one says: one alone."""
    given = keyword(call.node, "num_replicas") or (call.node.args[1] if len(call.node.args) > 1 else None)
    return given is not None and _is_given_one(context, function, dotted(given), 0)


def _is_given_one(context: Context, function: Function, name: str, depth: int) -> bool:
    """Tell whether a call of a function gives the number 1 for a parameter, itself or from above."""
    if name not in function.parameters or depth > 2:
        return False
    for site in context.program.sites.get(id(function), ()):
        value = argument(site, function, name)
        if is_constant(value, 1) or (
            value is not None and _is_given_one(context, site.function, dotted(value), depth + 1)
        ):
            return True
    return False


def _leaves_out(loader: Call) -> bool:
    """Tell whether a loader leaves out the last batch, and with it what the sampler has repeated."""
    size = loader.node.args[1] if len(loader.node.args) > 1 else keyword(loader.node, "batch_size")
    one = is_constant(size or ast.Constant(1), 1)
    return is_constant(keyword(loader.node, "drop_last"), True) and not one


def _never_told(context: Context, function: Function, call: Call, loaders: Sequence[Loader]) -> bool:
    """Tell whether a program that trains over epochs with a sampler has no set_epoch in any of its files."""
    if HELD_OUT.search(function.name):
        return False
    evaluated = any(loader_comes_to(context, loader, _evaluated_alone) for loader in loaders)
    trains: set[int] = set()  # the files of the loops

    def noted(context: Context, user: Function, holds: Held) -> bool:
        if _trained_on(context, user, holds):
            trains.add(id(user.module))
        return False

    for loader in loaders:
        loader_comes_to(context, loader, noted)
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


def _evaluated_alone(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether a function loops over something without a backward pass."""
    turns = turns_over(function, holds)
    return bool(turns) and not is_generator(function) and not goes_backward(context, function, turns)


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


def _writes_results(context: Context, function: Function, loops: set[ast.stmt]) -> bool:
    """Tell whether a function writes what it has of each sample or batch into files, which something else may join."""
    if WRITTEN.search(ast.unparse(function.node)):
        return True
    inside = [call for call in function.calls if loops & set(call.place.loops)]
    helpers = [context.program.called(call) for call in inside]
    return any(call.last in ("write", "writelines") for call in inside) or any(
        _opens_to_write(call) for helper in helpers if helper is not None for call in helper.calls
    )


def _opens_to_write(call: Call) -> bool:
    mode = keyword(call.node, "mode") or (call.node.args[1] if len(call.node.args) > 1 else None)
    return call.name == "open" and isinstance(mode, ast.Constant) and str(mode.value).startswith("w")


def _calls_reduction(context: Context, call: Call) -> bool:
    target = context.program.called(call)
    return target is not None and target is not call.function and reduces(context, target)


def _measured_alone(context: Context, function: Function, holds: Held) -> bool:
    """Tell whether a function evaluates something, and leaves the results to each rank."""
    turns = turns_over(function, holds)
    loops = set(turns)
    trains = goes_backward(context, function, turns)
    if not loops or trains or not _evaluates(function) or reduces(context, function):
        return False
    if COCO.search(function.module.file.text) or _writes_results(context, function, loops):
        return False
    return context.run_by_ranks(function) and not _taken_elsewhere(context, function)


def _uses(context: Context, loaders: Sequence[Loader]) -> set[str]:
    """Return what is done with loaders whose names do not tell: `trained`, `evaluated`, or `read` as something else."""
    found: set[str] = set()

    def noted(context: Context, function: Function, holds: Held) -> bool:
        if turns := turns_over(function, holds):
            trained = goes_backward(context, function, turns)
            found.add("trained" if trained else "evaluated" if _is_named_so(function) else "read")
        return False

    for loader in loaders:
        loader_comes_to(context, loader, noted)
    return found


def _evaluates(function: Function) -> bool:
    """Tell whether a function is one that evaluates, by its name or what it calls."""
    return _is_named_so(function) or any(c.last == "eval" for c in function.calls)


def _is_named_so(function: Function) -> bool:
    return bool(HELD_OUT.search(function.name) or EVALUATES.search(function.name))


def loaders_with(context: Context, function: Function, sampler: Call) -> Iterator[Loader]:
    """Yield the loaders that are given a sampler."""
    seen: set[int] = set()
    for where, holds in places_of(context.program, function, sampler.node, facts_of(sampler.place.guards)):
        for call in where.calls:
            if not call.last.endswith("Loader") or id(call) in seen:
                continue
            given = keyword(call.node, "sampler") or keyword(call.node, "batch_sampler")
            given = given or (call.node.args[3] if len(call.node.args) > 3 else None)
            if given is None or not holds(given):
                continue
            if isinstance(given, ast.IfExp) and not {"distributed", "ddp"} & names_in(given.test):
                continue  # which of two it is given is not known
            facts = (*holds.known(given), *facts_of(call.place.guards))
            if contradict(holds.known(given), facts) or _set_anew(where, given, sampler, call):
                continue
            seen.add(id(call))
            yield Loader(where, call, facts)


def _set_anew(function: Function, given: ast.expr, sampler: Call, loader: Call) -> bool:
    """Tell whether a variable gets another value between two calls: in both branches of an `if`."""
    branches: dict[int, set[bool]] = {}
    for assignment in function.assignments.get(dotted(given), ()) if sampler.function is function else ():
        *outer, last = assignment.place.guards or (None,)
        around = loader.place.guards[: len(outer)] == tuple(outer)
        if last is not None and around and sampler.order < assignment.order < loader.order:
            branches.setdefault(id(last.test), set()).add(last.holds)
    own = {id(guard.test) for guard in sampler.place.guards}
    return any(len(found) == 2 for test, found in branches.items() if test not in own)


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
    ) or any(_begins_again(function) for function in module.functions)


def _begins_again(function: Function) -> bool:
    """Tell whether a loop over steps asks for the next batch, and begins with the loader anew when it has no more."""
    given = {dotted(c.node.args[0]) for c in function.calls if c.last == "next" and c.place.loops and c.node.args}
    anew = [a for name in given for a in function.assignments.get(name, ()) if part_of_try(a.place) == "except"]
    values = [a.value for a in anew if isinstance(a.value, ast.Call) and a.place.loops]
    return any(dotted(value.func) == "iter" and "load" in ast.unparse(value) for value in values)


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


RULES = ()
OF_RANKS = (loaders, samplers)
