"""What is saved, in which file, and of what: `torch.save`, helpers that pass on what they get, and what paths hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .context import Context
from .effects import walk_body
from .module import Assignment, Call, Function, Place, argument, default_of, dotted, keyword, names_in
from .origins import values_of

UNKNOWN = "?"  # stands in a path for what is not known, not even whether it stays
FIXED = "*"  # begins the name of a setting, which stays for the run: `*save_path`
ENTRIES = {"main", "train", "main_worker", "run_training", "run", "worker"}
CHANGES = re.compile(r"epoch|step|iter|^i$|^e$|^it$|time|best|date|count|score|acc", re.IGNORECASE)
SETTINGS = re.compile(r"(?:.*_)?(?:args?|opts?|cfg|conf|configs?|hps?|hparams|params?|flags|settings)", re.I)
PLAIN = {"str", "Path", "pathlib.Path", "os.fspath", "os.path.abspath", "os.path.normpath", "os.path.realpath"}
PLAIN |= {"os.path.expanduser", "pathlib.PosixPath"}
LAST = re.compile(r"^(?:.*[_-])?(?:last|latest|newest)(?:[_.-]|$)", re.IGNORECASE)
RANKS = re.compile(r"rank$|^gpu$|\.gpu$")
FORMATS = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]|\{[^{}]*\}")
MAX_DEPTH = 6
MANY = 12  # alternatives that are followed


@dataclass(frozen=True)
class Saved:
    """What a call saves: `state` under `path`, as the function that the call is in says."""

    call: Call
    state: ast.expr
    path: ast.expr


def saved(context: Context, call: Call) -> Saved | None:
    """Return what a call of torch.save writes, or one of a helper that passes all that it gets on to torch.save."""
    if "save" not in call.last.lower() or not call.node.args:
        return None
    if call.name != "torch.save":
        target = context.program.called(call)
        if target is None or not _passes_on(target):
            return None
    given = call.node.args
    path = given[1] if len(given) > 1 else keyword(call.node, "f")
    return None if path is None or any(isinstance(one, ast.Starred) for one in given) else Saved(call, given[0], path)


def _passes_on(function: Function) -> bool:
    """Tell whether a function gives `*args` on to torch.save."""
    rest = None if isinstance(function.node, ast.Module) else function.node.args.vararg
    return rest is not None and any(
        call.name == "torch.save"
        and any(isinstance(one, ast.Starred) and dotted(one.value) == rest.arg for one in call.node.args)
        for call in function.calls
    )


@dataclass(frozen=True)
class Path:
    """One value that a path may have: its text, whether it is another one at each save, and who gives it."""

    text: str
    varies: bool = False
    sites: tuple[Call, ...] = ()  # the calls by which it is given, the outermost one first
    over: ast.stmt | None = None  # the loop over a list that has it

    @property
    def last(self) -> str:
        """Return the name of the file, or an empty text if it is not known to stay the same."""
        last = self.text.rpartition("/")[2]
        return "" if self.varies or (UNKNOWN in last and not LAST.search(last)) else last


def repeats_path(context: Context, call: Call, path: Path) -> bool:
    """Tell whether a call is made again and again with one path, and not once for each of a list of them."""
    for site in (call, *path.sites):
        if any(loop is not path.over for loop in site.place.loops):
            return True
    outer = path.sites[0] if path.sites else call
    return any(repeats(context, site) for site in context.program.sites.get(id(outer.function), ()))


Bound = Mapping[str, Sequence[Path]]


def paths(context: Context, call: Call, node: ast.expr) -> list[Path]:
    """Return the values that a path may have at a call."""
    return _Reader(context).read(call.function, node, call, 0, {})


def repeats(context: Context, call: Call, depth: int = 0) -> bool:
    """Tell whether a call is made in a loop, here or where its function is called."""
    if call.place.loops or depth > 3:
        return bool(call.place.loops)
    return any(repeats(context, site, depth + 1) for site in context.program.sites.get(id(call.function), ()))


def runs_once(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether a function is called, and in no loop: what it sets outside of its loops stays for the run."""
    sites = context.program.sites.get(id(function), ())
    begins = isinstance(function.node, ast.Module) or function.name in ENTRIES or context.is_spawned(function)
    if depth > 3 or not (sites or begins):
        return False
    return all(not site.place.loops and runs_once(context, site.function, depth + 1) for site in sites)


def reaching(found: Sequence[Assignment], at: Call | None) -> list[Assignment]:
    """Return those values of a variable that it may have at a call of the same function."""
    if at is None or len(found) < 2:
        return list(found)
    kept: list[Assignment] = []
    for one in sorted(found, key=lambda a: a.order, reverse=True):
        if one.order >= at.order or _apart(one.place, at.place):
            continue
        kept.append(one)
        held = {(id(guard.test), guard.holds) for guard in at.place.guards}
        if all((id(guard.test), guard.holds) in held for guard in one.place.guards) and set(one.place.loops) <= set(
            at.place.loops
        ):
            break
    return kept or list(found)


def _apart(one: Place, other: Place) -> bool:
    held = {(id(guard.test), guard.holds) for guard in other.guards}
    return any((id(guard.test), not guard.holds) in held for guard in one.guards)


class _Reader:
    """Reads the values of paths, over variables, attributes, callers and functions that return them."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def read(self, function: Function, node: ast.expr, at: Call | None, depth: int, bound: Bound) -> list[Path]:
        if depth > MAX_DEPTH:
            return [self._hole(node)]
        if isinstance(node, ast.Constant):
            return [] if node.value is None else [Path(str(node.value))]
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._named(function, node, at, depth, bound)
        inner = self._parts(function, node, at, depth, bound)
        return inner if inner is not None else [self._hole(node)]

    def _parts(
        self, function: Function, node: ast.expr, at: Call | None, depth: int, bound: Bound
    ) -> list[Path] | None:
        """Return the values of what is put together of others."""

        def read(one: ast.expr) -> list[Path]:
            return self.read(function, one, at, depth + 1, bound)

        if isinstance(node, ast.IfExp):
            return [*read(node.body), *read(node.orelse)][:MANY]
        if isinstance(node, ast.BoolOp):
            return [path for value in node.values for path in read(value)][:MANY]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
            return _joined([read(node.left), read(node.right)], "" if isinstance(node.op, ast.Add) else "/")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            given = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            return _filled(read(node.left), [read(one) for one in given])
        if isinstance(node, ast.JoinedStr):
            return _joined(
                [read(p.value if isinstance(p, ast.FormattedValue) else p) for p in node.values] or [[Path("")]], ""
            )
        if isinstance(node, ast.Call):
            return self._of_call(function, node, at, depth, bound)
        if isinstance(node, ast.Subscript):
            key = str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
            settings = bool(key) and SETTINGS.fullmatch(_first(ast.unparse(node.value))) is not None
            varies = bool(CHANGES.search(ast.unparse(node.slice)))
            return [Path(f"{FIXED}{key}" if settings else UNKNOWN, varies)]
        return None

    def _of_call(
        self, function: Function, node: ast.Call, at: Call | None, depth: int, bound: Bound
    ) -> list[Path] | None:
        name, last = function.module.full_name(node.func), getattr(node.func, "attr", "")

        def read(one: ast.expr) -> list[Path]:
            return self.read(function, one, at, depth + 1, bound)

        if (name.endswith("path.join") or name in ("join", "pathlib.Path", "Path")) and node.args:
            return _joined([[Path(UNKNOWN)] if isinstance(one, ast.Starred) else read(one) for one in node.args], "/")
        if (name in PLAIN or last == "open" or name == "open") and node.args:
            return read(node.args[0])
        if isinstance(node.func, ast.Attribute) and last in ("format", "joinpath", "resolve", "as_posix", "absolute"):
            owner, given = read(node.func.value), [read(one) for one in (*node.args,)]
            if last == "format":
                return _filled(owner, given + [read(word.value) for word in node.keywords])
            return _joined([owner, *given], "/") if last == "joinpath" else owner
        if last == "open" and isinstance(node.func, ast.Attribute):
            return read(node.func.value)
        call = next((c for c in function.calls if c.node is node), None)
        target = self.context.program.called(call) if call is not None else None
        if call is None or target is None or target.name == "__init__":
            return None
        given_to = {
            parameter: self.read(function, value, at, depth + 1, bound)
            for parameter in target.parameters
            if (value := argument(call, target, parameter)) is not None
        }
        returned = [e.node.value for e in target.exits if isinstance(e.node, ast.Return) and e.node.value is not None]
        found = [path for value in returned for path in self.read(target, value, None, depth + 1, given_to)]
        return found[:MANY] or None

    def _named(
        self, function: Function, node: ast.Name | ast.Attribute, at: Call | None, depth: int, bound: Bound
    ) -> list[Path]:
        name = dotted(node)
        if name in bound and name not in function.assignments:
            return list(bound[name])
        here = at if at is not None and at.function is function else None
        found = self.context.program.assigned(function, name) if name else []
        if any(_is_counted(one) for one in found):
            return [Path(UNKNOWN, varies=True)]
        stays = not any(a.place.loops for a in found)
        if isinstance(node, ast.Name) and name in function.assignments:
            found = reaching(function.assignments[name], here)
        if found and stays and self._is_set_once(function, name, found):
            values = self._of_values(function, node, found, here, depth, bound)
            return [replace(path, text=path.text.replace(UNKNOWN, FIXED), varies=False) for path in values]
        if found:
            return self._of_values(function, node, found, here, depth, bound)
        if name in function.parameters:
            return self._given(function, name, depth)
        if (kept := _of_class(function, name)) is not None:
            return self.read(function, kept, None, depth + 1, {})
        constant = self.context.program.constant(function.module, name) if name else None
        if constant is not None:
            return self.read(constant[0].body, constant[1], None, depth + 1, {})
        return [self._hole(node)]

    def _is_set_once(self, function: Function, name: str, found: Sequence[Assignment]) -> bool:
        """Tell whether a variable of a function that runs once, or an attribute, gets its value at the beginning."""
        if not name.startswith("self."):
            return "." not in name and runs_once(self.context, function)
        made = function.of_class.methods.get("__init__") if function.of_class is not None else None
        return made is not None and {id(a) for a in found} <= {id(a) for a in made.assignments.get(name, ())}

    def _of_values(
        self,
        function: Function,
        node: ast.expr,
        found: Sequence[Assignment],
        at: Call | None,
        depth: int,
        bound: Bound,
    ) -> list[Path]:
        paths: list[Path] = []
        for one in found[:MANY]:
            if one.value is not None and dotted(one.value) != one.target:
                paths += self.read(function, one.value, at, depth + 1, bound)
            elif isinstance(one.node, ast.For) and isinstance(one.node.target, ast.Name):
                paths += [replace(path, over=one.node) for path in self._of_list(function, one.node.iter, depth)]
            elif isinstance(one.node, ast.AugAssign):
                paths += _joined([[Path(UNKNOWN)], self.read(function, one.node.value, at, depth + 1, bound)], "")
            else:
                paths.append(self._hole(node))
        if isinstance(node, ast.Attribute) and any(path.varies for path in paths):
            paths = [path for path in paths if path.varies]  # what it has at first counts for the first save alone
        return paths[:MANY]

    def _of_list(self, function: Function, node: ast.expr, depth: int) -> list[Path]:
        """Return the values that a loop over a list goes through: those that it is made of, and what is added."""
        named = function.assignments.get(dotted(node), ()) if dotted(node) else ()
        values = [node, *(one.value for one in named)]
        elements = [one for value in values if isinstance(value, (ast.List, ast.Tuple)) for one in value.elts]
        if not elements:
            return [Path(UNKNOWN, varies=True)]
        return [path for one in elements for path in self.read(function, one, None, depth + 1, {})]

    def _given(self, function: Function, name: str, depth: int) -> list[Path]:
        """Return what the callers of a function give for a parameter, or its default."""
        paths: list[Path] = []
        for site in self.context.program.sites.get(id(function), ())[:MANY]:
            value = argument(site, function, name)
            if value is not None and site.function is not function:
                read = self.read(site.function, value, site, depth + 1, {})
            else:
                default = default_of(function, name)
                read = self.read(function, default or ast.Name(name), None, MAX_DEPTH if default else MAX_DEPTH + 1, {})
            counted = CHANGES.search(name) is not None  # `save(epoch=0)` is the first of many
            paths += [
                replace(path, sites=(*path.sites, site), varies=path.varies or (counted and path.text.isdigit()))
                for path in read
            ]
        if paths:
            return paths[: 2 * MANY]
        default = default_of(function, name)
        return [self._hole(ast.Name(name))] if default is None else self.read(function, default, None, MAX_DEPTH, {})

    def _hole(self, node: ast.AST) -> Path:
        """Return the value of what is not read further: it changes if its names say so; settings stay."""
        name = dotted(node)
        option = "." in name and SETTINGS.fullmatch(_first(name)) is not None
        varies = any(CHANGES.search(word) for word in names_in(node))
        stays = (option and not varies) or RANKS.search(name) is not None
        return Path(f"{FIXED}{name.rpartition('.')[2]}" if stays else UNKNOWN, varies and not stays)


def _is_counted(one: Assignment) -> bool:
    """Tell whether a variable is counted up, or comes from a loop that is not over a list of paths."""
    if isinstance(one.node, ast.AugAssign):
        value = one.node.value
        return isinstance(value, ast.Name) or (isinstance(value, ast.Constant) and not isinstance(value.value, str))
    return one.value is None and isinstance(one.node, ast.For) and not isinstance(one.node.target, ast.Name)


def _of_class(function: Function, name: str) -> ast.expr | None:
    """Return the value of `self.name` that the body of the class sets."""
    owner, _, last = name.partition(".")
    if owner not in ("self", "cls") or function.of_class is None:
        return None
    for statement in function.of_class.node.body:
        if isinstance(statement, ast.Assign) and any(dotted(target) == last for target in statement.targets):
            return statement.value
    return None


def _first(name: str) -> str:
    """Return `args` for `args.folder`, `self.args.folder` and `args["folder"]`."""
    return re.split(r"[.\[]", name.removeprefix("self."))[0]


def _joined(parts: Sequence[Sequence[Path]], between: str) -> list[Path]:
    """Return all ways to put values together."""
    found: list[Path] = []
    for combined in product(*parts):
        if len(found) >= MANY:
            break
        sites = next((path.sites for path in combined if path.sites), ())
        over = next((path.over for path in combined if path.over is not None), None)
        varies = any(path.varies for path in combined)
        found.append(Path(between.join(path.text for path in combined), varies, sites, over))
    return found


def _filled(patterns: Sequence[Path], values: Sequence[Sequence[Path]]) -> list[Path]:
    """Return the values of `"%s.pth" % name` and `"{}.pth".format(name)`."""
    found: list[Path] = []
    for pattern in patterns:
        for combined in product(*values):
            left = list(combined)
            text = FORMATS.sub(lambda _, left=left: left.pop(0).text if left else UNKNOWN, pattern.text)  # type: ignore[misc]
            one = _joined([[pattern], *[[path] for path in combined]], "")[0]
            found.append(replace(one, text=text))
            if len(found) >= MANY:
                return found
    return found


def parts_of(
    context: Context, function: Function, node: ast.expr
) -> Iterator[tuple[Function, ast.expr | None, ast.expr]]:
    """Yield what a dict holds that is saved: each key and value, with the function in which they stand."""
    seen: set[tuple[int, str]] = set()
    for where, value in values_of(context, function, node):
        if isinstance(value, ast.Dict):
            for key, held in zip(value.keys, value.values, strict=True):
                yield where, key, held
        elif isinstance(value, ast.Call) and dotted(value.func) == "dict":
            for word in value.keywords:
                if word.arg:
                    yield where, ast.Constant(word.arg), word.value
        name = dotted(value)
        if name and (id(where), name) not in seen:
            seen.add((id(where), name))
            for key, held in put_in(where, name):
                yield where, key, held


def put_in(function: Function, name: str) -> list[tuple[ast.expr | None, ast.expr]]:
    """Return what is put into a dict by `state["key"] = value` and `state.update({"key": value})`."""
    found: list[tuple[ast.expr | None, ast.expr]] = []
    for statement in getattr(function.node, "body", ()) if name else ():
        for part in walk_body(statement):
            target = part.targets[0] if isinstance(part, ast.Assign) else None
            if isinstance(part, ast.Assign) and isinstance(target, ast.Subscript) and dotted(target.value) == name:
                found.append((target.slice, part.value))
    for call in function.calls:
        if call.last == "update" and dotted(call.node.func) == f"{name}.update" and call.node.args:
            given = call.node.args[0]
            if isinstance(given, ast.Dict):
                found += list(zip(given.keys, given.values, strict=True))
    return found
