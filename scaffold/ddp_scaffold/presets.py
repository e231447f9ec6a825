"""Presets: what is known about a cluster, one YAML file each. Here are their schema, their checks and where they are.

A field that a preset leaves out is unknown; a field with `value: null` is known to be left open, and says why. New
fields are added here and in the templates that read them; a preset never holds what nothing reads.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

CHECKOUT = Path(__file__).parents[2] / "templates" / "presets"  # when the package runs from a source checkout
PACKAGED = Path(__file__).with_name("presets")  # in a wheel: the same files, as package data

T = TypeVar("T")
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=300, pattern=r"^[^\n]*$")]
Interfaces = Annotated[str, StringConstraints(pattern=r"^[\^=]?[A-Za-z0-9_.,-]{1,80}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Fact(_Strict, Generic[T]):
    """A value and how it is known: documented by the site or vendor, seen in somebody's public scripts, or inferred."""

    value: T
    source: Line
    confidence: Literal["documented", "seen", "inferred"]


class Preset(_Strict):
    """Where a project trains. Absent fields are unknown; None inside a fact is a value left open on purpose."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=60)]
    title: Line
    verified_on: datetime.date

    scheduler: Fact[Literal["none", "slurm"]]
    launcher: Fact[Literal["torchrun", "srun"]]
    gpus_per_node: Fact[Annotated[int, Field(ge=1, le=64)] | None]
    cpus_per_task: Fact[Annotated[int, Field(ge=1, le=1024)] | None]
    # How a batch script asks for GPUs: the sbatch option, or null where a node comes with its GPUs.
    gpu_request: Fact[Literal["gpus-per-node"] | None] | None = None
    master_addr: Fact[Literal["first-host"]] | None = None
    # NCCL takes prefixes, ^ and =; gloo takes concrete names only. `route` is the interface that leads to the master.
    nccl_socket_ifname: Fact[Interfaces | None] | None = None
    gloo_socket_ifname: Fact[Literal["route"] | None] | None = None
    # How long before the time limit the scheduler sends the signal to stop.
    stop_signal_lead_s: Fact[Annotated[int, Field(ge=30, le=3600)]] | None = None


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
    """Return the preset in a file. Raises PresetError with every problem at once."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PresetError([Problem(str(path), "", f"cannot be read: {reason}")]) from error
    problems = []
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
    preset = None
    try:
        preset = Preset.model_validate(data)
    except ValidationError as error:
        problems += [_problem(path, details) for details in error.errors()]
    if isinstance(data.get("name"), str) and data["name"] != path.stem:
        problems.append(Problem(str(path), "name", f"must be {path.stem!r}, like the file"))
    if problems or preset is None:
        raise PresetError(problems)
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
