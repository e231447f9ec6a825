"""Rules for seeds: set where no rank has them, or equal on ranks or workers that should draw for themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from .context import Context, Found, wraps_ddp
from .module import (
    Call,
    Class,
    Function,
    Guard,
    Module,
    arguments_of,
    default_of,
    dotted,
    is_constant,
    keyword,
    names_in,
    shown,
    variable_of,
)
from .ranks import COUNT
from .samplers import HELD_OUT
from .steps import within
from .stops import SPAWN

MANUAL = {"torch.manual_seed", "torch.random.manual_seed", "transformers.set_seed", "accelerate.utils.set_seed"}
MANUAL |= {"lhotse.utils.fix_random_seed", "lightning.seed_everything", "pytorch_lightning.seed_everything"}
OWN = re.compile(r"rank|local|gpu|device|pid|time|worker|world|node", re.IGNORECASE)
DRAWS = re.compile(r"(?:random|numpy\.random|torch)\.(?:rand\w*|choice\w*|shuffle|permutation|sample|normal|uniform)")
# Classes of torchvision and albumentations that draw numbers, and functions that are called so.
AUGMENTS = re.compile(
    r"Random\w+|ColorJitter|TrivialAugmentWide|AutoAugment|RandAugment|AugMix|(?:Shift)?ScaleRotate|\w*Aug(?:ment\w*)?"
)
# Functions of diffusion models that draw noise and timesteps at each step.
BACKWARD = re.compile(r"\.backward\(")
NOISES = re.compile(r"(?:training|p)_losses|q_sample|forward_backward|compute_loss|add_noise")
NOISE = re.compile(r"torch\.(?:randn|randn_like|randint|rand)|numpy\.random\.(?:choice|randint|randn)")
TENSORS = re.compile(r"torch\.(?:randn|rand|randint|bernoulli|multinomial|normal|randn_like|rand_like|randint_like)")
DROPS = re.compile(r"Dropout\w*|DropPath|dropout")
QUIET = re.compile(r"init|sampl|generat|infer|reset|test", re.IGNORECASE)
APPLIES = re.compile(
    r"(?:^|_)(?:eval\w*|infer\w*|predict\w*|generat\w*|sampl\w*|test\w*|retriev\w*|visuali\w*|demo)(?:_|$)"
)
FILLS = {"normal_", "uniform_", "bernoulli_", "random_"}
ONE_PROCESS = re.compile(r"(?<!Distributed)\bDataParallel\(")
UNSET = re.compile(r"\bseed\s*(?::[^=\n]+)?=\s*None\b")  # a setting: `self.seed = None`
LAUNCHED = re.compile(r"--local[_-]rank\b|[\"']LOCAL_RANK[\"']")
OF_WORKERS = re.compile(r"worker_(?:init|seed)|(?:init|seed)_(?:loader_)?worker")
HELPER = re.compile(r"seed|determin|reproduc|random|rng|set|fix|init|config|env|prepare|runtime", re.IGNORECASE)
SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed", "set_random_seed", "fix_seed"}
READS_OPTIONS = re.compile(r"(?:^|_)(?:cfg|args?|opts?|options?)(?:_|$)", re.IGNORECASE)  # they may seed as well
MAX_DEPTH = 4


def before_spawn(context: Context, function: Function) -> Iterator[Found]:
    """Yield seeds of a process that only starts the ranks: mp.spawn starts them anew, and they inherit no generator."""
    spawn = next((c for c in function.calls if c.name in SPAWN), None)
    if spawn is None or not spawn.node.args or is_constant(keyword(spawn.node, "start_method"), "fork"):
        return
    if LAUNCHED.search(function.module.file.text):
        return  # a launcher may start the ranks instead, and each of them comes to the seed
    worker = context.program.lookup(function.module, dotted(spawn.node.args[0]))
    seeds = [c for c in function.calls if c.order < spawn.order and _seeds_torch(context, c)]
    told = seeds[0] if seeds else None
    if not seeds:
        seeds, told = _seeded_with_options(context, function, spawn)
    if not seeds or told is None or not isinstance(worker, Function) or _seeds_within(context, worker):
        return
    if any(_is_off(context, function, guard) for guard in seeds[0].place.guards):
        return
    imported = [c for c in function.module.body.calls if c.last in SEEDS and not _under_main(c)]
    between = [c for c in function.calls if seeds[0].order < c.order < spawn.order]
    if imported or any(_may_draw(context, c) for c in between):
        return
    line = function.module.position(spawn.node.lineno)[1]
    message = (
        f"this seeds the process that starts the ranks; those of mp.spawn (line {line}) are new processes that do not"
        f" inherit it, and nothing in `{worker.name}` seeds torch on the CPU: two runs with one seed differ"
    )
    fix = f"call `{shown(told.node, 40)}` at the beginning of `{worker.name}`, in each rank"
    yield Found("DDP503", told.function.module, told.node, message, fix)


def _seeded_with_options(context: Context, function: Function, spawn: Call) -> tuple[list[Call], Call | None]:
    """Return the call that reads the options and seeds as well, `cfg = get_cfg(args)`, and the call within that seeds.

    Nothing may draw behind it: its own rest is looked at here, what comes between it and the ranks by the caller.
    """
    for call in function.calls:
        target = context.program.called(call) if call.order < spawn.order and READS_OPTIONS.search(call.last) else None
        inner = next((c for c in target.calls if _seeds_torch(context, c)), None) if target is not None else None
        if target is None or inner is None:
            continue
        if any(_is_off(context, target, guard) for guard in inner.place.guards):
            continue
        if not any(_may_draw(context, c) for c in target.calls if c.order > inner.order):
            return [call], inner
    return [], None


def _is_off(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a condition asks for an option that nobody gives by default: `if args.seed is not None`."""
    test, given = guard.test, guard.holds
    if isinstance(test, ast.Compare) and is_constant(test.comparators[0], None):
        given = given == isinstance(test.ops[0], ast.IsNot)
        test = test.left
    return given and is_constant(context.default_of(function.module, test), None)


def _seeds_torch(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call seeds torch, itself or in a helper of these files."""
    if call.name in MANUAL:
        return True
    target = context.program.called(call)
    if target is None or target is call.function or depth > MAX_DEPTH or not HELPER.search(call.last):
        return False
    return any(_seeds_torch(context, inner, depth + 1) for inner in target.calls)


def _seeds_within(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function, or one that it calls, seeds torch on the CPU, or something that is not known."""
    for call in function.calls:
        if call.name.startswith(("torch.cuda.", "random.", "numpy.random.")):
            continue  # of the GPU alone, or not of torch, in which the weights are drawn
        if call.last in SEEDS or re.search(r"seed|determinis", call.last):
            return True
        target = context.program.called(call)
        inner = target is not None and target is not function and depth < MAX_DEPTH
        if target is not None and inner and _seeds_within(context, target, depth + 1):
            return True
    return False


def _under_main(call: Call) -> bool:
    return any("__name__" in ast.unparse(guard.test) for guard in call.place.guards)


def _may_draw(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call draws from a generator, or makes a data set or a model: then the seed had an effect."""
    if DRAWS.fullmatch(call.name) or re.search(r"data|model|net|split|loader|build", call.last, re.IGNORECASE):
        return True
    target = context.program.called(call)
    return target is not None and depth < MAX_DEPTH and any(_may_draw(context, c, depth + 1) for c in target.calls)


def equal_on_all(context: Context, function: Function) -> Iterator[Found]:
    """Yield a seed that is the same on all ranks, where the data set draws augmentations: all ranks draw the same."""
    if not context.plain(function.module) or not context.run_by_ranks(function):
        return
    module = function.module
    if APPLIES.search(PurePosixPath(module.file.inside).stem) and not context.says_itself(module, BACKWARD):
        return  # a program that only applies the model
    if function.name == "__call__" or OF_WORKERS.search(function.name):
        return
    if context.says_itself(module, ONE_PROCESS) and not wraps_ddp(module):
        return  # DataParallel, of which one process feeds all GPUs
    seeds = [c for c in function.calls if c.node.args and (c.name in MANUAL or _seeds_torch(context, c))]
    if not seeds or _is_of_parent(context, function):
        return
    drawn = None
    if not _augments(context, function):
        drawn = _drawn_in_step(context, function) or _drawn_in_model(context, function)
        if drawn is None:
            return
    for call in seeds:
        if context.ranks.partial(call) is not None or context.ranks.alone(function, call.place.guards):
            continue
        if not isinstance(function.node, ast.Module) and _is_helper(context, function, call):
            continue  # the call of the helper is looked at
        if _is_own(context, function, call) or _seeded_apart(context, function) or _optional(context, function, call):
            continue
        message = (
            "all ranks have this seed: worker k of every rank draws the same augmentations, and the model the same"
            " noise and dropout masks, so the samples of a step are treated alike"
        )
        if drawn is not None:
            line = f"{drawn.function.module.file.path} line {drawn.function.module.position(drawn.node.lineno)[1]}"
            message = (
                f"all ranks have this seed: `{shown(drawn.node.func, 40)}` ({line}) draws the same numbers on every"
                " rank at each step, and dropout the same masks"
            )
        fix = f"write `{shown(call.node.func)}({shown(call.node.args[0], 30)} + rank)`: DDP makes the weights equal"
        yield Found("DDP608", function.module, call.node, message, fix)
        return


def _is_of_parent(context: Context, function: Function) -> bool:
    """Tell whether a function runs in the process that starts the ranks, before they are there."""
    if any(call.name in SPAWN for call in function.calls):
        return True
    if context.is_spawned(function):
        return False
    sites = context.program.sites.get(id(function), ())
    return bool(sites) and all(any(c.name in SPAWN for c in site.function.calls) for site in sites)


def _trains(context: Context, module: Module) -> bool:
    """Tell whether a program that has this file trains: it, or a file that it imports itself, has a backward pass."""
    starts = [files[0] for files in context.programs_with(module)]
    near = (other for start in starts for other in (start, *context.program.imports_of(start)))
    return any(BACKWARD.search(other.file.text) for other in near)


def _drawn_in_step(context: Context, function: Function) -> Call | None:
    """Return a call by which each step of training draws a tensor, as noise or a mask."""
    if not _trains(context, function.module):
        return None  # a program that draws samples, with a file of the training among its own
    for module in context.in_component(function.module):
        for other in module.functions if context.plain(module) else ():
            loops = {c.place.loops[-1] for c in other.calls if c.last == "backward" and c.place.loops}
            for call in other.calls:
                if not call.place.loops or call.place.loops[-1] not in loops:
                    continue
                if _draws_tensor(call) and not any(isinstance(g.test, ast.Compare) for g in within(call.place)):
                    return call
                target = context.program.called(call)
                if target is not None and (inner := next((c for c in target.calls if _draws_tensor(c)), None)):
                    return inner
    return None


def _drawn_in_model(context: Context, function: Function) -> Call | None:
    """Return a call by which a model draws noise or drops values, in a program that trains it."""
    if not _trains(context, function.module):
        return None
    for module in context.below(function.module):
        for made in module.classes.values() if context.plain(module) else ():
            if not any(base.endswith("Module") for base in made.bases):
                continue
            for method in made.methods.values():
                quiet = QUIET.search(method.name) is not None and not _in_forward(made, method)
                draws = (
                    c for c in method.calls if _drops(context, method, c) or (not quiet and _draws_within(context, c))
                )
                if (found := next(draws, None)) is not None:
                    return found
    return None


def _in_forward(made: Class, method: Function) -> bool:
    """Tell whether the forward pass calls a method whose name says that it makes parameters or samples."""
    forward = made.methods.get("forward")
    return forward is not None and any(dotted(c.node.func) == f"self.{method.name}" for c in forward.calls)


def _draws_within(context: Context, call: Call) -> bool:
    """Tell whether a call draws a tensor, itself or in a function of these files."""
    target = context.program.called(call)
    if target is None or target.of_class is not None:
        return _draws_tensor(call) or _fills(call)
    return any(_draws_tensor(c) or _fills(c) for c in target.calls)


def _fills(call: Call) -> bool:
    """Tell whether a call fills a new tensor with what it draws: `torch.empty_like(mu).normal_()`."""
    func = call.node.func
    return isinstance(func, ast.Attribute) and func.attr in FILLS and isinstance(func.value, ast.Call)


def _drops(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a call makes or applies dropout, of more than nothing."""
    if not DROPS.fullmatch(call.last) or not call.name.startswith(("torch.", "timm.")):
        return False
    given = next(iter(call.node.args[call.last.islower() :]), None) or keyword(call.node, "p")
    if given is not None and dotted(given) in function.parameters:
        given = default_of(function, dotted(given)) or given
    given = context.default_of(function.module, given) if given is not None else None
    return given is None or bool(given.value if isinstance(given, ast.Constant) else dotted(given))


def _draws_tensor(call: Call) -> bool:
    """Tell whether a call draws a tensor, and not one number for a decision of all ranks."""
    if not TENSORS.fullmatch(call.name):
        return False
    return not (len(call.node.args) == 1 and is_constant(call.node.args[0], 1))


def _is_helper(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a seed is a parameter, or an option, of a function that is called in these files to set it."""
    first, _, rest = dotted(call.node.args[0]).partition(".")
    if first not in function.parameters or (rest and not HELPER.search(function.name)):
        return False
    return bool(context.program.sites.get(id(function))) and not context.is_spawned(function)


def _is_own(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a seed may be the rank's own: made of the rank, the time, or of what is not known."""
    words = _made_of(context, function, call.node)
    target = context.program.called(call) if call.name not in MANUAL else None
    for inner in target.calls if target is not None else ():
        if inner.last in SEEDS:
            words |= _made_of(context, inner.function, inner.node)
    return any(OWN.search(word) and not COUNT.fullmatch(word) for word in words)


def _made_of(context: Context, function: Function, call: ast.Call) -> set[str]:
    """Return the names in the arguments of a call, and those in what these are set to."""
    words = {name for value in arguments_of(call) for name in names_in(value)}
    for name in sorted(words):
        for assignment in context.program.assigned(function, name):
            if isinstance(assignment.node, ast.AugAssign):
                words |= names_in(assignment.node.value)
            elif assignment.value is None:
                made = getattr(assignment.node, "value", None)
                words |= {"rank"} if made is None or "parse" not in ast.unparse(made) else set()
            else:
                words |= names_in(assignment.value)
    return words


def _seeded_apart(context: Context, function: Function) -> bool:
    """Tell whether something else in the program seeds by the rank, so that equal seeds may be meant."""
    near = {id(module) for files in context.programs_with(function.module) for module in files}
    for last in (*SEEDS, "Generator", "DataLoader", "set_rng_state"):
        for call in context.calls_in_component(function.module, last):
            if id(call.function.module) not in near:
                continue  # of another program
            if last == "DataLoader":
                given = keyword(call.node, "worker_init_fn")
                if keyword(call.node, "generator") is not None or (
                    given is not None and _may_know(context, call, given)
                ):
                    return True
            elif "?" not in call.name and any(
                re.search(r"rank", name) for value in arguments_of(call.node) for name in names_in(value)
            ):
                return True
    return False


def _may_know(context: Context, call: Call, given: ast.expr) -> bool:
    """Tell whether what seeds the workers may know the rank: it is not here, or the rank stands in it."""
    given, bound = without_partial(context, call.function, given)
    if any(re.search(r"rank|gpu", name) for value in bound for name in names_in(value)):
        return True
    target = context.program.lookup(call.function.module, dotted(given)) if dotted(given) else None
    nodes: list[ast.AST] = [target.node] if isinstance(target, Function) else []
    if not nodes:  # an object that can be called
        nodes = [made.node for made in context.program.objects.of_value(call.function, given) or ()]
    return not nodes or any(re.search(r"rank|gpu", ast.unparse(node)) for node in nodes)


def _optional(context: Context, function: Function, call: Call) -> bool:
    """Tell whether nothing is seeded unless the user asks for it: the option has no default, or None."""
    if not any("seed" in name for guard in call.place.guards for name in names_in(guard.test)):
        return False
    if context.says(function.module, UNSET):
        return True
    options = context.calls_in_component(function.module, "add_argument")
    own = [option for option in options if option.function.module is function.module]
    for option in own or options:
        named = any(isinstance(a, ast.Constant) and "seed" in str(a.value) for a in option.node.args)
        if named and is_constant(keyword(option.node, "default") or ast.Constant(None), None):
            return True
    return False


def _augments(context: Context, function: Function) -> bool:
    """Tell whether a data set of the program draws, by itself or with transforms that do."""
    trains = _trains(context, function.module)
    for module in context.in_component(function.module):
        for other in module.functions:
            if trains and NOISES.search(other.name) and any(NOISE.fullmatch(call.name) for call in other.calls):
                return True
            item = other.name == "__getitem__" or "transform" in other.name or other.name == "__call__"
            for call in other.calls:
                if AUGMENTS.fullmatch(call.last) or (item and DRAWS.fullmatch(call.name)):
                    return True
                target = context.program.called(call) if item else None
                if target is not None and any(DRAWS.fullmatch(inner.name) for inner in target.calls):
                    return True
    return False


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
            if not HELD_OUT.search(variable_of(function, call)):
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


RULES = (before_spawn, generators)
OF_RANKS = (equal_on_all, worker_seeds)  # only where several ranks run the file
