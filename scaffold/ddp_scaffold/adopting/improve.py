"""What may change once a loop stops and resumes: loaders that go on in the middle of an epoch, own saves, phases.

In doubt nothing is said. The reasons and their sources are in the documentation (facts.md, post-mortems.md).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ..check.python.context import Context
from ..check.python.module import Call, Function, is_constant, keyword
from .patch import Place, statement_of
from .shape import Shape

PHASE = "ddp_phase"
SAMPLER = "DistributedSampler"
# What make_loader has in another way: DDP_LOADER__WORKERS and the like, pinned memory, a clock of its own.
COVERED = {
    *("dataset", "batch_size", "shuffle", "sampler", "num_workers", "pin_memory", "drop_last", "collate_fn", "timeout"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "multiprocessing_context"),
}


def improvements(shape: Shape, context: Context, package: str) -> Iterator[Place]:
    """Yield the places, in the order of work."""
    for function in shape.reached:
        yield from _loaders(shape, context, function)
    for function in shape.reached:
        yield from _own_files(shape, function, package)
    yield from _phases(shape, package)


def _loaders(shape: Shape, context: Context, function: Function) -> Iterator[Place]:
    """Loader and sampler together, or neither: without its sampler, a loader reads the same on all ranks."""
    samplers = {
        _target(function, call) or ast.unparse(call.node): call for call in function.calls if call.last == SAMPLER
    }
    used: set[str] = set()
    for call in function.calls:
        if call.last != "DataLoader" or not call.name.startswith("torch.") or context.ranks.partial(call):
            continue
        found = _loader(shape, call, samplers)
        if found is None:
            continue
        place, sampler = found
        yield place
        used.add(sampler)
    for name, call in samplers.items():
        if name in used and _target(function, call):
            yield Place(function.module, call.node.lineno, "make_loader shares the samples out", "delete it")
    for call in function.calls:
        owner = ast.unparse(call.node.func.value) if isinstance(call.node.func, ast.Attribute) else ""
        if call.last == "set_epoch" and owner in used:
            instead = "delete it: batches(loader, run.job, epoch) sets the epoch"
            yield Place(function.module, call.node.lineno, "the sampler goes away", instead)


def _loader(shape: Shape, call: Call, samplers: Mapping[str, Call]) -> tuple[Place, str] | None:
    node = call.node
    size = keyword(node, "batch_size") or (node.args[1] if len(node.args) > 1 else None)
    dataset = keyword(node, "dataset") or (node.args[0] if node.args else None)
    sampler = keyword(node, "sampler") or (node.args[3] if len(node.args) > 3 else None)
    if dataset is None or size is None or is_constant(size, None) or keyword(node, "batch_sampler"):
        return None  # make_loader has no such thing
    if any(word.arg is None for word in node.keywords) or any(isinstance(arg, ast.Starred) for arg in node.args):
        return None
    name = ""
    if sampler is not None and not is_constant(sampler, None):
        chosen = sampler.body if isinstance(sampler, ast.IfExp) else sampler
        name = ast.unparse(chosen)
        if name not in samplers:
            return None  # one of the user's own has a purpose
    trains = _trains(shape, call)
    words = [ast.unparse(dataset), "run.job", "ddp.loader", f"batch_size={ast.unparse(size)}"]
    words += [] if trains else ["train=False"]
    words += [f"collate_fn={ast.unparse(collate)}"] if (collate := keyword(node, "collate_fn")) is not None else []
    words += ["full=True"] if is_constant(keyword(node, "drop_last"), True) else []
    seed = keyword(samplers[name].node, "seed") if name else None
    words += [f"seed={ast.unparse(seed)}"] if seed is not None else []
    lost = sorted(word.arg for word in node.keywords if word.arg and word.arg not in COVERED)
    said = f"; not kept: {', '.join(lost)} (DDP_LOADER__SEED_SAMPLES=true seeds each sample)" if lost else ""
    why = "nobody compares what the ranks read, a worker that hangs has no limit, and an evaluation repeats samples"
    instead = f"make_loader({', '.join(words)}), read by `batches(loader, run.job, epoch)`{said}"
    return Place(call.function.module, node.lineno, why, instead), name


def _trains(shape: Shape, call: Call) -> bool:
    """Tell whether the loop that makes steps reads this loader, by its name or by what it says of itself."""
    name = _target(call.function, call).rpartition(".")[2]
    if any(word in name.lower() for word in ("val", "test", "eval")):
        return False
    if "train" in name.lower() or keyword(call.node, "sampler") is not None:
        return not is_constant(keyword(call.node, "shuffle"), False) or "train" in name.lower()
    read = {ast.unparse(level.loop.iter) for level in shape.steps if isinstance(level.loop, ast.For)}
    return any(name and name in text for text in read) or is_constant(keyword(call.node, "shuffle"), True)


def _target(function: Function, call: Call) -> str:
    """Return the name that a call's result gets, also in `x = call() if several else None`, or an empty text."""
    statement, _ = statement_of(function, call.node)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    value = statement.value.body if isinstance(statement.value, ast.IfExp) else statement.value
    return ast.unparse(statement.targets[0]) if value is call.node else ""


def _own_files(shape: Shape, function: Function, package: str) -> Iterator[Place]:
    """Own checkpoints, which may stay for other purposes."""
    held = {each.text.rpartition(".")[2] for each in shape.held}
    for call in function.calls:
        owner = call.name.rpartition(".")[0].rpartition(".")[2]
        if call.last == "load_state_dict" and owner in held | {"module"}:
            why = "resumed_epochs loads all of it once more, from the newest complete checkpoint of the run"
            instead = "delete it, unless it begins from weights of another training"
            yield Place(function.module, call.node.lineno, why, instead)
        elif call.name == "torch.save":
            why = "a kill while this is written leaves a file that cannot be loaded"
            instead = "delete it, unless others need the file: resumed_epochs saves all that is trained, and"
            weights = f"`python -m {package}.ddp.export` gives the weights alone"
            yield Place(function.module, call.node.lineno, why, f"{instead} {weights}")


def _phases(shape: Shape, package: str) -> Iterator[Place]:
    """Phases: reports tell by them where a rank was, and what was slow."""
    lines: set[tuple[int, int]] = set()
    for level in shape.steps:
        loop = level.loop
        for call in level.function.calls:
            if loop not in call.place.loops or any(f"{PHASE}(" in ast.unparse(each) for each in call.place.withs):
                continue
            owner = call.name.rpartition(".")[0].rpartition(".")[2].lower()
            phase = "backward" if call.last == "backward" else "optim" if call.last == "step" and "opt" in owner else ""
            key = (id(level.function.module), call.node.lineno)
            if phase and key not in lines:
                lines.add(key)
                why = f"a report says in which phase a rank was: of this it says train, not {phase}"
                imported = f"`from {package}.ddp import phase as {PHASE}`"
                instead = f'put it below `with {PHASE}("{phase}"):`, with {imported}'
                yield Place(level.function.module, call.node.lineno, why, instead)
