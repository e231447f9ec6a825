"""Presets: what is known about a cluster, one YAML file each. Here is where they are, and how they are read.

`schema.py` says what may stand in one. A preset may extend another: it then holds only the fields that differ.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from . import checks, schema
from .schema import Preset
from .yaml_text import PRESET_BYTES, BoundedLoader

CHECKOUT = Path(__file__).parents[3] / "templates" / "presets"  # when the package runs from a source checkout
PACKAGED = Path(__file__).with_name("files")  # in a wheel: the same files, as package data

MAX_PARENTS = 2  # `extends` may be followed so many times; copier.yml holds one computed answer for each


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a preset file; `field` is a dotted path, or empty for the file itself."""

    file: str
    field: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.field, self.reason) if part)


class PresetError(Exception):
    """A preset file that cannot be used, with all its problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def in_one_line(self) -> str:
        """Return the first problem, and how many more there are."""
        more = f" (and {len(self.problems) - 1} more)" if self.problems[1:] else ""
        return f"{self.problems[0]}{more}"


def directory() -> Path:
    """Return where the presets of this installation are."""
    return CHECKOUT if CHECKOUT.is_dir() else PACKAGED


def find(name: str) -> Path | None:
    """Return the file of a preset, or None if there is none of that name."""
    return next((path for path in files() if path.stem == name), None)


def files() -> list[Path]:
    """Return the files of all presets, by name."""
    return sorted(directory().glob("*.yml"), key=lambda path: path.stem)


def keywords() -> dict[str, list[str]]:
    """Return the keywords of every preset that has some, by its name, without reading all that stands in the files."""
    found = {}
    for path in files():
        try:
            block = re.search(r"^keywords:.*\n(?:[ -].*\n)*", path.read_text(encoding="utf-8"), re.MULTILINE)
            found[path.stem] = [str(word) for word in yaml.safe_load(block[0])["keywords"] or ()] if block else []
        except (OSError, ValueError, TypeError, yaml.YAMLError):  # it cannot be used; `new` says so when it is chosen
            continue
    return found


def load_preset(path: Path) -> Preset:
    """Return the preset in a file, with the fields of those that it extends. Raises PresetError with every problem."""
    return load_with_origins(path)[0]


def load_with_origins(path: Path) -> tuple[Preset, dict[str, str]]:
    """Return the preset in a file, and for each field that it takes over the name of the preset that has it.

    Raises PresetError with every problem.
    """
    problems: list[Problem] = []
    chain, complete = _chain(path, problems)
    if not chain:
        raise PresetError(problems)
    merged: dict[str, Any] = {}
    holders: dict[str, Path] = {}
    for file, data in chain:
        merged = {**data, **merged}
        holders = {**dict.fromkeys(data, file), **holders}
    preset = _validate(path, merged, holders, complete, problems)
    own = chain[0][1]
    if isinstance(own.get("name"), str) and own["name"] != path.stem:
        problems.append(Problem(str(path), "name", f"must be {path.stem!r}, like the file"))
    problems += [
        Problem(str(path), name, "is missing: it is never taken over from the preset that this one extends")
        for name in ("name", "title", "verified_on", "status")
        if name not in own and name in merged
    ]
    if problems or preset is None:
        raise PresetError(problems)
    return preset, {field: file.stem for field, file in holders.items() if file != path}


def _chain(path: Path, problems: list[Problem]) -> tuple[list[tuple[Path, dict[str, Any]]], bool]:
    """Return the file and those that it extends, with what they hold, and whether all of them are there."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    file: Path | None = path
    while file is not None:
        data = _read(file, problems)
        if data is None:
            return chain, False
        chain.append((file, data))
        base = data.get("extends")
        if not isinstance(base, str):
            break
        file = find(base)
        if file is None:
            known = ", ".join(other.stem for other in files())
            reason = f"there is no preset {base!r}; there are: {known}"
        elif len(chain) > MAX_PARENTS or base == chain[0][1].get("name"):
            reason = f"goes deeper than {MAX_PARENTS} presets, or in a circle"
        else:
            continue
        problems.append(Problem(str(path), "extends", reason))
        return chain, False
    return chain, True


def _read(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """Return the mapping in a file, as it stands there, or None if there is none: `problems` then say why."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= PRESET_BYTES):
            most = f"{PRESET_BYTES >> 10} kB"
            raise PresetError([Problem(str(path), "", f"cannot be read: no file, or one of more than {most}")])
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(Problem(str(path), "", f"cannot be read: {reason}"))
        return None
    # Copier renders a preset as a Jinja template before it reads the YAML.
    for number, line in enumerate(text.splitlines(), start=1):
        problems += [
            Problem(f"{path}:{number}", "", f"holds {mark!r}, which Jinja would evaluate")
            for mark in ("{{", "{%", "{##")
            if mark in line
        ]
    try:
        data = deepcopy(_parsed(text))
    except Exception as error:  # of values that look like dates, numbers or binary, PyYAML raises nearly anything
        at = getattr(error, "problem_mark", None)
        where = f"{path}:{at.line + 1}" if at else str(path)
        reason = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        problems.append(Problem(where, "", f"is not YAML: {reason}"))
        return None
    if not isinstance(data, dict):
        problems.append(Problem(str(path), "", "must be a mapping of fields"))
        return None
    return data


@cache
def _parsed(text: str) -> Any:
    """What the YAML says. Presets that many extend are read for each of them, and PyYAML needs 20 ms for one."""
    return yaml.load(text, _NoDuplicates)


def _validate(
    path: Path, merged: dict[str, Any], holders: dict[str, Path], complete: bool, problems: list[Problem]
) -> Preset | None:
    """Return the merged preset, or None. A problem is reported for the file that holds the field."""
    try:
        preset = Preset.model_validate(merged)
    except ValidationError as error:
        for details in error.errors():
            if complete or details["type"] != "missing" or len(details["loc"]) > 1:  # else what is extended may have it
                problems.append(_problem(holders.get(str(details["loc"][0]), path), details))
        return None
    for field, reason in checks.contradictions(preset):  # of this file, which may change what another one relies on
        holder = holders.get(field.partition(".")[0], path)
        taken = "" if holder == path else f" (taken from {holder.stem})"
        problems.append(Problem(str(path), field, f"{reason}{taken}"))
    return preset


def _problem(path: Path, details: Any) -> Problem:
    field = ".".join(str(part) for part in details["loc"])
    message = re.sub(r"^(Input|String|List|Value) should ", "must ", details["msg"])
    if details["type"] == "extra_forbidden":
        message = "is not a known field"
    elif details["type"] == "missing":
        message = "is missing"
    elif details["type"] == "model_type":
        model = getattr(schema, details["ctx"]["class_name"], None)
        keys = list(model.model_fields) if model else ["value", "source", "confidence"]
        message = f"must be a mapping of {', '.join(keys[:-1])} and {keys[-1]}"
    return Problem(str(path), field, message)


class _NoDuplicates(BoundedLoader):
    """YAML lets the last of two equal keys win in silence; here the second is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{key.value!r} stands here twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)
