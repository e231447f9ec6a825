"""Rules for the GPU of each rank: one for all, one that is set too late."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from .context import Context, Found, wraps_ddp
from .module import Call, Function, Guard, argument, dotted, is_constant, keyword, names_in, shown
from .program import PROCESS_NUMBER

# A barrier guesses a GPU from the rank, and a group has no device before its first collective: neither takes GPU 0.
WITHOUT_TENSORS = {"barrier", "monitored_barrier", "new_group", "new_subgroups"}
SEVERAL = re.compile(
    r"dist|ddp|world_size|local_rank|multi|n(?:um)?_?gpus|parallel", re.IGNORECASE
)  # there are several ranks
# One GPU for each rank: not `"0,1"` for all of them, and not a command in a docstring.
MASKS = re.compile(
    r"^[^#\n]*[\"']CUDA_VISIBLE_DEVICES[\"']\s*(?:\]\s*=(?!=)|,|:)(?!\s*[\"']\d+(?:\s*,\s*\d+)+[\"'])", re.MULTILINE
)
LOCAL_RANK, ON_GPU = re.compile("LOCAL_RANK"), re.compile("cuda|nccl")
ONE_NODE = re.compile(r"127\.0\.0\.1|localhost|device_count\(\)")
SPAWNS = re.compile(r"mp\.spawn\(|multiprocessing\.spawn\(")
REMOVED = re.compile(r"unlink|os\.remove|rmtree|tempfile|mkdtemp|uuid|JOB_ID|TemporaryDirectory")
PLACES = re.compile(r"set_device|cuda\.device\(|\bxla\b|torch_xla|\bnpu|\bhpu|set_default_device|accelerator\.")
INIT = "torch.distributed.init_process_group"
SET_DEVICE = {"torch.cuda.set_device", "torch.accelerator.set_device_index", "torch.accelerator.set_device_idx"}
MAX_CALLERS = 4
LAUNCHERS = re.compile(r"torch\.distributed\.(?:launch|run)\b|torchrun|\bsrun\b")


def first_gpu(context: Context, function: Function) -> Iterator[Found]:
    """Yield code that puts every rank on GPU 0."""
    if not context.plain(function.module) or _masked(context, function):
        return
    for call in function.calls:
        if call.place.guards or context.ranks.partial(call) is not None:
            continue
        argument = call.node.args[0] if call.node.args else keyword(call.node, "device")
        if call.last in ("DistributedDataParallel", "DDP"):
            argument = keyword(call.node, "device_ids")
            everywhere = isinstance(argument, ast.List) and len(argument.elts) == 1 and is_constant(argument.elts[0], 0)
        elif call.name == "torch.cuda.set_device":
            everywhere = is_constant(argument, 0) or is_constant(argument, "cuda:0")
        elif call.last in ("to", "cuda", "device"):
            everywhere = is_constant(argument, "cuda:0") or (call.last == "cuda" and is_constant(argument, 0))
        else:
            continue
        joins = any(c.name == INIT or c.last in ("DistributedDataParallel", "DDP") for c in function.calls)
        if everywhere and joins:
            message = (
                "every rank of a node uses GPU 0 here: NCCL refuses two ranks on one GPU, or its memory is used up"
            )
            fix = f"use the GPU of the local rank in `{shown(call.node, 40)}`: int(os.environ['LOCAL_RANK'])"
            yield Found("DDP210", function.module, call.node, message, fix)


def default_gpu(context: Context, function: Function) -> Iterator[Found]:
    """Yield a model that every rank puts on GPU 0 by `.cuda()`, and DDP is told that it is on the GPU of the rank."""
    if not context.plain(function.module) or _masked(context, function) or context.says(function.module, PLACES):
        return
    for call in function.calls:
        given = keyword(call.node, "device_ids") if call.last in ("DistributedDataParallel", "DDP") else None
        if not _takes_gpu(given) or not isinstance(given, ast.List) or isinstance(given.elts[0], ast.Constant):
            continue
        name = dotted(call.node.args[0]) if call.node.args else ""
        moves = [c for c in function.calls if name and c.order < call.order and _moves(function, c, name)]
        if not moves or any(c.node.args or c.node.keywords or c.last == "to" for c in moves):
            continue
        message = (
            f"nothing sets this rank's device, so every rank of a node puts `{name}` on GPU 0, and DDP is told that it"
            f" is on `{shown(given.elts[0], 30)}`: NCCL refuses two ranks on one GPU, or the forward pass fails"
        )
        fix = f"call torch.cuda.set_device({shown(given.elts[0], 30)}) before `{shown(moves[0].node, 40)}`"
        yield Found("DDP210", function.module, moves[0].node, message, fix)


def _moves(function: Function, call: Call, name: str) -> bool:
    """Tell whether a call puts what a variable holds on a device: `model.cuda()`, `model = Net().cuda()`."""
    func = call.node.func
    if call.last not in ("cuda", "to") or not isinstance(func, ast.Attribute):
        return False
    return dotted(func.value) == name or any(a.value is call.node for a in function.assignments.get(name, ()))


def _masked(context: Context, function: Function) -> bool:
    """Tell whether each rank may see one GPU only: whether code, and no comment, sets the variable for that."""
    return context.says(function.module, MASKS)


def global_device(context: Context, function: Function) -> Iterator[Found]:
    """Yield the global rank as the number of a GPU: there are as many GPUs of a node as it has ranks, and no more."""
    if not context.plain(function.module) or _masked(context, function):
        return
    for call in function.calls:
        argument = call.node.args[0] if call.node.args else keyword(call.node, "device")
        if call.last in ("DistributedDataParallel", "DDP"):
            given = keyword(call.node, "device_ids")
            argument = given.elts[0] if isinstance(given, ast.List) and len(given.elts) == 1 else None
        elif call.name == "torch.device" and len(call.node.args) == 2 and is_constant(argument, "cuda"):
            argument = call.node.args[1]
        elif call.name not in ("torch.cuda.set_device", "torch.device") and call.last != "cuda":
            continue
        if argument is not None and _is_global_rank(context, function, argument):
            message = (
                f"`{shown(argument, 30)}` is the rank among all nodes: from the second node on there is no such GPU,"
                ' and the ranks there die of "invalid device ordinal"'
            )
            fix = f"use the local rank in `{shown(call.node, 40)}`: int(os.environ['LOCAL_RANK'])"
            yield Found("DDP607", function.module, call.node, message, fix)


def _is_global_rank(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a number is the global rank by what makes it: its name alone says nothing, as in mp.spawn."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return len(parts) == 1 and _is_global_rank(context, function, parts[0])
    if isinstance(node, ast.Call) and dotted(node.func) in ("int", "str") and len(node.args) == 1:
        return _is_global_rank(context, function, node.args[0])
    if isinstance(node, ast.Call):
        named = function.module.full_name(node.func)
        read = named in ("os.environ.get", "os.getenv") and bool(node.args) and is_constant(node.args[0], "RANK")
        return named == "torch.distributed.get_rank" or read or _gives_global_rank(context, function, node)
    if isinstance(node, ast.Subscript):
        return dotted(node.value) == "os.environ" and is_constant(node.slice, "RANK")
    if not dotted(node):
        return False
    values = [a.value for a in context.program.assigned(function, dotted(node))]
    return bool(values) and all(
        v is not None and not dotted(v) and _is_global_rank(context, function, v) for v in values
    )


def _gives_global_rank(context: Context, function: Function, node: ast.Call) -> bool:
    """Tell whether a function of these files returns the global rank, or a number where there is no group."""
    call = next((c for c in function.calls if c.node is node), None)
    target = context.program.called(call) if call is not None and not node.args else None
    if target is None or target is function:
        return False
    values = [leave.node.value for leave in target.exits if isinstance(leave.node, ast.Return) and leave.node.value]
    made = [value for value in values if not isinstance(value, ast.Constant)]
    return bool(made) and all(isinstance(v, ast.Call) and _is_global_rank(context, target, v) for v in made)


def local_rank_as_rank(context: Context, function: Function) -> Iterator[Found]:
    """Yield the rank within a node as the rank among all: two nodes have the same ones."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        shares = call.last == "DistributedSampler"
        given = keyword(call.node, "rank") if call.name == INIT or shares else None
        if given is None or not _is_local_rank(context, function, given) or _on_one_node(context, call):
            continue
        then = "ranks have numbers that the first has already, and all wait in init_process_group"
        fix = "leave rank and world_size to torchrun (init_method='env://'), or compute node * GPUs + local rank"
        if shares:
            then = "ranks read the samples that the first has read already, and the other samples are read by none"
            fix = "leave num_replicas and rank out: the sampler asks the process group"
        message = f"`{shown(given, 30)}` is the rank within a node: from the second node on {then}"
        yield Found("DDP634", function.module, call.node, message, fix)


def _on_one_node(context: Context, call: Call) -> bool:
    """Tell whether a group is made for one node: its address is local, or it has as many ranks as the node has GPUs."""
    if ONE_NODE.search(ast.unparse(call.node)) or context.says(call.function.module, SPAWNS):
        return True
    size = keyword(call.node, "world_size") or keyword(call.node, "num_replicas")
    values = context.program.assigned(call.function, dotted(size)) if size is not None and dotted(size) else []
    return any(a.value is not None and ONE_NODE.search(ast.unparse(a.value)) for a in values)


def _is_local_rank(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether an expression is the local rank by its name, and is not made of the node's number as well."""
    name = dotted(node)
    if name in function.parameters and name.rpartition(".")[2] != "local_rank":
        sites = context.program.sites.get(id(function), ())
        handed = [(site, argument(site, function, name)) for site in sites]
        return bool(handed) and all(
            value is not None and value is not PROCESS_NUMBER and _named_local(site, value) for site, value in handed
        )
    if name.rpartition(".")[2] != "local_rank":
        read = isinstance(node, ast.Subscript) and is_constant(node.slice, "LOCAL_RANK")
        return read or (bool(name) and _copies_local(context, function, name))
    values = [a.value for a in context.program.assigned(function, name) if a.value is not None]
    if any(_is_global_rank(context, function, value) for value in values):
        return False  # `local_rank = dist.get_rank()`: the name is wrong, the number is right
    return not any(isinstance(part, ast.BinOp) for value in values for part in ast.walk(value))


def _copies_local(context: Context, function: Function, name: str) -> bool:
    """Tell whether a variable is the local rank, `args.rank = args.local_rank`, and nothing adds to it."""
    assigned = context.program.assigned(function, name)
    if any(a.value is None or isinstance(a.value, ast.BinOp) for a in assigned):
        return False
    values = [a.value for a in assigned if a.value is not None]
    return any(
        dotted(value).rpartition(".")[2] == "local_rank" and _is_local_rank(context, function, value)
        for value in values
    )


def _named_local(site: Call, node: ast.expr) -> bool:
    """Tell whether a caller gives `args.local_rank`, or a variable that is nothing else."""
    values = [a.value for a in site.function.assignments.get(dotted(node), ()) if a.value is not None]
    made = [value for value in values if not isinstance(value, ast.Constant)]  # `rank = 0` of a single process
    return all(dotted(value).rpartition(".")[2] == "local_rank" for value in made or [node])


def late_device(context: Context, function: Function) -> Iterator[Found]:
    """Yield a group that is made before the device is set, where a collective or a tensor comes between."""
    init = next((c for c in function.calls if c.name == INIT), None)
    if init is None or keyword(init.node, "device_id") is not None or is_constant(_backend(init), "gloo"):
        return
    late = next((c for c in function.calls if c.name in SET_DEVICE), None)
    if late is None:
        yield from _late_elsewhere(context, function, init)
        return
    if late.order < init.order or _excludes(late, init):
        return
    around = [(ast.unparse(guard.test), guard.holds) for guard in late.place.guards]
    inits = [c for c in function.calls if c.name == INIT and c.order < late.order]
    others = [guard for guard in init.place.guards if (ast.unparse(guard.test), guard.holds) not in around]
    always = set(late.place.guards) <= set(init.place.guards)  # whoever comes to the group comes to the device
    if len(inits) == 1 and not always and not all(g.holds and SEVERAL.search(ast.unparse(g.test)) for g in others):
        return
    if any(init.order > c.order and _sets_device(context, c, 0) for c in function.calls):
        return
    between = [
        c
        for c in function.calls
        if init.order < c.order < late.order
        and c.last not in WITHOUT_TENSORS
        and (context.effects.direct(c) or (c.last == "cuda" and not _is_bare_loss(c)))
    ]
    if between:
        message = (
            f"`{shown(between[0].node, 40)}` comes before the device is set in line"
            f" {function.module.position(late.node.lineno)[1]}, so every rank of a node uses GPU 0 for it"
        )
        fix = f"call `{shown(late.node, 40)}` before init_process_group, and give that device_id="
        yield Found("DDP211", function.module, between[0].node, message, fix)
    else:
        message = "the group is made before the rank has its device, so NCCL has to guess a GPU for its first barrier"
        fix = f"call `{shown(late.node, 40)}` first, and give init_process_group device_id="
        yield Found("DDP602", function.module, init.node, message, fix)


def _excludes(one: Call, other: Call) -> bool:
    """Tell whether two calls of a function stand in branches of which a process takes one."""
    tests = {id(guard.test): guard.holds for guard in one.place.guards}
    return any(tests.get(id(guard.test), guard.holds) != guard.holds for guard in other.place.guards)


def _is_bare_loss(call: Call) -> bool:
    """Tell whether `.cuda()` is one of a loss without weights, which has no tensor: `nn.CrossEntropyLoss().cuda()`."""
    func = call.node.func
    made = func.value if isinstance(func, ast.Attribute) else None
    return (
        isinstance(made, ast.Call)
        and dotted(made.func).endswith("Loss")
        and not made.args
        and not any(word.arg in ("weight", "pos_weight", None) for word in made.keywords)
    )


def _late_elsewhere(context: Context, function: Function, init: Call) -> Iterator[Found]:
    """Yield a group where a function that is called behind it, or a caller, sets the device, or nothing does."""
    if not context.plain(function.module) or on_cpu(context, function):
        return
    setters = _set_behind(context, init, 0)
    if setters:
        message = "the group is made before the rank has its device, so NCCL has to guess a GPU for its first barrier"
        other = setters[0].function.module
        line = f"line {other.position(setters[0].node.lineno)[1]}"
        where = line if other is function.module else f"{other.file.path} {line}"
        fix = f"set the device before it, and not in {where}; give init_process_group device_id="
        yield Found("DDP602", function.module, init.node, message, fix)
    elif setters is not None and _never_set(context, function, init):
        message = (
            "nothing sets this rank's device: NCCL has to guess a GPU for its first barrier, and what is not placed"
            " by hand, such as pinned memory, takes memory of GPU 0 on every rank"
        )
        fix = "call torch.cuda.set_device(local_rank) before it, and give it device_id="
        yield Found("DDP602", function.module, init.node, message, fix)


def _set_behind(context: Context, init: Call, depth: int) -> list[Call] | None:
    """Return the calls that set the device behind one that makes the group, here or in callers; None if one is before.

    Where a program sets it before, it is right there; the others are told only if none of them does.
    """
    mine = [c for c in init.function.calls if c.node is not init.node and not _excludes(c, init)]
    setters = [c for c in mine if c.name in SET_DEVICE or _sets_device(context, c, 0)]
    if any(c.order < init.order for c in setters):
        return None
    if setters or depth > MAX_CALLERS:
        return setters[:1]
    found: list[Call] = []
    for site in context.program.sites.get(id(init.function), ()):
        behind = _set_behind(context, site, depth + 1)
        if behind is None:
            return None
        found += behind
    return found


def _takes_gpu(given: ast.expr | None) -> bool:
    """Tell whether `device_ids=` names a GPU."""
    return isinstance(given, ast.List) and len(given.elts) == 1 and not is_constant(given.elts[0], None)


def _sets_device(context: Context, call: Call, depth: int) -> bool:
    """Tell whether a call sets the device in a function that it reaches."""
    target = context.program.called(call)
    if target is None or depth > 2 or target is call.function:
        return False
    return any(c.name in SET_DEVICE or _sets_device(context, c, depth + 1) for c in target.calls)


def _never_set(context: Context, function: Function, init: Call) -> bool:
    """Tell whether a program with DDP on GPUs never says which GPU is the rank's."""
    if _masked(context, function) or any(word.arg is None for word in init.node.keywords):
        return False
    if not context.says(function.module, ON_GPU) or _of_one_process(context, function, init.place.guards):
        return False
    if not context.says(function.module, PLACES):
        return True
    programs = [part for part in context.programs_with(function.module) if any(wraps_ddp(one) for one in part)]
    return bool(programs) and not any(context.says_itself(one, PLACES) for part in programs for one in part)


def _of_one_process(context: Context, function: Function, guards: Sequence[Guard]) -> bool:
    """Tell whether conditions hold in a program of one process only, where it is asked if there is no group yet."""
    tests = [(test, guard) for guard in guards for test in _conditions(guard)]
    rest = [Guard(test, guard.holds, guard.line) for test, guard in tests if "initialized" not in ast.unparse(test)]
    return context.ranks.alone(function, rest)


def _conditions(guard: Guard) -> list[ast.expr]:
    """Return the parts of `a and b`, or the condition itself."""
    whole = isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.And) and guard.holds
    return list(guard.test.values) if whole and isinstance(guard.test, ast.BoolOp) else [guard.test]


def options(context: Context, function: Function) -> Iterator[Found]:
    """Yield the option `--local_rank`: since PyTorch 2.0 torch.distributed.launch passes `--local-rank`, torchrun none.

    Source: the documentation in torch/distributed/launch.py, "versionchanged:: 2.0.0".
    """
    if "--local_rank" not in function.module.file.text:
        return
    if id(function.module) not in context.distributed and not _feeds_ranks(context, function):
        return
    for call in function.calls:
        names = [a.value for a in call.node.args if isinstance(a, ast.Constant)]
        if call.last != "add_argument" or "--local_rank" not in names or "--local-rank" in names:
            continue
        options = context.calls_in_component(function.module, "add_argument")
        both = any(isinstance(a, ast.Constant) and a.value == "--local-rank" for c in options for a in c.node.args)
        if both or not _launched(context, function):
            continue
        read = context.says(function.module, LOCAL_RANK)
        rest = "" if read else "; torchrun passes none, and LOCAL_RANK is not read, so every rank takes the default"
        message = (
            "torch.distributed.launch passes `--local-rank` since PyTorch 2.0, which ends every rank as an unrecognized"
            f" argument{rest}"
        )
        fix = "read int(os.environ['LOCAL_RANK']) and start with torchrun, or add '--local-rank' to the names"
        yield Found("DDP610", function.module, call.node, message, fix)


def _launched(context: Context, function: Function) -> bool:
    """Tell whether a launcher may start the ranks: not where mp.spawn does, here or in what imports this file."""
    module = function.module
    starts = [c for last in ("spawn", "Process") for c in context.calls_in_component(module, last)]
    spawns = [c for c in starts if "multiprocessing" in c.name]
    users = {id(c.function.module): c.function.module for c in spawns}.values()
    spawned = any(module is user or module in context.program.imports_of(user) for user in users)
    return not spawned or any(LAUNCHERS.search(text) for text in context.texts)


def rendezvous_files(context: Context, function: Function) -> Iterator[Found]:
    """Yield a group that meets in a file which nothing removes: one that a run left behind makes the next one wait.

    Source: the documentation of torch.distributed, "Shared file-system initialization".
    """
    for call in function.calls:
        given = keyword(call.node, "init_method") if call.name == INIT else None
        given = context.default_of(function.module, given) if given is not None else None
        if given is None or not ast.unparse(given).lstrip("f").startswith(("'file://", '"file://')):
            continue
        if not _is_removed(context, function, given):
            message = (
                "the ranks meet in a file, and nothing removes one that a run which died has left: the ranks of the"
                " next run read its old addresses there, and wait until the timeout"
            )
            fix = "make the file's name anew for each run, or start with torchrun and init_method='env://'"
            yield Found("DDP615", function.module, call.node, message, fix)


def _is_removed(context: Context, function: Function, given: ast.expr) -> bool:
    """Tell whether the file in which ranks meet is made anew for each run, or something like it is removed."""
    if REMOVED.search(ast.unparse(given)):
        return True
    words = "|".join(["dist", "init", "rdzv", "rendez", "share", "store", "sync", "file", *sorted(names_in(given))])
    for module in context.in_component(function.module):
        for line in module.file.text.split("\n") if REMOVED.search(module.file.text) else ():
            if REMOVED.search(line) and re.search(words, line, re.IGNORECASE):
                return True
    return False


def _feeds_ranks(context: Context, function: Function) -> bool:
    """Tell whether a file is connected with one that several ranks run, as a file of options is."""
    return any(context.plain(module) for module in context.in_component(function.module))


def on_cpu(context: Context, function: Function) -> bool:
    """Tell whether all groups are of gloo: then nothing was saved on a GPU."""
    made = context.calls_in_component(function.module, "init_process_group")
    return bool(made) and all(is_constant(_backend(call), "gloo") for call in made)


def _backend(call: Call) -> ast.expr | None:
    return call.node.args[0] if call.node.args else keyword(call.node, "backend")


def on_gpus_by_gloo(context: Context, function: Function) -> Iterator[Found]:
    """Yield a group of gloo for models on GPUs: each gradient goes through the CPU."""
    if not context.plain(function.module):
        return
    made = context.calls_in_component(function.module, "init_process_group")
    for call in function.calls:
        if call.name != INIT:
            continue
        backends = [_backend(c) for c in made]
        wraps = [
            c for last in ("DistributedDataParallel", "DDP") for c in context.calls_in_component(function.module, last)
        ]
        given = [keyword(c.node, "device_ids") for c in wraps]
        placed = any(isinstance(one, ast.List) and one.elts for one in given) or any(_on_gpu(c) for c in wraps)
        chosen = [context.default_of(function.module, one) if one is not None else None for one in backends]
        if placed and all(is_constant(backend, "gloo") for backend in chosen):
            message = (
                "the models are on GPUs, and gloo copies each gradient to the CPU and sends it over TCP"
                " sockets, at every step: NCCL sends it from GPU to GPU"
            )
            fix = 'write backend="nccl", and make a second group with gloo for objects on the CPU'
            yield Found("DDP420", function.module, call.node, message, fix)


def _on_gpu(call: Call) -> bool:
    """Tell whether a model was moved to a GPU before DDP wraps it: `model.cuda()`."""
    name = dotted(call.node.args[0]) if call.node.args else ""
    moves = (c for c in call.function.calls if c.last == "cuda" and c.order <= call.order)
    return bool(name) and any(dotted(c.node.func) == f"{name}.cuda" for c in moves)


RULES = (late_device, options, rendezvous_files)
OF_RANKS = (
    first_gpu,
    default_gpu,
    global_device,
    local_rank_as_rank,
    on_gpus_by_gloo,
)  # only where several ranks run the file
