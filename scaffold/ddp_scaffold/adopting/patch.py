"""`adopt.patch`: the edits that give a loop of a usual shape a session, a stop, and a resume."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..check.python.module import Call, Function, Module, dotted
from .edits import Text, as_patch, encoded, encoding_of
from .shape import Level, Shape

PATCH = "adopt.patch"
SLURM = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_NPROCS": "WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_TASKS_PER_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_GPUS_ON_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_NODEID": "GROUP_RANK",
}
ADDRESS = {"MASTER_ADDR", "MASTER_PORT"}
STOPS = {"signal.SIGTERM", "signal.SIGUSR1", "signal.SIGUSR2", "signal.SIGINT", "signal.SIGHUP"}
SESSION, EPOCHS, BATCHES, WATCHED, VALUES = (
    *("ddp_session", "resumed_epochs", "resumed_batches", "watched_batches", "resumed_values"),
)
LOCAL_RANK, WORLD_SIZE = "ddp_local_rank", "ddp_world_size"
COUNT = re.compile(r"world_size|n_?procs|ngpus(?:_per_node)?|n_?gpus?")  # of processes


@dataclass(frozen=True)
class Place:
    """A place that must change, in the order of work: what stands there, why it must change, and into what."""

    module: Module
    line: int
    why: str
    instead: str


@dataclass
class Work:
    """The edits of each file, and the places that they are at."""

    package: str
    texts: dict[int, Text] = field(default_factory=dict)
    modules: dict[int, Module] = field(default_factory=dict)
    used: dict[int, set[str]] = field(default_factory=dict)  # names to import
    places: list[Place] = field(default_factory=list)

    def text(self, module: Module) -> Text:
        """The text of a file, to be edited."""
        self.modules[id(module)] = module
        return self.texts.setdefault(id(module), Text(module.file.text))

    def use(self, module: Module, name: str) -> str:
        """Note that a file needs a name of ours, and return what it is called there."""
        self.used.setdefault(id(module), set()).add(name)
        return self.called(module, name)

    def called(self, module: Module, name: str) -> str:
        """Return the name under which a file has one of ours: its own, unless the file uses it for something else."""
        taken = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
        taken |= {node.name for node in ast.walk(module.tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        return name if name not in taken or name in module.imports else f"adopted_{name}"

    def note(self, module: Module, line: int, why: str, instead: str) -> None:
        """Note a place."""
        self.places.append(Place(module, line, why, instead))


def plan(shape: Shape, package: str) -> Work:
    """Return the edits that a program of this shape needs, in the order in which a person would make them."""
    work = Work(package)
    _session(work, shape)
    _groups(work, shape)
    _launchers(work, shape)
    _signals(work, shape)
    if shape.epochs is not None:
        _epochs(work, shape, shape.epochs)
    for level in shape.watched:
        _loop(work, level, WATCHED, "a long evaluation moves on unseen, and counts as stalled after a while")
    return work


def write(work: Work, root: Path) -> bytes:
    """Return the patch of all edits, made for the files below `root` as they are."""
    changed = {}
    for key, text in work.texts.items():
        module = work.modules[key]
        _import(work, module, text)
        path = module.file.inside
        before = (root / path).read_bytes()
        after = encoded(text.result(), before)
        ast.parse(after.decode(encoding_of(before)).removeprefix("\ufeff"))
        changed[path] = (before, after)
    return as_patch(changed)


def _import(work: Work, module: Module, text: Text) -> None:
    names = sorted(work.used.get(id(module), ()))
    if not names:
        return
    last = _last_import(module.tree)
    called = [(name, work.called(module, name)) for name in names]
    words = ", ".join(name if name == own else f"{name} as {own}" for name, own in called)
    line = f"from {work.package}.ddp.adopted import {words}"
    text.insert_line((last.end_lineno or last.lineno) + 1 if last else 1, line)


def _last_import(tree: ast.Module) -> ast.stmt | None:
    """The last import of those that stand before the file's functions and classes; else its docstring, if any."""
    found: ast.stmt | None = None
    for index, node in enumerate(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.With)):
            break
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or docstring:
            found = node
    return found


def _session(work: Work, shape: Shape) -> None:
    first, last = _span(shape)
    if (first is None or last is None) and shape.unknown:
        pass  # which says why
    elif first is None or last is None:
        shape.unknown.append((shape.entry, 1, "where the processes begin: nothing in the body of this file trains"))
    else:
        module = shape.entry
        name = work.use(module, SESSION)
        work.text(module).indent(first, last, f"with {name}():")
        why = "a session makes the process group, watches the ranks, and gives each end its exit code"
        work.note(module, first.lineno, why, f"with {name}():  # around it, to line {last.end_lineno}")
    if shape.spawn is not None:
        _spawn(work, shape, shape.spawn)


def _span(shape: Shape) -> tuple[ast.stmt | None, ast.stmt | None]:
    """The statements of the entry that need the session: from the first that needs a group to the end of the block."""
    body: Sequence[ast.stmt] = shape.entry.tree.body
    guards = [node for node in body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    lines = {call.node.lineno for call in [*shape.path[:1], *shape.inits, *shape.destroys] if _at_top(shape, call)}
    lines |= {call.node.lineno for call in shape.entry.body.calls if _reaches(shape, call)}
    if shape.epochs is not None and shape.epochs.function is shape.entry.body:
        lines.add(shape.epochs.loop.lineno)
    for block in [*(guard.body for guard in guards), body]:
        for statement in block:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) or statement in guards:
                continue
            if any(statement.lineno <= line <= (statement.end_lineno or statement.lineno) for line in lines):
                return statement, block[-1]
    return None, None


def _at_top(shape: Shape, call: Call) -> bool:
    return call.function is shape.entry.body


def _reaches(shape: Shape, call: Call) -> bool:
    """Tell whether a call of the entry's own body makes the group, by the name of what it calls."""
    names = {init.function.name for init in shape.inits if init.function.name}
    return call.last in names


def _spawn(work: Work, shape: Shape, call: Call) -> None:
    """Call what mp.spawn would: the launcher has started a process for each rank."""
    module = call.function.module
    words = {word.arg: word.value for word in call.node.keywords}
    positional = dict(zip(("fn", "args", "nprocs"), call.node.args, strict=False))
    fn, given, count = (words.get(name) or positional.get(name) for name in ("fn", "args", "nprocs"))
    if fn is None:
        shape.unknown.append((module, call.node.lineno, "what mp.spawn calls"))
        return
    parts = [f"{work.use(module, LOCAL_RANK)}()"]
    if isinstance(given, (ast.Tuple, ast.List)):
        total = ast.unparse(count) if count is not None else ""
        for each in given.elts:
            text = ast.unparse(each)
            parts.append(f"{work.use(module, WORLD_SIZE)}()" if text == total or COUNT.fullmatch(text) else text)
    elif given is not None:
        parts.append(f"*{ast.unparse(given)}")
    direct = f"{ast.unparse(fn)}({', '.join(parts)})"
    work.text(module).replace(call.node, direct)
    why = "the launcher has started a process for each rank, and each of them would start others here"
    work.note(module, call.node.lineno, why, direct)


def _groups(work: Work, shape: Shape) -> None:
    for call in shape.inits:
        _remove(work, call, "the session has made the process group, and refuses another one", "delete it")
    for call in shape.destroys:
        why = "the session does it, after all ranks have met; on an error path it hides which rank failed"
        _remove(work, call, why, "delete it")


def _remove(work: Work, call: Call, why: str, instead: str) -> None:
    module = call.function.module
    statement, block = statement_of(call.function, call.node)
    if isinstance(statement, ast.Expr) and statement.value is call.node and block is not None:
        work.text(module).delete(statement, block)
    else:
        work.text(module).replace(call.node, "None")
    work.note(module, call.node.lineno, why, instead)


def _launchers(work: Work, shape: Shape) -> None:
    """Read ranks from torchrun's variables, which the session sets below srun, too; find no address by hand."""
    for function in shape.reached:
        gone: set[str] = set()
        for statement, block in statements_of(function):
            if _sets_address(function, statement):
                gone |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                work.text(function.module).delete(statement, block)
                why = "the launch script gives all ranks the address, and the session has met there"
                work.note(function.module, statement.lineno, why, "delete it")
        _delete_unused(work, function, gone)
    for module in {id(f.module): f.module for f in shape.reached}.values():
        guarded = _guarded(module)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and id(node) not in guarded:
                if module.full_name(node.value) == "os.environ" and isinstance(node.slice, ast.Constant):
                    _variable(work, module, node, str(node.slice.value))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                _local_rank_option(work, module, node)


def _variable(work: Work, module: Module, node: ast.Subscript, name: str) -> None:
    if not name.startswith("SLURM_"):
        return
    why = f"{name} is there below srun only, and without it this raises KeyError"
    if name in SLURM:
        work.text(module).replace(node.slice, f'"{SLURM[name]}"')
        work.note(module, node.lineno, why, f'os.environ["{SLURM[name]}"], which torchrun gives, or the session')
    elif name == "SLURM_CPUS_PER_TASK":
        instead = f'{ast.unparse(node.value)}.get("{name}", "1")'
        work.text(module).replace(node, instead)
        work.note(module, node.lineno, why, instead)


def _local_rank_option(work: Work, module: Module, node: ast.Call) -> None:
    """`torch.distributed.launch` gave each process `--local_rank`; torchrun does not, so the default counts."""
    names = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    if not names & {"--local_rank", "--local-rank"}:
        return
    words = {word.arg: word.value for word in node.keywords}
    default, text = words.get("default"), work.text(module)
    if default is not None and "environ" in ast.unparse(default):
        return
    environ = "os.environ" if module.imports.get("os") == "os" else '__import__("os").environ'
    before = ast.unparse(default) if default is not None else "0"
    instead = f'int({environ}.get("LOCAL_RANK", {before}))'
    if default is not None:
        text.replace(default, instead)
    else:
        last = node.keywords[-1].value if node.keywords else node.args[-1]
        text.span(text.end(last), text.end(last), f", default={instead}")
    why = "torchrun gives no --local_rank, as torch.distributed.launch did: each process would have the same one"
    work.note(module, node.lineno, why, f"default={instead}")


def _guarded(module: Module) -> set[int]:
    """The nodes that stand below a condition about variables of Slurm."""
    found: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.If, ast.IfExp)) and "SLURM" in ast.unparse(node.test):
            found |= {id(inner) for inner in ast.walk(node)}
    return found


def _sets_address(function: Function, statement: ast.stmt) -> bool:
    """Tell whether a statement finds MASTER_ADDR or MASTER_PORT by asking Slurm."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Subscript):
        return False
    target = statement.targets[0]
    if function.module.full_name(target.value) != "os.environ" or not isinstance(target.slice, ast.Constant):
        return False
    if target.slice.value not in ADDRESS:
        return False
    return not isinstance(statement.value, ast.Constant) and _from_slurm(function, statement.value)


def _from_slurm(function: Function, value: ast.expr, depth: int = 0) -> bool:
    if re.search(r"SLURM|scontrol|hostlist|subprocess|popen", ast.unparse(value)):
        return True
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    values = [a.value for name in names for a in function.assignments.get(name, ()) if a.value is not None]
    return depth < 3 and any(_from_slurm(function, each, depth + 1) for each in values)


def _delete_unused(work: Work, function: Function, names: set[str]) -> None:
    """Delete what was computed for statements that are gone, as long as nothing else reads it."""
    gone: set[ast.stmt] = {s for s, _ in statements_of(function) if _sets_address(function, s)}
    while True:
        left = [(s, block) for s, block in statements_of(function) if s not in gone]
        read = {
            node.id
            for s, _ in left
            if not hasattr(s, "body")
            for node in ast.walk(s)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        read |= {n.id for s, _ in left if hasattr(s, "body") for n in _head(s)}
        more = [
            (s, block)
            for s, block in left
            if isinstance(s, ast.Assign) and (made := dotted(s.targets[0])) in names and made not in read
        ]
        if not more:
            return
        for statement, block in more:
            gone.add(statement)
            names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            work.text(function.module).delete(statement, block)


def _head(statement: ast.stmt) -> Iterator[ast.Name]:
    for name in ("test", "iter"):
        value = getattr(statement, name, None)
        if value is not None:
            yield from (node for node in ast.walk(value) if isinstance(node, ast.Name))
    for item in getattr(statement, "items", ()):
        yield from (node for node in ast.walk(item) if isinstance(node, ast.Name))


def _signals(work: Work, shape: Shape) -> None:
    for function in shape.reached:
        for call in function.calls:
            given = function.module.full_name(call.node.args[0]) if call.node.args else ""
            if call.name == "signal.signal" and given in STOPS:
                why = "the session handles this signal, and the last handler wins; ranks must stop together"
                _remove(work, call, why, "delete it: the loop is left by all ranks at the same step")


def _epochs(work: Work, shape: Shape, top: Level) -> None:
    module, loop = top.function.module, top.loop
    text, name = work.text(module), work.use(module, EPOCHS)
    held = ", ".join(
        f"{each.name}={each.text}{f' if {each.when} else None' if each.when else ''}" for each in shape.held
    )
    if not isinstance(loop, (ast.For, ast.While)):
        shape.unknown.append((module, loop.lineno, "the loop of the epochs is an async for"))
        return
    if shape.steps == [top] and isinstance(loop, ast.For):
        text.indent(loop, loop, f"for _ in {name}(range(1), {held}):")
        instead = f"for _ in {name}(range(1), {held}):  # around it"
    elif isinstance(loop, ast.For):
        text.around(loop.iter, f"{name}(", f", {held})")
        instead = f"for {ast.unparse(loop.target)} in {name}({ast.unparse(loop.iter)}, {held}):"
    else:
        if loop.orelse:
            shape.unknown.append((module, loop.lineno, "the while loop of the epochs has an else"))
            return
        condition = f"bool({ast.unparse(loop.test)})" if not isinstance(loop.test, ast.Constant) else "True"
        instead = f"for _ in {name}(iter(lambda: {condition}, False), {held})"
        text.span(text.start(loop), text.end(loop.test), instead)
        instead += ":"
    why = "nothing loads a checkpoint of all that is trained, and begins where it was written"
    work.note(module, loop.lineno, why, instead)
    if shape.counted and loop.body[0].lineno > loop.lineno:
        names = ", ".join(shape.counted) + ("," if len(shape.counted) == 1 else "")
        line = f"{names} = {work.use(module, VALUES)}(lambda: ({names}))"
        if len(shape.counted) == 1:
            line = f"({names}) = {work.use(module, VALUES)}(lambda: ({names}))"
        text.insert_line(loop.body[0].lineno, f"{text.indentation(loop.body[0].lineno)}{line}")
        work.note(module, loop.body[0].lineno, "these begin anew when a run goes on", line)
    for level in shape.steps:
        _loop(work, level, BATCHES, "nobody asks between two steps whether to stop, and where to go on is not known")


def _loop(work: Work, level: Level, name: str, why: str) -> None:
    if not isinstance(level.loop, ast.For):
        return
    module, loop = level.function.module, level.loop
    used = work.use(module, name)
    before, after = (f"{used}((", "))") if isinstance(loop.iter, ast.Tuple) else (f"{used}(", ")")
    work.text(module).around(loop.iter, before, after)
    work.note(module, loop.lineno, why, f"for {ast.unparse(loop.target)} in {used}({ast.unparse(loop.iter)}):")


def statements_of(function: Function) -> Iterator[tuple[ast.stmt, Sequence[ast.stmt]]]:
    """Yield the statements of a function, each with the block that it is in, without those of inner functions."""
    waiting: list[Sequence[ast.stmt]] = [function.node.body]
    while waiting:
        block = waiting.pop()
        for statement in block:
            yield statement, block
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list) and inner:
                    waiting.append(inner)
            waiting += [handler.body for handler in getattr(statement, "handlers", ())]
            waiting += [case.body for case in getattr(statement, "cases", ())]


def statement_of(function: Function, node: ast.AST) -> tuple[ast.stmt | None, Sequence[ast.stmt] | None]:
    """Return the innermost statement that a node is in, and the block that this is in."""
    found: tuple[ast.stmt | None, Sequence[ast.stmt] | None] = (None, None)
    for statement, block in statements_of(function):
        inside = found[0] is None or any(statement is each for each in ast.walk(found[0]))
        if inside and any(node is each for each in ast.walk(statement)):
            found = (statement, block)
    return found
