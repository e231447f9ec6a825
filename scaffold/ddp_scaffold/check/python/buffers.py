"""A rule for buffers that are too large for what DDP does with them: it broadcasts them at each forward pass."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .context import Context, Found
from .effects import DDP
from .module import Call, Class, Function, argument, default_of, dotted, keyword, last_of

MINIMUM = 8_000_000  # bytes: fewer are lost beside the broadcast of the statistics of BatchNorm
SAMPLES = 50_000.0  # of a training set whose length the files ask for: those of CIFAR, one of the smallest
SET = re.compile(r"data|train|samples|images|_set\b")
MAX_DEPTH = 8
FILLED = {"zeros", "ones", "empty", "rand", "randn", "full", "Tensor", "FloatTensor", "LongTensor", "IntTensor"}
FILLED |= {"BoolTensor", "ByteTensor", "HalfTensor", "DoubleTensor"}
RANGES = {"arange", "linspace"}
# Functions and methods that give a tensor of the size of what they are given.
ALIKE = {
    *("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "contiguous", "t", "clone", "detach"),
    *("cos", "sin", "exp", "abs", "sqrt", "pow", "log", "masked_fill", "masked_fill_", "normalize", "tril", "triu"),
    *("from_numpy", "as_tensor", "tensor", "to", "cuda", "fill_", "zero_", "mul_", "add_", "div_", "mul", "add", "div"),
    *("uniform_", "normal_", "random_", "rand_like", "zeros_like", "ones_like", "Parameter", "logical_not", "T"),
    "flatten",
}
KINDS = {
    **dict.fromkeys(("bool", "uint8", "int8", "byte", "BoolTensor", "ByteTensor", "char"), 1),
    **dict.fromkeys(("float16", "half", "bfloat16", "HalfTensor", "int16", "short"), 2),
    **dict.fromkeys(("float32", "float", "int32", "int", "FloatTensor", "Tensor", "IntTensor"), 4),
    **dict.fromkeys(("float64", "double", "int64", "long", "LongTensor", "DoubleTensor"), 8),
}
LEFT_OUT = re.compile(r"_ddp_params_and_buffers_to_ignore|_set_params_and_buffers_to_ignore_for_model")
OUTSIDE = re.compile(r"loss|criteri|metric|memory_?bank", re.IGNORECASE)  # modules that are seldom within the DDP model


@dataclass(frozen=True)
class Size:
    """How many elements a tensor has, and of how many bytes each."""

    elements: float
    bytes_each: int = 4

    @property
    def bytes(self) -> float:
        """Return the bytes of all elements."""
        return self.elements * self.bytes_each


@dataclass
class Sizes:
    """Answers how large a tensor is, from the numbers that are written in the files."""

    context: Context
    bound: dict[str, float] = field(default_factory=dict)  # of a helper: the numbers it is given

    def number(self, function: Function, node: ast.AST | None, depth: int = 0) -> float | None:
        """Return the number that an expression is: the smallest, where callers give several."""
        if node is None or depth > MAX_DEPTH:
            return None
        if isinstance(node, ast.Constant):
            plain = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
            return float(node.value) if plain else None  # type: ignore[arg-type]
        if isinstance(node, ast.BinOp):
            left, right = self.number(function, node.left, depth + 1), self.number(function, node.right, depth + 1)
            return _computed(node.op, left, right) if left is not None and right is not None else None
        if isinstance(node, ast.Call) and dotted(node.func) == "len" and SET.search(ast.unparse(node)):
            return SAMPLES
        if isinstance(node, ast.Call) and dotted(node.func) in ("int", "float", "round") and node.args:
            return self.number(function, node.args[0], depth + 1)
        return self._of_name(function, node, depth) if dotted(node) else None

    def _of_name(self, function: Function, node: ast.AST, depth: int) -> float | None:
        name, program = dotted(node), self.context.program
        if name in self.bound:
            return self.bound[name]
        assigned = program.assigned(function, name)
        if len(assigned) == 1 and assigned[0].value is not None:
            made = function
            if name.startswith("self."):
                owners = (m for one in program.with_bases(function) for m in one.methods.values())
                made = next((m for m in owners if assigned[0] in m.assignments.get(name, ())), function)
            return self.number(made, assigned[0].value, depth + 1)
        if not assigned and name in function.parameters:
            return self._of_parameter(function, name, depth)
        found = program.constant(function.module, name) if not assigned else None
        if found is not None:
            return self.number(found[0].body, found[1], depth + 1)
        default = self.context.default_of(function.module, node) if isinstance(node, ast.expr) else node
        return self.number(function, default, depth + 1) if default is not node else None

    def _of_parameter(self, function: Function, name: str, depth: int) -> float | None:
        default = default_of(function, name)
        given: list[float | None] = []
        for site in self.context.program.sites.get(id(function), ()):
            value = argument(site, function, name) or default
            given.append(self.number(site.function, value, depth + 1))
        if not given:
            return self.number(function, default, depth + 1)
        return min((one for one in given if one is not None), default=None) if None not in given else None

    def of(self, function: Function, node: ast.AST | None, depth: int = 0) -> Size | None:
        """Return the size of a tensor, or None where the files do not tell."""
        if node is None or depth > MAX_DEPTH:
            return None
        if isinstance(node, ast.Call):
            return self._of_call(function, node, depth)
        if isinstance(node, ast.BinOp):
            sides = [self.of(function, one, depth + 1) for one in (node.left, node.right)]
            return max((one for one in sides if one is not None), key=lambda one: one.elements, default=None)
        if isinstance(node, (ast.Compare, ast.UnaryOp)):
            inner = self.of(function, node.left if isinstance(node, ast.Compare) else node.operand, depth + 1)
            return Size(inner.elements, 1) if inner is not None and isinstance(node, ast.Compare) else inner
        name = dotted(node)
        values = [a.value for a in self.context.program.assigned(function, name) if a.value is not None] if name else []
        first = next((value for value in values if name not in {dotted(part) for part in ast.walk(value)}), None)
        return self.of(function, first, depth + 1)

    def _of_call(self, function: Function, node: ast.Call, depth: int) -> Size | None:
        last, owner = last_of(node), getattr(node.func, "value", None)
        library = function.module.full_name(node.func).partition(".")[0] in ("torch", "numpy", "F")
        if library and last in FILLED | RANGES | {"eye"}:
            return self._made(function, node, last, depth)
        if library and last in ("outer", "ger") and len(node.args) == 2:
            sides = [self.of(function, one, depth + 1) for one in node.args]
            return None if None in sides else Size(sides[0].elements * sides[1].elements)  # type: ignore[union-attr]
        inner = node.args[0] if library and node.args else owner
        if last in ALIKE or last in KINDS or last == "astype":
            found = self.of(function, inner, depth + 1)
            kind = _kind(node) or (KINDS.get(last) if last in KINDS else None)
            return Size(found.elements, kind) if found is not None and kind else found
        call = next((c for c in function.calls if c.node is node), None)
        target = self.context.program.called(call) if call is not None else None
        return self._returned(call, target, depth) if call is not None and target is not None else None

    def _made(self, function: Function, node: ast.Call, last: str, depth: int) -> Size | None:
        shape: Sequence[ast.expr] = node.args
        if last == "full":
            shape = node.args[:1]
        if last in RANGES:  # of three numbers the second is where it ends, or the last how many there are
            shape = node.args[-1:] if last == "linspace" else node.args[:2][-1:]
        if len(shape) == 1:
            shape = _elements(function, shape[0])
        sizes = [self.number(function, one, depth + 1) for one in shape]
        if not sizes or any(size is None or size < 0 for size in sizes):
            return None
        elements = 1.0
        for size in sizes:
            elements *= size or 0.0
        if last == "eye" and len(sizes) == 1:
            elements *= elements
        of_numpy = function.module.full_name(node.func).startswith("numpy.")
        usual = 8 if of_numpy or last in ("arange",) else KINDS.get(last, 4)
        return Size(elements, _kind(node) or usual)

    def _returned(self, call: Call, target: Function, depth: int) -> Size | None:
        """Return the size of what a helper returns for the numbers that it is given."""
        values = [e.node.value for e in target.exits if isinstance(e.node, ast.Return) and e.node.value is not None]
        if len(values) != 1:
            return None
        bound: dict[str, float] = {}
        for name in target.parameters:
            given = argument(call, target, name) if name not in ("self", "cls") else None
            number = self.number(call.function, given if given is not None else default_of(target, name), depth + 1)
            if number is not None:
                bound[name] = number
        return Sizes(self.context, bound).of(target, values[0], depth + 1)


def large(context: Context, function: Function) -> Iterator[Found]:
    """Yield buffers of many megabytes in a model that DDP wraps: rank 0 sends them to all at each forward pass."""
    owner = function.of_class
    calls = [call for call in function.calls if call.last == "register_buffer"]
    if not calls or owner is None or not context.plain(function.module):
        return
    for call in calls:
        given = call.node.args[1] if len(call.node.args) > 1 else keyword(call.node, "tensor")
        size = Sizes(context).of(function, given)
        named = call.node.args[0] if call.node.args else keyword(call.node, "name")
        if size is None or size.bytes < MINIMUM:
            continue
        if not _is_broadcast(context, owner):  # asked last: it looks through the whole model
            return
        name = str(named.value) if isinstance(named, ast.Constant) else owner.name
        message = (
            f"DDP broadcasts the buffer `{name}` from rank 0 at each forward pass: {size.bytes / 1e6:.0f} MB for each"
            f" `{owner.name}` of the model, which all ranks wait for"
        )
        fix = "DDP(..., broadcast_buffers=False), where all ranks compute it alike, or keep it out of the buffers"
        yield Found("DDP425", function.module, call.node, message, fix)


def _is_broadcast(context: Context, owner: Class) -> bool:
    """Tell whether a class is a part of a model that DDP wraps, with its buffers."""
    wraps = [
        call
        for last in ("DistributedDataParallel", "DDP")
        for call in context.calls_in_component(owner.module, last)
        if DDP.fullmatch(call.name) and not call.name.startswith("apex")
    ]
    if not wraps or any(keyword(call.node, "broadcast_buffers") is not None for call in wraps):
        return False
    if any(word.arg is None for call in wraps for word in call.node.keywords) or context.says(owner.module, LEFT_OUT):
        return False
    known = [one for call in wraps for one in _wrapped(context, call)]
    if known:
        return any(one is owner for one in _parts(context, known))
    return not OUTSIDE.search(owner.name) and context.is_named(owner.name) and bool(owner.bases)


def _wrapped(context: Context, call: Call) -> list[Class]:
    """Return the classes that the model has that a call of DDP wraps, as far as they are known."""
    given = call.node.args[0] if call.node.args else keyword(call.node, "module")
    if given is None:
        return []
    values = [a.value for a in context.program.assigned(call.function, dotted(given))] if dotted(given) else []
    found = [context.program.objects.of_value(call.function, value) for value in (given, *values) if value is not None]
    return [one for part in found for one in part or ()]


def _parts(context: Context, models: Sequence[Class]) -> list[Class]:
    """Return classes of modules, and all that their methods make, directly or over functions."""
    found = {id(one): one for one in models}
    functions = [method for one in models for method in _methods(context, one)]
    seen = {id(one) for one in functions}
    while functions and len(found) < 500:
        for call in functions.pop().calls:
            meant = context.program.lookup(call.function.module, dotted(call.node.func))
            called: Sequence[Class | Function] | None = [meant] if isinstance(meant, Class) else None
            called = called or context.program.objects.callables(call.function, call.node.func)
            for one in called or ():
                new = _methods(context, one) if isinstance(one, Class) else [one]
                if isinstance(one, Class):
                    found[id(one)] = one
                functions += [method for method in new if id(method) not in seen]
                seen.update(id(method) for method in new)
    return list(found.values())


def _methods(context: Context, made: Class) -> list[Function]:
    return [method for one in context.program.hierarchy(made) for method in one.methods.values()]


def _computed(op: ast.operator, left: float, right: float) -> float | None:
    if isinstance(op, ast.Add):
        return left + right
    if isinstance(op, ast.Sub):
        return left - right
    if isinstance(op, ast.Mult):
        return left * right
    if isinstance(op, (ast.Div, ast.FloorDiv)) and right:
        return left // right if isinstance(op, ast.FloorDiv) else left / right
    return left**right if isinstance(op, ast.Pow) and abs(right) <= 32 and 0 < left < 1e6 else None


def _elements(function: Function, node: ast.expr) -> Sequence[ast.expr]:
    """Return the numbers of a shape, where it is written as one value."""
    values = [a.value for a in function.assignments.get(dotted(node), ()) if a.value is not None]
    node = values[0] if len(values) == 1 and isinstance(values[0], (ast.Tuple, ast.List)) else node
    return node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]


def _kind(node: ast.Call) -> int | None:
    """Return the bytes of an element that a call asks for: `dtype=torch.bool`, `.astype("uint8")`."""
    given = [keyword(node, "dtype"), *(node.args[:1] if last_of(node) in ("to", "astype", "type") else ())]
    for one in given:
        name = one.value if isinstance(one, ast.Constant) else dotted(one).rpartition(".")[2] if one is not None else ""
        if isinstance(name, str) and name in KINDS:
            return KINDS[name]
    return None


RULES = ()
OF_RANKS = (large,)
