"""One file, read once: its functions, and their calls, exits and assignments with what they stand under."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from ..files import SourceFile

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOP = (ast.For, ast.AsyncFor, ast.While)
LEAVING_CALLS = {"sys.exit", "exit", "quit", "os._exit", "os.abort"}
LEAVES = {ast.Name, ast.Constant, ast.Lambda}  # expressions in which no call is made where they stand
BLOCKS = ("finalbody", "orelse", "handlers", "cases", "body")
SIMPLE = {ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Import, ast.ImportFrom, ast.Raise}
SIMPLE |= {ast.Pass, ast.Assert, ast.Delete, ast.Global, ast.Nonlocal, ast.Break, ast.Continue}  # hold no statements
NO_EXPRESSIONS = {"ctx", "attr", "id", "kind", "type_comment", "op", "ops", "names", "level", "module", "arg"}
FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}  # of a kind of node: the fields that may hold expressions
CLASS = re.compile(r"\.[A-Z]\w*[a-z]\w*$")
MAGIC = re.compile(r"\s*(?:[%!]|[\w.]+\?+\s*$)")  # of IPython, in a notebook's cell


@dataclass(frozen=True)
class Guard:
    """A condition that holds where something stands: in a branch of an `if`, or after one whose branch leaves."""

    test: ast.expr
    holds: bool
    line: int
    early: str = ""  # return, continue, ...: how the ranks leave for which `test` is not `holds`


@dataclass(frozen=True)
class Place:
    """What a statement stands under within its function, from the outside in."""

    guards: tuple[Guard, ...] = ()
    loops: tuple[ast.stmt, ...] = ()
    withs: tuple[ast.expr, ...] = ()
    tries: tuple[tuple[ast.Try, str], ...] = ()  # (try, body | except | else | finally)

    def under(self, *guards: Guard) -> Place:
        """Return the place that stands under more guards."""
        return Place(self.guards + guards, self.loops, self.withs, self.tries) if guards else self


@dataclass(frozen=True, eq=False)
class Call:
    """A call: `name` is its full name as the imports tell it, such as `torch.distributed.barrier`."""

    node: ast.Call
    name: str
    place: Place
    function: Function
    order: int

    @cached_property
    def last(self) -> str:
        """Return the last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, eq=False)
class Exit:
    """A statement by which control leaves a loop or a function: return, raise, break, continue, exit."""

    node: ast.stmt
    kind: str
    place: Place
    order: int


@dataclass(frozen=True, eq=False)
class Assignment:
    """A name or `self.name` that gets a value; `value` is None where it is unpacked, counted or looped over."""

    target: str
    value: ast.expr | None
    node: ast.stmt
    place: Place
    order: int


@dataclass(eq=False)
class Function:
    """A function, a method, or the body of a module (`node` is the module's tree then)."""

    module: Module
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    owner: Function | None = None
    of_class: Class | None = None
    calls: list[Call] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    assignments: dict[str, list[Assignment]] = field(default_factory=dict)
    tests: list[tuple[ast.If, Place, int]] = field(default_factory=list)
    asserts: list[tuple[ast.Assert, Place, int]] = field(default_factory=list)
    tries: list[tuple[ast.Try, Place]] = field(default_factory=list)
    loops: list[tuple[ast.stmt, Place]] = field(default_factory=list)
    inner: dict[str, Function] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> list[str]:
        """Return the names of the parameters that can be given by position, then the others."""
        if isinstance(self.node, ast.Module):
            return []
        given = self.node.args
        return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]

    @cached_property
    def entries(self) -> list[ast.Assign]:
        """Return the assignments to an entry of something, `loaders["val"] = ...`."""
        own = (one for one in self.node.body if not isinstance(one, (ast.FunctionDef, ast.ClassDef)))
        parts = (part for one in own for part in ast.walk(one))
        return [part for part in parts if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Subscript)]

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Return the names behind a dot that stand in it: `loader` of `self.loader`."""
        return frozenset(part.attr for part in ast.walk(self.node) if isinstance(part, ast.Attribute))


@dataclass(eq=False)
class Class:
    """A class: its bases as they are written, in full names, and its methods."""

    module: Module
    name: str
    node: ast.ClassDef
    bases: list[str]
    methods: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Module:
    """A file that was read, or one that could not be: then `problem` says why, and the rest is empty."""

    file: SourceFile
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))
    problem: str = ""
    problem_line: int = 1
    cells: Sequence[tuple[int, int]] = ()  # of a notebook: (number of the cell, its first line in all of the text)
    imports: dict[str, str] = field(default_factory=dict)
    relative: dict[str, tuple[str, str]] = field(default_factory=dict)  # name: (module as written, name in it)
    rebound: list[tuple[str, str]] = field(default_factory=list)  # of names that are imported again from elsewhere
    stars: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    classes: dict[str, Class] = field(default_factory=dict)
    body: Function = field(init=False)

    def __post_init__(self) -> None:
        self.body = Function(self, "", self.tree)

    @cached_property
    def is_package(self) -> bool:
        """Tell whether the file is a package's `__init__.py`."""
        return PurePosixPath(self.file.inside).stem == "__init__"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Return `("a", "b")` for a/b.py and for a/b/__init__.py."""
        path = PurePosixPath(self.file.inside).with_suffix("")
        return path.parts[:-1] if self.is_package else path.parts

    @property
    def runs_itself(self) -> bool:
        """Tell whether the file is a program: it has a test of `__name__`."""
        return any("__name__" in ast.unparse(test.test) for test, _, _ in self.body.tests)

    def position(self, line: int) -> tuple[int, int]:
        """Return (cell, line in it) for a notebook, else (0, line)."""
        found = (0, line)
        for cell, first in self.cells:
            if first <= line:
                found = (cell, line - first + 1)
        return found

    def full_name(self, node: ast.AST) -> str:
        """Return `torch.distributed.barrier` for `dist.barrier`; a name that is not imported stays as it stands.

        Of `DDP if distributed else Bare` it is the name of the one that is of torch.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            parts.append(self.imports.get(node.id, node.id))
        elif isinstance(node, ast.IfExp) and not parts:
            names = [self.full_name(node.body), self.full_name(node.orelse)]
            return next((name for name in names if name.startswith("torch.")), names[0])
        else:
            parts.append("?")
        return ".".join(reversed(parts))


def read(file: SourceFile, outline: bool = False) -> Module:
    """Return a file's functions and facts. What cannot be read is a Module with a `problem`; nothing is raised.

    With `outline` the file is only looked through for syntax.
    """
    if file.unread:
        return Module(file, problem=file.unread)
    try:
        text, cells = code_of(file)
        if file.kind == "notebook":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in code that is not ours to correct
                tree = ast.parse(text)
        else:
            tree = file.tree
        module = Module(file, tree, cells=cells)
        if not outline:
            _Reader(module).read()
    except SyntaxError as error:
        return Module(file, problem=f"it is not Python 3: {error.msg}", problem_line=error.lineno or 1)
    except (RecursionError, MemoryError):
        return Module(file, problem="it is nested too deeply")
    except ValueError as error:
        return Module(file, problem=f"it is not a text of Python: {error}")
    return module


def code_of(file: SourceFile) -> tuple[str, list[tuple[int, int]]]:
    """Return the text to parse; of a notebook, its code cells one after the other, and where each begins."""
    if file.kind != "notebook":
        return file.text, []
    notebook = json.loads(file.text)
    if not isinstance(notebook, dict):
        raise ValueError("it is not a notebook")
    lines: list[str] = []
    cells: list[tuple[int, int]] = []
    listed = notebook.get("cells")
    if listed is None:  # before version 4 of the format
        listed = [cell for sheet in notebook.get("worksheets", ()) for cell in sheet.get("cells", ())]
    if not isinstance(listed, list):
        raise ValueError("its cells are no list")
    for cell in listed:
        if not (isinstance(cell, dict) and cell.get("cell_type") == "code"):
            continue
        source = cell.get("source", cell.get("input", ""))
        text = "".join(source) if isinstance(source, list) else str(source)
        cells.append((len(cells) + 1, len(lines) + 1))
        if text.lstrip().startswith("%%") and not re.match(r"\s*%%(?:time|timeit|capture)\b", text):
            text = re.sub(r"(?m)^", "# ", text)  # another language
        lines += [re.sub(r"\S.*", "pass", line) if MAGIC.match(line) else line for line in text.split("\n")]
    return "\n".join(lines), cells


class _Reader:
    """Fills a Module: one walk over its tree."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.order = 0

    def read(self) -> None:
        module = self.module
        self._imports()
        module.functions.append(module.body)
        self._block(module.tree.body, Place(), module.body, None)

    def _imports(self) -> None:
        for node in _statements(self.module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self.module.imports[alias.asname or first] = alias.name if alias.asname else first
                    self.module.relative.setdefault(alias.asname or alias.name, (alias.name, ""))
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                for alias in node.names:
                    if alias.name == "*":
                        self.module.stars.append(base)
                        continue
                    name = alias.asname or alias.name
                    self.module.imports[name] = f"{base}.{alias.name}".lstrip(".") if base.strip(".") else alias.name
                    if name in self.module.relative:
                        self.module.rebound.append(self.module.relative[name])
                    self.module.relative[name] = (base, alias.name)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: Function, of: Class | None) -> None:
        function = Function(self.module, node.name, node, owner, of)
        self.module.functions.append(function)
        if of is not None:
            of.methods.setdefault(node.name, function)
        else:
            owner.inner.setdefault(node.name, function)
        self._block(node.body, Place(), function, None)

    def _class(self, node: ast.ClassDef, owner: Function) -> None:
        found = Class(self.module, node.name, node, [self.module.full_name(base) for base in node.bases])
        self.module.classes.setdefault(node.name, found)
        for statement in node.body:
            if isinstance(statement, FUNCTION):
                self._function(statement, owner, found)
            elif isinstance(statement, ast.ClassDef):
                self._class(statement, owner)

    def _block(self, body: Sequence[ast.stmt], place: Place, function: Function, of: Class | None) -> tuple[Guard, ...]:
        """Walk statements; return the conditions under which whatever follows them is reached."""
        guards: tuple[Guard, ...] = ()
        for statement in body:
            guards += self._statement(statement, place.under(*guards), function)
        return guards

    def _statement(self, node: ast.stmt, place: Place, function: Function) -> tuple[Guard, ...]:
        self.order += 1
        if isinstance(node, FUNCTION):
            for decorator in node.decorator_list:
                self._expression(decorator, place, function)
            self._function(node, function, None)
        elif isinstance(node, ast.ClassDef):
            self._class(node, function)
        elif isinstance(node, ast.If):
            return self._if(node, place, function)
        elif isinstance(node, LOOP):
            self._loop(node, place, function)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            contexts = tuple(item.context_expr for item in node.items)
            for item in node.items:
                self._expression(item.context_expr, place, function)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, item.context_expr, node, place, function)
            inside = Place(place.guards, place.loops, place.withs + contexts, place.tries)
            return self._block(node.body, inside, function, None)
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, place, function)  # type: ignore[arg-type]  # except* has the same fields
        elif type(node).__name__ == "Match":
            self._expression(node.subject, place, function)  # type: ignore[attr-defined]
            for case in node.cases:  # type: ignore[attr-defined]
                self._block(case.body, place, function, None)
        else:
            self._simple(node, place, function)
        return ()

    def _if(self, node: ast.If, place: Place, function: Function) -> tuple[Guard, ...]:
        function.tests.append((node, place, self.order))
        self._expression(node.test, place, function)
        line, under = node.test.lineno, place
        self._block(node.body, place.under(Guard(node.test, True, line)), function, None)
        last = node
        while len(last.orelse) == 1 and isinstance(last.orelse[0], ast.If):  # a chain of elif, however long
            under = under.under(Guard(last.test, False, last.test.lineno))
            last = last.orelse[0]
            function.tests.append((last, under, self.order))
            self._expression(last.test, under, function)
            self._block(last.body, under.under(Guard(last.test, True, last.test.lineno)), function, None)
        if last.orelse:
            self._block(last.orelse, under.under(Guard(last.test, False, last.test.lineno)), function, None)
        body, other = self._leaves(node.body), self._leaves(node.orelse)
        if body and not other:
            return (Guard(node.test, False, line, body),)
        return (Guard(node.test, True, line, other),) if other and not body else ()

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, place: Place, function: Function) -> None:
        function.loops.append((node, place))
        inside = Place(place.guards, (*place.loops, node), place.withs, place.tries)
        if isinstance(node, ast.While):
            self._expression(node.test, inside, function)
        else:
            self._expression(node.iter, place, function)
            self._assign(node.target, None, node, inside, function)
        self._block(node.body, inside, function, None)
        self._block(node.orelse, place, function, None)

    def _try(self, node: ast.Try, place: Place, function: Function) -> tuple[Guard, ...]:
        function.tries.append((node, place))

        def part(name: str) -> Place:
            return Place(place.guards, place.loops, place.withs, (*place.tries, (node, name)))

        guards = self._block(node.body, part("body"), function, None)
        for handler in node.handlers:
            self._block(handler.body, part("except"), function, None)
        guards += self._block(node.orelse, part("else").under(*guards), function, None)
        self._block(node.finalbody, part("finally"), function, None)
        return guards

    def _leaves(self, body: Sequence[ast.stmt], depth: int = 0) -> str:
        """Return how a block ends by leaving: return, raise, continue, break, exit; or an empty text."""
        if not body:
            return ""
        last = body[-1]
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
            return "exit" if self.module.full_name(last.value.func) in LEAVING_CALLS else ""
        if isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
            return type(last).__name__.lower()
        if isinstance(last, ast.If) and last.orelse and depth < 50:
            return self._leaves(last.body, depth + 1) and self._leaves(last.orelse, depth + 1)
        return ""

    def _simple(self, node: ast.stmt, place: Place, function: Function) -> None:
        for child in _children(node):
            self._expression(child, place, function)
        if kind := self._leaves([node]):
            function.exits.append(Exit(node, kind, place, self.order))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, node, place, function)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, node, place, function)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, None, node, place, function)
        elif isinstance(node, ast.Assert):
            function.asserts.append((node, place, self.order))

    def _assign(
        self, target: ast.expr, value: ast.expr | None, node: ast.stmt, place: Place, function: Function
    ) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                values = value.elts
            for part, one in zip(target.elts, values, strict=True):
                self._assign(part, one, node, place, function)
            return
        name = dotted(target)
        if name:
            found = Assignment(name, value, node, place, self.order)
            function.assignments.setdefault(name, []).append(found)
            if isinstance(target, ast.Name) and isinstance(value, (ast.Attribute, ast.IfExp)):
                self._alias(target.id, self.module.full_name(value))

    def _alias(self, name: str, value: str) -> None:
        """Take a name for a class of torch that it is given: `wrapper = torch.nn.parallel.DistributedDataParallel`."""
        if value.startswith("torch.") and CLASS.search(value):
            self.module.imports.setdefault(name, value)

    def _expression(self, node: ast.expr, place: Place, function: Function) -> None:
        """Record the calls in an expression; those in a lambda come later, from wherever, so they are left out."""
        while isinstance(node, ast.Attribute):
            node = node.value
        kind = type(node)
        if kind in LEAVES:
            return
        if kind is ast.Call:
            self._call(node, place, function)  # type: ignore[arg-type]
        elif kind is ast.IfExp or kind is ast.BoolOp:
            self._choice(node, place, function)
        else:
            for child in _children(node):
                self._expression(child, place, function)
            if isinstance(node, ast.NamedExpr):
                self.order += 1
                name = dotted(node.target)
                found = Assignment(name, node.value, ast.Pass(), place, self.order)
                function.assignments.setdefault(name, []).append(found)

    def _call(self, node: ast.Call, place: Place, function: Function) -> None:
        if type(node.func) is not ast.Name:
            self._expression(node.func, place, function)
        for argument in node.args:
            self._expression(argument, place, function)
        for word in node.keywords:
            self._expression(word.value, place, function)
        function.calls.append(Call(node, self.module.full_name(node.func), place, function, self.order))

    def _choice(self, node: ast.expr, place: Place, function: Function) -> None:
        """Record the calls of `a if test else b`, `a and b`, `a or b`: each stands under what was tested before it."""
        if isinstance(node, ast.IfExp):
            self._expression(node.test, place, function)
            self._expression(node.body, place.under(Guard(node.test, True, node.lineno)), function)
            self._expression(node.orelse, place.under(Guard(node.test, False, node.lineno)), function)
        elif isinstance(node, ast.BoolOp):
            holds = isinstance(node.op, ast.And)
            for before, value in enumerate(node.values):
                guards = [Guard(test, holds, node.lineno) for test in node.values[:before]]
                self._expression(value, place.under(*guards), function)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements of a file, in the order of lines: ast.walk would visit every expression as well."""
    stack: list[ast.AST] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind not in SIMPLE:
            for name in BLOCKS:
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    stack.extend(reversed(inner))
            if not isinstance(node, ast.stmt):
                continue
        yield node  # type: ignore[misc]


def _children(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions right below a node, and those of its keywords and comprehensions."""
    kind = type(node)
    names = FIELDS.get(kind)
    if names is None:
        names = FIELDS[kind] = tuple(name for name in node._fields if name not in NO_EXPRESSIONS)
    for name in names:
        value = getattr(node, name, None)
        if isinstance(value, list):
            for one in value:
                if isinstance(one, ast.expr):
                    yield one
                elif isinstance(one, ast.keyword):
                    yield one.value
                elif isinstance(one, ast.comprehension):
                    yield one.iter
                    yield from one.ifs
        elif isinstance(value, ast.expr):
            yield value


def variable_of(function: Function, call: Call) -> str:
    """Return the name that the result of a call gets, also in `x = call() if several else None`."""
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            value = assignment.value
            if value is call.node or (isinstance(value, ast.IfExp) and call.node in (value.body, value.orelse)):
                return name
    return ""


def dotted_names(node: ast.expr) -> set[str]:
    """Return the names in an expression, and those with attributes: `x`, `self.x`."""
    return {dotted(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))}


def dotted(node: ast.AST) -> str:
    """Return `self.rank` for that expression, and an empty text for what is no name with attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return the values of all arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


def argument(call: Call, function: Function, name: str) -> ast.expr | None:
    """Return what a call gives for a parameter of the function that it reaches."""
    for word in call.node.keywords:
        if word.arg == name:
            return word.value
    if any(isinstance(arg, ast.Starred) for arg in call.node.args):
        return None
    parameters = function.parameters
    bound = function.of_class is not None and parameters[:1] in (["self"], ["cls"], ["ctx"])
    position = parameters.index(name) - (1 if bound else 0)
    return call.node.args[position] if 0 <= position < len(call.node.args) else None


def default_of(function: Function, name: str) -> ast.expr | None:
    """Return the default of a parameter, or None."""
    if isinstance(function.node, ast.Module):
        return None
    given = function.node.args
    ordered = [*given.posonlyargs, *given.args]
    pairs = [*zip(reversed(ordered), reversed(given.defaults), strict=False)]
    pairs += [(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    return next((default for one, default in pairs if one.arg == name), None)


def last_of(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Tell whether an expression is this constant, of this type."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def names_in(node: ast.AST) -> set[str]:
    """Return all names and attributes in an expression, without what they belong to."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def shown(node: ast.AST, limit: int = 60) -> str:
    """Return an expression as text that fits into a message."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
