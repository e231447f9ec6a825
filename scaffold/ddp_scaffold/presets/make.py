"""`presets init`: makes a preset file from what this machine and the user tell."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _output
from .._errors import ScaffoldError, UsageError, show
from .ask import ask_open, settle
from .draft import Draft, write
from .fields import text
from .load import PresetError, find
from .probe import probe_machine
from .schema import OWN, Account


@dataclass(frozen=True)
class Made:
    """A preset file that was written."""

    path: Path
    draft: Draft
    shown: Set[str]  # what was printed before the questions

    @property
    def next(self) -> list[str]:
        """Return the commands to go on with."""
        return [f"ddp-scaffold new DEST --preset {shlex.quote(_typed(self.path))}"]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `presets init --json` prints."""
        draft = self.draft
        return {
            "version": 1,
            "file": str(self.path.absolute()),
            "extends": draft.extends,
            "found": draft.facts,
            "limits": draft.limits,
            "storage": draft.storage,
            "needs": draft.needs,
            "not_found": draft.not_found,
            "next": self.next,
        }


def make(name: str, output: Path | None, *, probe: bool, ask: bool) -> Made:
    """Look at this machine, ask for what is open, and write the file. Raises ScaffoldError, UsageError."""
    _check_name(name)
    path = _path(name, output)
    draft = Draft(name, datetime.date.today())
    if probe:
        probe_machine(draft)
    shown: set[str] = set()
    if ask:
        _show(draft, shown)
        shown = {*draft.facts, *draft.not_found, "limits", "needs"}
        ask_open(draft)
    settle(draft)
    try:
        write(draft, path)
    except FileExistsError as error:
        raise _exists(path) from error
    except PresetError as error:
        raise ScaffoldError(
            f"what was found makes no valid preset: {error.problems[0].field}: {error.problems[0].reason}",
            "Try --no-probe, and answer the questions.",
        ) from error
    return Made(path, draft, shown)


def show_end(made: Made) -> None:
    """Print what is known, but for what was shown before, and how to go on."""
    _show(made.draft, made.shown)
    _output.shell(f"{_typed(made.path)} written; it extends {made.draft.extends}. Next:", made.next)


def _check_name(name: str) -> None:
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name) or len(name) > 60:
        raise UsageError(f"NAME {show(name)} is no name of a preset", "Write it as my-cluster: a-z, 0-9 and hyphens.")
    if name == OWN or find(name):
        raise UsageError(f"NAME: there is a preset {show(name)} already", f"Choose another name, like my-{name}.")


def _path(name: str, output: Path | None) -> Path:
    """Return the path of the file to write. Raises ScaffoldError if it is there already, UsageError for a wrong one."""
    path = Path(f"{name}.yml") if output is None else output / f"{name}.yml" if output.is_dir() else output
    if path.name != f"{name}.yml":
        raise UsageError(f"--output {show(str(output))} is not named like the preset", f"Call it {name}.yml.")
    if not path.parent.is_dir():
        raise UsageError(f"--output: {show(str(path.parent))} is not a directory", "Make it first.")
    if path.exists() or path.is_symlink():
        raise _exists(path)
    return path


def _exists(path: Path) -> ScaffoldError:
    return ScaffoldError(f"{show(str(path))} exists", "Remove it, or choose another NAME or --output.")


def _typed(path: Path) -> str:
    """Return a path as an argument that no shell and no option parser takes for anything else: ./name.yml."""
    return str(path) if path.is_absolute() or path.parent != Path() else f"./{path}"


def _show(draft: Draft, shown: Set[str]) -> None:
    """Print what is known, and what was not found, but for what is shown already."""
    facts = {name: fact for name, fact in draft.facts.items() if name not in shown}
    rows = [(name, _value(fact["value"]), fact["confidence"], fact["source"]) for name, fact in facts.items()]
    if "limits" not in shown:
        rows += [("limit", _limit(fact["value"]), fact["confidence"], fact["source"]) for fact in draft.limits]
        rows += [("storage", fact["value"], fact["confidence"], fact["source"]) for fact in draft.storage]
    if "needs" not in shown:
        rows += [
            (_need(fact["value"]), _who(fact["value"]), fact["confidence"], fact["source"]) for fact in draft.needs
        ]
    if rows:
        _output.table(("field", "value", "confidence", "source"), rows)
    missing = [line for line in draft.not_found if line not in shown]
    if missing:
        _output.say()
        _output.say("Not found:")
        for line in missing:
            _output.say_filled(f"  {line}", indent=4)


def _value(value: object) -> str:
    return text(Account(**value) if isinstance(value, dict) and "required" in value else value)


def _limit(limit: dict[str, object]) -> str:
    words = {"min_nodes": "from {} nodes", "max_nodes": "up to {} nodes", "max_walltime": "{}", "note": "{}"}
    parts = [word.format(limit[key]) for key, word in words.items() if key in limit]
    parts += ["preemptible"] if limit.get("preemptible") else []
    return f"{limit['name']}: {', '.join(parts) or 'no limit'}"


def _need(need: dict[str, str]) -> str:
    return f"needs {need['what']}"


def _who(need: dict[str, str]) -> str:
    by = {"user": "still needed", "site": "there", "module": "a module"}.get(need["by"], need["by"])
    return f"{by}: {need['name']}" if "name" in need else by
