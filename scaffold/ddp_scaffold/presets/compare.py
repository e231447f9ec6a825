"""Two states of one preset next to each other: what was added, removed or changed, field by field."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from .. import _output
from .._errors import ScaffoldError, UsageError
from .history import Releases, State, choose, read
from .load import find
from .yaml_text import BoundedLoader

KNOWLEDGE = ("source", "confidence", "verified_on")  # how a value is known: below the values
ABSENT = ""  # a field that one of the two does not have


@dataclass(frozen=True)
class Difference:
    """One value that differs; None where one of the two has none."""

    field: str
    before: Any
    after: Any

    def kind(self) -> str:
        """Return added, removed or changed."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"


@dataclass(frozen=True)
class Comparison:
    """The differences of a preset between two states, and the preset that it extends, whose changes count as well."""

    name: str
    before: State
    after: State
    differences: list[Difference]
    extends: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `presets diff --json` prints."""
        states = {"from": self.before, "to": self.after}
        ends = {key: {"release": state.release, "day": state.day} for key, state in states.items()}
        rows = [
            {"field": each.field, "change": each.kind(), "from": each.before, "to": each.after}
            for each in self.differences
        ]
        return {"version": 1, "preset": self.name, **ends, "resolution": "release", "differences": rows,
                "extends": self.extends}  # fmt: skip


def compare(name: str, start: str | None, end: str | None, releases: Releases) -> Comparison:
    """Compare two states of a preset. Raises UsageError for a name, day or release that is not there, ScaffoldError."""
    if "/" in name or name.endswith((".yml", ".yaml")):
        raise UsageError("a file of your own has no history here", "Its history is where you keep it: git diff FILE.")
    states = read([name], releases)[name] if name.replace("-", "").isalnum() and name.isascii() else []
    if not states:
        raise UsageError(f"there is no preset {name!r}, and no release had one", "See `ddp-scaffold presets list`.")
    before, after = choose(states, start, "--from"), choose(states, end, "--to")
    if states.index(before) > states.index(after):
        raise UsageError(f"--from {before.label()} is after --to {after.label()}", "Give them the other way round.")
    one, other = _parsed(before), _parsed(after)
    base = other.get("extends")
    found = sorted(differences(one, other), key=lambda each: each.field.rpartition(".")[2] in KNOWLEDGE)
    return Comparison(name, before, after, found, base if isinstance(base, str) else None)


def show_comparison(found: Comparison) -> None:
    """Print the differences as a table: on a terminal in a frame, plain in a pipe."""
    _output.say(f"{found.name}: {found.before.label()} to {found.after.label()}")
    if not found.differences:
        _output.say("nothing differs")
    else:
        rows = [(each.field, each.kind(), _text(each.before), _text(each.after)) for each in found.differences]
        _output.table(("field", "change", "from", "to"), rows)
    _output.note("the history is that of releases: what changed between two of them shows at the second")
    if found.extends and find(found.extends):
        _output.note(f"it extends {found.extends}: see `ddp-scaffold presets diff {found.extends}` as well")


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs between two presets as YAML holds them, whatever schema they are of."""
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if one == other:
            continue
        if isinstance(one, list) or isinstance(other, list):
            yield from _of_lists(name, _by_key(one), _by_key(other))
        else:
            yield from _of_values(name, one, other)


def _of_lists(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the entries that differ. One of another day only is shown by its day, not as a whole."""
    for key in {**one, **other}:
        if one.get(key) != other.get(key):
            yield from _of_values(f"{name}.{key}", one.get(key), other.get(key))


def _of_values(name: str, one: Any, other: Any) -> Iterator[Difference]:
    """Yield what differs of a fact: each of its parts if both have it, else all of it as one."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for part in {**one, **other}:
            if one.get(part) != other.get(part):
                yield from _of_values(f"{name}.{part}", one.get(part), other.get(part))
    else:
        yield Difference(name, one, other)


def _by_key(items: Any) -> dict[str, Any]:
    """Return the entries of a list by what names them: a variable with its conditions, a limit, or their text."""
    found: dict[str, Any] = {}
    for item in items if isinstance(items, list) else ():
        key = _key(item)
        number = 2
        while key in found:
            key, number = f"{_key(item)} ({number})", number + 1
        found[key] = item
    return found


def _key(item: Any) -> str:
    named = not isinstance(item, Mapping) or "name" in item  # a line of an environment file has a value of its own
    value = item if named else item.get("value", item)
    if isinstance(value, Mapping):
        parts = [value.get(name) for name in ("name", "path", "partition", "gpu", "min_nodes", "max_nodes")]
        return " ".join(str(part) for part in parts if part is not None)[:80]
    return str(value)[:40]


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, Mapping) and set(value) >= {"value", "source"}:
        return _text(value["value"])
    return str(value) if isinstance(value, (str, datetime.date)) else json.dumps(value, default=str)


def _parsed(state: State) -> dict[str, Any]:
    try:
        data = yaml.load(state.text, BoundedLoader)
    except Exception as error:  # as in load.py: of odd values PyYAML raises nearly anything
        raise ScaffoldError(f"the preset at {state.label()} is not YAML", "Choose another --from or --to.") from error
    if not isinstance(data, dict):
        raise ScaffoldError(f"the preset at {state.label()} holds no fields", "Choose another --from or --to.")
    return data
