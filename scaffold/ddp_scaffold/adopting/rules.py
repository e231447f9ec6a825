"""Process groups and data loaders of existing code: one rule a function.

A rule yields findings: (node, what is wrong, what to write instead). In doubt it yields none. `run` and `ddp` in what
to write are those of the sketch. The reasons and their sources are in the documentation (facts.md, post-mortems.md).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from .code import Module, is_constant, keyword

Finding = tuple[ast.AST, str, str]
DIST = "torch.distributed."


def groups(module: Module) -> Iterator[Finding]:
    """Yield what makes and destroys process groups."""
    for call, name in module.calls:
        if name == f"{DIST}init_process_group":
            reasons = ["session() makes the process group, and refuses one that is there before"]
            if keyword(call, "timeout") is None:
                reasons.append("without timeout=, a hang is noticed after 10 minutes with backend nccl, else after 30")
            if keyword(call, "device_id") is None:
                reasons.append("without device_id=, NCCL connects at the first collective, and some calls guess a GPU")
            instead = "delete it, and put what follows into `with session(...) as run:`; run.job has rank and device"
            yield call, "; ".join(reasons), instead
        elif name == f"{DIST}destroy_process_group" and not _on_error(module, call):
            why = "session() does it, after all ranks have met; before that, ranks that still work lose their peers"
            yield call, why, "delete it"
        elif name == f"{DIST}new_group" and keyword(call, "timeout") is None and len(call.args) < 2:
            why = "a new group does not inherit the timeout: its own is 10 minutes with backend nccl, else 30"
            given = ast.unparse(call).removesuffix(")") + (", " if call.args or call.keywords else "")
            yield call, why, f"{given}timeout=seconds(run.job.clocks.collective_s)), with `seconds` of ddp.clocks"


def error_paths(module: Module) -> Iterator[Finding]:
    """Yield collectives, and the end of the group, in `except` and `finally`."""
    for call, name in module.calls:
        if not (name.startswith(DIST) and _on_error(module, call)):
            continue
        if name == f"{DIST}destroy_process_group":
            why = "on an error path it hides which rank failed: the others only report a lost connection"
            yield call, why, "delete it: session() ends all ranks within seconds, and names the one that began"
        elif name.rpartition(".")[2] in ("barrier", "monitored_barrier"):
            why = "after an exception only the failed rank comes here, and waits for the others until the timeout"
            yield call, why, "delete it, and let the exception leave `with session(...)`: it ends all ranks"


def _on_error(module: Module, node: ast.AST) -> bool:
    for parent, child in module.above(node):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(parent, ast.ExceptHandler) or child in getattr(parent, "finalbody", ()):
            return True
    return False


def loaders(module: Module, sets_epoch: bool) -> Iterator[Finding]:
    """Yield data loaders and samplers of ranks. `sets_epoch`: whether any file calls set_epoch."""
    samplers = {}
    for call, name in module.calls:
        if not (name.startswith("torch.utils.data.") and name.endswith(".DistributedSampler")):
            continue
        samplers[_assigned(module, call) or ast.unparse(call)] = call
        reasons = ["make_loader shares the samples out"]
        if not is_constant(keyword(call, "drop_last"), True):
            reasons.append("this pads by repeating samples, which an evaluation then counts twice")
        if not sets_epoch and not is_constant(keyword(call, "shuffle"), False):
            reasons.append("and set_epoch is never called, so every epoch has the same order")
        yield call, "; ".join(reasons), "delete it: see DataLoader"
    for call, name in module.calls:
        if name.endswith(".set_epoch") and isinstance(call.func, ast.Attribute):
            if ast.unparse(call.func.value) in samplers:
                yield call, "the sampler goes away", "delete it: batches(loader, run.job, epoch) sets the epoch"
        elif name.startswith("torch.utils.data.") and name.endswith(".DataLoader") and not module.only_rank0(call):
            yield from _loader(call, samplers)


def _loader(call: ast.Call, samplers: Mapping[str, ast.Call]) -> Iterator[Finding]:
    size = keyword(call, "batch_size") or (call.args[1] if len(call.args) > 1 else None)
    dataset = keyword(call, "dataset") or (call.args[0] if call.args else None)
    if dataset is None or size is None or is_constant(size, None) or keyword(call, "batch_sampler"):
        return  # make_loader has no such thing
    if any(k.arg is None for k in call.keywords) or any(isinstance(arg, ast.Starred) for arg in call.args):
        return
    reasons, in_order = ["a restarted run cannot go on in the middle of an epoch"], keyword(call, "shuffle")
    if (sampler := keyword(call, "sampler")) is None:
        reasons.append("and all ranks read the same samples, unless the data set shares them out")
    elif ast.unparse(sampler) in samplers:
        in_order = keyword(samplers[ast.unparse(sampler)], "shuffle")
    elif "ampler" not in ast.unparse(sampler) or "Sampler(" in ast.unparse(sampler):
        return  # a sampler of the user's own has a purpose
    if not is_constant(keyword(call, "num_workers") or ast.Constant(0), 0) and keyword(call, "timeout") is None:
        reasons.append("and a worker that hangs is waited for without a limit")
    words = [ast.unparse(dataset), "run.job", "ddp.loader", f"batch_size={ast.unparse(size)}"]
    words += ["train=False"] if is_constant(in_order, False) else []
    words += [f"collate_fn={ast.unparse(collate)}"] if (collate := keyword(call, "collate_fn")) is not None else []
    workers = "" if keyword(call, "num_workers") is None else "; DDP_LOADER__WORKERS sets its workers"
    instead = f"make_loader({', '.join(words)}), read by `for batch in batches(loader, run.job, epoch)`{workers}"
    yield call, "; ".join(reasons), instead


def _assigned(module: Module, call: ast.Call) -> str:
    """Return the name that a call's result gets, also in `x = call() if several else None`, or an empty text."""
    parent = module.parents[call]
    if isinstance(parent, ast.IfExp):
        parent = module.parents[parent]
    return ast.unparse(parent.targets[0]) if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else ""
