"""Checkpoints that every rank loads onto the GPU from which they were saved."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .checkpoints import parts_of, paths, saved
from .context import Context, Found
from .devices import on_cpu
from .module import Call, Function, Module, dotted, keyword, names_in, shown

# What only a checkpoint has from which training goes on, and how its path is called.
PROGRESS = re.compile(r"optim|epoch|step|iter|sched|scaler|best", re.IGNORECASE)
RESUMED = re.compile(r"resume|ckpt|checkpoint|snapshot", re.IGNORECASE)
EVALUATES = re.compile(r"test|eval|infer|demo|predict|visuali[sz]e")
OPTIMIZER = re.compile(r"optim", re.IGNORECASE)
# Weights that others have saved: of a backbone, a metric, a tokenizer.
OTHERS = re.compile(
    r"imagenet|resnet|vgg|url|lpips|inception|clip|bert|swin|dino|vit|i3d|glove|word2vec|torchvision|backbone|hub",
    re.IGNORECASE,
)
ANYBODYS = {"model", "state_dict", "net", "params", "weights", "model_state_dict"}  # keys that others use as well
MOVED = re.compile(r"(?:param\w*|v|val|value|p|tensor|w|weights?|state\w*|model\w*|module|net\w*|\]|\))\.cpu\(\)")


def loads(context: Context, function: Function) -> Iterator[Found]:
    """Yield checkpoints that every rank loads onto the GPU from which they were saved."""
    if not context.plain(function.module) or on_cpu(context, function) or not _one_gpu_each(context, function):
        return
    for call in function.calls:
        if call.name != "torch.load" or not call.node.args or len(call.node.args) > 1:
            continue
        if keyword(call.node, "map_location") is not None or any(k.arg is None for k in call.node.keywords):
            continue
        if context.ranks.alone(function, call.place.guards) or not context.run_by_ranks(function):
            continue
        if context.ranks.partial(call) is not None or not _is_checkpoint(context, function, call):
            continue
        if any(re.search(r"rank|gpu|device", name) for name in names_in(call.node.args[0])):
            continue  # a file of its own for each
        if EVALUATES.match(function.name) and not any(c.last == "backward" for c in function.calls):
            continue  # a program of its own, of one process as a rule
        if any("download" in c.last or c.last == "load_url" for c in function.calls):
            continue  # others have saved it, who knows where
        if any("gpu" in name or "device" in name for guard in call.place.guards for name in names_in(guard.test)):
            continue  # where the rank has no GPU of its own
        message = (
            "tensors that were saved on GPU 0 are loaded by every rank onto GPU 0: it holds one copy for each rank"
        )
        fix = f'write `torch.load({shown(call.node.args[0], 40)}, map_location="cpu")`'
        yield Found("DDP209", function.module, call.node, message, fix)


def _one_gpu_each(context: Context, function: Function) -> bool:
    """Tell whether several ranks share a node: DDP without device_ids was once one process with all GPUs of a node."""
    if context.calls_in_component(function.module, "set_device"):
        return True
    wraps = [
        c for last in ("DistributedDataParallel", "DDP") for c in context.calls_in_component(function.module, last)
    ]
    return not wraps or any(c.node.keywords or len(c.node.args) > 1 for c in wraps)


def _is_checkpoint(context: Context, function: Function, call: Call) -> bool:
    """Tell whether a file is a checkpoint of this program: weights of others were saved who knows where."""
    if not _saves(context, function.module) or _all_on_cpu(context, function):
        return False
    uses = [(function, _names_of(function, call)), *_used_by_callers(context, function, call)]
    loads = [(where, c, names) for where, names in uses for c in _state_loads(where, names, call)]
    if not loads:
        return False
    keys = {key for where, names in uses for node in ast.walk(where.node) if (key := _key_of(node, names))}
    if any(PROGRESS.search(key) for key in keys) or any(_of_optimizer(c) for _, c, _ in loads):
        return True
    own = keys & _saved_keys(context, function.module)
    if own - ANYBODYS:
        return True
    text = f"{function.name} {shown(call.node.args[0])}"
    foreign = "pretrain" in text or any(keyword(c, "strict") is not None for _, c, _ in loads)
    if not foreign and (RESUMED.search(text) or any(RESUMED.search(dotted(c.func)) for _, c, _ in loads)):
        return True
    text += " ".join(path.text for path in paths(context, call, call.node.args[0]))
    return (
        bool(own) and not foreign and not OTHERS.search(f"{text} {function.of_class.name if function.of_class else ''}")
    )


def _of_optimizer(node: ast.Call) -> bool:
    """Tell whether a state that is loaded is that of an optimizer."""
    return OPTIMIZER.search(dotted(node.func)) is not None


def _names_of(function: Function, call: Call) -> set[str]:
    """Return the variables that get what a file holds, and those that are made of it."""
    used = {name for name, found in function.assignments.items() for a in found if a.value is call.node}
    for _ in range(3):
        for name, found in function.assignments.items():
            if used and any(a.value is not None and _made_of(a.value, used, call) for a in found):
                used.add(name)
    return used


def _made_of(node: ast.expr, used: set[str], call: Call) -> bool:
    """Tell whether a value is a part of what was loaded, or it with other keys."""
    return any(part is call.node or dotted(part) in used for part in ast.walk(node) if isinstance(part, ast.expr)) and (
        isinstance(node, (ast.Subscript, ast.DictComp, ast.Name, ast.IfExp, ast.Attribute))
        or (isinstance(node, ast.Call) and not RESUMED.search(dotted(node.func)))
    )


def _state_loads(function: Function, names: set[str], call: Call) -> list[ast.Call]:
    """Return the calls of load_state_dict that are given what was loaded, here or in a function within."""
    return [
        node
        for node in ast.walk(function.node)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and any(part is call.node or (isinstance(part, ast.expr) and dotted(part) in names) for part in ast.walk(node))
    ]


def _used_by_callers(context: Context, function: Function, call: Call) -> list[tuple[Function, set[str]]]:
    """Return the callers of a function that returns what it has loaded, with the variables that get it."""
    names = _names_of(function, call)
    returned = [e.node.value for e in function.exits if isinstance(e.node, ast.Return) and e.node.value is not None]
    if not any(value is call.node or dotted(value) in names for value in returned):
        return []
    return [(site.function, _names_of(site.function, site)) for site in context.program.sites.get(id(function), ())]


def _saves(context: Context, module: Module) -> list[Call]:
    return [c for c in context.calls_in_component(module, "save") if c.name == "torch.save"]


def _saved_keys(context: Context, module: Module) -> set[str]:
    """Return the keys of all checkpoints that these files save."""
    number = context.program.component[id(module)]
    calls = [c for name, found in context.program.calls_named.items() if "save" in name.lower() for c in found]
    keys: set[str] = set()
    for call in calls:
        one = saved(context, call) if context.program.component[id(call.function.module)] == number else None
        if one is not None:
            held = (key for _, key, _ in parts_of(context, call.function, one.state))
            keys |= {str(key.value) for key in held if isinstance(key, ast.Constant)}
    return keys


def _all_on_cpu(context: Context, function: Function) -> bool:
    """Tell whether tensors may be moved to the CPU before they are saved: by this file, or where it saves none."""
    saves = _saves(context, function.module)
    saves = [c for c in saves if c.function.module is function.module] or saves
    texts = (ast.unparse(c.function.node) for c in saves)
    return any(MOVED.search(text) or "to('cpu')" in text for text in texts)


def _key_of(node: ast.AST, used: set[str]) -> str:
    """Return the key in `checkpoint["epoch"]` and `checkpoint.get("epoch")`."""
    if isinstance(node, ast.Subscript) and dotted(node.value) in used and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        first = node.args[0]
        return str(first.value) if dotted(node.func.value) in used and isinstance(first, ast.Constant) else ""
    return ""


RULES = ()
OF_RANKS = (loads,)
