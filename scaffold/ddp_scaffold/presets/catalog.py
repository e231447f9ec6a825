"""What `presets list`, `show` and `check` find, and how it is printed."""

from __future__ import annotations

import datetime
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import _output
from .._errors import ScaffoldError, UsageError, show
from .checks import future
from .facts import age, is_old
from .fields import gpus, tables
from .history import Change, Releases, last_changes
from .load import PresetError, Problem, files, find, load_preset, load_with_origins
from .meant import preset_meant
from .schema import Preset

NARROW = 110  # columns of a terminal; fewer do not hold all columns of the list
COLUMNS = ("preset", "GPUs a node", "scheduler", "launcher", "verified", "last change", "status", "title")
NARROW_COLUMNS = ("preset", "GPUs a node", "verified", "title")


@dataclass(frozen=True)
class Found:
    """A preset and its file, and where the fields come from that it takes over: {field: preset}."""

    file: Path
    preset: Preset
    taken_from: dict[str, str]
    last_change: Change | None = None  # None: not looked up, or no release is here that tells

    def entry(self) -> dict[str, Any]:
        """Return its entry of `list --json`."""
        preset = self.preset
        return {
            "name": preset.name,
            "title": preset.title,
            "scheduler": preset.scheduler.value,
            "launcher": preset.launcher.value,
            "gpus_per_node": preset.gpus_per_node.value,
            "gpu": preset.gpu.value if preset.gpu else None,
            "status": preset.status,
            "keywords": preset.keywords,
            "verified_on": preset.verified_on.isoformat(),
            "last_change": self.last_change.to_json() if self.last_change else None,
            "file": str(self.file),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the object that `show --json` prints."""
        fields = self.preset.model_dump(mode="json", exclude_unset=True)
        return {"version": 1, "preset": fields, "taken_from": self.taken_from, "file": str(self.file)}


@dataclass(frozen=True)
class Checked:
    """A preset file and what is wrong with it."""

    file: str
    problems: list[Problem]

    def entry(self) -> dict[str, Any]:
        """Return its entry of `check --json`."""
        problems = [{"where": p.file, "field": p.field, "reason": p.reason} for p in self.problems]
        return {"file": self.file, "ok": not self.problems, "problems": problems}


def search(words: Sequence[str], releases: Releases) -> list[Found]:
    """Return the presets that have all these words in name, title, keywords or GPU, each with its last change.

    Raises ScaffoldError for a preset that is broken. Without git or releases, no change is known.
    """
    listed = [found for path in files() if _matches((found := _read(path)).preset, words)]
    changes: dict[str, Change] = {}
    with suppress(ScaffoldError):
        changes = last_changes((found.preset.name for found in listed), releases) if listed else {}
    return [replace(found, last_change=changes.get(found.preset.name)) for found in listed]


def by_name(name: str) -> Found:
    """Return the preset of that name, or in the file of that path. Raises UsageError if there is none."""
    path = Path(name) if name.endswith((".yml", ".yaml")) else find(name)
    if path is None:
        meant = preset_meant(name, [file.stem for file in files()])
        hint = "`ddp-scaffold presets list` shows them; a file is given by its path."
        raise UsageError(f"there is no preset {show(name)}", f"{meant} {hint}".lstrip())
    return _read(path)


def check_files(paths: Sequence[Path]) -> list[Checked]:
    """Return every problem of each file."""
    return [Checked(path, problems) for path, problems in {str(path): _problems(path) for path in paths}.items()]


def show_list(presets: Sequence[Found]) -> None:
    """Print a table of presets; a narrow terminal gets fewer columns."""
    today = datetime.date.today()
    terminal = sys.stdout.isatty()
    rows = []
    for found in presets:
        p, change = found.preset, found.last_change.words() if found.last_change else ""
        verified = age(p.verified_on, today) if terminal else f"{p.verified_on}, {age(p.verified_on, today)}"
        rows.append((p.name, gpus(p), p.scheduler.value, p.launcher.value, verified, change, p.status, p.title))
    narrow = terminal and shutil.get_terminal_size().columns < NARROW
    columns = [COLUMNS.index(name) for name in (NARROW_COLUMNS if narrow else COLUMNS)]
    lines = [tuple(line[column] for column in columns) for line in (COLUMNS, *rows)]
    _output.table(lines[0], lines[1:], keep_first=True)
    if not rows:
        _output.note("no preset has these words; `ddp-scaffold presets init NAME` makes one")


def show_fields(found: Found) -> None:
    """Print the fields of a preset in groups, each with its source."""
    preset, today = found.preset, datetime.date.today()
    _output.say(f"{preset.name}: {preset.title}")
    _output.say(f"{preset.status}, verified on {preset.verified_on}, {age(preset.verified_on, today)}")
    if is_old(preset.verified_on, today):
        _output.say("WARNING: verified more than a year ago: check it with the site's pages before the first job")
    for table in tables(preset, found.taken_from):
        _output.say()
        _output.say(table.title)
        _output.table(table.header, table.rows)


def show_problems(checked: Sequence[Checked]) -> None:
    """Print a line for each problem, and for each file without one."""
    if sys.stdout.isatty():
        rows = [[(p.file, p.field, p.reason) for p in one.problems] or [(one.file, "", "ok")] for one in checked]
        _output.table(("file", "field", "result"), [row for of_file in rows for row in of_file])
        return
    for one in checked:
        for line in [str(problem) for problem in one.problems] or [f"{one.file}: ok"]:
            _output.say(line)


def _matches(preset: Preset, words: Sequence[str]) -> bool:
    texts = [preset.name, preset.title, *preset.keywords, preset.gpu.value if preset.gpu else ""]
    return all(any(word.casefold() in text.casefold() for text in texts) for word in words)


def _problems(path: Path) -> list[Problem]:
    try:
        late = future(load_preset(path), datetime.date.today())
    except PresetError as error:
        return error.problems
    return [Problem(str(path), field, reason) for field, reason in late]


def _read(path: Path) -> Found:
    try:
        return Found(path, *load_with_origins(path))
    except PresetError as error:
        raise ScaffoldError(
            error.in_one_line(),
            f"See all problems with `ddp-scaffold presets check {shlex.quote(str(path))}`.",
        ) from error
