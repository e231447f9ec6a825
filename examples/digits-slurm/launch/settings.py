"""Names of settings, read from the source without importing it: a typo is refused before anything starts.

    python settings.py check TRAIN_PY [training arguments]   exit code 78, and two lines, if one of them does not exist
    python settings.py list TRAIN_PY                         all of them, a line for each section

Values are training's to check, which imports torch. Where the source is not as this reader expects, training says it.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONFIG = 78
DEFAULT_FILE = "configs/train.yaml"
NO_SETTINGS = {"DDP_FAULTS", "DDP_ATTEMPT", "DDP_WALLTIME_END"}  # variables of one start, not of the run
BASES = {"BaseModel", "BaseSettings"}


@dataclass
class Names:
    """What the classes of settings have."""

    settings: list[str] = field(default_factory=list)  # section.key, in the order of the classes
    sections: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # sections with a base class from elsewhere: any key may be one

    def has(self, name: str) -> bool:
        """Whether training may know `name`; what is below a setting (a mapping) is that setting's."""
        known = (*self.settings, *self.unknown)
        return name in (*known, *self.sections) or any(not one or name.startswith(f"{one}.") for one in known)


def names_of(train: Path) -> Names | None:
    """The settings that train.py reads; None if it does not read them by a call with the class `Settings`."""
    tree = _parse(train)
    given = (argument for node in ast.walk(tree) if isinstance(node, ast.Call) for argument in node.args)
    if not any(isinstance(argument, ast.Name) and argument.id == "Settings" for argument in given):
        return None
    found = _find("Settings", train, tree)
    if found is None:
        return None
    names = Names()
    _collect(*found, "", names)
    return names


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):  # training will say it better
        return ast.Module([], [])


def _find(name: str, path: Path, tree: ast.Module) -> tuple[ast.ClassDef, Path, ast.Module] | None:
    """The class that `name` stands for in a module, and the module that it is in; None if it is not of the project."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, path, tree
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                module = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                module = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                if (alias.asname or alias.name) == name and module != path:
                    return _find(alias.name, module, _parse(module))
    return None


def _collect(definition: ast.ClassDef, path: Path, tree: ast.Module, above: str, names: Names) -> None:
    """Add the fields of a class, and those of the classes that they are of."""
    for base in definition.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        if name in BASES:
            continue
        if found := _find(name, path, tree):
            _collect(*found, above, names)
        else:
            names.unknown.append(above)
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        full = f"{above}.{node.target.id}" if above else node.target.id
        annotation = node.annotation.id if isinstance(node.annotation, ast.Name) else ""
        if found := _find(annotation, path, tree):
            names.sections.append(full)
            _collect(*found, full, names)
        else:
            names.settings.append(full)


def problem(names: Names, arguments: Sequence[str], variables: Iterable[str]) -> tuple[str, str] | None:
    """What is no setting, on the command line, in the variables or in the file, and what may be meant."""
    file, options = DEFAULT_FILE, list[str]()
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--config":
            file = value if equals else next(iter(arguments[number + 1 :]), "")
        elif option.startswith("--") and option not in ("--", "--help"):
            options.append(option.removeprefix("--"))
    if file != DEFAULT_FILE and not Path(file).is_file():
        return f"{file} does not exist", "give --config the path of a YAML file"
    for name in options:
        if not names.has(name):
            return f"--{name} is not a setting", _meant(name, names, "--{}")
    for variable in sorted(variables):
        name = variable.removeprefix("DDP_").replace("__", ".").lower()
        ours = variable not in NO_SETTINGS and not variable.startswith("DDP_SCAFFOLD_")  # which is the generator's
        if ours and not names.has(name):
            return f"nothing reads the variable {variable}", _meant(name, names, "DDP_{}", "__")
    for name in _in_file(Path(file)):
        if not names.has(name):
            return f"{file}: {name} is not a setting", _meant(name, names, "{}")
    return None


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


def _meant(name: str, names: Names, form: str, between: str = ".") -> str:
    """Advice: the setting that looks most like `name`, or that has the same key in another section."""
    key = name.rpartition(".")[2]
    alike = [each for each in names.settings if each.rpartition(".")[2] == key]
    alike += difflib.get_close_matches(name, names.settings, 1)
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
        for section in names.sections:
            keys = [each.removeprefix(f"{section}.") for each in names.settings if each.startswith(f"{section}.")]
            print(f"  --{section}.  {' '.join(keys)}")
        return 0
    found = problem(names, arguments, (name for name in os.environ if name.startswith("DDP_")))
    if found is None:
        return 0
    print(f"[launch] error: {found[0]}\n[launch]        {found[1]}", file=sys.stderr)
    return CONFIG


if __name__ == "__main__":
    sys.exit(main())
