"""What a run goes on with: state that no checkpoint has, or that no resume loads; a best value that begins anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoints import paths, repeats, saved
from .context import Context, Found
from .module import Assignment, Call, Function, Module, argument, dotted, is_constant, keyword, names_in, shown
from .origins import MANY, Value, assignments_of, sources, values_of

OPTIMIZERS = re.compile(r"(?:\w*_)?optim(?:izer)?s?(?:_\w+)?|opt(?:_\w+)?|optim\w*", re.IGNORECASE)
OPTIMIZER_LOADED = re.compile(
    r"opt(?:im\w*)?(?:_\w+)?(?:\[[^\]]*\])?\.load_state_dict|load_optim|optim\w*\.load\b", re.I
)
OPTIMIZER = re.compile(r"opt|solver|adam|sgd")
ELSEWHERE = re.compile(
    r"vars\(|__dict__\[|getattr\([^()]*\)\.state_dict|save_state|save_checkpoint\(model=|\.save_checkpoint\("
)
BY_NAMES = re.compile(r"vars\(self|getattr\([^()]*\)\.state_dict|save_state\(")  # states that nothing here names
ADAPTIVE = re.compile(r"\bAdam\w*\(|\bLamb\(|\bRMSprop\(|momentum\s*=", re.IGNORECASE)
COUNTED = re.compile(r"(?:^|[._])(?:epoch|step|iter)", re.IGNORECASE)
COUNTED_KEY = re.compile(r"(?:\[|get\()['\"]\w*(?:epoch|step|iter)\w*['\"]", re.IGNORECASE)
SCHEDULE = re.compile(r"sched", re.IGNORECASE)
COPIES = {"shutil.copyfile", "shutil.copy", "shutil.copy2"}
SET_AGAIN = re.compile(
    r"\.last_epoch\s*=|last_epoch\s*=\s*(?!last_epoch\b)[a-z]|[\"']last_epoch[\"']\s*:|sched\w*\.step\((?!\))"
    r"|sched\w*\.\w*(?:step|epoch|iter)\w*\s*=[^=]"
    r"|range\([^,\n]*(?:start|resume|init|last)[^,\n]*\):\s*\n?\s*\w*\.?\w*sched\w*\.step"
)
OF_ITS_RATE = re.compile(r"ExponentialLR|ReduceLROnPlateau")  # goes on from the rate that the optimizer has
SETS_ANY = re.compile(r"setattr\(|__dict__\.update")
BEST = re.compile(
    r"best|^(?:min|max|lowest|highest)_(?:val|loss|acc|err|f1|dice|score|psnr|miou|map|ap)", re.IGNORECASE
)
FROM_FILE = re.compile(
    r"(?:ckpt|checkpoint|check_?point|state\w*|resume\w*|path|file\w*|snapshot|loaded|saved)\w*\b", re.I
)
COUNTER = re.compile(r"(?:start|resume|init|begin|last|current)_?(?:epoch|step|iter\w*)")


def without_optimizer(context: Context, function: Function) -> Iterator[Found]:
    """Yield checkpoints from which training goes on, in a program that never saves the optimizer's state."""
    if not context.plain(function.module):
        return
    states = context.calls_in_component(function.module, "state_dict")
    if not states or any(OPTIMIZER.search(_told_of(c).lower()) for c in states):
        return
    if context.says(function.module, ELSEWHERE) or not _is_adaptive(context, function.module):
        return
    for call in function.calls:
        if saved(context, call) is None or not repeats(context, call):
            continue
        start = _goes_on_from(context, function)
        if start is None:
            continue
        message = (
            f"no checkpoint has the optimizer's state, and {start.where} goes on from one: each"
            " resume begins with moments of zero"
        )
        fix = 'save {"model": ..., "optimizer": optimizer.state_dict()}, and load both'
        yield Found("DDP310", function.module, call.node, message, fix)
        return


def _is_adaptive(context: Context, module: Module) -> bool:
    """Tell whether a program with a file has an optimizer with state."""
    return any(context.says_itself(one, ADAPTIVE) for part in context.programs_with(module) for one in part)


@dataclass(frozen=True)
class _Start:
    """Where a run takes up its counter from a checkpoint."""

    module: Module
    node: ast.AST

    @property
    def where(self) -> str:
        """Return the file and the line."""
        return f"{self.module.file.path} line {self.module.position(getattr(self.node, 'lineno', 1))[1]}"


def _goes_on_from(context: Context, function: Function) -> _Start | None:
    """Return where a counter of steps or epochs is set from a checkpoint, or from its name."""
    here = function.module
    others = {id(module): module for part in context.programs_with(here) for module in part if module is not here}
    for module in (here, *others.values()):
        if "load" not in module.file.text:
            continue
        for other in module.functions:
            found = _counter_in(other) or _returned_counter(other)
            if found is not None:
                return _Start(module, found)
    return None


def _counter_in(function: Function) -> ast.AST | None:
    """Return where a function sets a counter from a checkpoint: `start_epoch = state["epoch"] + 1`."""
    if function.name == "step":
        return None  # of an optimizer, whose own state has a step for each parameter
    for name, found in function.assignments.items():
        counter = COUNTER.fullmatch(name.rpartition(".")[2]) is not None
        if not counter and not COUNTED.search(name):
            continue
        for one in found:
            text = ast.unparse(one.value) if one.value is not None else ""
            if FROM_FILE.search(text) and (
                COUNTED_KEY.search(text) or (counter and re.search(r"\bint\(|from_filename|parse_\w+\(", text))
            ):
                return one.node
    return None


def _returned_counter(function: Function) -> ast.AST | None:
    """Return where a function that loads a file returns the epoch or the step in it."""
    if not any(call.name == "torch.load" for call in function.calls):
        return None
    for leaves in function.exits:
        value = leaves.node.value if isinstance(leaves.node, ast.Return) else None
        if value is not None and COUNTED_KEY.search(ast.unparse(value)) and FROM_FILE.search(ast.unparse(value)):
            return leaves.node
        loads = (c for c in function.calls if c.last == "load_state_dict")
        if value is not None and _is_next(value) and any(OPTIMIZERS.fullmatch(_owner_of(c)) for c in loads):
            return leaves.node
    return None


def _is_next(node: ast.expr) -> bool:
    """Tell whether a value is the number of the next epoch or step, or has it: `max_epoch + 1`."""
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Add)
        and is_constant(part.right, 1)
        and COUNTED.search(dotted(part.left)) is not None
        for part in (node.elts if isinstance(node, ast.Tuple) else [node])
    )


def not_loaded(context: Context, function: Function) -> Iterator[Found]:
    """Yield an optimizer's state that is saved, where a resume takes up the weights and the epoch, and never that."""
    saves = [c for c in function.calls if saved(context, c) is not None]
    if not saves or not context.plain(function.module) or context.says(function.module, OPTIMIZER_LOADED):
        return
    states = [c for c in function.calls if c.last == "state_dict" and OPTIMIZERS.fullmatch(_owner_of(c))]
    held = next((c for c in states if _saved_with(function, c, saves)), None)
    if held is None:
        return
    loads = [c for c in context.calls_in_component(function.module, "load") if c.name in ("torch.load", "json.load")]
    loads.sort(key=lambda c: c.function.module is not function.module)
    resume = next((c for c in loads if _takes_up(c)), None)
    if resume is not None:
        module = resume.function.module
        where = f"{module.file.path} line {module.position(resume.node.lineno)[1]}"
        message = (
            f"`{shown(held.node, 40)}` is saved, and nothing loads it: the run that goes on from {where} has the"
            " weights and the epoch, and an optimizer that begins anew"
        )
        fix = f"load it there, `{_owner_of(held)}.load_state_dict(...)`, and the schedule's state as well"
        yield Found("DDP321", function.module, held.node, message, fix)


def _told_of(call: Call) -> str:
    """Return the text of what a state is taken of, with that of the list over which a loop goes that gives it."""
    owner = dotted(call.node.func).rpartition(".")[0]
    loops = [a.node.iter for a in call.function.assignments.get(owner, ()) if isinstance(a.node, ast.For)]
    return " ".join(ast.unparse(one) for one in (call.node.func, *loops))


def _owner_of(call: Call) -> str:
    return dotted(call.node.func).rpartition(".")[0].rpartition(".")[2]


def _saved_with(function: Function, call: Call, saves: list[Call]) -> bool:
    """Tell whether a value is part of what torch.save is given, at once or as a part of a variable."""
    for save in saves:
        node = save.node.args[0]
        values = [node, *(a.value for a in function.assignments.get(dotted(node), ()) if dotted(node) and a.value)]
        if any(part is call.node for value in values for part in ast.walk(value)):
            return True
    return False


def _takes_up(call: Call) -> bool:
    """Tell whether a load gives the epoch or the step at which training goes on, and the weights."""
    names = {name for name, found in call.function.assignments.items() for a in found if a.value is call.node}
    keys = {
        str(part.slice.value)
        for part in ast.walk(call.function.node)
        if isinstance(part, ast.Subscript) and dotted(part.value) in names and isinstance(part.slice, ast.Constant)
    }
    counted = any(re.search(r"epoch|step|iter", key) for key in keys)
    return counted and any(c.last == "load_state_dict" for c in call.function.calls)


def not_saved(context: Context, function: Function) -> Iterator[Found]:
    """Yield a second optimizer, or a schedule, that makes steps and is in no checkpoint, though the run goes on."""
    if not context.plain(function.module) or not any(call.last == "step" for call in function.calls):
        return
    if context.says(function.module, BY_NAMES) or (start := _goes_on_from(context, function)) is None:
        return
    for call in function.calls:
        owner = call.node.func.value if call.last == "step" and isinstance(call.node.func, ast.Attribute) else None
        if owner is None or not dotted(owner):
            continue
        schedule = SCHEDULE.search(dotted(owner)) is not None
        if not schedule and not OPTIMIZERS.fullmatch(dotted(owner).rpartition(".")[2]):
            continue
        looped = any(isinstance(a.node, ast.For) for a in function.assignments.get(dotted(owner), ()))
        if looped or not any(isinstance(value.node, ast.Call) for value in values_of(context, function, owner)):
            continue  # one of several, or nobody knows what made it
        kept = _held_by(context, function.module)
        if not any(OPTIMIZERS.fullmatch(name) for _, name in kept):
            continue
        last = dotted(owner).rpartition(".")[2]
        if _variables_behind(context, function, owner) & kept or any(last == name for _, name in kept):
            continue
        if schedule and _is_set_again(context, function, call, owner):
            continue
        place = _state_of_optimizer(context, function)
        module, line = function.module, function.module.position(call.node.lineno)[1]
        what = "its schedule begins anew" if schedule else "its moments are zero again"
        message = (
            f"`{shown(owner, 30)}` makes steps ({module.file.path} line {line}), and no checkpoint has its state: in a"
            f" run that {start.where} lets go on, {what}"
        )
        fix = f"save `{shown(owner, 30)}.state_dict()` as well, and load it"
        yield Found("DDP323", place.function.module, place.node, message, fix)
        return


def _state_of_optimizer(context: Context, function: Function) -> Call:
    """Return where the state of another optimizer is taken, in the same file if it is there."""
    states = context.calls_in_component(function.module, "state_dict")
    named = [call for call in states if OPTIMIZERS.fullmatch(_owner_of(call))]
    return min(named or states, key=lambda call: call.function.module is not function.module)


def _variables_behind(context: Context, function: Function, node: ast.expr) -> set[tuple[int, str]]:
    """Return the variables and attributes that a value has been in, on its way from the call that made it.

    Each comes with the function that it is of, an attribute with none.
    """
    found: set[tuple[int, str]] = set()
    seen: set[tuple[int, str]] = set()
    waiting = [Value(function, node)]
    while waiting and len(seen) < MANY:
        here = waiting.pop()
        name = dotted(here.node)
        if not name or (id(here.function), name) in seen:
            continue
        seen.add((id(here.function), name))
        found.add((0 if "." in name else id(here.function), name.rpartition(".")[2]))
        waiting += sources(context, *here)
    return found


def _held_by(context: Context, module: Module) -> set[tuple[int, str]]:
    """Return the variables whose state is taken, to be saved; none where that is not known of one."""
    found: set[tuple[int, str]] = set()
    for call in context.calls_in_component(module, "state_dict"):
        owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
        if owner is None or not dotted(owner):
            return set()
        if any(isinstance(a.node, ast.For) for _, a in assignments_of(context, call.function, dotted(owner))):
            return set()  # from a loop over many
        if _is_of_unknown(context, call, owner):
            return set()  # given by somebody who is not known
        found |= _variables_behind(context, call.function, owner)
    return found


def _is_of_unknown(context: Context, call: Call, owner: ast.expr) -> bool:
    """Tell whether a state is that of an optimizer or a schedule which callers give, nobody knows which."""
    if not isinstance(owner, ast.Name) or not context.program.sites.get(id(call.function)):
        return False
    kind = OPTIMIZERS.fullmatch(owner.id) or SCHEDULE.search(owner.id)
    known = any(isinstance(value.node, ast.Call) for value in values_of(context, call.function, owner))
    return kind is not None and not known


def _is_set_again(context: Context, function: Function, call: Call, owner: ast.expr) -> bool:
    """Tell whether a schedule is told where the run is: by last_epoch, or the argument of its steps."""
    if call.node.args or call.node.keywords or context.says(function.module, SET_AGAIN):
        return True
    made = [v.node for v in values_of(context, function, owner) if isinstance(v.node, ast.Call)]
    if all(OF_ITS_RATE.search(dotted(one.func)) for one in made):
        return True
    told = (keyword(one, "last_epoch") for one in made)  # by its own name: what the caller gives, or does not
    return any(one is not None and dotted(one) != "last_epoch" for one in told) or any(
        len(one.args) > 3 for one in made
    )


def best_begins_anew(context: Context, function: Function) -> Iterator[Found]:
    """Yield a best value that a run which goes on begins with nothing: its first checkpoint overwrites the best one."""
    if not context.plain(function.module) or "best" not in function.module.file.text.lower():
        return
    for name, assigned in function.assignments.items():
        if not BEST.search(name.rpartition(".")[2]) or "[" in name:
            continue
        update = next((a for a in assigned if _is_update(function, name, a)), None)
        if update is None or not _begins_with_nothing(context, function, name):
            continue
        save = next((c for c in function.calls if _saves_best(context, c, name, update)), None)
        start = _goes_on_from(context, function) if save is not None else None
        if save is None or start is None or not _goes_on_here(context, function, start, update):
            continue
        begins = [a for _, a in assignments_of(context, function, name) if not _is_update(function, name, a)]
        begin = max(begins, key=lambda a: (a in assigned, a.order))
        message = (
            f"`{name}` begins anew in a run that goes on from a checkpoint ({start.where}): the first validation after"
            f" that is the best one, and `{shown(save.node.func, 30)}` overwrites the best checkpoint with what it has"
        )
        yield Found("DDP322", function.module, begin.node, message, f"save `{name}` in the checkpoint, and load it")
        return


def _is_update(function: Function, name: str, one: Assignment) -> bool:
    """Tell whether an assignment is that of a better value: under a comparison with the name, or the maximum."""
    last = name.rpartition(".")[2]
    better = isinstance(one.value, ast.Call) and dotted(one.value.func) in ("max", "min")
    compared = any(_compares(function, guard.test, last) for guard in one.place.guards)
    return one.value is not None and (compared or (better and last in names_in(one.value)))


def _compares(function: Function, test: ast.expr, last: str) -> bool:
    """Tell whether a condition is one of a name, at once or by a flag: `better = now > best`."""
    if last in names_in(test):
        return not isinstance(test, ast.Name)
    flags = [a.value for name in names_in(test) for a in function.assignments.get(name, ()) if a.value is not None]
    return any(last in names_in(value) for value in flags)


def _begins_with_nothing(context: Context, function: Function, name: str) -> bool:
    """Tell whether a variable has no other values than numbers that are written down, and better ones."""
    if name in function.parameters or any(
        c.last.startswith("load") and name in dotted(c.node.func) for c in function.calls
    ):
        return False
    owner, _, last = name.rpartition(".")
    found = assignments_of(context, function, name)
    if owner not in ("", "self") or not found:
        return False
    begins = [one for _, one in found if not _is_update(function, name, one)]
    if owner == "self" or any(one in begins for one in function.module.body.assignments.get(name, ())):
        target = re.compile(rf"\b{re.escape(last)}\b[^=\n]*=[^=][^\n]*(?:\[|get\(|load)")
        if context.says(function.module, target) or context.says(function.module, SETS_ANY):
            return False
    return bool(begins) and all(one.value is not None and _is_nothing(one.value, last) for one in begins)


def _is_nothing(node: ast.expr, name: str) -> bool:
    """Tell whether a value is a number that is written down, infinity, or an object that is made of nothing else."""
    if isinstance(node, ast.UnaryOp):
        return _is_nothing(node.operand, name)
    if isinstance(node, ast.Call):
        return len(node.args) <= 2 and bool(node.args) and all(_is_nothing(one, name) for one in node.args)
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, (int, float)) or node.value in ("inf", "-inf")
    return dotted(node).rpartition(".")[2] in ("inf", "infty", "Inf", "maxsize", name)


def _saves_best(context: Context, call: Call, name: str, update: Assignment) -> bool:
    """Tell whether a call saves a checkpoint under the condition of a better value, to a file that stays the same."""
    last = name.rpartition(".")[2]
    held = {id(g.test) for g in update.place.guards if _compares(call.function, g.test, last)}
    if not held & {id(g.test) for g in call.place.guards}:
        return _saves_where_told(context, call, last, held)
    one = saved(context, call)
    if one is not None:
        return any(path.last for path in paths(context, call, one.path))
    target = context.program.called(call)
    inner = target is not None and any(saved(context, c) is not None for c in target.calls)
    return inner and "best" in ast.unparse(call.node)


def _saves_where_told(context: Context, call: Call, last: str, held: set[int]) -> bool:
    """Tell whether a call is told by a flag that this is the best one, and saves that to a file that stays the same."""
    target = context.program.called(call)
    if target is None or not call.place.loops or "save" not in call.last:
        return False
    given = {one: argument(call, target, one) for one in target.parameters}
    flags = {one for one, value in given.items() if value is not None and _is_flag(call.function, value, last, held)}
    for inner in target.calls if flags else ():
        one = saved(context, inner)
        copied = inner.node.args[1] if inner.name in COPIES and len(inner.node.args) > 1 else None
        path = one.path if one is not None else copied
        if path is None or not any(g.holds and dotted(g.test) in flags for g in inner.place.guards):
            continue
        text = f"{ast.unparse(path)} " + " ".join(one.text for one in paths(context, inner, path))
        if "best" in text.lower() and not any(COUNTED.search(word) for word in names_in(path)):
            return True
    return False


def _is_flag(function: Function, value: ast.expr, last: str, held: set[int]) -> bool:
    """Tell whether a value is the outcome of a comparison with the best: `now > best`, or True under that condition."""
    if isinstance(value, ast.Compare):
        return last in names_in(value)
    for one in function.assignments.get(dotted(value), ()) if dotted(value) else ():
        if isinstance(one.value, ast.Compare) and last in names_in(one.value):
            return True
        if is_constant(one.value, True) and any(g.holds and id(g.test) in held for g in one.place.guards):
            return True
    return False


def _goes_on_here(context: Context, function: Function, start: _Start, update: Assignment) -> bool:
    """Tell whether the loop over epochs begins where the checkpoint says."""
    first = update.place.loops[0] if update.place.loops else None
    if not isinstance(first, ast.For) or not isinstance(first.iter, ast.Call):
        return False
    given = first.iter.args[0] if len(first.iter.args) > 1 else None
    if given is None or isinstance(given, ast.Constant):
        return False
    values = [*values_of(context, function, given)]
    if any(FROM_FILE.search(ast.unparse(v.node)) and COUNTED_KEY.search(ast.unparse(v.node)) for v in values):
        return True
    assigned = [a for _, a in assignments_of(context, function, dotted(given))] if dotted(given) else []
    return any(a.node is start.node for a in assigned)


RULES = ()
OF_RANKS = (without_optimizer, not_loaded, not_saved, best_begins_anew)
