"""The shape of a training program: where its processes begin, which loop has its epochs, and what that loop trains.

All of it is found in the syntax trees and the call graph of `check`. What is not recognised is said, with its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..check.python.effects import DDP
from ..check.python.module import Assignment, Call, Class, Function, Guard, Module, argument, dotted
from ..check.python.program import Program

INIT, DESTROY = "init_process_group", "destroy_process_group"
SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
PROCESSES = re.compile(r"(?:torch\.)?multiprocessing\.(?:.*\.)?Process")
DATA = re.compile(
    r"(?:.*_)?(?:data_?)?(?:loaders?|batches|dl|dataloader|minibatches)(?:_\w+)?|.*(?:loader|Loader)", re.I
)
OPTIMIZER = re.compile(r"(?:.*_)?(?:optim|opts?|optimi[sz]ers?)(?:_.*|[dg12]?)", re.IGNORECASE)
SCHEDULER = re.compile(r".*sched.*|(?:.*_)?lr_(?:decay|policy|warmup)|(?:.*_)?warmup", re.IGNORECASE)
SCALER = re.compile(r"(?:.*_)?(?:scaler|loss_scaler|grad_scaler)(?:_.*)?", re.IGNORECASE)
AVERAGE = re.compile(r"(?:.*_)?(?:ema|swa)(?:_model|_net)?|.*_ema", re.IGNORECASE)
NETWORK = re.compile(
    r"(?:.*_)?(?:ddp|model|net|network|module|encoder|decoder|generator|discriminator|critic|backbone|classifier)"
    r"(?:_.*|[dg12]?)|net[dg]",
    re.IGNORECASE,
)
USES = {
    *("step", "zero_grad", "update", "update_parameters", "scale", "unscale_", "train", "eval", "no_sync"),
}
RANGES = {"range", "trange", "count", "xrange"}
WRAPPERS = {"enumerate", "tqdm", "zip", "islice", "iter", "list", "reversed", "track", "cycle", "trange"}
KINDS = ("model", "average", "optimizer", "scheduler", "scaler")
DEEPEST, MOST = 12, 4000  # calls above each other, and visits of functions: a program that is larger is not followed


@dataclass(frozen=True)
class Level:
    """A loop on the way to a step of the optimizer, and the function that it is in."""

    function: Function
    loop: ast.stmt


@dataclass(frozen=True)
class Held:
    """What a checkpoint must hold: a name for it, the expression in the function of the loop, when it is there."""

    name: str
    text: str
    kind: str
    when: str = ""  # a condition, as text; empty: always


@dataclass
class Shape:
    """What was found. `unknown` has what was not recognised, as (module, line, words)."""

    entry: Module
    spawn: Call | None = None
    inits: list[Call] = field(default_factory=list)
    destroys: list[Call] = field(default_factory=list)
    epochs: Level | None = None
    steps: list[Level] = field(default_factory=list)  # loops whose items are steps of the optimizer
    watched: list[Level] = field(default_factory=list)  # other loops over data
    held: list[Held] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)  # names of numbers that the loop of the epochs changes
    reached: list[Function] = field(default_factory=list)
    path: list[Call] = field(default_factory=list)  # the calls from the body of the entry to the loop of the epochs
    unknown: list[tuple[Module, int, str]] = field(default_factory=list)


class Reader:
    """Follows a program from the file that is started."""

    def __init__(self, program: Program, entry: Module) -> None:
        self.program, self.entry = program, entry
        self._edges: dict[int, list[tuple[Call, Function]]] = {}
        self._steps: dict[int, bool] = {}

    def edges(self, function: Function) -> list[tuple[Call, Function]]:
        """The functions that a function calls, or gives to something that will: `mp.spawn(main)`, `fire.Fire(main)`."""
        if id(function) not in self._edges:
            found: list[tuple[Call, Function]] = []
            for call in function.calls:
                target = self.program.called(call)
                if target is not None:
                    found.append((call, target))
                    continue
                given = [*call.node.args, *(word.value for word in call.node.keywords)]
                for name in filter(None, map(dotted, given)):
                    meant = self._function(function, name)
                    if meant is not None:
                        found.append((call, meant))
            self._edges[id(function)] = found
        return self._edges[id(function)]

    def _function(self, function: Function, name: str) -> Function | None:
        scope: Function | None = function
        while scope is not None:
            if name in scope.inner:
                return scope.inner[name]
            scope = scope.owner
        meant = self.program.lookup(function.module, name)
        return meant if isinstance(meant, Function) else None

    def reached(self) -> list[Function]:
        """All functions that the entry may call, itself first."""
        found, waiting = {id(self.entry.body): self.entry.body}, [self.entry.body]
        while waiting and len(found) < MOST:
            for _, target in self.edges(waiting.pop(0)):
                if id(target) not in found:
                    found[id(target)] = target
                    waiting.append(target)
        return list(found.values())

    def is_step(self, call: Call) -> bool:
        """Tell whether a call is a step of an optimizer, by itself or through a scaler."""
        if call.last != "step" or not isinstance(call.node.func, ast.Attribute):
            return False
        receiver = dotted(call.node.func.value)
        kind = self.kind(call.function, receiver) if receiver else ""
        if kind == "scaler":
            return True
        return kind == "optimizer" or (not receiver and "optim" in ast.unparse(call.node.func.value).lower())

    def steps(self, function: Function) -> bool:
        """Tell whether a function makes steps of an optimizer, by itself or by what it calls."""
        if id(function) not in self._steps:
            self._steps[id(function)] = False  # for a function that calls itself
            self._steps[id(function)] = any(self.is_step(call) for call in function.calls) or any(
                self.steps(target) for _, target in self.edges(function)
            )
        return self._steps[id(function)]

    def chains(self) -> list[tuple[tuple[Level, ...], tuple[Call, ...]]]:
        """The loops around each step of an optimizer, from the outside in, and the calls that lead there."""
        found: list[tuple[tuple[Level, ...], tuple[Call, ...]]] = []
        visits = 0

        def visit(function: Function, above: tuple[Level, ...], calls: tuple[Call, ...]) -> None:
            nonlocal visits
            visits += 1
            if visits > MOST or len(calls) > DEEPEST:
                return
            for call in function.calls:
                if self.is_step(call):
                    found.append((above + _levels(function, call), calls))
            for call, target in self.edges(function):
                if self.steps(target) and all(target is not each.function for each in calls):
                    starts = call.name in SPAWNS or PROCESSES.fullmatch(
                        call.name
                    )  # a loop around it is one of processes
                    visit(target, () if starts else above + _levels(function, call), (*calls, call))

        visit(self.entry.body, (), ())
        return found

    def kind(self, function: Function, name: str, depth: int = 0) -> str:
        """Return what a name holds: model, optimizer, scheduler, scaler, average; empty if nothing says so."""
        last = name.rpartition(".")[2]
        for assignment in self.program.assigned(function, name) if depth < 4 else ():
            if found := self._kind_of_value(function, assignment, depth):
                return found
        if name in function.parameters and (found := self._kind_given(function, name, depth)):
            return found
        for pattern, kind in (
            (SCALER, "scaler"),
            (SCHEDULER, "scheduler"),
            (OPTIMIZER, "optimizer"),
            (AVERAGE, "average"),
            (NETWORK, "model"),
        ):
            if pattern.fullmatch(last):
                return kind
        return ""

    def _kind_given(self, function: Function, name: str, depth: int) -> str:
        for call in self.program.sites.get(id(function), ())[:4]:
            value = argument(call, function, name)
            given = dotted(value) if value is not None else ""
            if given and depth < 3 and (given != name or call.function is not function):
                return self.kind(call.function, given, depth + 1)
        return ""

    def _kind_of_value(self, function: Function, assignment: Assignment, depth: int) -> str:
        value = assignment.value
        if isinstance(value, ast.IfExp):
            value = value.body if isinstance(value.body, ast.Call) else value.orelse
        if not isinstance(value, ast.Call):
            return ""
        name, last = function.module.full_name(value.func), ""
        last = name.rpartition(".")[2]
        if "lr_scheduler" in name or last.endswith(("LR", "Scheduler")) or "schedule" in last.lower():
            return "scheduler"
        if last.endswith("GradScaler"):
            return "scaler"
        if name.startswith("torch.optim.") or last in ("AdamW", "Adam", "SGD", "ZeroRedundancyOptimizer"):
            return "average" if "swa_utils" in name else "optimizer"
        if DDP.fullmatch(name):
            return "model"
        made = self.program.lookup(function.module, dotted(value.func)) if dotted(value.func) else None
        if isinstance(made, Class) and any(base.rpartition(".")[2] == "Module" for base in made.bases):
            return "model"
        if last in ("to", "cuda", "compile", "train") and isinstance(value.func, ast.Attribute):
            inner = value.args[0] if last == "compile" and value.args else value.func.value
            return self.kind(function, dotted(inner), depth + 1) if dotted(inner) else ""
        return ""

    def is_data(self, function: Function, node: ast.expr, depth: int = 0) -> bool:
        """Tell whether an expression is a loader, or something over one: `enumerate(tqdm(loader))`."""
        if isinstance(node, ast.Call):
            last = function.module.full_name(node.func).rpartition(".")[2]
            if last in RANGES or last in ("items", "keys", "values"):
                return False
            if last == "DataLoader":
                return True
            return depth < 4 and any(self.is_data(function, each, depth + 1) for each in node.args)
        name = dotted(node)
        if not name:
            return False
        values = [a.value for a in self.program.assigned(function, name)]
        made = [v for v in values if isinstance(v, ast.Call)]
        if any(function.module.full_name(v.func).endswith("DataLoader") for v in made):
            return True
        if any(function.module.full_name(v.func).rpartition(".")[2] in WRAPPERS for v in made) and depth < 3:
            return any(self.is_data(function, v, depth + 1) for v in made)
        return bool(DATA.fullmatch(name.rpartition(".")[2]))


def _levels(function: Function, call: Call) -> tuple[Level, ...]:
    return tuple(Level(function, loop) for loop in call.place.loops)


def read_shape(program: Program, entry: Module) -> Shape:
    """Return the shape of the program that is started with `entry`."""
    reader = Reader(program, entry)
    shape = Shape(entry, reached=reader.reached())
    for function in shape.reached:
        for call in function.calls:
            _note_call(shape, reader, call)
    _find_loops(shape, reader)
    if shape.epochs is not None:
        _find_held(shape, reader, shape.epochs)
        shape.counted = counted(shape.epochs)
    return shape


def _note_call(shape: Shape, reader: Reader, call: Call) -> None:
    if call.last == INIT and "distributed" in f"torch.distributed {call.name}" and call.name != f"self.{INIT}":
        shape.inits.append(call)
    elif call.last == DESTROY and not call.node.args:
        shape.destroys.append(call)
    elif call.name in SPAWNS:
        if shape.spawn is not None:
            shape.unknown.append(_at(call, "processes are started by a second mp.spawn"))
        shape.spawn = call
    elif PROCESSES.fullmatch(call.name) and any(
        each is call and reader.steps(target) for each, target in reader.edges(call.function)
    ):
        shape.unknown.append(_at(call, "processes are started one by one, with Process()"))


def _at(call: Call, words: str) -> tuple[Module, int, str]:
    return call.function.module, call.node.lineno, words


def _find_loops(shape: Shape, reader: Reader) -> None:
    chains = reader.chains()
    here = shape.entry
    if not chains:
        shape.unknown.append((here, 1, "no step of an optimizer was found in what this file calls"))
        return
    outer = {id(levels[0].loop): levels[0] for levels, _ in chains if levels}
    if any(not levels for levels, _ in chains) or not outer:
        line = next(iter(calls[-1].node.lineno for levels, calls in chains if not levels and calls), 1)
        shape.unknown.append((here, line, "the optimizer makes steps outside of a loop"))
        return
    if len(outer) > 1:
        lines = ", ".join(f"{each.function.module.file.inside}:{each.loop.lineno}" for each in outer.values())
        shape.unknown.append((here, 1, f"several loops train, one after another or by choice: {lines}"))
        return
    shape.epochs = next(iter(outer.values()))
    _, calls = next((levels, calls) for levels, calls in chains if levels)
    shape.path = list(calls)
    inner: dict[int, Level] = {}
    for levels, _ in chains:
        if len(levels) == 1:
            continue
        chosen = next((each for each in levels[1:] if _over_data(reader, each)), levels[-1])
        inner[id(chosen.loop)] = chosen
    shape.steps = list(inner.values())
    for level in shape.steps:
        if not isinstance(level.loop, ast.For):
            words = "the loop over batches is a while loop"
            shape.unknown.append((level.function.module, level.loop.lineno, words))
    if not inner and _over_data(reader, shape.epochs):
        shape.steps = [shape.epochs]  # one pass over the data, without epochs
    training = {id(level.loop) for level in [shape.epochs, *shape.steps]}
    for function in shape.reached:
        for loop, _ in function.loops:
            level = Level(function, loop)
            if id(loop) not in training and _over_data(reader, level) and not _within(level, shape.steps):
                shape.watched.append(level)


def _over_data(reader: Reader, level: Level) -> bool:
    return isinstance(level.loop, ast.For) and reader.is_data(level.function, level.loop.iter)


def _within(level: Level, steps: Sequence[Level]) -> bool:
    """Tell whether a loop stands in the text of another one: over the parts of a batch, say."""
    return any(level.loop in ast.walk(each.loop) for each in steps)


class _Binder:
    """Says what a name in a called function is called in the function of the loop."""

    def __init__(self, reader: Reader, top: Level) -> None:
        self.reader, self.top = reader, top

    def translate(self, function: Function, name: str, given: dict[str, str] | None, depth: int = 0) -> str:
        """Return the expression, or an empty text where there is none. `given`: of parameters; None at the top."""
        if given is None:
            return name
        first, dot, rest = name.partition(".")
        if first in given:
            return f"{given[first]}{dot}{rest}" if given[first] else ""
        if first in function.parameters:
            return ""
        if first not in function.assignments:
            same = function.module is self.top.function.module
            return name if same and first in function.module.body.assignments else ""
        values = {dotted(a.value) for a in function.assignments[first] if a.value is not None}
        if depth < 4 and len(values) == 1 and (value := values.pop()) and value.partition(".")[0] != first:
            inner = self.translate(function, value, given, depth + 1)
            return f"{inner}{dot}{rest}" if inner else ""
        return ""

    def bind(self, call: Call, target: Function, given: dict[str, str] | None) -> dict[str, str]:
        """What the parameters of a called function are called in the function of the loop."""
        found: dict[str, str] = {}
        for name in target.parameters:
            if target.of_class is not None and name in ("self", "cls") and isinstance(call.node.func, ast.Attribute):
                owner = dotted(call.node.func.value)
                found[name] = self.translate(call.function, owner, given) if owner else ""
                continue
            value = argument(call, target, name)
            text = dotted(value) if value is not None else ""
            found[name] = self.translate(call.function, text, given) if text else ""
        if target.owner is call.function and not target.of_class:  # defined inside: it sees the names around it
            found |= {name: self.translate(call.function, name, given) for name in call.function.assignments}
        return found


def _find_held(shape: Shape, reader: Reader, top: Level) -> None:
    """Find what the loop trains, by the names that its function has for it."""
    binder = _Binder(reader, top)
    found: dict[str, tuple[str, Call]] = {}
    lost: dict[str, tuple[str, Call]] = {}
    seen: set[tuple[int, str]] = set()

    def visit(function: Function, given: dict[str, str] | None, calls: Sequence[Call], depth: int) -> None:
        for call in calls:
            for name, kind in _used(reader, call):
                text = binder.translate(function, name, given)
                (found if text else lost).setdefault(text or name, (kind, call))
        for call, target in reader.edges(function):
            if call not in calls or depth > DEEPEST:
                continue
            bound = binder.bind(call, target, given)
            key = (id(target), repr(sorted(bound.items())))
            if key not in seen and len(seen) < MOST:
                seen.add(key)
                visit(target, bound, target.calls, depth + 1)

    visit(top.function, None, [call for call in top.function.calls if top.loop in call.place.loops], 0)
    for name, (kind, call) in lost.items():
        if kind in ("optimizer", "scaler") and kind not in {each for each, _ in found.values()}:
            words = f"the {kind} `{name}` has no name in the function of the loop (line {top.loop.lineno})"
            shape.unknown.append(_at(call, words))
    names: set[str] = set()
    for text, (kind, _) in _without_wrapped(reader, top.function, found).items():
        name = next(each for each in _names_for(text) if each not in names)
        names.add(name)
        shape.held.append(Held(name, text, kind, _when(reader.program, top, text)))
    shape.held.sort(key=lambda each: KINDS.index(each.kind))
    kinds = {each.kind for each in shape.held}
    for kind in ("model", "optimizer"):
        if kind not in kinds and not any(kind in words for _, _, words in shape.unknown):
            words = f"which {kind} this loop trains is not seen"
            shape.unknown.append((top.function.module, top.loop.lineno, words))


def _used(reader: Reader, call: Call) -> Iterator[tuple[str, str]]:
    """Yield the names that a call uses as a model, an optimizer or the like, each with its kind."""
    func = call.node.func
    owner = dotted(func.value) if isinstance(func, ast.Attribute) else ""
    if owner and call.last in USES:
        kind = reader.kind(call.function, owner)
        allowed = {
            "step": ("optimizer", "scheduler", "scaler", "average"),
            "update": ("scaler", "average"),
            "update_parameters": ("average",),
            "zero_grad": ("optimizer", "model"),
        }.get(call.last, ("model",) if call.last in ("train", "eval", "no_sync") else ("scaler",))
        if kind in allowed and reader.program.called(call) is None:
            yield owner, kind
    elif call.last in ("parameters", "module") and owner and reader.kind(call.function, owner) == "model":
        yield owner, "model"
    name = dotted(func)
    if name and reader.program.called(call) is None and _is_network(reader, call.function, name):
        yield name, "model"
    if call.last == "step":
        for given in map(dotted, call.node.args):
            if given and reader.kind(call.function, given) == "optimizer":
                yield given, "optimizer"


def _is_network(reader: Reader, function: Function, name: str) -> bool:
    """Tell whether a name that is called is a model, not a function that builds one."""
    known = name.partition(".")[0] in function.parameters or bool(reader.program.assigned(function, name))
    return known and name not in function.module.imports and reader.kind(function, name) == "model"


def _without_wrapped(
    reader: Reader, function: Function, found: dict[str, tuple[str, Call]]
) -> dict[str, tuple[str, Call]]:
    """Leave out what another one holds: `net` where there is `ddp_net = DDP(net)`, `model.module` beside `model`."""
    inner: set[str] = set()
    for text in found:
        for assignment in reader.program.assigned(function, text):
            value = assignment.value
            if isinstance(value, ast.Call) and DDP.fullmatch(function.module.full_name(value.func)) and value.args:
                inner.add(dotted(value.args[0]))
            elif isinstance(value, ast.Attribute) and value.attr == "module" and dotted(value.value) in found:
                inner.add(text)
        for other in found:
            if text.startswith(f"{other}.") and found[other][0] == "model":
                inner.add(text)
    left = {text: what for text, what in found.items() if text not in inner}
    same = {text: what for text, what in found.items() if text in inner and _same_name(reader, function, text)}
    return left | same


def _same_name(reader: Reader, function: Function, text: str) -> bool:
    """Tell whether a name is given to its own wrapper: `model = DDP(model)`."""
    values = [a.value for a in reader.program.assigned(function, text)]
    return any(isinstance(v, ast.Call) and v.args and dotted(v.args[0]) == text for v in values)


def _names_for(text: str) -> Iterator[str]:
    """Yield names for an expression: `self.model` is model, then self_model, then numbered."""
    parts = [part.strip("_") or "self" for part in text.split(".")]
    yield parts[-1]
    yield "_".join(parts)
    yield from (f"{parts[-1]}{number}" for number in range(2, 100))


def _when(program: Program, top: Level, text: str) -> str:
    """Return the condition under which a local name exists, if it is made in one branch only, where the loop is not."""
    if "." in text:
        return ""
    function = top.function
    around = {id(g.test) for loop, place in function.loops if loop is top.loop for g in place.guards}
    assigned = program.assigned(function, text)
    places = [[g for g in a.place.guards if not g.early and id(g.test) not in around] for a in assigned]
    if not places or not all(places) or text in function.parameters:
        return ""
    tests = {(ast.unparse(g.test), g.holds) for guards in places for g in guards}
    if any((test, not holds) in tests for test, holds in tests):
        return ""  # made in each branch, as far as can be seen
    return " and ".join(dict.fromkeys(_condition(guard) for guard in places[0]))


def _condition(guard: Guard) -> str:
    text = ast.unparse(guard.test)
    return f"({text})" if guard.holds else f"not ({text})"


def counted(top: Level) -> list[str]:
    """Return the names of numbers that were set before the loop of the epochs, and are changed in it.

    Like `global_step = 0` before it and `global_step += 1` inside, or the best accuracy so far; `self.best` as well.
    """
    function, first, last = top.function, top.loop.lineno, top.loop.end_lineno or top.loop.lineno
    declared = {name for node in ast.walk(function.node) if isinstance(node, ast.Nonlocal) for name in node.names}
    shared = {name for node in ast.walk(function.node) if isinstance(node, ast.Global) for name in node.names}
    found = []
    for name, assignments in function.assignments.items():
        if name in declared or "." in name:
            continue
        outside = function.module.body.assignments.get(name, []) if name in shared else []
        before = [*outside, *(a for a in assignments if _line(a) < first)]
        inside = [a for a in assignments if first < _line(a) <= last]
        if any(isinstance(a.node, (ast.For, ast.AsyncFor)) for a in inside):
            continue
        if _set_to_number(before) and any(not _is_number(a.value) for a in inside):
            found.append(name)
    return found + _counted_attributes(function)


def _counted_attributes(function: Function) -> list[str]:
    """The same for what an object counts: set to a number where it is made, and changed by its other methods."""
    owner = function.of_class
    if owner is None or "__init__" not in owner.methods:
        return []
    found = []
    for name, assignments in owner.methods["__init__"].assignments.items():
        others = [m for key, m in owner.methods.items() if key != "__init__"]
        changed = [a for method in others for a in method.assignments.get(name, ()) if not _is_number(a.value)]
        if name.startswith("self.") and name.count(".") == 1 and _set_to_number(assignments) and changed:
            found.append(name)
    return found


def _set_to_number(assignments: Sequence[Assignment]) -> bool:
    """Tell whether one of them sets a number whatever else holds."""
    return any(_is_number(a.value) and not [g for g in a.place.guards if not g.early] for a in assignments)


def _line(assignment: Assignment) -> int:
    return getattr(assignment.node, "lineno", 0)


def _is_number(value: ast.expr | None) -> bool:
    """Tell whether an expression is a number: 0, -1, 1e9, float("inf"), -np.inf, math.inf."""
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
    if isinstance(value, ast.Attribute):
        return value.attr in ("inf", "Inf", "infty")
    return isinstance(value, ast.Call) and dotted(value.func) == "float"
