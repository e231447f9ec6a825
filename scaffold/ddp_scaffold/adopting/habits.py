"""Options, norms, signals and variables of existing code that cost time, hide something or do nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .code import Module, is_constant, keyword
from .rules import Finding

# Neither NCCL 2.30.7 nor PyTorch 2.14.1 reads them.
READ_BY_NOBODY = {
    *("NCCL_TIMEOUT", "NCCL_CONNECT_TIMEOUT", "NCCL_SOCKET_TIMEOUT", "NCCL_COMM_TIMEOUT", "NCCL_MAX_RETRIES"),
    *("NCCL_WATCHDOG", "NCCL_ABORT_ON_ERROR", "NCCL_CHECKS_DISABLE", "NCCL_LL_THRESHOLD", "NCCL_TREE_THRESHOLD"),
    *("NCCL_IB_CUDA_SUPPORT", "NCCL_IB_GDR_LEVEL", "TORCH_NCCL_TIMEOUT", "TORCH_NCCL_FLIGHT_RECORDER_ENABLED"),
    *("TORCH_DISTRIBUTED_TIMEOUT", "PYTORCH_TIMEOUT", "GLOO_TIMEOUT_SECONDS"),
}
STOP_SIGNALS = {"signal.SIGTERM", "signal.SIGUSR1", "signal.SIGUSR2", "signal.SIGINT"}


def options(module: Module) -> Iterator[Finding]:
    """Yield options that cost time or hide something. Some models need them, so these are remarks."""
    for call, name in module.calls:
        if name.endswith(".DistributedDataParallel") and name.startswith("torch."):
            if is_constant(keyword(call, "find_unused_parameters"), True):
                why = "remark: it walks the graph at each step, and hides a parameter that is left out by mistake"
                yield call, why, "leave it out, unless parts of the model are skipped on purpose"
        elif name.endswith(".backward") and is_constant(keyword(call, "retain_graph"), True):
            why = "remark: it keeps the memory of the forward pass"
            yield call, why, "leave it out, unless the same graph is differentiated again"


def norms(module: Module) -> Iterator[Finding]:
    """Yield norms of gradients that wait for the GPU once a parameter, or at every step."""
    for loop in ast.walk(module.tree):
        if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call)):
            continue
        over = module.full_name(loop.iter.func).rpartition(".")[2]
        if over not in ("parameters", "named_parameters") or module.only_rank0(loop):
            continue
        norms_of_one = {
            ast.unparse(target)
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign) and _of_gradient(node.value, set())
            for target in node.targets
        }
        for node in ast.walk(loop):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args):
                continue
            if node.func.attr in ("item", "cpu") and _of_gradient(node.func.value, norms_of_one):
                why = "it waits for the GPU once for each parameter, and all other ranks wait for the slowest"
                owner = ast.unparse(loop.iter.func.value) if isinstance(loop.iter.func, ast.Attribute) else "model"
                yield node, why, f"after the backward pass: norm = global_norm(p.grad for p in {owner}.parameters())"
                break
    for call, _ in module.calls:
        inner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "item" else None
        if not (isinstance(inner, ast.Call) and len(inner.args) >= 2):
            continue
        if module.full_name(inner.func) == "torch.nn.utils.clip_grad_norm_":
            words = f"{ast.unparse(inner.args[0])}, 1.0, {ast.unparse(inner.args[1])}"
            why = ".item() makes the CPU wait for the GPU at every step"
            yield call, why, f"norm = clip_gradients({words}); run.metrics.scalars(step, {{'grad_norm': norm}})"


def _of_gradient(node: ast.expr, names: set[str]) -> bool:
    parts = list(ast.walk(node))
    attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return "grad" in attributes or any(isinstance(part, ast.Name) and part.id in names for part in parts)


def signals(module: Module) -> Iterator[Finding]:
    """Yield handlers of signals that session() handles."""
    for call, name in module.calls:
        if name == "signal.signal" and call.args and module.full_name(call.args[0]) in STOP_SIGNALS:
            why = "session() handles this signal, and the last handler wins; a rank that stops alone hangs the others"
            instead = "delete it; run.agreement.poll(step) raises StopRequested on all ranks at the same step"
            yield call, why, instead


def variables(module: Module, read: set[str]) -> Iterator[Finding]:
    """Yield variables that nothing reads, where they are set, and a timeout that is patched where nothing looks.

    `read`: those that the repository's own code reads.
    """
    for node in ast.walk(module.tree):
        found: set[str] = set()
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and module.full_name(target.value) == "os.environ":
                    found |= _texts(target.slice)
                elif isinstance(target, ast.Attribute) and target.attr == "_DEFAULT_PG_TIMEOUT":
                    why = "torch.distributed has no such attribute, so nothing reads it"
                    yield node, why, "delete it; DDP_CLOCKS__COLLECTIVE_S sets the timeout"
        elif isinstance(node, ast.Call) and module.full_name(node.func) in ("os.environ.setdefault", "os.putenv"):
            found |= _texts(node.args[0]) if node.args else set()
        for name in sorted(found & READ_BY_NOBODY - read):
            instead = "delete it" + ("; DDP_CLOCKS__COLLECTIVE_S sets the timeout" if "TIMEOUT" in name else "")
            yield node, f"nothing reads {name}: neither NCCL nor PyTorch", instead


def variables_read(module: Module) -> set[str]:
    """Return the names of variables that a file reads."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            found |= _texts(node.slice) if module.full_name(node.value) == "os.environ" else set()
        elif isinstance(node, ast.Call) and module.full_name(node.func) in ("os.getenv", "os.environ.get"):
            found |= _texts(node)
    return found


def _texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
