"""What a call does that all ranks must do together: a collective, a forward pass of DDP, a sharded save, a metric."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .module import Assignment, Call, Class, Function, Guard, argument, dotted, is_constant, keyword, shown
from .program import Program
from .ranks import ALONE, Ranks, is_off

DIST = "torch.distributed."
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "all_gather_coalesced"),
}
CERTAIN = {"barrier", "all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "monitored_barrier"}
LIGHTNING = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
# Methods that every rank must call, of objects that are called like this in files that import such a package.
METHODS: tuple[tuple[re.Pattern[str], frozenset[str], frozenset[str]], ...] = (
    (
        re.compile(r"(?:.*\.)?_?accelerator"),
        frozenset({"wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes"}),
        frozenset({"accelerate"}),
    ),
    (re.compile(r"(?:.*\.)?_?fabric"), frozenset({"barrier", "all_gather", "all_reduce", "broadcast"}), LIGHTNING),
    (re.compile(r"(?:.*\.)?strategy"), frozenset({"barrier", "broadcast", "all_gather", "reduce"}), LIGHTNING),
    (
        re.compile(r"(?:.*\.)?hvd|horovod\.torch"),
        frozenset({"allreduce", "allgather", "broadcast", "broadcast_object"}),
        frozenset({"horovod"}),
    ),
)
# Functions of libraries that call a collective.
KNOWN = {
    **dict.fromkeys((f"{DIST}checkpoint.{name}" for name in ("save", "async_save", "save_state_dict")), "sharded save"),
    **dict.fromkeys((f"{DIST}checkpoint.{name}" for name in ("load", "load_state_dict")), "sharded load"),
    **{f"timm.utils.{name}": "collective" for name in ("reduce_tensor", "distribute_bn")},
    **{
        f"detectron2.utils.comm.{name}": "collective" for name in ("synchronize", "gather", "all_gather", "reduce_dict")
    },
    **{f"ignite.distributed.{name}": "collective" for name in ("barrier", "all_reduce", "all_gather", "broadcast")},
    **{f"mmengine.dist.{name}": "collective" for name in ("barrier", "all_reduce", "all_gather", "broadcast")},
    "torch_xla.core.xla_model.rendezvous": "collective",
    f"{DIST}new_group": "group",
    f"{DIST}new_subgroups": "group",
    f"{DIST}device_mesh.init_device_mesh": "group",
}
DDP = re.compile(r"(?:.*\.)?(?:DistributedDataParallel|DDP)")
FSDP = re.compile(r"(?:.*\.)?(?:FullyShardedDataParallel|FSDP)")
# Objects by what makes them, and their methods that every rank must call.
MAKERS: tuple[tuple[re.Pattern[str], frozenset[str]], ...] = (
    (re.compile(r"transformers\.(?:Seq2Seq)?Trainer|trl\.\w+Trainer"), frozenset({"train", "evaluate", "predict"})),
    (
        re.compile(r"(?:pytorch_lightning|lightning(?:\.pytorch)?)\.Trainer"),
        frozenset({"fit", "validate", "test", "predict", "save_checkpoint"}),
    ),
    (re.compile(r"deepspeed\.initialize"), frozenset({"save_checkpoint", "load_checkpoint", "backward", "step"})),
)
FRAMEWORK_METHODS = frozenset().union(*(methods for _, methods in MAKERS))
MAX_DEPTH = 12
MOVES = {"to", "cuda", "train", "eval", "float", "half", "requires_grad_"}  # methods that return the model itself
QUIET = {"no_grad", "inference_mode"}
BUFFERS = re.compile(r"Batch_?Norm|InstanceNorm|spectral_norm|torchvision|timm")
BUFFERED = re.compile(
    r"torch\.nn\.(?:Sync)?BatchNorm\w*|torchvision\.models\.(?:resne|wide_resnet|densenet|mobilenet|regnet|shufflenet)\w*"
)
BUFFERLESS = {f"torch.nn.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LSTM", "GRU")}


@dataclass(frozen=True)
class Effect:
    """What all ranks must do together. `via` are the functions through which it is reached, and where it stands."""

    kind: str  # collective, group, forward, sharded save, sharded load, metric
    name: str
    via: tuple[str, ...] = ()
    where: str = ""
    quiet: bool = False  # a forward pass without gradients
    doubt: str = ""  # what is not known about the way to it: that a condition is met, or which function a call means

    @property
    def sure(self) -> bool:
        """Tell whether it is reached whenever several processes come to the call."""
        return not self.doubt

    def words(self) -> str:
        """Return it in words: `barrier (through synchronize, in utils/dist.py line 12)`."""
        name = {"forward": f"the forward pass of {self.name}", "metric": f"{self.name}"}.get(self.kind, self.name)
        return f"{name} (through {', '.join(self.via)}; {self.where})" if self.via else name


class Effects:
    """Finds effects of calls, in the call's own function and through the functions that it reaches."""

    def __init__(self, program: Program, ranks: Ranks) -> None:
        self.program, self.ranks = program, ranks
        self._summary: dict[int, list[Effect]] = {}
        self._direct: dict[int, Effect | None] = {}
        self._wrapped: dict[tuple[int, str], tuple[Function, ast.Call] | None] = {}
        self._called_parameters: dict[int, frozenset[str]] = {}

    def of(self, call: Call) -> list[Effect]:
        """Return the effects of a call; several, if it reaches several."""
        direct = self.direct(call)
        if direct is not None:
            return [direct]
        target = self.program.called(call)
        found = list(self.inside(target)) if target is not None and target is not call.function else []
        found = [replace(effect, doubt=self.unclear(call, effect) or effect.doubt) for effect in found]
        if target is not None and not found:
            forward = self._forward_through(call, target)
            found = [forward] if forward else []
        return found

    def direct(self, call: Call) -> Effect | None:
        """Return the effect of a call by itself."""
        if id(call) not in self._direct:
            self._direct[id(call)] = self._direct_now(call)
        return self._direct[id(call)]

    def _direct_now(self, call: Call) -> Effect | None:
        name, last = call.name, call.last
        if name in KNOWN:
            return Effect("collective" if KNOWN[name] == "collective" else KNOWN[name], last)
        if name.startswith(DIST) and last in COLLECTIVES and name.count(".") == 2:
            return None if _of_group(call, last) else Effect("collective", last)
        if self._from_star(call) and not _of_group(call, last):
            return Effect("collective", last)
        owner = dotted(call.node.func).rpartition(".")[0]
        for pattern, methods, packages in METHODS:
            if last in methods and owner and pattern.fullmatch(owner):
                known = packages & {written.partition(".")[0] for written, _ in call.function.module.relative.values()}
                return Effect("collective", f"{owner}.{last}", doubt="" if known else f"what `{owner}` is")
        if not owner and last in CERTAIN and last in call.function.module.relative:
            written, inside = call.function.module.relative[last]
            if inside and self.program.lookup(call.function.module, last) is None and "thread" not in written:
                return None if _of_group(call, last) else Effect("collective", last)
        if owner and self._is_metric(call, owner, last):
            return Effect("metric", f"{owner}.compute()")
        text = dotted(call.node.func)
        if text and self.is_ddp(call.function, text) and wrapped_by_then(self, call, text):
            return Effect("forward", text, quiet=without_gradients(call))
        if (framework := self._of_framework(call, owner, last)) is not None:
            ended = (c for c in call.function.calls if c.last == "destroy_process_group" and c.order < call.order)
            return None if any(True for _ in ended) else framework
        if last == "state_dict" and owner and self._made_by(call.function, owner, FSDP):
            return Effect("collective", f"{owner}.state_dict()")
        return None

    def _of_framework(self, call: Call, owner: str, last: str) -> Effect | None:
        """Return the effect of a method of Lightning's, DeepSpeed's or the HF Trainer's objects."""
        if owner == "self" and last in ("log", "log_dict") and is_constant(keyword(call.node, "sync_dist"), True):
            return Effect("collective", f"self.{last}(sync_dist=True)")
        if not owner or last not in FRAMEWORK_METHODS:
            return None
        makers = [a.value for a in self.program.assigned(call.function, owner) if isinstance(a.value, ast.Call)]
        if any(is_constant(keyword(maker, "devices"), 1) for maker in makers):
            return None
        for assignment in self.program.assigned(call.function, owner):
            value = getattr(assignment.node, "value", None)
            made = call.function.module.full_name(value.func) if isinstance(value, ast.Call) else ""
            if any(pattern.fullmatch(made) and last in methods for pattern, methods in MAKERS):
                return Effect("sharded save" if "save" in last else "collective", f"{owner}.{last}")
        return None

    def _from_star(self, call: Call) -> bool:
        module = call.function.module
        return call.name in COLLECTIVES and "torch.distributed" in module.stars

    def _is_metric(self, call: Call, owner: str, last: str) -> bool:
        if last != "compute":
            return False
        values = [a.value for a in self.program.assigned(call.function, owner)]
        return bool(values) and all(
            isinstance(v, ast.Call) and call.function.module.full_name(_innermost(v).func).startswith("torchmetrics.")
            for v in values
        )

    def _made_by(self, function: Function, name: str, pattern: re.Pattern[str]) -> bool:
        return any(
            isinstance(a.value, ast.Call) and pattern.fullmatch(function.module.full_name(a.value.func))
            for a in self.program.assigned(function, name)
        )

    def is_ddp(self, function: Function, name: str) -> bool:
        """Tell whether a variable holds a model that DDP wraps, also where a caller gives it."""
        return self.wrap(function, name) is not None

    def wrap(self, function: Function, name: str, depth: int = 0) -> tuple[Function, ast.Call] | None:
        """Return the call of DistributedDataParallel that a variable has its value from, and the function it is in."""
        key = (id(function), name)
        if key not in self._wrapped:
            self._wrapped[key] = None
            self._wrapped[key] = self._wrap_now(function, name, depth)
        return self._wrapped[key]

    def _wrap_now(self, function: Function, name: str, depth: int) -> tuple[Function, ast.Call] | None:
        for assignment in self.program.assigned(function, name):
            if (made := self.wrap_of(function, assignment)) is not None:
                return function, made
        if name in function.parameters and depth <= 3:
            for call in self.program.sites.get(id(function), ()):
                value = argument(call, function, name)
                given = dotted(value) if value is not None else ""
                if given and (found := self.wrap(call.function, given, depth + 1)) is not None:
                    return found
        return None

    def wrap_of(self, function: Function, assignment: Assignment) -> ast.Call | None:
        """Return the call of DistributedDataParallel that an assignment gets its value from."""
        value = assignment.value
        if isinstance(value, ast.IfExp):
            value = value.body
        value = _innermost(value) if isinstance(value, ast.Call) else value
        if isinstance(value, ast.Call) and DDP.fullmatch(function.module.full_name(value.func)):
            return value
        return None

    def broadcasts_buffers(self, function: Function, name: str) -> bool:
        """Tell whether the model in a DDP variable has buffers, which DDP broadcasts in each forward pass.

        Its class is read, with the classes that it names; of a model that is not in these files the answer is yes.
        """
        found = self.wrap(function, name)
        if found is None or is_constant(keyword(found[1], "broadcast_buffers"), False):
            return False
        owner, wrap = found
        values = self._models(owner, wrap)
        read = [made for value in values if (made := self._made(owner, value)) is not None]
        if not read:
            return not any(owner.module.full_name(_innermost(v).func) in BUFFERLESS for v in values)
        return self._has_buffers(read)

    def is_read(self, function: Function, name: str) -> bool:
        """Tell whether it is known if the model in a DDP variable has buffers: its class is here, or is a known one."""
        found = self.wrap(function, name)
        if found is None:
            return False
        models = self._models(*found)
        names = (found[0].module.full_name(_innermost(value).func) for value in models)
        return any(self._made(found[0], value) for value in models) or any(BUFFERED.fullmatch(name) for name in names)

    def _models(self, owner: Function, wrap: ast.Call) -> list[ast.Call]:
        """Return the calls that make the model which a call of DistributedDataParallel wraps."""
        model = wrap.args[0] if wrap.args else keyword(wrap, "module")
        while isinstance(model, ast.Call) and isinstance(model.func, ast.Attribute) and model.func.attr in MOVES:
            model = model.func.value
        if model is not None and dotted(model):
            return [a.value for a in self.program.assigned(owner, dotted(model)) if isinstance(a.value, ast.Call)]
        return [model] if isinstance(model, ast.Call) else []

    def _made(self, function: Function, value: ast.expr | None) -> Class | None:
        if not isinstance(value, ast.Call) or not dotted(_innermost(value).func):
            return None
        found = self.program.lookup(function.module, dotted(_innermost(value).func))
        return found if isinstance(found, Class) else None

    def _has_buffers(self, classes: list[Class]) -> bool:
        seen: set[int] = set()
        while classes:
            made = classes.pop()
            if id(made) in seen:
                continue
            seen.add(id(made))
            registered = (c for method in made.methods.values() for c in method.calls if c.last == "register_buffer")
            if any(not call.place.guards for call in registered):
                return True
            for node in ast.walk(made.node):
                name = dotted(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
                if name and BUFFERS.search(name):
                    return True
                inner = self.program.lookup(made.module, name) if name and len(seen) < 200 else None
                if isinstance(inner, Class):
                    classes.append(inner)
        return False

    def inside(self, function: Function, depth: int = 0) -> list[Effect]:
        """Return what a function does together with the other ranks whenever it is called; each name once."""
        key = id(function)
        if key in self._summary:
            return self._summary[key]
        self._summary[key] = []  # for a function that calls itself
        if depth > MAX_DEPTH or is_generator(function) or _is_cached(function):
            return []
        found: dict[str, Effect] = {}
        for call in function.calls:
            if not self._surely_reached(call):
                continue
            direct = self.direct(call)
            if direct is not None:
                if direct.kind == "forward" and dotted(call.node.func) in function.parameters:
                    continue  # that depends on who calls it
                doubt = self._doubt(call)
                effects = [Effect(direct.kind, direct.name, (function.name,), self.where(call), direct.quiet, doubt)]
            else:
                target = self.program.called(call)
                if target is None or target is function:
                    continue
                quiet = without_gradients(call)
                doubt = self._doubt(call)
                effects = [
                    Effect(
                        *(e.kind, e.name, (function.name, *e.via), e.where, quiet or e.quiet),
                        doubt=doubt or self.unclear(call, e) or e.doubt,
                    )
                    for e in self.inside(target, depth + 1)
                ]
            for effect in effects:
                if effect.name not in found or (effect.sure and not found[effect.name].sure):
                    found[effect.name] = effect
        self._summary[key] = list(found.values())
        return self._summary[key]

    def _doubt(self, call: Call) -> str:
        """Return the condition in a helper that may keep all ranks from a call, if there is one."""
        for guard in call.place.guards:
            several = self.ranks.alone(call.function, [Guard(guard.test, not guard.holds, guard.line)])
            if not several and guard.early != "raise":
                return (
                    f"whether `{shown(guard.test, 40)}` {'holds' if guard.holds else 'fails'} in `{call.function.name}`"
                )
        return ""

    def unclear(self, call: Call, effect: Effect) -> str:
        """Return why it is not certain that a call comes to an effect of the function which it is taken to mean."""
        others = (self.inside(other) for other in self.program.overrides(call))
        agree = all(any(e.name == effect.name and e.sure for e in effects) for effects in others)
        known = self.program.unambiguous(call) and agree
        return "" if known else f"which function `{shown(call.node.func, 40)}` means there"

    def where(self, call: Call) -> str:
        """Return `utils/dist.py line 12` for a call."""
        module = call.function.module
        cell, line = module.position(call.node.lineno)
        return f"{module.file.path} " + (f"cell {cell} " if cell else "") + f"line {line}"

    def _surely_reached(self, call: Call) -> bool:
        """Tell whether a call is made whenever its function is called by several ranks."""
        function = call.function
        if any(part == "except" for _, part in call.place.tries):
            return False
        if self.ranks.partial(call) is not None:
            return False
        for guard in call.place.guards:
            parts = [part.id for part in ast.walk(guard.test) if isinstance(part, ast.Name)]
            depends = any(
                part in function.parameters
                and part not in ("self", "args", "cfg", "config")
                and not ALONE.search(part.lower())
                for part in parts
            )
            if re.search(r"tpu|xla", ast.unparse(guard.test).lower()):
                return False
            if guard.holds and dotted(guard.test) in function.parameters and is_off(function, dotted(guard.test)):
                return False  # who calls it has to ask for it
            if isinstance(guard.test, ast.Compare) and is_constant(guard.test.comparators[0], None):
                return False  # it depends on what it has been given or has found
            if depends:
                return False
        return True

    def forward_through(self, call: Call) -> Effect | None:
        """Return the forward pass of a DDP model that a call makes by giving it to a function of these files."""
        target = self.program.called(call)
        return self._forward_through(call, target) if target is not None else None

    def _forward_through(self, call: Call, target: Function) -> Effect | None:
        """Return the forward pass of a DDP model that a call gives to a function which calls it."""
        for name in self.called_parameters(target):
            value = argument(call, target, name)
            given = dotted(value) if value is not None else ""
            if given and self.is_ddp(call.function, given) and wrapped_by_then(self, call, given):
                quiet = without_gradients(call) or self._quiet_inside(target, name)
                where = f"{target.module.file.path} line {target.node.lineno}"  # type: ignore[union-attr]
                return Effect("forward", given, (target.name,), where, quiet)
        return None

    def _quiet_inside(self, function: Function, name: str, depth: int = 0) -> bool:
        """Tell whether a function calls its parameter without gradients only."""
        found = []
        for call in function.calls:
            if dotted(call.node.func) == name:
                found.append(without_gradients(call))
                continue
            target = self.program.called(call)
            if target is None or depth > MAX_DEPTH:
                continue
            for inner in self.called_parameters(target):
                value = argument(call, target, inner)
                if value is not None and dotted(value) == name:
                    found.append(without_gradients(call) or self._quiet_inside(target, inner, depth + 1))
        return bool(found) and all(found)

    def called_parameters(self, function: Function, depth: int = 0) -> frozenset[str]:
        """Return the parameters that a function calls itself, or gives to one that does."""
        key = id(function)
        if key in self._called_parameters:
            return self._called_parameters[key]
        self._called_parameters[key] = frozenset()
        mine, found = set(function.parameters) - set(function.assignments), set()
        for call in function.calls:
            name = dotted(call.node.func)
            if name in mine:
                found.add(name)
                continue
            target = self.program.called(call)
            if target is None or depth > MAX_DEPTH:
                continue
            for inner in self.called_parameters(target, depth + 1):
                value = argument(call, target, inner)
                if value is not None and dotted(value) in mine:
                    found.add(dotted(value))
        self._called_parameters[key] = frozenset(found)
        return self._called_parameters[key]


def without_gradients(call: Call) -> bool:
    """Tell whether a call is made under no_grad() or inference_mode(), here or by a decorator of its function."""
    decorators = [] if isinstance(call.function.node, ast.Module) else call.function.node.decorator_list
    return any(
        QUIET & {dotted(part).rpartition(".")[2] for part in ast.walk(one)} for one in (*call.place.withs, *decorators)
    )


def wrapped_by_then(effects: Effects, call: Call, name: str) -> bool:
    """Tell whether a DDP model is still, and already, wrapped where a call uses it."""
    mine = call.function.assignments.get(name, [])
    wraps = [a for a in mine if effects.wrap_of(call.function, a) is not None]
    before = [a for a in wraps if a.order < call.order]
    if wraps and not before and not any(set(a.place.loops) & set(call.place.loops) for a in wraps):
        return False
    start = max((a.order for a in before), default=0)
    return not any(start < a.order < call.order and a.value is not None and _unwraps(a.value) for a in mine)


def _is_cached(function: Function) -> bool:
    """Tell whether a function is run once for the same arguments: whether a call runs it is not known."""
    decorators = [] if isinstance(function.node, ast.Module) else function.node.decorator_list
    names = {dotted(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in decorators}
    return bool(names & {"cache", "lru_cache", "cached"})


def _unwraps(value: ast.expr) -> bool:
    names = {dotted(part).rpartition(".")[2] for part in ast.walk(value) if isinstance(part, (ast.Name, ast.Attribute))}
    return bool(names & {"module", "unwrap", "unwrap_model", "de_parallel", "get_raw_model"})


def _innermost(call: ast.Call) -> ast.Call:
    """Return `Metric()` of `Metric().to(device)`."""
    while isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        call = call.func.value
    return call


def _of_group(call: Call, last: str) -> bool:
    """Tell whether a collective is one of a smaller group: which ranks that has is not known."""
    group = keyword(call.node, "group") or keyword(call.node, "process_group")
    position = {"barrier": 0, "monitored_barrier": 0, "all_reduce": 2, "broadcast": 2, "all_gather": 2}.get(last, 99)
    if group is None and len(call.node.args) > position:
        group = call.node.args[position]
    return group is not None and not is_constant(group, None) and not dotted(group).endswith("WORLD")


def is_generator(function: Function) -> bool:
    """Tell whether a function yields."""
    stack: list[ast.AST] = list(getattr(function.node, "body", ()))
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))
    return False


def walk_body(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement without those of functions that are defined in it."""
    stack = [node]
    while stack:
        part = stack.pop()
        yield part
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)) or part is node:
            stack.extend(ast.iter_child_nodes(part))
