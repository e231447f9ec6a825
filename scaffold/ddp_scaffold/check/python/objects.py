"""Of which class an object is: by what makes it, a function that returns it, a table of classes, or the callers."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Protocol

from .module import Assignment, Call, Class, Function, Module, argument, dotted, is_constant

SAME = {"train", "eval", "to", "cuda", "cpu"}  # methods that return the object itself
OF_GROUP = {"init_process_group", "DistributedDataParallel", "DDP"}
MAX_DEPTH = 5
Classes = frozenset[int]


class Files(Protocol):
    """What is asked of the program: what names mean, what they are set to, and who calls."""

    sites: dict[int, list[Call]]

    def lookup(self, module: Module, name: str) -> Function | Class | Module | None: ...

    def assigned(self, function: Function, name: str) -> list[Assignment]: ...

    def constant(self, module: Module, name: str) -> tuple[Module, ast.expr] | None: ...

    def with_bases(self, function: Function) -> list[Class]: ...

    def method(self, owner: Class, name: str) -> Function | None: ...

    def is_partial(self, function: Function, call: ast.Call) -> bool: ...


class Objects:
    """Answers of which classes of these files a value may be; None is: nobody knows."""

    def __init__(self, program: Files) -> None:
        self.program = program
        self._of_name: dict[tuple[int, str], list[Class] | None] = {}

    def of_name(self, function: Function, name: str, depth: int = 0) -> list[Class] | None:
        """Return the classes that the object in a variable, a parameter or `self.x` may have."""
        key = (id(function), name)
        if key not in self._of_name:
            self._of_name[key] = None  # for what is made from itself
            self._of_name[key] = self._of_name_now(function, name, depth)
        return self._of_name[key]

    def forget(self) -> None:
        """Forget what was not known: the callers of all functions have been found since."""
        self._of_name = {key: value for key, value in self._of_name.items() if value is not None}

    def _of_name_now(self, function: Function, name: str, depth: int) -> list[Class] | None:
        if depth > MAX_DEPTH:
            return None
        assigned = self.program.assigned(function, name)
        if assigned:
            return self._union([self.of_value(a_function, v, depth) for a_function, v in self._values(function, name)])
        scope: Function | None = function
        while scope is not None and name not in scope.parameters:
            scope = scope.owner
        if scope is None or name in ("self", "cls"):
            return None
        sites = self.program.sites.get(id(scope), ())
        given = [(site.function, argument(site, scope, name)) for site in sites]
        return self._union([self.of_value(where, value, depth) for where, value in given if value is not None])

    def _values(self, function: Function, name: str) -> list[tuple[Function, ast.expr | None]]:
        """Return what is assigned to a variable, each with the function in which that stands."""
        if not name.startswith("self."):
            return [(function, a.value) for a in self.program.assigned(function, name)]
        owners = self.program.with_bases(function)
        found = [(m, a.value) for owner in owners for m in owner.methods.values() for a in m.assignments.get(name, ())]
        return [(where, value) for where, value in found] or [
            (function, a.value) for a in self.program.assigned(function, name)
        ]

    def of_value(self, function: Function, value: ast.expr | None, depth: int = 0) -> list[Class] | None:
        """Return the classes that a value may have; none at all for None itself."""
        if value is None or depth > MAX_DEPTH:
            return None
        if is_constant(value, None):
            return []
        if isinstance(value, ast.IfExp):
            return self._union([self.of_value(function, one, depth + 1) for one in (value.body, value.orelse)])
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute) and value.func.attr in SAME:
                return self.of_value(function, value.func.value, depth + 1)
            return self._of_call(function, value, depth)
        return self.of_name(function, dotted(value), depth + 1) if dotted(value) else None

    def _of_call(self, function: Function, value: ast.Call, depth: int) -> list[Class] | None:
        called = self.callables(function, value.func, depth)
        if called is None and isinstance(value.func, ast.Attribute):
            called = self._methods(function, value.func, depth)
        if called is None:
            return None
        found: list[list[Class] | None] = []
        for one in called:
            if isinstance(one, Class):
                found.append([one])
                continue
            returned = [e.node.value for e in one.exits if isinstance(e.node, ast.Return)]
            found.append(self._union([self.of_value(one, made, depth + 1) for made in returned]) if returned else None)
        return self._union(found)

    def _methods(self, function: Function, node: ast.Attribute, depth: int) -> list[Class | Function] | None:
        """Return the methods that `x.f` may name, where the classes of x are known."""
        own = isinstance(node.value, ast.Name) and node.value.id == "self" and function.of_class is not None
        owners = [function.of_class] if own else self.of_value(function, node.value, depth + 1)
        found = [self.program.method(one, node.attr) for one in owners or () if one is not None]
        methods: list[Class | Function] = [one for one in found if one is not None]
        return methods if found and len(methods) == len(found) else None

    def callables(self, function: Function, node: ast.expr, depth: int = 0) -> list[Class | Function] | None:
        """Return the classes and functions that an expression may name: `A`, `TABLE[key]`, `TABLE.get(key)`."""
        if depth > MAX_DEPTH:
            return None
        if isinstance(node, ast.Subscript):
            return self._in_table(function, node.value, depth)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            return self._in_table(function, node.func.value, depth)
        if isinstance(node, ast.Call) and node.args and self._is_the_same(function, node):
            return self.callables(function, node.args[0], depth + 1)
        name = dotted(node)
        if not name:
            return None
        for scope in _chain(function):
            if name in scope.inner:
                return [scope.inner[name]]
            if name in scope.parameters and name not in scope.assignments:
                return self._given(scope, name, depth)
        found = self.program.lookup(function.module, name)
        if isinstance(found, (Class, Function)):
            return [found]
        if name.startswith("self.") and name.count(".") == 1:
            methods = (owner.methods.get(name[5:]) for owner in self.program.with_bases(function))
            if (method := next((one for one in methods if one is not None), None)) is not None:
                return [method]
        assigned = self.program.assigned(function, name)
        if not assigned or any(a.value is not None and dotted(a.value) == name for a in assigned):
            return None
        parts = [
            self.callables(function, a.value, depth + 1) if a.value is not None else self._unpacked(function, a, depth)
            for a in assigned
        ]
        known = {id(one): one for part in parts for one in part or ()}
        return list(known.values()) if all(part is not None for part in parts) else None

    def _is_the_same(self, function: Function, node: ast.Call) -> bool:
        """Tell whether a call makes a function that runs the one it is given: `partial(f, 1)`, `torch.compile(f)`."""
        compiles = function.module.full_name(node.func) in ("torch.compile", "torch.jit.script")
        return compiles or self.program.is_partial(function, node)

    def _unpacked(self, function: Function, assignment: Assignment, depth: int) -> list[Class | Function] | None:
        """Return the functions that a variable may have of `train, validate = choose(args)`."""
        value = getattr(assignment.node, "value", None)
        target = next(iter(getattr(assignment.node, "targets", ())), None)
        names = [dotted(one) for one in target.elts] if isinstance(target, ast.Tuple) else []
        if not isinstance(value, ast.Call) or assignment.target not in names:
            return None
        found: list[Class | Function] = []
        for one in self.callables(function, value.func, depth + 1) or ():
            returned = [] if isinstance(one, Class) else [e.node for e in one.exits if isinstance(e.node, ast.Return)]
            for part in (exit.value for exit in returned):
                if isinstance(part, ast.Tuple) and len(part.elts) == len(names) and isinstance(one, Function):
                    found += self.callables(one, part.elts[names.index(assignment.target)], depth + 1) or []
        return found or None

    def _given(self, function: Function, name: str, depth: int) -> list[Class | Function] | None:
        """Return the classes and functions that callers give for a parameter, if all are known."""
        found: dict[int, Class | Function] = {}
        for site in self.program.sites.get(id(function), ()):
            value = argument(site, function, name)
            called = self.callables(site.function, value, depth + 1) if value is not None else None
            if called is None:
                return None
            found.update((id(one), one) for one in called)
        return list(found.values()) or None

    def _in_table(self, function: Function, node: ast.expr, depth: int) -> list[Class | Function] | None:
        """Return what a dict has for values, if all of them are classes or functions of these files."""
        where, table = self._table(function, node)
        if table is None:
            return None
        found: list[Class | Function] = []
        for value in table.values:
            one = self.callables(where, value, depth + 1)
            if not one:
                return None
            found += one
        return found

    def _table(self, function: Function, node: ast.expr) -> tuple[Function, ast.Dict | None]:
        if isinstance(node, ast.Dict):
            return function, node
        name = dotted(node)
        values = [a.value for a in self.program.assigned(function, name)] if name else []
        where = function
        if name and not values:
            found = self.program.constant(function.module, name)
            values, where = ([found[1]], found[0].body) if found is not None else ([], function)
        return (where, values[0]) if len(values) == 1 and isinstance(values[0], ast.Dict) else (where, None)

    def _union(self, parts: Sequence[list[Class] | None]) -> list[Class] | None:
        known = [part for part in parts if part is not None]
        if len(known) != len(parts) or not parts:
            return None
        found: dict[int, Class] = {id(one): one for part in known for one in part}
        return list(found.values())


def _chain(function: Function) -> list[Function]:
    """Return a function and those that it is defined in, without the body of the module."""
    found: list[Function] = []
    scope: Function | None = function
    while scope is not None and scope.owner is not None:
        found.append(scope)
        scope = scope.owner
    return found


def joins_group(made: Class) -> bool:
    """Tell whether a class makes the process group, or wraps a model in DDP: the one of its kind for several ranks."""
    return any(call.last in OF_GROUP for method in made.methods.values() for call in method.calls)
