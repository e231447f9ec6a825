"""The files together: which file an import means, and which function a call reaches."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import PurePosixPath

from .module import Assignment, Call, Class, Function, Module, argument, dotted, is_constant

# Packages that nobody's own file stands for, unless it lies right beside the importing one.
FOREIGN = {
    *sys.stdlib_module_names,
    *("torch", "numpy", "transformers", "accelerate", "datasets", "lightning", "pytorch_lightning", "torchvision"),
    *("torchmetrics", "deepspeed", "wandb", "tqdm", "timm", "yaml", "PIL", "cv2", "scipy", "pandas", "horovod"),
}
# Names of methods that many classes have: which of them a call means is not known from the name.
COMMON = {"add_scalar", "load_state_dict", "state_dict", "zero_grad", "from_pretrained", "save_pretrained", "set_epoch"}
SOURCES = (("src",), ("lib",))
ADDED = re.compile(r"sys\.path\.(?:append|insert)\([^()\n]*[\"'](\w[\w/-]*)[\"'][^()\n]*\)")
SAME = {"train", "eval", "to", "cuda", "cpu"}  # methods that return the object itself
# `import_module("data." + name)`: any file of the package may be meant.
BY_NAME = re.compile(r"(?:import_module|__import__)\(\s*f?[\"']([A-Za-z_][\w.]*)\.(?:[\"']\s*[+%]|\{|%s)")
PLAIN = {"staticmethod", "classmethod", "no_grad", "inference_mode", "enable_grad", "record"}


class Program:
    """All files that are checked together, with an index of what they define."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = [module for module in modules if not module.problem]
        self.by_last: dict[str, list[tuple[tuple[str, ...], Module]]] = defaultdict(list)
        self.methods: dict[str, list[Function]] = defaultdict(list)
        for module in self.modules:
            parts = module.parts
            if parts:
                self.by_last[parts[-1]].append((parts, module))
            for found in module.classes.values():
                for name, method in found.methods.items():
                    self.methods[name].append(method)
        self.added = {name for module in self.modules for name in _added_to_path(module)}
        self._imported: dict[tuple[int, str], Module | None] = {}
        self._called: dict[int, Function | None] = {}
        self._unambiguous: dict[int, bool] = {}
        self._meaning: dict[tuple[int, str, bool], Function | Class | Module | None] = {}
        self._stars: dict[int, list[Module]] = {}
        self._imports_of: dict[int, list[Module]] = {}
        self._given: dict[tuple[int, str], Class | None] = {}
        self.calls_named: dict[str, list[Call]] = defaultdict(list)
        for module in self.modules:
            for function in module.functions:
                for call in function.calls:
                    self.calls_named[call.last].append(call)
        self.component = self._components()
        self.sites: dict[int, list[Call]] = defaultdict(list)  # of a function: the calls that reach it

    def connect(self) -> None:
        """Find out which calls reach which function."""
        for module in self.modules:
            for function in module.functions:
                for call in function.calls:
                    target = self.called(call)
                    if target is not None:
                        self.sites[id(target)].append(call)
        waiting = [call for module in self.modules for f in module.functions for call in f.calls if self._may_be(call)]
        for call in waiting:
            if (target := self._method_given(call)) is not None:
                self._called[id(call)] = target
                self.sites[id(target)].append(call)

    def _may_be(self, call: Call) -> bool:
        """Tell whether a call that was not resolved has the name of a method of these files."""
        unknown = self._called[id(call)] is None and type(call.node.func) is ast.Attribute
        return unknown and call.last in self.methods and call.function.owner is not None

    def _method_given(self, call: Call) -> Function | None:
        owner, _, last = dotted(call.node.func).rpartition(".")
        function = call.function
        if not owner or owner in ("self", "cls") or owner.count(".") > (1 if owner.startswith("self.") else 0):
            return None
        made = self.given_class(function, owner)
        return self.method(made, last) if made is not None else None

    def given_class(self, function: Function, name: str, depth: int = 0) -> Class | None:
        """Return the class of an object that all callers give for a parameter, also where it is kept as `self.x`."""
        key = (id(function), name)
        if key in self._given or depth > 3:
            return self._given.get(key)
        self._given[key] = None  # for a function that gives it to itself
        if name.startswith("self."):
            found = self._kept(function, name, depth)
        elif name in function.parameters and name not in function.assignments:
            found = self._of_callers(function, name, depth)
        else:
            found = self.class_of(function, name)
        self._given[key] = found
        return found

    def _kept(self, function: Function, name: str, depth: int) -> Class | None:
        owner = function.of_class
        kept = [(m, a) for m in owner.methods.values() for a in m.assignments.get(name, ())] if owner else []
        found = {
            self.given_class(method, assignment.value.id, depth + 1) if isinstance(assignment.value, ast.Name) else None
            for method, assignment in kept
        }
        return found.pop() if len(found) == 1 else None

    def _of_callers(self, function: Function, name: str, depth: int) -> Class | None:
        found: set[Class | None] = set()
        for site in self.sites.get(id(function), ()):
            value = argument(site, function, name)
            if value is None or is_constant(value, None):
                continue
            if isinstance(value, ast.Call):
                made = self.lookup(site.function.module, dotted(value.func)) if dotted(value.func) else None
                found.add(made if isinstance(made, Class) else None)
            else:
                found.add(self.given_class(site.function, dotted(value), depth + 1) if dotted(value) else None)
        return found.pop() if len(found) == 1 else None

    def imported(self, module: Module, written: str) -> Module | None:
        """Return the file that `written` (`a.b`, `..c`) means in an import of `module`, or None."""
        key = (id(module), written)
        if key not in self._imported:
            self._imported[key] = self._find(module, written)
        return self._imported[key]

    def _find(self, module: Module, written: str) -> Module | None:
        here = module.parts
        folder = here if module.is_package else here[:-1]
        level = len(written) - len(written.lstrip("."))
        parts = tuple(part for part in written.split(".") if part)
        if level:
            base = folder[: len(folder) - level + 1]
            wanted = (*base, *parts)
            return next((m for p, m in self.by_last.get(wanted[-1] if wanted else "", ()) if p == wanted), None)
        if not parts:
            return None
        best: tuple[int, Module] | None = None
        for candidate, found in self.by_last.get(parts[-1], ()):
            if candidate[len(candidate) - len(parts) :] != parts:
                continue
            root = candidate[: len(candidate) - len(parts)]
            above = folder[: len(root)] == root
            if (parts[0] in FOREIGN and root != folder) or not (above or root[-1:] in SOURCES or root in self.added):
                continue
            # A file of a package that imports its neighbours by dots means one from above without them.
            depth = -1 if root == folder and root and self._is_in_package(module) else len(root)
            if best is None or depth > best[0]:
                best = (depth, found)
        return best[1] if best else None

    def _is_in_package(self, module: Module) -> bool:
        """Tell whether a file is one of a package: it imports a neighbour by dots."""
        return any(written.startswith(".") for written, _ in module.relative.values())

    def _components(self) -> dict[int, int]:
        """Return a number for each module; those that import each other, directly or not, have the same."""
        parent = {id(module): id(module) for module in self.modules}

        def root(key: int) -> int:
            while parent[key] != key:
                parent[key] = parent[parent[key]]
                key = parent[key]
            return key

        for module in self.modules:
            for target in self.imports_of(module):
                parent[root(id(target))] = root(id(module))
        return {key: root(key) for key in parent}

    def imports_of(self, module: Module) -> list[Module]:
        """Return the files that a file imports."""
        if id(module) not in self._imports_of:
            found: dict[int, Module] = {}
            for written, name in [*module.relative.values(), *((star, "") for star in module.stars)]:
                dots = "" if written.endswith(".") else "."
                for target in (self.imported(module, written), self.imported(module, f"{written}{dots}{name}")):
                    if target is not None and target is not module:
                        found[id(target)] = target
            for target in self._imported_by_name(module):
                found[id(target)] = target
            self._imports_of[id(module)] = list(found.values())
        return self._imports_of[id(module)]

    def _imported_by_name(self, module: Module) -> list[Module]:
        """Return the files of the packages of which a file imports one by a name that a setting tells."""
        if "import" not in module.file.text or ("import_module(" not in module.file.text):
            return []
        folder = module.parts if module.is_package else module.parts[:-1]
        found: list[Module] = []
        for match in BY_NAME.finditer(module.file.text):
            wanted = tuple(match[1].split("."))
            for other in self.modules:
                package = other.parts if other.is_package else other.parts[:-1]
                root = package[: len(package) - len(wanted)]
                if package[len(root) :] == wanted and folder[: len(root)] == root and other is not module:
                    found.append(other)
        return found

    def lookup(self, module: Module, name: str, depth: int = 0, stars: bool = True) -> Function | Class | Module | None:
        """Return what `name`, as it stands in `module` (`f`, `package.f`, `Class.method`), means."""
        if depth > 8:
            return None
        key = (id(module), name, stars)
        if key not in self._meaning:
            self._meaning[key] = None  # for a name that is imported in a circle
            self._meaning[key] = self._lookup_now(module, name, depth, stars)
        return self._meaning[key]

    def _lookup_now(self, module: Module, name: str, depth: int, stars: bool) -> Function | Class | Module | None:
        first, _, rest = name.partition(".")
        found: Function | Class | Module | None = module.body.inner.get(first) or module.classes.get(first)
        if found is None and first in module.relative:
            written, inside = module.relative[first]
            target = self.imported(module, written)
            if inside and target is not None:
                found = self.lookup(target, inside, depth + 1)
            if found is None and inside:
                found = self.imported(module, f"{written}{'' if written.endswith('.') else '.'}{inside}")
            if found is None and not inside:
                found = target
        if found is None and stars:
            others = (self.lookup(other, first, depth + 1, stars=False) for other in self._starred(module))
            found = next((other for other in others if other is not None), None)
        if not rest or found is None:
            return found if not rest else self._dotted_import(module, name, depth)
        if isinstance(found, Module):
            return self.lookup(found, rest, depth + 1)
        return self.method(found, rest) if isinstance(found, Class) else None

    def _starred(self, module: Module) -> list[Module]:
        """Return the files whose names a file has by `from x import *`, directly or over others, each once."""
        if id(module) not in self._stars:
            found, waiting = {id(module): module}, [module]
            while waiting:
                here = waiting.pop(0)
                targets = [self.imported(here, star) for star in here.stars]
                for target in targets:
                    if target is not None and id(target) not in found:
                        found[id(target)] = target
                        waiting.append(target)
            self._stars[id(module)] = list(found.values())[1:]
        return self._stars[id(module)]

    def _dotted_import(self, module: Module, name: str, depth: int) -> Function | Class | Module | None:
        """Return what `a.b.f` means where the file says `import a.b`."""
        before, _, last = name.rpartition(".")
        if before in module.relative:
            target = self.imported(module, before)
            return self.lookup(target, last, depth + 1) if target is not None else None
        return None

    def method(self, owner: Class, name: str, depth: int = 0) -> Function | None:
        """Return a method of a class, or of one that it inherits from."""
        found = owner.methods.get(name)
        if found is not None or depth > 5:
            return found
        for base in owner.node.bases:
            parent = self.lookup(owner.module, dotted(base), depth + 1) if dotted(base) else None
            if isinstance(parent, Class) and parent is not owner:
                found = self.method(parent, name, depth + 1)
                if found is not None:
                    return found
        return None

    def called(self, call: Call) -> Function | None:
        """Return the function that a call reaches, or None where that is not known."""
        if id(call) not in self._called:
            self._called[id(call)] = self.resolve(call)
        return self._called[id(call)]

    def resolve(self, call: Call) -> Function | None:
        """Return what `called` does, for a call that is not one of the files' own."""
        function, name = call.function, dotted(call.node.func)
        if not name:
            return self._on_expression(call)
        first, _, rest = name.partition(".")
        scope: Function | None = function
        while scope is not None and not rest:  # a function that is defined within a function
            if first in scope.inner and scope.owner is not None:
                return scope.inner[first]
            scope = scope.owner
        owner = function.of_class or (function.owner.of_class if function.owner else None)
        if first in ("self", "cls") and owner is not None:
            if "." not in rest:
                return self.method(owner, rest)
            held = self.class_of(function, name.rpartition(".")[0])
            found_by_name = None if held else self._by_name(call, name)
            if found_by_name is not None and found_by_name.of_class is owner:  # of another object, not of its own class
                return None
            return self.method(held, name.rpartition(".")[2]) if held else found_by_name
        if any(first in f.assignments or first in f.parameters for f in _chain(function)):
            if not rest and (other := self._other_name(function, first)) is not None:
                return other
            held = self.class_of(function, name.rpartition(".")[0]) if rest else None
            return self.method(held, name.rpartition(".")[2]) if held else self._by_name(call, name)
        return self._meant(function.module, name)

    def _meant(self, module: Module, name: str) -> Function | None:
        """Return what a call of a name in a file runs; that of `f.apply` of autograd is its forward."""
        found = self.lookup(module, name)
        if isinstance(found, Class):
            return self.method(found, "__init__")
        if found is None and name.endswith(".apply"):
            owner = self.lookup(module, name.rpartition(".")[0])
            if isinstance(owner, Class) and any(base.rpartition(".")[2] == "Function" for base in owner.bases):
                return owner.methods.get("forward")
        return found if isinstance(found, Function) else None

    def _other_name(self, function: Function, name: str) -> Function | None:
        """Return the function for which a variable is another name: `gather = Gather.apply`."""
        values = [assignment.value for assignment in self.assigned(function, name)]
        written = dotted(values[0]) if len(values) == 1 and values[0] is not None else ""
        if not written or written.partition(".")[0] in ("self", "cls", name):
            return None
        return self._meant(function.module, written)

    def unambiguous(self, call: Call) -> bool:
        """Tell whether a call can only mean the function that `called` returns.

        It does not where the name is defined twice, where the object may be of another class, or where a decorator may
        do something else. Methods of subclasses are `overrides`.
        """
        if id(call) not in self._unambiguous:
            target = self.called(call)
            self._unambiguous[id(call)] = target is not None and self._only(call, target)
        return self._unambiguous[id(call)]

    def _only(self, call: Call, target: Function) -> bool:
        if isinstance(target.node, ast.Module) or any(not _is_plain(d) for d in target.node.decorator_list):
            return False
        alike = [f for f in target.module.functions if f.name == target.name and f.owner is target.owner]
        if sum(f.of_class is target.of_class for f in alike) > 1 or target.name in target.module.body.assignments:
            return False
        name = dotted(call.node.func)
        first, _, rest = name.partition(".")
        if target.of_class is None:
            return not any(first in f.assignments or first in f.parameters for f in _chain(call.function)[:-1])
        if (first in ("self", "cls") and "." not in rest) or not name or target.name == "__init__":
            return True
        return self.class_of(call.function, name.rpartition(".")[0]) is not None

    def overrides(self, call: Call) -> list[Function]:
        """Return the methods of subclasses, direct or not, that a call of `self.f()` may mean as well."""
        target = self.called(call)
        if target is None or target.of_class is None or dotted(call.node.func).partition(".")[0] not in ("self", "cls"):
            return []
        found: dict[int, Function] = {}
        waiting, seen = [target.of_class.name], set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for child in self._children[name]:
                if self.component[id(child.module)] != self.component[id(target.module)]:
                    continue  # a class of this name that has no import in common
                if child is not target.of_class and target.name in child.methods:
                    found[id(child)] = child.methods[target.name]
                waiting.append(child.name)
        return list(found.values())

    @cached_property
    def _children(self) -> dict[str, list[Class]]:
        """Return the classes that name a class, by the last part of that name, as a base."""
        found: dict[str, list[Class]] = defaultdict(list)
        for module in self.modules:
            for made in module.classes.values():
                for base in made.bases:
                    found[base.rpartition(".")[2]].append(made)
        return found

    def _on_expression(self, call: Call) -> Function | None:
        """Resolve `super().f()` and `Class(...).f()`."""
        func = call.node.func
        if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call)):
            return None
        name = dotted(func.value.func)
        owner = call.function.of_class
        if name == "super" and owner is not None:
            bases = (self.lookup(owner.module, dotted(base)) for base in owner.node.bases if dotted(base))
            return next((self.method(base, func.attr) for base in bases if isinstance(base, Class)), None)
        found = self.lookup(call.function.module, name) if name else None
        return self.method(found, func.attr) if isinstance(found, Class) else None

    def _by_name(self, call: Call, name: str) -> Function | None:
        """Return the one method of all files that has such a name, if the name is not one that libraries have too."""
        last = name.rpartition(".")[2]
        if "." not in name or len(last) < 8 or "_" not in last or last in COMMON or last.startswith("__"):
            return None
        component = self.component[id(call.function.module)]
        found = [f for f in self.methods.get(last, ()) if self.component[id(f.module)] == component]
        return found[0] if len(found) == 1 else None

    def class_of(self, function: Function, name: str) -> Class | None:
        """Return the class of what a variable holds, if it is only ever made by that class."""
        found: set[Class] = set()
        for assignment in self.assigned(function, name):
            value = assignment.value
            if isinstance(value, ast.IfExp) and is_constant(value.orelse, None):
                value = value.body
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in SAME:
                value = value.func.value
            if not isinstance(value, ast.Call) or not dotted(value.func):
                return None
            made = self.lookup(function.module, dotted(value.func))
            if not isinstance(made, Class):
                return None
            found.add(made)
        return found.pop() if len(found) == 1 else None

    def assigned(self, function: Function, name: str) -> list[Assignment]:
        """Return where a variable gets its values: in the function, its outer ones, the file; `self.x` in its class."""
        if name.startswith("self.") and name.count(".") == 1:
            owner = function.of_class or (function.owner.of_class if function.owner else None)
            methods = owner.methods.values() if owner is not None else [function]
            return [a for method in methods for a in method.assignments.get(name, ())]
        for scope in _chain(function):
            if name in scope.assignments:
                return scope.assignments[name]
            if name in scope.parameters:
                return []
        return []


def _added_to_path(module: Module) -> list[tuple[str, ...]]:
    """Return the folders that a file puts into sys.path, below its own: `sys.path.append("core")`."""
    if "sys.path" not in module.file.text:
        return []
    folder = PurePosixPath(module.file.inside).parent.parts
    return [(*folder, *PurePosixPath(match[1]).parts) for match in ADDED.finditer(module.file.text)]


def _chain(function: Function) -> list[Function]:
    """Return a function and what it is defined in, to the body of the module."""
    found: list[Function] = []
    scope: Function | None = function
    while scope is not None:
        found.append(scope)
        scope = scope.owner
    return found


def _is_plain(decorator: ast.expr) -> bool:
    """Tell whether a decorator leaves it to the function what a call does."""
    return dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).rpartition(".")[2] in PLAIN
