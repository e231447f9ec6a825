"""What a preset said at each release: the history of its file, from the releases that the package carries.

The resolution is a release: what was changed twice between two releases shows once, under the day of the second. The
file of this installation is the last state, released or not.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import ScaffoldError, UsageError, show
from .._git import git, git_bytes
from .load import files

FOLDER = "templates/presets"
TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
HERE = "this installation"
SHOWN = 3  # so many names of fields in a line; the others are counted


Releases = Callable[[], AbstractContextManager[Path]]  # a bare repository with a tag for every release


@dataclass(frozen=True)
class State:
    """What the file of a preset held at a release, or holds here (`day` is None then)."""

    release: str
    day: datetime.date | None
    text: str

    def label(self) -> str:
        """Return the release and its day, for people."""
        return f"{self.release} ({self.day})" if self.day else self.release


@dataclass(frozen=True)
class Change:
    """How one state of a preset differs from the one before it; `fields` is empty for a preset that is new."""

    state: State
    fields: tuple[str, ...]

    def words(self) -> str:
        """Return the day and the fields that differ, in one short text."""
        when = str(self.state.day) if self.state.day else "not released"
        if not self.fields:
            return f"{when}: new"
        if self.fields == ("verified_on",):
            return f"{when}: read again, nothing else"
        names = [name for name in self.fields if name != "verified_on"]
        more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
        return f"{when}: {', '.join(names[:SHOWN])}{more}"

    def to_json(self) -> dict[str, Any]:
        """Return it as `presets list --json` prints it."""
        day = self.state.day.isoformat() if self.state.day else None
        return {"release": self.state.release, "day": day, "fields": list(self.fields)}


def last_changes(names: Iterable[str], releases: Releases) -> dict[str, Change]:
    """Return the last change of each preset that has a history. Raises ScaffoldError if there are no releases."""
    histories = read(names, releases)
    return {name: change for name, states in histories.items() if (change := last_change(states)) is not None}


def last_change(states: Sequence[State]) -> Change | None:
    """Return the newest difference between two states that follow each other, or the first state of all."""
    for before, after in zip(reversed(states[:-1]), reversed(states[1:]), strict=True):
        if changed := changed_fields(before.text, after.text):
            return Change(after, changed)
    return Change(states[0], ()) if states else None


def changed_fields(before: str, after: str) -> tuple[str, ...]:
    """Return the fields of two files that differ as text. Comments and empty lines do not count."""
    one, other = _fields(before), _fields(after)
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def read(names: Iterable[str], carried: Releases) -> dict[str, list[State]]:
    """Return the states of presets, oldest first, by their names. Raises ScaffoldError without releases."""
    names = list(names)
    with carried() as repository:
        releases = _releases(repository)
        wanted = [(name, tag) for name in names for tag, _ in releases]
        texts = _blobs(repository, [f"{tag}:{FOLDER}/{name}.yml" for name, tag in wanted])
    held = {key: text for key, text in zip(wanted, texts, strict=True) if text is not None}
    here = {path.stem: path for path in files()}
    found: dict[str, list[State]] = {}
    for name in names:
        states = [State(tag, day, held[name, tag]) for tag, day in releases if (name, tag) in held]
        text = None
        with suppress(OSError, ValueError, KeyError):
            text = here[name].read_text(encoding="utf-8")
        if text is not None and (not states or states[-1].text != text):
            states.append(State(HERE, None, text))
        found[name] = states
    return found


def choose(states: Sequence[State], wanted: str | None, option: str) -> State:
    """Return the state that a day or a release on the command line stands for.

    A day: what the newest release of that day or before it said. Without one, `--to` is the newest state, and `--from`
    the one before the last change. Raises UsageError if there is none.
    """
    if wanted is None:
        if option == "--to":
            return states[-1]
        newest = last_change(states)
        number = states.index(newest.state) if newest else 0
        return states[max(0, number - 1)]
    known = ", ".join(state.label() for state in states)
    if TAG.fullmatch(f"v{wanted.removeprefix('v')}"):
        match = [state for state in states if state.release == f"v{wanted.removeprefix('v')}"]
        if not match:
            raise UsageError(f"{option} {show(wanted)}: no such release has this preset", f"There are: {known}.")
        return match[0]
    try:
        day = datetime.date.fromisoformat(wanted)
    except ValueError:
        raise UsageError(
            f"{option} {show(wanted)} is neither a day nor a release", "Write 2026-11-28 or 0.5.0."
        ) from None
    if day >= datetime.date.today():
        return states[-1]
    match = [state for state in states if state.day is not None and state.day <= day]
    if not match:
        raise UsageError(f"{option} {wanted}: no release of that day or before has this preset", f"There are: {known}.")
    return match[-1]


def _releases(repository: Path) -> list[tuple[str, datetime.date]]:
    """Return the tags of releases with their days, oldest first. Pre-releases are none."""
    listed = git("for-each-ref", "--format=%(refname:short) %(creatordate:short)", "refs/tags/v*", cwd=repository)
    pairs = [line.split() for line in listed.splitlines()]
    found = [(tag, datetime.date.fromisoformat(day)) for tag, day in pairs if TAG.fullmatch(tag)]
    return sorted(found, key=lambda pair: [int(number) for number in re.findall(r"\d+", pair[0])])


def _blobs(repository: Path, names: Sequence[str]) -> list[str | None]:
    """Return the contents of objects, None for those that are not there, by one git for all."""
    asked = "".join(f"{name}\n" for name in names).encode()
    done = git_bytes("cat-file", "--batch", cwd=repository, data=asked)
    if done.returncode:
        raise ScaffoldError("git cannot read the releases that this installation carries", "Install it again.")
    contents: list[str | None] = []
    rest = done.stdout
    while rest:
        head, _, rest = rest.partition(b"\n")
        if head.endswith(b" missing"):
            contents.append(None)
            continue
        size = int(head.rsplit(b" ", 1)[1])
        contents.append(rest[:size].decode("utf-8", errors="replace"))
        rest = rest[size + 1 :]
    return contents


def _fields(text: str) -> Mapping[str, str]:
    """Return the top-level fields of a file with their lines, without reading YAML, which takes long for many."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    blocks = re.split(r"^(?=[a-z_]+:)", "\n".join(lines), flags=re.MULTILINE)
    return {block.partition(":")[0]: block.strip() for block in blocks if re.match(r"[a-z_]+:", block)}
