"""What the rules share: the files as one program, which of them several ranks run, what a rule has found."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .doubts import Doubts
from .effects import CERTAIN, DDP, DIST, Effects, without_gradients
from .module import (
    Call,
    Class,
    Function,
    Guard,
    Module,
    Place,
    argument,
    default_of,
    dotted,
    is_constant,
    keyword,
    names_in,
)
from .program import Program
from .ranks import Ranks
from .tensors import Tensors, is_step_of_scaler

# Packages whose objects own the loop, the loaders or the process group: advice for a plain loop would be wrong there.
FRAMEWORKS = (
    *("accelerate", "deepspeed", "fairscale", "horovod", "ignite", "lightning", "pytorch_lightning", "composer"),
    *("mmengine", "mmcv", "detectron2", "colossalai", "megatron", "fairseq", "ray", "lightning_fabric", "fastai"),
)
INIT = "init_process_group"
MAKES = re.compile(r"DDP|DistributedDataParallel|all_reduce")
# What is made of a tensor and is none on the GPU.
HOST = {
    *("item", "cpu", "tolist", "numpy", "size", "len", "dim", "numel", "float", "int", "str", "bool", "shape"),
    *("dtype", "device", "ndim", "isinstance", "type", "format", "keys", "print", "enumerate", "zip", "range"),
    *("append", "join", "update", "list", "dict", "set", "is_cuda", "requires_grad", "parameters", "state_dict"),
    *("to_dict", "backward"),
}
REDUCED = re.compile(r"reduc|gather|sync|global|_all\b|world|agree|consensus", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """What a rule has found in a module; the line and the column are those of `node`."""

    rule: str
    module: Module
    node: ast.AST | object
    message: str
    fix: str


class Context:
    """The program and the answers about it."""

    def __init__(self, program: Program, texts: Sequence[str] | None = None) -> None:
        self.program = program
        self.texts = texts if texts is not None else [module.file.text for module in program.modules]
        self.ranks = Ranks(program)
        self.effects = Effects(program, self.ranks)
        self.doubts = Doubts(self.ranks, self.effects)
        self.tensors = Tensors(program)
        self.backward_steps: dict[int, bool] = {}  # of a call: whether it is a backward pass or makes a step
        self._named: dict[str, bool] = {}
        self._said: dict[tuple[int, str], bool] = {}
        self._found_in: dict[tuple[int, re.Pattern[str]], bool] = {}
        self._run_by_ranks: dict[int, bool] = {}
        self._joined: dict[int, bool] = {}
        self._backward: dict[int, list[Call]] = {}
        self._to_group: dict[tuple[int, int], bool] = {}
        self._calls: dict[tuple[int, str], list[Call]] = {}
        self._below: dict[int, list[Module]] = {}

    @cached_property
    def distributed(self) -> dict[int, str]:
        """Return the files that several ranks run, each with its framework or ''.

        They wrap a model in DDP, call a function that does, or join the group of one that a file connected with them
        wraps; and what they import, and files of classes that inherit from one of theirs that trains: a setting may
        choose one by its name.
        """
        wraps = [call.function for module in self.program.modules for call in wrapping(module)]
        numbers = {self.program.component[id(function.module)] for function in wraps}
        joins = (m for m in self.program.modules if self.program.component[id(m)] in numbers and self.joins_group(m))
        waiting = list({id(module): module for module in (*self._trained_by(wraps), *joins)}.values())
        found = {id(module): framework_of(module) for module in waiting}
        heirs = [m for m in self.program.modules if self.program.component[id(m)] in numbers and id(m) not in found]
        while waiting:
            module = waiting.pop()
            for target in self.program.imports_of(module):
                if id(target) not in found:
                    found[id(target)] = framework_of(target)
                    waiting.append(target)
            if not waiting:
                new = [m for m in heirs if id(m) not in found and self._inherits_training(m, found)]
                found.update((id(m), framework_of(m)) for m in new)
                waiting += new
        return found

    @cached_property
    def _wrapping(self) -> frozenset[int]:
        """Return the files that make a DDP model."""
        return frozenset(id(module) for module in self.program.modules if wraps_ddp(module))

    def _trained_by(self, functions: Sequence[Function]) -> list[Module]:
        """Return the files of functions that wrap a model, and of those callers that go backward and are called."""
        functions = list({id(function): function for function in functions}.values())
        found = {id(function): function for function in functions}
        waiting = list(functions)
        while waiting:
            calls = self.program.sites.get(id(waiting.pop()), ())
            new = {id(call.function): call.function for call in calls if id(call.function) not in found}
            found.update(new)
            waiting += new.values()
        trained = {id(call.function.module) for call in self.program.calls_named["backward"]}
        imported = {name.rpartition(".")[2] for module in self.program.modules for name in module.imports.values()}
        callers = [
            function
            for function in list(found.values())[len(functions) :]
            if id(function.module) in trained and (self.program.sites.get(id(function)) or function.name in imported)
        ]
        return [function.module for function in (*functions, *callers)]

    def _inherits_training(self, module: Module, found: Collection[int]) -> bool:
        """Tell whether a class of a file inherits from one that trains, in one of the files that ranks run."""
        return any(
            base is not made and id(base.module) in found and trains(base)
            for made in module.classes.values()
            if made.node.bases
            for base in self.program.hierarchy(made)
        )

    def plain(self, module: Module) -> bool:
        """Tell whether several ranks run this file with DDP, and no framework owns its loop."""
        return self.distributed.get(id(module)) == ""

    def in_component(self, module: Module) -> list[Module]:
        """Return the files that are connected with one by imports."""
        return self._components[self.program.component[id(module)]]

    @cached_property
    def _components(self) -> dict[int, list[Module]]:
        found: dict[int, list[Module]] = {}
        for module in self.program.modules:
            found.setdefault(self.program.component[id(module)], []).append(module)
        return found

    def below(self, module: Module) -> list[Module]:
        """Return a file with what it imports, directly or not."""
        if id(module) not in self._below:
            found, waiting = {id(module): module}, [module]
            while waiting:
                new = [one for one in self.program.imports_of(waiting.pop()) if id(one) not in found]
                found.update((id(one), one) for one in new)
                waiting += new
            self._below[id(module)] = list(found.values())
        return self._below[id(module)]

    def programs_with(self, module: Module) -> list[list[Module]]:
        """Return the files of each program that has a file: of what runs itself, or is imported by nothing."""
        files = self.in_component(module)
        imported = {id(target) for one in files for target in self.program.imports_of(one)}
        starts = [one for one in files if id(one) not in imported or one.runs_itself]
        found = [self.below(one) for one in starts or files]
        return [part for part in found if any(one is module for one in part)]

    def calls_in_component(self, module: Module, last: str) -> list[Call]:
        """Return the calls of something with this last name in all files that are connected with one."""
        key = (self.program.component[id(module)], last)
        if key not in self._calls:
            calls = self.program.calls_named[last]
            self._calls[key] = [c for c in calls if self.program.component[id(c.function.module)] == key[0]]
        return self._calls[key]

    def named(self, module: Module, last: str) -> list[Function]:
        """Return the functions and methods that a call with this last name may mean, in files connected with one."""
        number = self.program.component[id(module)]
        return [f for f in self._by_name.get(last, ()) if self.program.component[id(f.module)] == number]

    def is_named(self, name: str) -> bool:
        """Tell whether a name stands anywhere but where it is defined: else nothing in these files calls it."""
        if name not in self._named:
            used = re.compile(rf"(?<!def )\b{re.escape(name)}\b")
            self._named[name] = any(used.search(text) for text in self.texts)
        return self._named[name]

    @cached_property
    def _by_name(self) -> dict[str, list[Function]]:
        found: dict[str, list[Function]] = {}
        for module in self.program.modules:
            for function in module.functions:
                found.setdefault(function.name, []).append(function)
        return found

    def says(self, module: Module, pattern: re.Pattern[str]) -> bool:
        """Tell whether a pattern is found in the text of a file, or of one that is connected with it."""
        key = (self.program.component[id(module)], pattern.pattern)
        if key not in self._said:
            self._said[key] = any(self.says_itself(other, pattern) for other in self.in_component(module))
        return self._said[key]

    def default_of(self, module: Module, node: ast.expr) -> ast.expr:
        """Return the default of an option for `args.name`, as add_argument gives it; else the expression itself."""
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return node
        wanted = {f"--{node.attr}", f"--{node.attr.replace('_', '-')}"}
        for call in self.calls_in_component(module, "add_argument"):
            names = {a.value for a in call.node.args if isinstance(a, ast.Constant)}
            value = keyword(call.node, "default") if names & wanted else None
            if value is not None:
                return value
        return node

    def says_near(self, module: Module, pattern: re.Pattern[str]) -> bool:
        """Tell whether a pattern is found in the text of a file, or of one that it imports, at once or over another."""
        near = [module, *self.program.imports_of(module)]
        near += [other for one in near[1:] for other in self.program.imports_of(one)]
        return any(self.says_itself(other, pattern) for other in near)

    def says_itself(self, module: Module, pattern: re.Pattern[str]) -> bool:
        """Tell whether a pattern is found in the text of a file. It is looked up once."""
        key = (id(module), pattern)
        if key not in self._found_in:
            self._found_in[key] = pattern.search(module.file.text) is not None
        return self._found_in[key]

    def is_spawned(self, function: Function) -> bool:
        """Tell whether a function is what mp.spawn starts as a rank."""
        starts = (c for last in ("spawn", "start_processes") for c in self.calls_in_component(function.module, last))
        given = (c.node.args[0] if c.node.args else keyword(c.node, "fn") for c in starts)
        return any(one is not None and dotted(one).rpartition(".")[2] == function.name for one in given)

    def run_by_ranks(self, function: Function) -> bool:
        """Tell whether a file that makes a DDP model, or the group for it, has a function or calls it over others."""
        if id(function) not in self._run_by_ranks:
            self._run_by_ranks[id(function)] = self._run_by_ranks_now(function)
        return self._run_by_ranks[id(function)]

    def _run_by_ranks_now(self, function: Function) -> bool:
        waiting, seen = [function], {id(function)}
        while waiting:
            here = waiting.pop()
            classes = self.program.with_bases(here)
            if self._joins(here.module) or (id(here.module) in self.distributed and any(map(trains, classes))):
                return True
            meant = [here, *(c.methods[here.name] for c in classes[1:] if here.of_class and here.name in c.methods)]
            for site in (site for one in meant for site in self.program.sites.get(id(one), ())):
                if id(site.function) not in seen:
                    seen.add(id(site.function))
                    waiting.append(site.function)
        return False

    def joins_group(self, module: Module) -> bool:
        """Tell whether a file makes the group, or calls or starts a function of these files that does."""
        return any(self._comes_to_group(call, 0) for function in module.functions for call in function.calls)

    def _comes_to_group(self, call: Call, depth: int) -> bool:
        """Tell whether a call makes the group, itself or in helpers, or in a process that it starts."""
        if call.last == INIT:
            return True
        target = self.program.called(call)
        inner = [target] if target is not None else self.program.started(call)
        return depth < 3 and any(self._function_comes_to_group(one, depth) for one in inner)

    def _function_comes_to_group(self, function: Function, depth: int) -> bool:
        key = (id(function), depth)
        if key not in self._to_group:
            self._to_group[key] = False
            self._to_group[key] = any(self._comes_to_group(c, depth + 1) for c in function.calls)
        return self._to_group[key]

    def _joins(self, module: Module) -> bool:
        if id(module) not in self._joined:
            made = any(c.last == INIT for function in module.functions for c in function.calls)
            self._joined[id(module)] = (
                made or id(module) in self._wrapping or (self.joins_group(module) and self._needs(module))
            )
        return self._joined[id(module)]

    def _needs(self, module: Module) -> bool:
        """Tell whether a program that makes the group by a helper uses it: for a DDP model, or by a collective."""
        if any(id(target) in self._wrapping for target in self.below(module)):
            return True
        return any(c.name.startswith(DIST) and c.last in CERTAIN for f in module.functions for c in f.calls)

    def together(self, function: Function, loop: ast.stmt) -> bool:
        """Tell whether the ranks do something together in a loop: a collective, or the backward pass of DDP."""
        for call in function.calls:
            if loop not in call.place.loops:
                continue
            if (found := self.ranks.partial(call)) is not None and not self._as_others(call, found[0]):
                continue
            if id(function.module) in self.distributed and self.goes_backward(call):
                return True
            if self.effects.of(call):
                return True
        return False

    def _as_others(self, call: Call, guard: Guard) -> bool:
        """Tell whether a backward pass has its like on the other ranks: `if first: ... else: ...`."""
        others = (
            c
            for c in call.function.calls
            if any(g.test is guard.test and g.holds != guard.holds and not g.early for g in c.place.guards)
        )
        return self.goes_backward(call) and any(self.goes_backward(c) for c in others)

    def goes_backward(self, call: Call) -> bool:
        """Tell whether a call is a backward pass, or runs one in a function of these files, in a loop of it or not."""
        if call.last == "backward" or is_step_of_scaler(call):
            return True
        target = self.program.runs(call)
        if target is None or target is call.function or without_gradients(call):
            return False
        return any(not any(declines(call, target, g) for g in c.place.guards) for c in self.backwards(target))

    def backwards(self, function: Function) -> list[Call]:
        """Return the calls in a function that go backward."""
        if id(function) not in self._backward:
            self._backward[id(function)] = []  # for a function that calls itself
            self._backward[id(function)] = [call for call in function.calls if self.goes_backward(call)]
        return self._backward[id(function)]

    def agreed(self, function: Function, names: set[str], test: tuple[Place, int] | None = None) -> bool:
        """Tell whether one of these names, or what it is made from, may have met the other ranks' values.

        `test` is where they are looked at: what has a new value there in each turn of a loop must have met them before.
        """
        if any(REDUCED.search(name) for name in names):
            return True
        for call in function.calls:
            meets = any(effect.kind != "forward" for effect in self.effects.of(call))
            given = names & names_in(call.node) if meets else set()
            if given and not (test and call.order > test[1] and all(_is_new(function, one, *test) for one in given)):
                return True
        before: set[str] = set()
        for name in names:
            for assignment in function.assignments.get(name, ()):
                if assignment.value is not None:
                    before |= names_in(assignment.value) - names
        return bool(before) and any(REDUCED.search(name) for name in before)


def framework_of(module: Module) -> str:
    """Return the framework that a file imports, if any."""
    first = {written.partition(".")[0] for written, _ in module.relative.values()}
    found = next((name for name in FRAMEWORKS if name in first), "")
    trains = any("Trainer" in name for name in module.imports) and "transformers" in first
    return found or ("transformers" if trains else "")


def wraps_ddp(module: Module) -> bool:
    """Tell whether a file makes a DistributedDataParallel, or averages the gradients itself."""
    return any(True for _ in wrapping(module))


def wrapping(module: Module) -> Iterator[Call]:
    """Yield the calls that make a DistributedDataParallel of PyTorch or apex, or of a class that inherits from it,
    and those that average a gradient.
    """
    if not MAKES.search(module.file.text):
        return
    heirs = {made.name for made in module.classes.values() if any(DDP.fullmatch(base) for base in made.bases)}
    for function in module.functions:
        for call in function.calls:
            if call.name == "torch.distributed.all_reduce":
                wraps = is_of_gradient(call) or _of_flat_gradients(call)
            else:
                of_library = call.name.startswith(("torch.", "apex.")) or "." not in call.name
                wraps = bool(of_library and DDP.fullmatch(call.name)) or call.name in heirs
            if wraps:
                yield call


def trains(made: Class) -> bool:
    """Tell whether a class is one that trains: its methods go backward, or wrap a model in DDP."""
    calls = (call for method in made.methods.values() for call in method.calls)
    return any(call.last == "backward" or DDP.fullmatch(call.name) for call in calls)


def is_of_gradient(call: Call) -> bool:
    """Tell whether a call is given the gradient of one parameter, `p.grad` or `p.grad.data`."""
    given = dotted(call.node.args[0]) if call.node.args else ""
    return given.endswith((".grad", ".grad.data"))


def _of_flat_gradients(call: Call) -> bool:
    """Tell whether a call stands where gradients are put into one tensor: `_flatten_dense_tensors(grads)`."""
    flat = any(other.last == "_flatten_dense_tensors" for other in call.function.calls)
    return flat and any("grad" in name for name in names_in(call.function.node))


def declines(call: Call, function: Function, guard: Guard) -> bool:
    """Tell whether a call gives False or None for a parameter that a condition in the function asks for."""
    test = guard.test
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and is_constant(test.comparators[0], None):
        test = test.left
    name = dotted(test)
    if not guard.holds or name not in function.parameters:
        return False
    given = argument(call, function, name) or default_of(function, name)
    return is_constant(given, False) or is_constant(given, None)


def _is_new(function: Function, name: str, place: Place, order: int) -> bool:
    """Tell whether a variable is set in the same turn of a loop, and under no other condition, before a place."""
    return any(
        a.value is not None
        and a.order < order
        and a.place.loops == place.loops
        and a.place.guards == place.guards[: len(a.place.guards)]
        for a in function.assignments.get(name, ())
        if place.loops
    )


def carries(node: ast.AST, names: Collection[str]) -> bool:
    """Tell whether an expression is a tensor that is made of one of `names`, and no number or shape of it."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return dotted(node) in names or (node.attr not in HOST and carries(node.value, names))
    if isinstance(node, ast.Call):
        last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owned = isinstance(node.func, ast.Attribute) and carries(node.func.value, names)
        return last not in HOST and (owned or any(carries(arg, names) for arg in node.args))
    if isinstance(node, (ast.Subscript, ast.Starred, ast.keyword)):
        return carries(node.value, names)
    if isinstance(node, ast.BinOp):
        return carries(node.left, names) or carries(node.right, names)
    if isinstance(node, ast.UnaryOp):
        return carries(node.operand, names)
    if isinstance(node, ast.Compare):
        return carries(node.left, names) and not any(isinstance(op, (ast.Is, ast.In, ast.NotIn)) for op in node.ops)
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(carries(one, names) for one in node.elts)
    return False


def inside(place: Place, loop: ast.stmt) -> bool:
    """Tell whether a place is in a loop."""
    return loop in place.loops


def part_of_try(place: Place) -> str:
    """Return except or finally for what stands in such a block, however deep; else an empty text."""
    return next((part for _, part in place.tries if part in ("except", "finally")), "")
