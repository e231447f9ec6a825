"""Presets: what is known about a cluster, one YAML file each. Here is where they are, and how they are read.

`schema.py` says what may stand in one. A preset may extend another: it then holds only the fields that differ.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .schema import Preset

CHECKOUT = Path(__file__).parents[2] / "templates" / "presets"  # when the package runs from a source checkout
PACKAGED = Path(__file__).with_name("presets")  # in a wheel: the same files, as package data

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


def directory() -> Path:
    """Return where the presets of this installation are."""
    return CHECKOUT if CHECKOUT.is_dir() else PACKAGED


def find(name: str) -> Path | None:
    """Return the file of a preset, or None if there is none of that name."""
    return next((path for path in files() if path.stem == name), None)


def files() -> list[Path]:
    """Return the files of all presets, by name."""
    return sorted(directory().glob("*.yml"))


def load(path: Path) -> Preset:
    """Return the preset in a file, with the fields of those that it extends. Raises PresetError with every problem."""
    problems: list[Problem] = []
    own = _read(path, problems)
    merged, parents = dict(own), 0
    base = own.get("extends")
    while isinstance(base, str):
        file = find(base)
        parents += 1
        if file is None or parents > MAX_PARENTS or base == own.get("name"):
            known = ", ".join(other.stem for other in files())
            reason = f"goes deeper than {MAX_PARENTS} presets, or in a circle"
            if file is None:
                reason = f"there is no preset {base!r}; there are: {known}"
            problems.append(Problem(str(path), "extends", reason))
            break
        parent = _read(file, problems)
        merged = {**parent, **merged}
        base = parent.get("extends")
    preset = _validate(path, own, merged, problems)
    if problems or preset is None:
        raise PresetError(problems)
    return preset


def _read(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Return the mapping in a file, as it stands there. Raises PresetError if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PresetError([Problem(str(path), "", f"cannot be read: {reason}")]) from error
    # Copier renders a preset as a Jinja template before it reads the YAML.
    for number, line in enumerate(text.splitlines(), start=1):
        problems += [
            Problem(f"{path}:{number}", "", f"holds {mark!r}, which Jinja would evaluate")
            for mark in ("{{", "{%", "{##")
            if mark in line
        ]
    try:
        data = yaml.load(text, _NoDuplicates)
    except Exception as error:  # of values that look like dates, numbers or binary, PyYAML raises nearly anything
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        problems.append(Problem(where, "", f"is not YAML: {reason}"))
        raise PresetError(problems) from error
    if not isinstance(data, dict):
        raise PresetError([*problems, Problem(str(path), "", "must be a mapping of fields")])
    return data


def _validate(path: Path, own: dict[str, Any], merged: dict[str, Any], problems: list[Problem]) -> Preset | None:
    preset = None
    try:
        preset = Preset.model_validate(merged)
    except ValidationError as error:
        problems += [_problem(path, details) for details in error.errors()]
    if isinstance(own.get("name"), str) and own["name"] != path.stem:
        problems.append(Problem(str(path), "name", f"must be {path.stem!r}, like the file"))
    problems += [
        Problem(str(path), name, "is missing: it is never taken over from the preset that this one extends")
        for name in ("name", "title", "verified_on", "status")
        if name not in own and name in merged
    ]
    return preset


def _problem(path: Path, details: Any) -> Problem:
    field = ".".join(str(part) for part in details["loc"])
    known = {
        "extra_forbidden": "is not a known field",
        "missing": "is missing",
        "model_type": "must be a mapping of value, source and confidence",
    }
    message = re.sub(r"^(Input|String) should ", "must ", details["msg"])
    return Problem(str(path), field, known.get(details["type"], message))


class _NoDuplicates(yaml.SafeLoader):
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
