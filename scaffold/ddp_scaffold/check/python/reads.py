"""Rules for what makes the CPU wait for the GPU at each step of training, and for barriers there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .context import Context, Found, declines
from .module import (
    Call,
    Class,
    Function,
    Guard,
    Place,
    argument,
    arguments_of,
    default_of,
    dotted,
    dotted_names,
    is_constant,
    last_of,
    names_in,
    shown,
)
from .ranks import is_off
from .steps import (
    each_step,
    holds_each_step,
    is_choice,
    makes_step,
    seldom,
    step_loops,
    targets,
    within,
)
from .tensors import NORMS, Held

SYNCHRONIZES = {"torch.cuda.synchronize"}
WAITS = {*SYNCHRONIZES, "torch.cuda.empty_cache"}
FINITE = {"torch.isnan", "torch.isinf", "torch.isfinite"}
BARRIER = "torch.distributed.barrier"
WRAPS = re.compile("DistributedDataParallel|DDP")
SHOWS = {"print", "format", "info", "set_description", "set_postfix_str", "set_postfix", "write", "msg"}
SHOWN = {*SHOWS, "add_scalar", "log"}
NUMBERS = {
    *("float", "int", "bool", "math.isnan", "math.isinf", "math.isfinite", "math.sqrt", "math.exp", "math.log"),
    *("numpy.isnan", "numpy.isfinite", "numpy.isinf"),
}
REDUCES = {"any", "all", "sum", "max", "min", "mean", "norm"}
OF_TENSOR = {"item", "tolist", "cpu"}
LOADERS = re.compile(r"loader|dataset|batches|epoch")
NO_STEP = re.compile(
    r"eval|valid|infer|metric|post_?process|accuracy|sampler|visual|export|wrapper|inception|(?:^|_)fid|statistics"
    r"|test|demo|predict",
    re.IGNORECASE,
)
NO_TRAINING = re.compile(r"infer|deploy|runtime|demo|serv|onnx|export|sequence_generator|beam|decoding", re.IGNORECASE)
MEASURES = re.compile(r"profil|bench", re.IGNORECASE)
DEPTH = 4


@dataclass(frozen=True)
class Read:
    """An expression that reads a tensor from the GPU, its function, and whether rank 0 alone comes to it."""

    node: ast.expr
    function: Function
    first: bool
    test: str = ""  # if, assert, while: it is the condition of one
    many: bool = False  # it stands in a loop of a helper, over classes or samples

    @property
    def told(self) -> str:
        """Return it as a message names it."""
        return f"{self.test} {shown(self.node, 40)}".lstrip()

    @property
    def of_loss(self) -> bool:
        """Tell whether it is `loss.item()`, which whoever reads the loop sees first."""
        if not isinstance(self.node, ast.Call):
            return False
        number = dotted(self.node.func) == "float" and self.node.args
        return (last_of(self.node) in OF_TENSOR and _is_loss(self.node.func)) or bool(
            number and _is_loss(self.node.args[0])
        )

    @property
    def tensor(self) -> str:
        """Return the tensor that is read, as a fix names it."""
        node = self.node
        if (
            self.test
            or not isinstance(node, ast.Call)
            or last_of(node) in SHOWS
            or last_of(node) in ("add_scalar", "log")
        ):
            return "loss"
        if isinstance(node.func, ast.Attribute) and node.func.attr in OF_TENSOR:
            return re.sub(r"\.(?:item|cpu|tolist|detach|numpy)(?:\(\))?", "", shown(node.func, 40))
        return shown(node.args[0], 40) if node.args else "loss"


def per_step(context: Context, function: Function) -> Iterator[Found]:
    """Yield what makes the CPU wait for the GPU at each step: item() of the loss, here or in a helper; a barrier."""
    if not context.plain(function.module) or (
        isinstance(function.node, ast.Module) and not context.run_by_ranks(function)
    ):
        return
    file = function.module.parts[-1] if function.module.parts else ""
    if MEASURES.search(function.name) or "benchmark" in file:
        return
    loops: list[ast.stmt | None] = [*step_loops(context, function)]
    if not loops and makes_step(context, function):
        loops = [None]
    for loop in loops:
        for read in _first_reads(context, function, loop):
            yield _told(read)
        yield from _waits(context, function, loop)


def _waits(context: Context, function: Function, loop: ast.stmt | None) -> Iterator[Found]:
    """Yield synchronize(), empty_cache() and barriers of each step."""
    for call in function.calls:
        if call.place.loops[-1:] != ((loop,) if loop is not None else ()) or not each_step(context, call):
            continue
        if (wait := _cuda_wait(context, call, 0)) is not None:
            guards = [(function, guard) for guard in within(call.place)]
            guards += [(wait.function, guard) for guard in wait.place.guards if wait is not call]
            first = any(context.ranks.guard(where, guard) == "first" for where, guard in guards)
            ranks = "on rank 0, for which the others wait" if first else "on every rank"
            message = f"`{shown(wait.node)}` {_done_by(wait)}, at every step, {ranks}: the CPU cannot run ahead"
            yield Found("DDP413", wait.function.module, wait.node, message, f"delete `{shown(wait.node)}`")
        elif not within(call.place) and context.says(function.module, WRAPS) and _waits_for_all(context, call):
            message = "a barrier at every step makes all ranks wait for the slowest; backward already synchronises them"
            yield Found("DDP406", function.module, call.node, message, f"delete `{shown(call.node)}`")


def _done_by(wait: Call) -> str:
    return "waits until the GPU has done everything" if wait.name in SYNCHRONIZES else "gives memory back to CUDA"


def _cuda_wait(context: Context, call: Call, depth: int) -> Call | None:
    """Return the call of synchronize() or empty_cache() that a call is, or surely comes to in a helper."""
    if call.name in WAITS:
        return call
    if depth > 2:
        return None
    for target in targets(context, call):
        for inner in target.calls:
            guards = [guard for guard in inner.place.guards if not _is_of_several(context, target, guard)]
            if inner.place.loops or any(seldom(context, target, guard) or guard.early for guard in guards):
                continue
            unknown = [g for g in guards if context.ranks.guard(target, g) is None]
            if unknown and not all(_asks_for_cuda(guard) for guard in unknown):
                continue
            if (found := _cuda_wait(context, inner, depth + 1)) is not None:
                return found
    return None


def _is_of_several(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a condition holds wherever there are several ranks: a group, or a model in DDP."""
    test, holds = guard.test, guard.holds
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    if isinstance(test, ast.Call) and dotted(test.func) == "isinstance" and len(test.args) == 2:
        return holds and WRAPS.search(ast.unparse(test.args[1])) is not None
    return context.ranks.alone(function, [Guard(guard.test, not guard.holds, guard.line)])


def _asks_for_cuda(guard: Guard) -> bool:
    return "cuda" in ast.unparse(guard.test).lower() and guard.holds


def _waits_for_all(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call is a barrier, or comes to one in a helper that does not train."""
    if call.name == BARRIER:
        return True
    target = context.program.called(call)
    if target is None or depth > 2 or target is call.function:
        return False
    return any(
        _waits_for_all(context, c, depth + 1)
        and not c.place.loops
        and all(context.ranks.alone(target, [Guard(g.test, not g.holds, g.line)]) for g in c.place.guards)
        for c in target.calls
    )


def _told(read: Read) -> Found:
    """Return what is said of a place that reads from the GPU."""
    ranks = "on rank 0, for which the others wait" if read.first else "on every rank"
    often = "several times at every step" if read.many else "at every step"
    message = f"`{read.told}` makes the CPU wait for the GPU {often}, {ranks}"
    fix = f"add `{read.tensor}.detach()` up on the GPU, and read it every n steps"
    if read.test:
        fix = "compute it without the test, as by torch.where or a mask, or ask where the data is still on the CPU"
    return Found("DDP401", read.function.module, read.node, message, fix)


def _first_reads(context: Context, function: Function, loop: ast.stmt | None) -> list[Read]:
    """Return the first place at which each step of a loop reads from the GPU: on every rank, else on rank 0.

    And the first one that does it for each of several classes or samples, in a helper.
    """
    found: list[Read] = []
    held = context.tensors.held(function)
    seen: set[tuple[int, Held]] = set()
    for call in function.calls:
        if not _is_in(context, call, loop) or not each_step(context, call, loop):
            continue
        first = any(context.ranks.guard(function, guard) == "first" for guard in within(call.place, loop))
        for read in _read_by(context, call, held, seen, 0):
            found.append(replace(read, first=read.first or first))
    return _chosen(found, function)


def _chosen(found: list[Read], function: Function) -> list[Read]:
    """Return the first of some places, and the first that is read several times a step."""
    chosen = min(found, key=lambda read: (read.first, read.function is not function, not read.of_loss), default=None)
    if chosen is None:
        return []
    others = (read for read in found if read.many and not read.first and read.function is not chosen.function)
    many = next(others, None)
    return [chosen] if many is None else [chosen, many]


def _is_in(context: Context, call: Call, loop: ast.stmt | None) -> bool:
    """Tell whether a call stands in a loop, or in one within it that goes over parts of the step."""
    if loop is not None and loop not in call.place.loops:
        return False
    inner = call.place.loops[call.place.loops.index(loop) + 1 :] if loop is not None else call.place.loops
    if not all(isinstance(one, ast.For) for one in inner):
        return False
    texts = [ast.unparse(one.iter).lower() for one in inner if isinstance(one, ast.For)]
    if any(LOADERS.search(text) for text in texts):
        return False
    counted = [one for one, text in zip(inner, texts, strict=True) if "range(" in text]
    return not counted or not any(one in step_loops(context, call.function) for one in counted)


def _read_by(context: Context, call: Call, held: Held, seen: set[tuple[int, Held]], depth: int) -> Iterator[Read]:
    """Yield where a call reads a tensor from the GPU: the call itself, or places in a helper."""
    if reads(context, call, held):
        yield Read(call.node, call.function, False, many=depth > 0 and _goes_over_samples(call))
        return
    if depth > DEPTH:
        return
    for target in targets(context, call):
        given = context.tensors.given(call, target, held)
        if (id(target), given) in seen:
            continue
        seen.add((id(target), given))
        yield from _inside(context, call, target, context.tensors.held(target, given), seen, depth)


def _goes_over_samples(call: Call) -> bool:
    """Tell whether a call stands in a loop over samples or classes: not over the values of a meter, or parameters."""
    over = [loop.iter for loop in call.place.loops if isinstance(loop, ast.For)]
    return bool(over) and not any(
        re.search(r"items\(|values\(|param|kwargs|meter|loss", ast.unparse(one)) for one in over
    )


def _inside(
    context: Context, site: Call, target: Function, held: Held, seen: set[tuple[int, Held]], depth: int
) -> Iterator[Read]:
    """Yield the places in a helper that read from the GPU whenever it is called."""
    for call in target.calls:
        guards = call.place.guards
        if context.ranks.alone(target, guards) or any(part == "except" for _, part in call.place.tries):
            continue
        if any(_declined(site, target, guard) for guard in guards) or _is_told(call):
            continue
        first = any(context.ranks.guard(target, guard) == "first" for guard in guards)
        if not _passed(context, target, guards, held, first):
            continue
        for read in _read_by(context, call, held, seen, depth + 1):
            yield replace(read, first=read.first or first)
    for read in _tests_in(context, target, held):
        place = next(place for test, place, _ in conditions(target) if test is read.node)
        if not any(_declined(site, target, guard) for guard in place.guards):
            yield read


def _declined(site: Call, target: Function, guard: Guard) -> bool:
    """Tell whether a call does not pass a condition of a helper: `mode == "cpu"` where the mode is another."""
    if declines(site, target, guard):
        return True
    test = guard.test
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and guard.holds):
        return False
    name, wanted = dotted(test.left), test.comparators[0]
    if name not in target.parameters or not isinstance(wanted, ast.Constant):
        return False
    given = argument(site, target, name) or default_of(target, name)
    return isinstance(given, ast.Constant) and given.value != wanted.value


def _is_told(call: Call) -> bool:
    """Tell whether a call stands in the message of an exception, or where one is raised in the end."""
    function = call.function
    raised = [(e.node.lineno, e.node.end_lineno or 0) for e in function.exits if e.kind == "raise"]
    raised += [(one.msg.lineno, one.msg.end_lineno or 0) for one, _, _ in function.asserts if one.msg is not None]
    if any(first <= call.node.lineno <= last for first, last in raised):
        return True
    held = {id(guard.test) for guard in call.place.guards if guard.holds and not guard.early}
    return any(id(one.test) in held and isinstance(one.body[-1], ast.Raise) for one, _, _ in function.tests)


def _passed(context: Context, function: Function, guards: Sequence[Guard], held: Held, first: bool) -> bool:
    """Tell whether each step gets past conditions: those of options, and those that ask whether there is a sample."""
    return not any(
        seldom(context, function, guard, of_rank=first) and not _asks_for_any(context, function, guard, held)
        for guard in guards
    )


def _asks_for_any(context: Context, function: Function, guard: Guard, held: Held) -> bool:
    """Tell whether a condition holds for all but odd batches: `if mask.any()`, `if mask.sum() == 0: continue`."""
    parts = guard.test.values if isinstance(guard.test, ast.BoolOp) else [guard.test]
    wanted = ast.Gt if guard.holds else ast.Eq
    return any(
        is_test(context, function, part, held)
        and (
            (isinstance(part, ast.Compare) and isinstance(part.ops[0], wanted) and is_constant(part.comparators[0], 0))
            or (isinstance(part, ast.Call) and last_of(part) == "any" and guard.holds)
        )
        for part in parts
    )


def _tests_in(context: Context, function: Function, held: Held) -> Iterator[Read]:
    """Yield the conditions and assertions in a helper that ask for the value of a tensor."""
    for test, place, word in conditions(function):
        if context.ranks.alone(function, place.guards) or not _passed(context, function, place.guards, held, False):
            continue
        if is_test(context, function, test, held):
            yield Read(test, function, False, word, bool(place.loops))


def conditions(function: Function) -> Iterator[tuple[ast.expr, Place, str]]:
    """Yield what is asked for by `if`, `while` and `assert`, each with its place and that word."""
    yield from ((one.test, place, "if") for one, place, _ in function.tests)
    yield from ((one.test, place, "assert") for one, place, _ in function.asserts)
    yield from ((one.test, place, "while") for one, place in function.loops if isinstance(one, ast.While))


def reads(context: Context, call: Call, held: Held) -> bool:
    """Tell whether a call waits for a tensor on the GPU."""
    func, function, line = call.node.func, call.function, call.node.lineno
    tensors = context.tensors

    def surely(node: ast.expr) -> bool:
        return tensors.holds_at(function, node, held.surely, line)

    if isinstance(func, ast.Attribute) and not call.node.args and func.attr in OF_TENSOR:
        return _is_loss(func.value) or tensors.holds(function, func.value, held.may) or _is_one_of_values(call)
    if call.name in NUMBERS and len(call.node.args) == 1:
        return surely(call.node.args[0])
    if call.name == "range":
        return any(surely(one) for one in call.node.args)
    if call.last in SHOWS:
        return any(_is_shown(context, function, one, held, line) for one in arguments_of(call.node))
    if any(_is_text(one) and _is_shown(context, function, one, held, line) for one in call.node.args):
        return True
    if call.last == "add_scalar" and len(call.node.args) > 1:
        return surely(call.node.args[1])
    if call.last in ("log", "add_scalars", "log_metrics") and call.name.partition(".")[0] not in (
        "math",
        "torch",
        "numpy",
    ):
        dicts = [one for one in call.node.args if isinstance(one, ast.Dict)]
        return any(surely(value) for one in dicts for value in one.values)
    return False


def _is_text(node: ast.expr) -> bool:
    """Tell whether an expression is a text that is made there: `f"{x}"`, `"%f" % x`."""
    left = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else node
    return isinstance(left, ast.JoinedStr) or (left is not node and isinstance(left, ast.Constant))


def _texts(function: Function, name: str) -> list[ast.expr]:
    """Return the texts that a variable is set to, or that are put behind it."""
    found = [getattr(a.node, "value", a.value) for a in function.assignments.get(name, ())]
    return [one for one in found if one is not None and _is_text(one)]


def _is_shown(context: Context, function: Function, node: ast.expr, held: Held, line: int) -> bool:
    """Tell whether a text is made of a tensor on the GPU, whose value has to come to the CPU for that."""
    if isinstance(node, ast.Name) and (texts := _texts(function, node.id)):
        return any(_is_shown(context, function, text, held, text.lineno) for text in texts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # "%.3f" % loss
        parts = getattr(node.right, "elts", [node.right])
        return isinstance(node.left, (ast.Constant, ast.JoinedStr)) and any(
            context.tensors.holds_at(function, one, held.surely, line) for one in parts
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # "a" + f"{loss}"
        return any(
            _is_shown(context, function, one, held, line)
            for one in (node.left, node.right)
            if not isinstance(one, (ast.Name, ast.Attribute))
        )
    if isinstance(node, ast.JoinedStr):
        values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return any(context.tensors.holds_at(function, one, held.surely, line) for one in values)
    if isinstance(node, ast.Call) and last_of(node) not in ("str", "repr"):
        return False
    if isinstance(node, ast.Call):
        node = node.args[0] if node.args else node
    return context.tensors.holds_at(function, node, held.surely, line)


def _is_one_of_values(call: Call) -> bool:
    """Tell whether a call is `value.item()` in `for name, value in metrics.items()`."""
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) and call.last == "item" else None
    loop = call.place.loops[-1] if call.place.loops else None
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call) or not isinstance(owner, ast.Name):
        return False
    over = loop.iter.func
    if (
        not isinstance(over, ast.Attribute)
        or over.attr not in ("items", "values")
        or owner.id not in names_in(loop.target)
    ):
        return False
    return re.search(r"loss|metric|scalar|log", dotted(over.value), re.IGNORECASE) is not None


def _is_loss(node: ast.expr) -> bool:
    """Tell whether what is read is a loss by its names, and no number already."""
    if isinstance(node, ast.Call) and last_of(node) in ("item", "tolist", "float", "mean_value"):
        return False
    return "loss" in ast.unparse(node).lower()


def is_test(context: Context, function: Function, test: ast.expr, held: Held) -> bool:
    """Tell whether a condition asks for the value of a tensor on the GPU: `if torch.isnan(loss)`, `if loss > 10`."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    for part in parts:
        while isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
            part = part.operand
        if isinstance(part, ast.BinOp) and isinstance(part.op, (ast.BitAnd, ast.BitOr)):
            part = part.left
        for one in ast.walk(part):
            if not (isinstance(one, ast.Call) and function.module.full_name(one.func) in FINITE and one.args):
                continue
            if _is_loss(one.args[0]) or context.tensors.holds(function, one.args[0], held.may):
                return True
        plain = isinstance(part, ast.Compare) and (
            not _is_no_number(part.comparators[0])
            or (isinstance(part.left, ast.Call) and last_of(part.left) in REDUCES)
        )
        of_tensor = plain or (isinstance(part, ast.Call) and last_of(part) in ("any", "all"))
        if of_tensor and context.tensors.holds_at(function, part, held.surely, test.lineno):
            return True
        if of_tensor and function.name == "forward" and _is_reduced(context, function, part, held):
            return True
    return False


def _is_reduced(context: Context, function: Function, node: ast.expr, held: Held) -> bool:
    """Tell whether what a forward pass is given is made one value, as lists and numbers do not: `mask.any()`."""
    node = node.left if isinstance(node, ast.Compare) else node
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REDUCES):
        return False
    return context.tensors.holds(function, node.func.value, held.may)


def _is_no_number(node: ast.expr) -> bool:
    """Tell whether what a comparison has on its right may be another thing than a number: a name, None, a text."""
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, (str, bool))
    return isinstance(node, (ast.Name, ast.Attribute))


def checks(context: Context, function: Function) -> Iterator[Found]:
    """Yield `if torch.isnan(loss)` at each step: the CPU waits for the answer."""
    if not context.plain(function.module):
        return
    steps = step_loops(context, function)
    for test, place, word in conditions(function) if steps else ():
        if (
            not place.loops
            or place.loops[-1] not in steps
            or not _is_asked(context, function, within(place), place.loops)
        ):
            continue
        if is_test(context, function, test, context.tensors.held(function)):
            asked = f"{word} {shown(test, 40)}"
            message = f"`{asked}` makes the CPU wait for the GPU at every step, on every rank"
            fix = f"keep `{shown(test, 40)}` on the GPU, and read it every n steps, or let GradScaler skip the step"
            yield Found("DDP401", function.module, test, message, fix)


def _is_asked(context: Context, function: Function, guards: list[Guard], loops: tuple[ast.stmt, ...]) -> bool:
    return holds_each_step(context, function, guards, loops[-1:])


def in_forward(context: Context, function: Function) -> Iterator[Found]:
    """Yield what reads from the GPU in the forward pass of a module, itself or in helpers: that is at every step."""
    if not is_forward(context, function):
        return
    given = frozenset(name for name in function.parameters if name != "self" and not _is_number(function, name))
    held = context.tensors.held(function, Held(given))
    found: list[Read] = []
    seen: set[tuple[int, Held]] = set()
    for call in function.calls:
        if _in_each_forward(context, function, call.place.guards, held) and not _is_told(call):
            found += _read_by(context, call, held, seen, 1)
    found += _tests_in(context, function, held)
    own = [read for read in found if not read.first and (read.function is function or read.function.name != "forward")]
    for read in _chosen(own, function):
        yield _told(read)


def is_forward(context: Context, function: Function) -> bool:
    """Tell whether a function is the forward pass of a module that the ranks train, or that training asks."""
    owner = function.of_class
    if owner is None or function.name not in ("forward", "__call__") or not _is_module(context, owner):
        return False
    if function.name == "__call__" and "forward" in owner.methods:
        return False
    if any("no_grad" in ast.unparse(one) or "inference_mode" in ast.unparse(one) for one in _decorators(function)):
        return False
    if not context.plain(function.module) or not context.is_named(owner.name):
        return False
    file = function.module.parts[-1] if function.module.parts else ""
    if NO_TRAINING.search(function.module.file.inside):
        return False
    return not NO_STEP.search(owner.name) and not NO_STEP.search(file)


def _decorators(function: Function) -> list[ast.expr]:
    return [] if isinstance(function.node, ast.Module) else function.node.decorator_list


def _is_module(context: Context, owner: Class) -> bool:
    """Tell whether a class is a module of PyTorch, directly or over others of these files."""
    classes = context.program.hierarchy(owner) if owner.bases else []
    return any(base.rpartition(".")[2] in ("Module", "_Loss") for one in classes for base in one.bases)


def _is_number(function: Function, name: str) -> bool:
    """Tell whether a parameter is no tensor by its default or what it is said to be: `scale=1.0`, `epoch: int`."""
    default = default_of(function, name)
    if isinstance(default, ast.Constant) and default.value is not None:
        return True
    said = getattr(function.node, "args", None)
    notes = [one.annotation for one in (*said.args, *said.kwonlyargs) if one.arg == name] if said is not None else []
    return any(note is not None and re.match(r"(?:int|float|bool|str)\b", ast.unparse(note)) for note in notes)


def _in_each_forward(context: Context, function: Function, guards: Sequence[Guard], held: Held) -> bool:
    """Tell whether each forward pass of training gets past conditions."""
    return all(
        (guard.holds and dotted(guard.test) == "self.training")
        or (is_choice(guard) and not seldom(context, function, guard) and _is_usual(context, function, guard))
        or _asks_for_any(context, function, guard, held)
        or (guard.holds and isinstance(guard.test, ast.Compare) and is_constant(guard.test.comparators[0], None))
        for guard in guards
    )


def _is_usual(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether an option of a module has the value for which a condition holds, where nobody gives another."""
    test, holds = guard.test, guard.holds
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    name = dotted(test)
    made = function.of_class.methods.get("__init__") if function.of_class is not None else None
    if made is None or not name.startswith("self.") or name == "self.training":
        return False
    values = [a.value for a in context.program.assigned(function, name)]
    if len(values) != 1 or values[0] is None:
        return False
    value = default_of(made, dotted(values[0])) if dotted(values[0]) in made.parameters else values[0]
    return isinstance(value, ast.Constant) and isinstance(value.value, bool) and value.value is holds


def in_optimizer(context: Context, function: Function) -> Iterator[Found]:
    """Yield waits for the GPU in the step of an optimizer of these files, for each parameter or each step."""
    owner = function.of_class
    if function.name != "step" or owner is None or not any("optim" in base.lower() for base in owner.bases):
        return
    if not context.is_named(owner.name):
        return
    held = context.tensors.held(function)
    inner = [c for c in function.calls if len(c.place.loops) > 1]
    read = next((c.node for c in inner if _of_parameter(context, c, held)), None)
    clips = next((c for c in inner if c.last in NORMS and len(c.place.loops) == 2 and _is_of_one(c)), None)
    if clips is not None:
        yield _clipped(function, clips)
    tests = [t for t, place, _ in conditions(function) if len(place.loops) > 1]
    test = next((t for t in tests if is_test(context, function, t, held)), None)
    if (node := read or test) is not None:
        message = (
            f"`{shown(node, 40)}` waits for the GPU once a parameter, at every step of the optimizer, while the other"
            " ranks wait in the next reduction"
        )
        yield Found("DDP402", function.module, node, message, "keep it on the GPU: torch.where instead of a test")
    for call in function.calls:
        if call.name in WAITS and not any("profil" in ast.unparse(guard.test) for guard in call.place.guards):
            how = "for each parameter" if len(call.place.loops) > 1 else "at every step"
            message = f"`{shown(call.node)}` makes the CPU wait for the GPU {how} of the optimizer, on every rank"
            yield Found("DDP413", function.module, call.node, message, f"delete `{shown(call.node)}`")
            return


def _is_of_one(call: Call) -> bool:
    """Tell whether a call is given one parameter, that of the turn of its loop."""
    given, loop = call.node.args[:1], call.place.loops[-1] if call.place.loops else None
    if isinstance(given[0] if given else None, (ast.List, ast.Tuple)):
        given = given[0].elts  # type: ignore[attr-defined]
    return isinstance(loop, ast.For) and len(given) == 1 and dotted(given[0]) in dotted_names(loop.target) - {""}


def _clipped(function: Function, call: Call) -> Found:
    message = (
        f"`{shown(call.node, 40)}` takes the norm of each parameter by itself at every step: several kernels for each"
        " of hundreds, and before PyTorch 1.10 a wait for the GPU for each, while the other ranks wait"
    )
    fix = "call it once behind the backward pass, with all parameters: that clips by the norm of all"
    return Found("DDP402", function.module, call.node, message, fix)


def clipping(context: Context, function: Function) -> Iterator[Found]:
    """Yield clip_grad_norm_ of each single parameter at each step of training."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        if call.last in NORMS and _is_of_one(call) and _over_parameters(call.place.loops[-1]):
            outer = call.place.loops[-2:-1]
            if (outer and outer[0] in step_loops(context, function)) or (not outer and makes_step(context, function)):
                yield _clipped(function, call)


def _over_parameters(loop: ast.stmt) -> bool:
    return isinstance(loop, ast.For) and re.search(r"param", ast.unparse(loop.iter)) is not None


def waits_in_forward(context: Context, function: Function) -> Iterator[Found]:
    """Yield barriers and synchronize() in the forward pass of a module, itself or in what it calls."""
    if not is_forward(context, function):
        return
    for wait in _waits_inside(context, function, 0, {id(function)}):
        if wait.name == BARRIER:
            message = "a barrier in every forward pass makes all ranks wait for the slowest; backward synchronises them"
            yield Found("DDP406", wait.function.module, wait.node, message, f"delete `{shown(wait.node)}`")
        else:
            often = "in every forward pass, on every rank: the CPU cannot run ahead"
            message = f"`{shown(wait.node)}` {_done_by(wait)}, {often}"
            yield Found("DDP413", wait.function.module, wait.node, message, f"delete `{shown(wait.node)}`")


def _waits_inside(
    context: Context, function: Function, depth: int, seen: set[int], site: Call | None = None
) -> Iterator[Call]:
    for call in function.calls:
        if not all(
            _comes_in_training(context, function, guard)
            or (site is not None and _is_chosen(context, site, function, guard))
            for guard in call.place.guards
        ):
            continue
        if call.name in WAITS or call.name == BARRIER:
            yield call
        for target in targets(context, call) if depth < 3 else ():
            if id(target) not in seen and target.name not in ("forward", "__init__"):
                seen.add(id(target))
                yield from _waits_inside(context, target, depth + 1, seen, call)


def _is_chosen(context: Context, site: Call, function: Function, guard: Guard) -> bool:
    """Tell whether a condition asks for a parameter that the call does not decline: `if loose:` for `f(loose=x)`."""
    name = dotted(guard.test)
    given = argument(site, function, name) if name in function.parameters else None
    if given is None or is_off(site.function, dotted(given)):
        return False
    return guard.holds and not _declined(site, function, guard) and not seldom(context, function, guard)


def _comes_in_training(context: Context, function: Function, guard: Guard) -> bool:
    """Tell whether a forward pass of training on several GPUs gets past a condition: `if self.training`, of options."""
    if "training" not in ast.unparse(guard.test):
        return (
            _asks_for_cuda(guard)
            or _asks_for_ranks(guard)
            or (is_choice(guard) and not seldom(context, function, guard))
        )
    parts = guard.test.values if isinstance(guard.test, ast.BoolOp) else [guard.test]
    wanted = [Guard(part, guard.holds, guard.line) for part in parts]
    told = (dotted(one.test) == "self.training" or _asks_for_cuda(one) or _asks_for_ranks(one) for one in wanted)
    return guard.holds and all(told)


def _asks_for_ranks(guard: Guard) -> bool:
    return guard.holds and re.search(r"world_size|distributed|is_initialized", ast.unparse(guard.test)) is not None


def _of_parameter(context: Context, call: Call, held: Held) -> bool:
    seldom_read = any(seldom(context, call.function, guard) for guard in call.place.guards)
    return not seldom_read and call.last not in SHOWN and reads(context, call, held)


RULES = (in_forward,)
OF_RANKS = (per_step, checks, in_optimizer, clipping, waits_in_forward)  # only where several ranks run the file
