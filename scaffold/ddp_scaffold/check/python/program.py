"""The files together: which file an import means, and which function a call reaches."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import PurePosixPath

from .module import Assignment, Call, Class, Function, Module, dotted, keyword
from .objects import Objects, joins_group

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
BUILT_IN = set(dir(builtins))
NAMED = re.compile(r"[\"']((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)[\"']")  # a file by its name: import_module("models.unet")
BY_NAME = re.compile(r"import_module|__import__")
# `import_module("data." + name)`: any file of the package may be meant.
PACKAGE_BY_NAME = re.compile(r"(?:import_module|__import__)\(\s*f?[\"']([A-Za-z_][\w.]*)\.(?:[\"']\s*[+%]|\{|%s)")
# What starts processes: (name of the function's keyword, its position), and the arguments are `args`.
STARTS = {"spawn": ("fn", 0), "start_processes": ("fn", 0), "Process": ("target", 1)}
PROCESS_NUMBER = ast.Name("local_rank")  # what spawn gives a function first
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
        self.own_name = self._name_of_all()
        self._imported: dict[tuple[int, str], Module | None] = {}
        self._called: dict[int, Function | None] = {}
        self._runs: dict[int, Function | None] = {}
        self._started: dict[int, list[Function]] = {}
        self.objects = Objects(self)
        self.by_name = any(BY_NAME.search(module.file.text) for module in self.modules)
        self._unambiguous: dict[int, bool] = {}
        self._meaning: dict[tuple[int, str, bool], Function | Class | Module | None] = {}
        self._stars: dict[int, list[Module]] = {}
        self._imports_of: dict[int, list[Module]] = {}
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
        self._connect_objects()

    def _connect_objects(self) -> None:
        """Find the calls of methods of what callers give, and of functions that they give: callers must be known."""
        methods = [
            call
            for name in self.methods
            for call in self.calls_named.get(name, ())
            if self._called.get(id(call)) is None and type(call.node.func) is ast.Attribute
        ]
        given = [
            call for name, calls in self.calls_named.items() if "." not in name for call in calls if _is_given(call)
        ]
        starts = [call for last in STARTS for call in self.calls_named.get(last, ())]
        for _ in range(2):
            self.objects.forget()
            before = len(methods), len(given), len(starts)
            methods = [call for call in methods if not self._connect_method(call)]
            starts = [call for call in starts if not self._connect_started(call)]
            given = [call for call in given if not self._connect_given(call)]
            if before == (len(methods), len(given), len(starts)):
                return

    def _connect_method(self, call: Call) -> bool:
        target = self.resolve(call)
        if target is not None:
            self._called[id(call)] = target
            self.sites[id(target)].append(call)
        return target is not None

    def _connect_given(self, call: Call) -> bool:
        """Tell who calls a function that is given as an argument; of several, none is what the call means."""
        called = self.objects.callables(call.function, call.node.func) or []
        functions = [one for one in called if isinstance(one, Function)]
        for target in functions:
            self.sites[id(target)].append(call)
        if len(called) == 1:
            self._called[id(call)] = functions[0] if functions else None
        return bool(functions)

    def _connect_started(self, call: Call) -> bool:
        """Tell what starts a function as a process; spawn gives it the number of the process first."""
        node, (word, position) = call.node, STARTS[call.last]
        run = keyword(node, word) or (node.args[position] if len(node.args) > position else None)
        if run is None:
            return False
        called = self.objects.callables(call.function, run) or []
        functions = [one for one in called if isinstance(one, Function)]
        given = keyword(node, "args") or (node.args[position + 1] if len(node.args) > position + 1 else None)
        values: list[ast.expr] = [] if word == "target" else [PROCESS_NUMBER]
        if isinstance(given, (ast.Tuple, ast.List)):
            values += given.elts
        elif given is not None:
            values.append(ast.Starred(given))
        for target in functions:
            started = ast.copy_location(ast.Call(run, values, []), node)
            site = Call(started, call.function.module.full_name(run), call.place, call.function, call.order)
            self._called[id(site)] = target
            self.sites[id(target)].append(site)
        self._started[id(call)] = functions
        return bool(functions)

    def started(self, call: Call) -> list[Function]:
        """Return the functions that a call starts processes with."""
        return self._started.get(id(call), [])

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
        if len(parts) > 1 and parts[0] == self.own_name:
            return next((m for p, m in self.by_last.get(parts[-1], ()) if p == parts[1:]), None)
        if not parts:
            return None
        best: tuple[int, Module] | None = None
        for candidate, found in self.by_last.get(parts[-1], ()):
            if candidate[len(candidate) - len(parts) :] != parts:
                continue
            root = candidate[: len(candidate) - len(parts)]
            above = folder[: len(root)] == root
            own = parts[0] == "datasets" and (len(parts) > 1 or self._has_own(module, parts[0]))
            if (parts[0] in FOREIGN and root != folder and not own) or not (
                above or root[-1:] in SOURCES or root in self.added
            ):
                continue
            # A file of a package that imports its neighbours by dots means one from above without them.
            depth = -1 if root == folder and root and self._is_in_package(module) else len(root)
            if best is None or depth > best[0]:
                best = (depth, found)
        return best[1] if best else None

    def _name_of_all(self) -> str:
        """Return the name under which these files import each other where their folder is itself a package, or "".

        That name stands in no path of theirs; it is the one of which several files are imported, and all are here.
        """
        wanted: dict[str, set[str]] = defaultdict(set)
        for module in self.modules:
            for written in (*(written for written, _ in module.relative.values()), *module.stars):
                first, _, rest = written.partition(".")
                if first and first not in FOREIGN:
                    wanted[first].add(rest)
        tops = {parts[0] for found in self.by_last.values() for parts, _ in found}
        here = {".".join(parts) for found in self.by_last.values() for parts, _ in found}
        names = (first for first, files in wanted.items() if first not in tops and len(files) > 2 and files <= here)
        return next(names, "")

    def _has_own(self, module: Module, package: str) -> bool:
        """Tell whether a file imports one of these files out of a package, which many have and a library too."""
        named = [name for written, name in module.relative.values() if written == package]
        return any((package, name) == found[-2:] for name in named for found, _ in self.by_last.get(name, ()))

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
            found: dict[int, Module] = {id(one): one for one in self._named_in(module)}
            for written, name in [*module.relative.values(), *module.rebound, *((s, "") for s in module.stars)]:
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
        for match in PACKAGE_BY_NAME.finditer(module.file.text):
            wanted = tuple(match[1].split("."))
            for other in self.modules:
                package = other.parts if other.is_package else other.parts[:-1]
                root = package[: len(package) - len(wanted)]
                if package[len(root) :] == wanted and folder[: len(root)] == root and other is not module:
                    found.append(other)
        return found

    def _named_in(self, module: Module) -> list[Module]:
        """Return the files that a file names in a text, where these files import some by name."""
        if not self.by_name:
            return []
        found = (self.imported(module, name) for name in _names_of_files(module.file.text))
        return [one for one in found if one is not None and one is not module]

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
        if name == "apply" and found is None and any(base.endswith("Function") for base in owner.bases):
            found = owner.methods.get("forward")  # of torch.autograd.Function
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

    def runs(self, call: Call) -> Function | None:
        """Return the function that a call reaches, or the `__call__` or `forward` of the object that it calls."""
        target = self.called(call)
        if target is not None:
            return target
        if id(call) not in self._runs:
            name = dotted(call.node.func)
            made = self.objects.of_name(call.function, name) if name else None
            found = [self.method(one, "__call__") or self.method(one, "forward") for one in made or ()]
            self._runs[id(call)] = found[0] if len(found) == 1 else None
        return self._runs[id(call)]

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
                found_method = self.method(owner, rest)
                return self._concrete(found_method) if found_method is not None else self._by_value(call)
            found_method = self._of_object(function, name)
            found_by_name = None if found_method else self._by_name(call, name)
            if found_by_name is not None and found_by_name.of_class is owner:  # of another object, not of its own class
                return None
            return found_method or found_by_name
        if any(first in f.assignments or first in f.parameters for f in _chain(function)):
            if not rest and (other := self._other_name(function, first)) is not None:
                return other
            if not rest:
                return self._by_value(call)
            return self._of_object(function, name) or self._by_name(call, name)
        meant = self._meant(function.module, name)
        written = function.module.relative.get(first, ("", ""))[0].partition(".")[0]
        return meant if meant is not None or first in BUILT_IN or written in FOREIGN else self._by_value(call)

    def _of_object(self, function: Function, name: str) -> Function | None:
        """Return what `x.f` runs: the method of the class of x, or the one that all classes inherit that x may have."""
        owner, _, last = name.rpartition(".")
        held = self.class_of(function, owner)
        classes = [held] if held is not None else self.objects.of_name(function, owner) or []
        methods = {id(found): found for found in (self.method(one, last) for one in classes)}
        return next(iter(methods.values())) if len(methods) == 1 else None

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

    def _concrete(self, method: Function) -> Function:
        """Return what a subclass does where a method only says that it should: `pass`, `raise NotImplementedError`."""
        if method.calls and any(call.last != "NotImplementedError" for call in method.calls):
            return method
        body = getattr(method.node, "body", [])
        if any(not isinstance(part, (ast.Pass, ast.Raise, ast.Expr)) for part in body) or method.of_class is None:
            return method
        waiting, seen = [method.of_class.name], set[str]()
        while waiting:
            name = waiting.pop(0)
            children = [child for child in self._children[name] if child.name not in seen] if name not in seen else []
            seen.add(name)
            for child in children:
                if self.component[id(child.module)] != self.component[id(method.module)]:
                    continue
                if child is not method.of_class and method.name in child.methods:
                    return child.methods[method.name]
                waiting.append(child.name)
        return method

    def _by_value(self, call: Call) -> Function | None:
        """Return the function that a call of a value reaches: of an alias, a partial, an entry of a table."""
        found = self.objects.callables(call.function, call.node.func) or []
        if len(found) > 1:  # the one of several ranks
            found = [one for one in found if isinstance(one, Class) and joins_group(one)]
        if len(found) != 1:
            return None
        return self.method(found[0], "__init__") if isinstance(found[0], Class) else found[0]

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
        return len(self.objects.of_name(call.function, name.rpartition(".")[0]) or []) == 1

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
        """Resolve `super().f()`, `Class(...).f()` and `TABLE[key]()`."""
        func = call.node.func
        if not isinstance(func, ast.Attribute):
            return self._by_value(call)
        if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call)):
            return None
        name = dotted(func.value.func)
        owner = call.function.of_class
        if name == "super" and owner is not None:
            bases = (self.lookup(owner.module, dotted(base)) for base in owner.node.bases if dotted(base))
            return next((self.method(base, func.attr) for base in bases if isinstance(base, Class)), None)
        made = self.objects.of_value(call.function, func.value) or []
        return self.method(made[0], func.attr) if len(made) == 1 else None

    def _by_name(self, call: Call, name: str) -> Function | None:
        """Return the one method of all files that has such a name, if the name is not one that libraries have too."""
        last = name.rpartition(".")[2]
        if "." not in name or len(last) < 8 or "_" not in last or last in COMMON or last.startswith("__"):
            return None
        component = self.component[id(call.function.module)]
        found = [f for f in self.methods.get(last, ()) if self.component[id(f.module)] == component]
        return found[0] if len(found) == 1 else None

    def class_of(self, function: Function, name: str) -> Class | None:
        """Return the class of what a variable holds: of several, the only one that is there for several ranks."""
        found = self.objects.of_name(function, name) or []
        several = [one for one in found if joins_group(one)] if len(found) > 1 else found
        return several[0] if len(several) == 1 else None

    def is_partial(self, function: Function, call: ast.Call) -> bool:
        """Tell whether a call is `functools.partial(f, ...)`."""
        return function.module.full_name(call.func) in ("functools.partial", "partial")

    def with_bases(self, function: Function) -> list[Class]:
        """Return the class that a method is of, and those that it inherits from."""
        owner = function.of_class or (function.owner.of_class if function.owner else None)
        return self.hierarchy(owner) if owner is not None else []

    def hierarchy(self, owner: Class) -> list[Class]:
        """Return a class and those that it inherits from."""
        found: list[Class] = []
        waiting = [owner]
        while waiting and len(found) < 8:
            here = waiting.pop(0)
            if here in found:
                continue
            found.append(here)
            parents = (self.lookup(here.module, dotted(base)) for base in here.node.bases if dotted(base))
            waiting += [parent for parent in parents if isinstance(parent, Class)]
        return found

    def family(self, owner: Class) -> list[Class]:
        """Return a class with those that it inherits from, and those that inherit from it."""
        found, waiting = {id(owner): owner}, [owner]
        while waiting and len(found) < 20:
            here = waiting.pop()
            bases = (self.lookup(here.module, dotted(base)) for base in here.node.bases if dotted(base))
            near = [one for one in bases if isinstance(one, Class)]
            near += [
                one
                for one in self._children[here.name]
                if self.component[id(one.module)] == self.component[id(here.module)]
            ]
            waiting += [one for one in near if id(one) not in found]
            found.update((id(one), one) for one in near)
        return list(found.values())

    def constant(self, module: Module, name: str, depth: int = 0) -> tuple[Module, ast.expr] | None:
        """Return the file and the value of a name that a file sets once, here or where it is imported from."""
        first, _, rest = name.partition(".")
        if not rest:
            assigned = module.body.assignments.get(first, ())
            if len(assigned) == 1 and assigned[0].value is not None:
                return module, assigned[0].value
        if depth > 4 or first not in module.relative:
            return None
        written, inside = module.relative[first]
        target = self.imported(module, written)
        if inside and not rest:
            return self.constant(target, inside, depth + 1) if target is not None else None
        if inside:
            target = self.imported(module, f"{written}{'' if written.endswith('.') else '.'}{inside}")
        return self.constant(target, rest, depth + 1) if target is not None and rest else None

    def assigned(self, function: Function, name: str) -> list[Assignment]:
        """Return where a variable gets its values: in the function, its outer ones, the file; `self.x` in its class."""
        if name.startswith("self.") and name.count(".") == 1:
            owner = function.of_class or (function.owner.of_class if function.owner else None)
            methods = owner.methods.values() if owner is not None else [function]
            found = [a for method in methods for a in method.assignments.get(name, ())]
            bases = self.with_bases(function)[1:] if not found and owner is not None and owner.bases else []
            return found or [a for base in bases for m in base.methods.values() for a in m.assignments.get(name, ())]
        for scope in _chain(function):
            if name in scope.assignments:
                return scope.assignments[name]
            if name in scope.parameters:
                return []
        return []


@lru_cache(maxsize=8192)
def _names_of_files(text: str) -> tuple[str, ...]:
    """Return what looks like the name of a module in the texts of a file."""
    return tuple(sorted({match[1] for match in NAMED.finditer(text)}))


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


def _is_given(call: Call) -> bool:
    """Tell whether a call is one of a parameter or a variable of the function in which it stands."""
    func, function = call.node.func, call.function
    return type(func) is ast.Name and (func.id in function.parameters or func.id in function.assignments)


def _is_plain(decorator: ast.expr) -> bool:
    """Tell whether a decorator leaves it to the function what a call does."""
    return dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).rpartition(".")[2] in PLAIN
