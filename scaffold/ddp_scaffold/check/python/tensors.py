"""Which variables hold tensors on the GPU: what is put there, what a model, a loss or a helper makes of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .module import Assignment, Call, Function, argument, dotted, last_of
from .program import Program

MODEL = re.compile(
    r"(?:.*_)?(?:model|net|generator|discriminator|encoder|decoder|unet|student|module|backbone|ddp)(?:_.*)?"
    r"|net[A-Z]\w*|forward_loss|training_losses",
    re.IGNORECASE,
)
CRITERION = re.compile(r"(?:.*_)?(?:criterion|criteria|loss_?(?:fn|fns|func|function|fct))(?:_.*)?", re.IGNORECASE)
LOSS = re.compile(r"loss|(?:^|_)err[DG]?(?:_|$)", re.IGNORECASE)
NORMS = {"clip_grad_norm_", "clip_grad_norm", "get_total_norm"}
# Methods and attributes of tensors that give no tensor on the GPU, and functions that give no tensor at all.
OF_HOST = {
    *("item", "tolist", "cpu", "numpy", "size", "dim", "numel", "shape", "dtype", "device", "ndim", "is_cuda", "name"),
    *("requires_grad", "backward", "step", "keys", "append", "extend", "update", "add_scalar", "log", "format", "join"),
    *(
        "parameters",
        "named_parameters",
        "state_dict",
        "to_dict",
        "param_groups",
        "get_lr",
        "get_last_lr",
        "element_size",
    ),
    *("nelement", "stride", "data_ptr", "is_contiguous", "grad_fn", "get_device", "is_leaf", "is_sparse", "nbytes"),
    *("is_floating_point", "is_complex", "is_quantized", "layout", "itemsize", "training", "names", "is_cpu"),
    *("ndimension", "type", "storage", "stride"),
}
# Methods of tensors that arrays of numpy, lists and numbers do not have.
OF_TENSORS = {
    *("view", "view_as", "permute", "unsqueeze", "contiguous", "detach", "detach_", "cuda", "dim", "numel", "to"),
    *("float", "long", "half", "bool", "int", "double", "expand", "expand_as", "new_zeros", "new_ones", "new_full"),
    *("masked_fill", "masked_fill_", "masked_select", "scatter_", "gather", "index_select", "softmax", "log_softmax"),
    *("sigmoid", "type_as", "unbind", "bmm", "backward", "requires_grad_", "add_", "mul_", "zero_", "copy_", "size"),
}
COLLECTIVES = {f"torch.distributed.{name}" for name in ("all_reduce", "reduce", "broadcast", "all_gather", "gather")}
NO_LOSS = re.compile(r"weight|coef|lambda|scale|factor|ratio|alpha|beta|gamma|type|name|fn|func|crit|meter|scaler|rate")
FUNCTIONS_OF_HOST = {
    *("float", "int", "str", "bool", "len", "isinstance", "type", "print", "range", "format", "repr", "round", "id"),
    *("hasattr", "getattr", "set", "open", "input", "any", "all", "next", "iter", "enumerate"),
}
LIBRARIES_OF_HOST = re.compile(r"(?:numpy|math|time|os|json|random|copy|logging|datetime|wandb|PIL|cv2|itertools)\.")
PUTS = re.compile(r"device|cuda|gpu|rank")


@dataclass(frozen=True)
class Held:
    """Names that hold tensors on the GPU: all that may, and those of them that surely do."""

    may: frozenset[str] = frozenset()
    surely: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """What gives names their values: `value`, or each element of it in a loop."""

    names: tuple[str, ...]
    value: ast.expr
    each: bool = False
    part: int | None = None  # which part of the value the name is, where it is one of several


@dataclass
class Tensors:
    """Answers which variables of a function hold tensors on the GPU, for what it is given."""

    program: Program
    _held: dict[tuple[int, Held], Held] = field(default_factory=dict)
    _sources: dict[int, list[Source]] = field(default_factory=dict)
    _seeds: dict[int, frozenset[str]] = field(default_factory=dict)
    _calls: dict[int, dict[int, Call]] = field(default_factory=dict)
    _returned: dict[tuple[int, Held, int | None], tuple[bool, bool]] = field(default_factory=dict)
    _of_class: dict[int, Held] = field(default_factory=dict)
    _nodes: dict[int, list[ast.Attribute | ast.comprehension]] = field(default_factory=dict)

    def held(self, function: Function, given: Held | None = None) -> Held:
        """Return the names in a function that hold tensors on the GPU, where those of `given` do."""
        given = given or Held()
        key = (id(function), given)
        if key not in self._held:
            self._held[key] = given
            of_class = self._in_class(function)
            seeds = self._backward(function)
            may = self._grow(function, given.may | of_class.may | seeds, surely=False)
            used = may & self._used(function)
            surely = self._grow(function, given.surely | of_class.surely | seeds | used, surely=True)
            self._held[key] = Held(may | surely, surely)
        return self._held[key]

    def _grow(self, function: Function, names: frozenset[str], surely: bool) -> frozenset[str]:
        found, before = set(names), -1
        while before != len(found):
            before = len(found)
            for source in self._sources_of(function):
                new = [name for name in source.names if name not in found]
                if new and self._gives(function, source, found, surely):
                    found.update(new)
        return frozenset(found)

    def _gives(self, function: Function, source: Source, names: set[str], surely: bool) -> bool:
        if source.each:
            over = source.value.func if isinstance(source.value, ast.Call) else None
            if isinstance(over, ast.Attribute) and over.attr in ("parameters", "named_parameters"):
                return True
            if re.search(r"\[.params.\]", ast.unparse(source.value)):  # of an optimizer
                return True
            if isinstance(over, ast.Attribute) and over.attr in ("values", "items"):
                return self.holds(function, over.value, names, surely)
        if source.part is not None and isinstance(source.value, ast.Call):
            call = self._call(function, source.value)
            target = self.program.called(call) if call is not None else None
            if call is not None and target is not None:
                given = self.given(call, target, Held(frozenset(names), frozenset(names) if surely else frozenset()))
                return self._returns(target, given, source.part)[surely]
        return not (surely and source.part is not None) and self.holds(function, source.value, names, surely)

    def _in_class(self, function: Function) -> Held:
        """Return the attributes in which the class of a method keeps tensors, if the class trains."""
        owner = function.of_class
        if owner is None or function.name == "__init__":
            return Held()
        if id(owner) not in self._of_class:
            self._of_class[id(owner)] = Held()
            methods = list(owner.methods.values())
            if any(c.last == "backward" for method in methods for c in method.calls):
                inside = [self.held(method) for method in methods if method.name != "__init__"]
                for method in methods:
                    self._held.pop((id(method), Held()), None)
                self._of_class[id(owner)] = Held(
                    frozenset(name for one in inside for name in one.may if name.startswith("self.")),
                    frozenset(name for one in inside for name in one.surely if name.startswith("self.")),
                )
        return self._of_class[id(owner)]

    def _sources_of(self, function: Function) -> list[Source]:
        if id(function) not in self._sources:
            found = [s for name, given in function.assignments.items() for a in given for s in _sources(name, a)]
            found += _of_comprehensions(function, self._nodes_in(function))
            self._sources[id(function)] = found
        return self._sources[id(function)]

    def _nodes_in(self, function: Function) -> list[ast.Attribute | ast.comprehension]:
        """Return the methods that a function names, and its comprehensions."""
        if id(function) not in self._nodes:
            found: list[ast.Attribute | ast.comprehension] = []
            for statement in () if isinstance(function.node, ast.Module) else function.node.body:
                for node in ast.walk(statement):
                    kind = type(node)
                    if kind is ast.comprehension or (kind is ast.Attribute and node.attr in OF_TENSORS):  # type: ignore[attr-defined]
                        found.append(node)  # type: ignore[arg-type]
            self._nodes[id(function)] = found
        return self._nodes[id(function)]

    def _used(self, function: Function) -> set[str]:
        """Return the names of which a function calls methods that tensors alone have, or that it says are tensors."""
        given = [] if isinstance(function.node, ast.Module) else function.node.args.args
        said = {one.arg for one in given if one.annotation is not None and _is_tensor(one.annotation)}
        return said | {dotted(node.value) for node in self._nodes_in(function) if isinstance(node, ast.Attribute)}

    def _parts_of_loss(self, function: Function, names: set[str]) -> set[str]:
        """Return the losses of which these are made: of `loss = a_loss + weight * b_loss` both."""
        found: set[str] = set()
        for name in names:
            for one in function.assignments.get(name, ()):
                value = one.value if one.value is not None else getattr(one.node, "value", None)
                if isinstance(value, ast.BinOp):
                    parts = {part for part in _tensors_in(value) if LOSS.search(part.rpartition(".")[2])}
                    known = {part for part in parts if part in function.assignments or part in function.parameters}
                    found |= {part for part in known if not NO_LOSS.search(part.rpartition(".")[2].lower())}
        return found

    def _backward(self, function: Function) -> frozenset[str]:
        """Return the losses from which a function goes back, the norms of gradients, and what the ranks reduce."""
        if id(function) not in self._seeds:
            found: set[str] = set()
            for call in function.calls:
                if call.name in COLLECTIVES and call.node.args:
                    given = call.node.args[1:2] if call.last == "all_gather" else call.node.args[:1]
                    found |= {dotted(one) for one in given}
                elif call.last == "backward" and isinstance(call.node.func, ast.Attribute):
                    of_framework = re.search(r"accelerator|fabric|engine|optim", dotted(call.node.func.value))
                    start = call.node.args[0] if of_framework and call.node.args else call.node.func.value
                    found |= _tensors_in(start)
                elif is_step_of_scaler(call) or (call.last == "scale_loss" and call.node.args):
                    found |= _tensors_in(call.node.args[0])
            found -= {"", "self", "scaler", "args"}
            new = found
            for _ in range(3):
                new = self._parts_of_loss(function, new) - found
                found |= new
            self._seeds[id(function)] = frozenset(found)
        return self._seeds[id(function)]

    def holds(self, function: Function, node: ast.AST, names: frozenset[str] | set[str], surely: bool = False) -> bool:
        """Tell whether an expression is a tensor on the GPU, or has one in it, where `names` hold some."""
        if isinstance(node, ast.Name):
            return node.id in names
        if isinstance(node, ast.Attribute):
            if dotted(node) in names or node.attr == "grad":
                return True
            return (
                node.attr not in OF_HOST
                and dotted(node.value) != "self"
                and self.holds(function, node.value, names, surely)
            )
        if isinstance(node, ast.Call):
            return self._of_call(function, node, names, surely)
        if isinstance(node, ast.Compare):
            plain = not any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
            return plain and any(self.holds(function, one, names, surely) for one in (node.left, *node.comparators))
        if isinstance(node, (ast.DictComp, ast.ListComp, ast.GeneratorExp)):
            return self._of_comprehension(function, node, names, surely)
        return any(self.holds(function, part, names, surely) for part in _parts(node))

    def _of_comprehension(
        self,
        function: Function,
        node: ast.DictComp | ast.ListComp | ast.GeneratorExp,
        names: frozenset[str] | set[str],
        surely: bool,
    ) -> bool:
        inside = set(names)
        for one in node.generators:
            for source in _each_of(one.target, one.iter):
                if self._gives(function, source, inside, surely):
                    inside.update(source.names)
        return self.holds(function, node.value if isinstance(node, ast.DictComp) else node.elt, inside, surely)

    def _of_call(self, function: Function, node: ast.Call, names: frozenset[str] | set[str], surely: bool) -> bool:
        last = last_of(node)
        method = isinstance(node.func, ast.Attribute)
        if last in NORMS or _puts(node):
            return True
        if method and last == "type" and node.args:  # of another kind; without one it is the name of its kind
            return self.holds(function, node.func.value, names, surely)  # type: ignore[attr-defined]
        if last in (OF_HOST if method else FUNCTIONS_OF_HOST) or last[:1].isupper():
            return False
        name = function.module.full_name(node.func)
        if LIBRARIES_OF_HOST.match(name):
            return False
        call = self._call(function, node)
        target = self.program.runs(call) if call is not None else None
        if call is not None and target is not None and target.name != "forward":
            given = self.given(call, target, Held(frozenset(names), frozenset(names) if surely else frozenset()))
            return self._returns(target, given)[surely]
        if method and not name.startswith("torch.") and self.holds(function, node.func.value, names, surely):  # type: ignore[attr-defined]
            return True
        if CRITERION.fullmatch(last) or (MODEL.fullmatch(last) and not surely):
            return True
        if surely and not name.startswith(("torch.", "F.")) and last not in ("sum", "max", "min", "abs"):
            return False
        return any(self.holds(function, one, names, surely) for one in (*node.args, *(k.value for k in node.keywords)))

    def _returns(self, function: Function, given: Held, part: int | None = None) -> tuple[bool, bool]:
        """Tell whether a function may, and whether it surely does, return a tensor on the GPU, as a part or as all."""
        key = (id(function), given, part)
        if key not in self._returned:
            self._returned[key] = (False, False)
            held = self.held(function, given)
            values = [e.node.value for e in function.exits if isinstance(e.node, ast.Return) and e.node.value]
            if part is not None:
                tuples = [v.elts for v in values if isinstance(v, ast.Tuple) and part < len(v.elts)]
                values = [elements[part] for elements in tuples] if len(tuples) == len(values) else values
            may = any(self.holds(function, value, held.may) for value in values)
            values = [value for value in values if not isinstance(value, ast.Constant)]
            surely = bool(values) and all(
                not isinstance(value, ast.Tuple) and self.holds_at(function, value, held.surely, value.lineno)
                for value in values
            )
            self._returned[key] = (may, surely)
        return self._returned[key]

    def holds_at(self, function: Function, node: ast.expr, names: frozenset[str], line: int) -> bool:
        """Tell whether an expression surely is a tensor at a line: no name in it has become a number before."""
        if not self.holds(function, node, names, surely=True):
            return False
        used = {dotted(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))} & names
        return not any(self._is_number_by_then(function, name, names, line) for name in used)

    def _is_number_by_then(self, function: Function, name: str, names: frozenset[str], line: int) -> bool:
        before = [
            a for a in function.assignments.get(name, ()) if a.value is not None and getattr(a.node, "lineno", 0) < line
        ]
        last = max(before, key=lambda a: a.order, default=None)
        if last is None or last.value is None:
            return False
        around = _loop_behind(last, line, function.assignments[name])
        again = [a for a in function.assignments[name] if around is not None and around in a.place.loops]
        if again and all(a.value is not None and self.holds(function, a.value, names, surely=True) for a in again):
            return False  # a number in the first turn of the loop alone
        return not self.holds(function, last.value, names | self.held(function).may)

    def given(self, call: Call, target: Function, held: Held) -> Held:
        """Return the parameters of a function to which a call gives tensors on the GPU."""
        may: set[str] = set()
        surely: set[str] = set()
        bound: list[ast.expr] = []
        for name in target.parameters:
            value = argument(call, target, name) if name not in ("self", "cls") else None
            if value is None:
                continue
            bound.append(value)
            if self.holds(call.function, value, held.surely, surely=True):
                surely.add(name)
            elif self.holds(call.function, value, held.may):
                may.add(name)
        arguments = getattr(target.node, "args", None)
        for rest in (getattr(arguments, "vararg", None), getattr(arguments, "kwarg", None)):
            if rest is not None:
                others = [one for one in _values(call.node) if not any(one is other for other in bound)]
                if any(self.holds(call.function, one, held.may) for one in others):
                    may.add(rest.arg)
        return Held(frozenset(may | surely), frozenset(surely))

    def _call(self, function: Function, node: ast.Call) -> Call | None:
        if id(function) not in self._calls:
            self._calls[id(function)] = {id(call.node): call for call in function.calls}
        return self._calls[id(function)].get(id(node))


def _loop_behind(assignment: Assignment, line: int, others: Iterable[Assignment]) -> ast.stmt | None:
    """Return the loop around a line that begins behind an assignment, where others of the same name stand in it."""
    loops = [loop for other in others for loop in other.place.loops if loop not in assignment.place.loops]
    return next((loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)), None)


def is_step_of_scaler(call: Call) -> bool:
    """Tell whether a call is `loss_scaler(loss, optimizer, ...)` of timm: it goes back, and makes the step."""
    given = call.node.args
    if len(given) < 2 or not re.search(r"scaler|amp", call.last.lower()):
        return False
    return LOSS.search(ast.unparse(given[0])) is not None and any("optim" in dotted(one).lower() for one in given[1:2])


def _tensors_in(node: ast.expr) -> set[str]:
    """Return the names of which a loss is made: of `scaler.scale(loss / n)` the loss."""
    if isinstance(node, ast.Call):
        scales = last_of(node) in ("scale", "scale_loss", "sum") or dotted(node.func).startswith("torch.")
        inner = node.args if scales and node.args else [getattr(node.func, "value", node.func)]
        inner = inner if scales or isinstance(node.func, ast.Attribute) else []
        return {name for one in inner for name in _tensors_in(one)}
    if isinstance(node, ast.BinOp):
        both = _tensors_in(node.left) | _tensors_in(node.right)
        return {name for name in both if LOSS.search(name)} or _tensors_in(node.left)
    if isinstance(node, (ast.Subscript, ast.UnaryOp)):
        return _tensors_in(node.value if isinstance(node, ast.Subscript) else node.operand)
    name = dotted(node)
    return {name} if name else set()


def _sources(name: str, assignment: Assignment) -> Iterator[Source]:
    """Yield from where an assignment has the value of a name."""
    node = assignment.node
    if assignment.value is not None:
        yield Source((name,), assignment.value)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from (one for one in _each_of(node.target, node.iter) if name in one.names)
    elif isinstance(node, ast.AugAssign):
        yield Source((name,), node.value)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        yield Source((name,), node.value, part=_part(name, node))


def _is_tensor(annotation: ast.expr) -> bool:
    return dotted(annotation).rpartition(".")[2] in ("Tensor", "LongTensor", "FloatTensor", "BoolTensor")


def _of_comprehensions(function: Function, nodes: list[ast.Attribute | ast.comprehension]) -> Iterator[Source]:
    """Yield what comprehensions give their variables, of which none is a variable of something else as well."""
    sources = [s for node in nodes if isinstance(node, ast.comprehension) for s in _each_of(node.target, node.iter)]
    meant: dict[str, set[str]] = {}
    for source in sources:
        for name in source.names:
            meant.setdefault(name, set()).add(ast.unparse(source.value))
    for source in sources:
        if all(len(meant[name]) == 1 and name not in function.assignments for name in source.names):
            yield source


def _part(name: str, node: ast.Assign | ast.AnnAssign) -> int:
    """Return which part of a value a name gets: of `a, b = f()` that b is the second."""
    for target in getattr(node, "targets", ()):
        names = [dotted(one) for one in target.elts] if isinstance(target, (ast.Tuple, ast.List)) else []
        if name in names:
            return names.index(name)
    return 0


def _each_of(target: ast.expr, over: ast.expr) -> Iterator[Source]:
    """Yield what each turn of a loop gives: of `for i, x in enumerate(xs)` that x is one of xs."""
    last = last_of(over) if isinstance(over, ast.Call) else ""
    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if isinstance(over, ast.Call) and last == "enumerate" and len(elements) == 2 and over.args:
        yield from _each_of(elements[1], over.args[0])
    elif isinstance(over, ast.Call) and last == "zip" and len(elements) == len(over.args):
        for one, part in zip(elements, over.args, strict=True):
            yield from _each_of(one, part)
    elif last in ("items", "named_parameters") and len(elements) == 2:
        yield from (
            _each_of(elements[1], over)
            if not isinstance(elements[1], ast.Name)
            else [Source((elements[1].id,), over, each=True)]
        )
    else:
        names = tuple(dotted(part) for part in ast.walk(target) if isinstance(part, (ast.Name, ast.Attribute)))
        yield Source(tuple(name for name in names if name), over, each=True)


def _puts(node: ast.Call) -> bool:
    """Tell whether a call puts something on the GPU: `x.cuda()`, `x.to(device)`, `torch.zeros(1, device=device)`."""
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "cuda":
        return not re.search(r"model|net|criterion|module", ast.unparse(node.func.value).lower())
    if node.func.attr == "to" and node.args and PUTS.search(ast.unparse(node.args[0])):
        return "cpu" not in ast.unparse(node.args[0])
    made = dotted(node.func.value) == "torch" and node.func.attr != "load"
    return made and any(k.arg == "device" and PUTS.search(ast.unparse(k.value)) for k in node.keywords)


def _parts(node: ast.AST) -> list[ast.expr]:
    """Return the parts of an expression of which one that holds a tensor makes the whole hold one."""
    if isinstance(node, (ast.Subscript, ast.Starred, ast.keyword, ast.FormattedValue, ast.NamedExpr)):
        return [node.value]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right] if not isinstance(node.left, (ast.Constant, ast.JoinedStr)) else [node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand] if not isinstance(node.op, ast.Not) else []
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return node.elts
    return list(node.values) if isinstance(node, ast.Dict) else []


def _values(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(word.value for word in node.keywords)]
