"""Names of settings, read from the source without importing it: a typo is refused before anything starts.

    python settings.py check TRAIN_PY [training arguments]   exit code 78, and two lines, if one of them does not exist
    python settings.py list TRAIN_PY                         all of them, a line for each section

Values are training's to check, which imports torch. Only what is written as this project writes it is understood: a
class of pydantic with extra="forbid" and plain fields, each name bound once. Where it is not, any name may be one.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CONFIG = 78
DEFAULT_FILE = "configs/train.yaml"
NO_SETTINGS = {"DDP_FAULTS", "DDP_ATTEMPT", "DDP_WALLTIME_END"}  # variables of one start, not of the run
SPELLINGS = {"fast-dev-run": "train.fast_dev_run", "profile": "log.profile"}  # options: training's start/settings.py
LOADERS = {"load_settings", "load"}
# Options of a class that change no name, beside `extra`.
PLAIN = {"extra", "env_prefix", "env_nested_delimiter", "allow_inf_nan", "frozen", "validate_assignment"}


class Class(NamedTuple):
    """A class, and the module that it is in."""

    definition: ast.ClassDef
    path: Path
    tree: ast.Module


def names_of(train: Path) -> list[str] | None:
    """The settings that train.py reads, section.key, in the order of the classes; None if that cannot be told.

    It reads them by one call with nothing but the class `Settings`; a train.py with arguments of its own does not.
    """
    tree = _parse(train)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in LOADERS]
    if len(calls) != 1 or calls[0].keywords or [_name(argument) for argument in calls[0].args] != ["Settings"]:
        return None
    found = _find("Settings", train, tree)
    return _fields(found, "") if found else None


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):  # training will say it better
        return ast.Module([], [])


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _bound(node: ast.AST) -> list[str]:
    """The names that a statement, or a target, binds."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []


def _bound_once(name: str, tree: ast.Module) -> bool:
    return [other for node in ast.walk(tree) for other in _bound(node)].count(name) == 1


def _find(name: str, path: Path, tree: ast.Module) -> Class | None:
    """The class that `name` stands for in a module; None if that is not a class of the project, or cannot be told."""
    if not _bound_once(name, tree):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return Class(node, path, tree)
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                module = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                module = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                if (alias.asname or alias.name) == name and module != path:
                    return _find(alias.name, module, _parse(module))
    return None


def _fields(section: Class, above: str, strict: bool = False) -> list[str] | None:
    """The settings of a section and those below it; None if it is not understood as a whole.

    Args:
        strict: whether a class that inherits from this one has extra="forbid".
    """
    if section.definition.decorator_list:
        return None
    found = list[str]()
    options = {keyword.arg: keyword.value for keyword in section.definition.keywords}
    for node in section.definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _has_alias(node):
            full = f"{above}.{node.target.id}" if above else node.target.id
            inner = _find(_name(node.annotation), section.path, section.tree)
            found += (_fields(inner, full) if inner else None) or [full]
        elif isinstance(node, ast.Assign) and list(map(_name, node.targets)) == ["model_config"]:
            if not isinstance(node.value, ast.Call) or node.value.args:
                return None
            options |= {keyword.arg: keyword.value for keyword in node.value.keywords}
        elif not (isinstance(node, ast.FunctionDef) and not _is_before(node)) and not isinstance(node, ast.Expr):
            return None
    extra = options.get("extra")
    forbids = isinstance(extra, ast.Constant) and extra.value == "forbid"
    if not options.keys() <= PLAIN or (extra and not forbids):
        return None
    inherited = [_inherited(base, section, above, strict or forbids) for base in section.definition.bases]
    if not inherited or None in inherited:
        return None
    return [*(name for names in inherited if names for name in names), *found]


def _inherited(base: ast.expr, section: Class, above: str, strict: bool) -> list[str] | None:
    """The settings of a base class: none of pydantic's own, if extra keys are forbidden by then."""
    if found := _find(_name(base), section.path, section.tree):
        return _fields(found, above, strict)
    imports = [node for node in section.tree.body if isinstance(node, ast.ImportFrom) and not node.level]
    modules = [node.module for node in imports if _name(base) in _bound(node)]
    pydantic = modules in (["pydantic"], ["pydantic_settings"]) and _name(base) in ("BaseModel", "BaseSettings")
    return [] if strict and pydantic and _bound_once(_name(base), section.tree) else None


def _has_alias(field: ast.AnnAssign) -> bool:
    keywords = (node.arg or "" for node in ast.walk(field) if isinstance(node, ast.keyword))
    return any("alias" in keyword for keyword in keywords)


def _is_before(function: ast.FunctionDef) -> bool:
    """Whether it is a validator that sees what was given, and may accept other names."""
    constants = (node for decorator in function.decorator_list for node in ast.walk(decorator))
    return any(isinstance(node, ast.Constant) and node.value in ("before", "wrap") for node in constants)


def problem(names: Sequence[str], arguments: Sequence[str], variables: Iterable[str]) -> tuple[str, str] | None:
    """What is no setting, on the command line, in the variables or in the file, and what may be meant."""
    file, options, strays = DEFAULT_FILE, list[str](), list[str]()
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        before = arguments[number - 1] if number else "="
        if not option.startswith("-") and ("=" in before or not before.startswith("--")):  # not the value of an option
            strays.append(argument)
        if option == "--config":
            file = value if equals else next(iter(arguments[number + 1 :]), "")
        elif option.startswith("--") and option not in ("--", "--help"):
            name = option.removeprefix("--")
            options.append(SPELLINGS.get(name, name))
    if file != DEFAULT_FILE and not Path(file).is_file():
        return f"--config {file or 'without a value'}: there is no such file", "give it the path of a YAML file"
    for name in options:
        if not _is_known(name, names):
            return f"--{name} is not a setting", _meant(name, names, "--{}")
    for stray in strays:
        return f"{stray} is not an option", _instead(*stray.partition("=")[::2], names)
    for variable in sorted(variables):
        name = variable.removeprefix("DDP_").replace("__", ".").lower()
        ours = variable not in NO_SETTINGS and not variable.startswith("DDP_SCAFFOLD_")  # which is the generator's
        if ours and not _is_known(name, [each.lower() for each in names]):
            return f"nothing reads the variable {variable}", _meant(name, names, "DDP_{}", "__")
    for name in _in_file(Path(file)):
        if not _is_known(name, names):
            return f"{file}: {name} is not a setting", _meant(name, names, "{}")
    return None


def _is_known(name: str, names: Iterable[str]) -> bool:
    """A setting, a section, or a part of what is not understood as a section."""
    return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in names)


def _in_file(file: Path) -> Iterator[str]:
    """The names that a settings file sets."""
    try:
        import yaml

        content = yaml.safe_load(file.read_text())
    except Exception:  # whatever is wrong with it, training will say it better
        return
    for section, values in content.items() if isinstance(content, Mapping) else ():
        for key in values if isinstance(values, Mapping) else ():
            yield f"{section}.{key}"


def _instead(name: str, value: str, names: Sequence[str]) -> str:
    """Advice for `name=value` without dashes, as Hydra and launch/sweep.py take it."""
    known = _is_known(name, names)
    return f"did you mean --{name} {value or '...'}?" if known else "settings are options: --section.key value"


def _meant(name: str, names: Sequence[str], form: str, between: str = ".") -> str:
    """Advice: the same key in another section, `lr` for learning_rate, one that begins so or looks alike."""
    keys, key = {each: each.rpartition(".")[2] for each in names}, name.rpartition(".")[2]
    alike = [each for each in names if keys[each] == key]
    short = [each for each in names if "".join(word[:1] for word in keys[each].split("_")) == key]
    alike += sorted(short, key=lambda each: each.partition(".")[0] != (name.rpartition(".")[0] or "train"))
    alike += [each for each in names if each.startswith(name)]
    close = difflib.get_close_matches(name, names, 3)  # a long section makes all of its keys look alike
    alike += [each for each in close if difflib.SequenceMatcher(None, key, keys[each]).ratio() > 0.35]
    if not alike:
        return f"{Path(__file__).parent.name}/torchrun.sh --help lists all settings"
    meant = form.format(alike[0].replace(".", between))
    return f"did you mean {meant.upper() if between == '__' else meant}?"


def main() -> int:
    """The command."""
    command, train, *arguments = sys.argv[1:]
    names = names_of(Path(train))
    if names is None:
        return 0
    if command == "list":
        for section in dict.fromkeys(name.partition(".")[0] for name in names):
            keys = [name.partition(".")[2] for name in names if name.startswith(f"{section}.")]
            print(f"  --{section}.  {' '.join(keys)}" if keys else f"  --{section}")
        return 0
    found = problem(names, arguments, (name for name in os.environ if name.startswith("DDP_")))
    if found is None:
        return 0
    print(f"[launch] error: {found[0]}\n[launch]        {found[1]}", file=sys.stderr)
    return CONFIG


if __name__ == "__main__":
    sys.exit(main())
