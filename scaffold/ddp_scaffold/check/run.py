"""All rules on some files: what is asked for, what a line ignores, and what is left."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._errors import UsageError
from . import rules
from .files import SourceFile, collect
from .findings import Finding, Rule
from .shell.rules import SCRIPTS

SITE = "https://github.com/ddp-scaffold/ddp-scaffold/blob/main/"
IGNORED = re.compile(r"#\s*ddp:\s*ignore(?:\[([A-Za-z0-9, -]*)\])?")
SECTION = re.compile(r"^\[tool\.ddp-scaffold\.check\][ \t]*(?:#.*)?$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^[ \t]*([\w-]+)[ \t]*=[ \t]*(\[[^\]]*\]|\"[^\"\n]*\"|'[^'\n]*')", re.MULTILINE)


@dataclass(frozen=True)
class Selection:
    """Which rules count: ids, beginnings of ids (`DDP1`), names or severities. Nothing selected is everything."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def has(self, rule: Rule) -> bool:
        """Whether the findings of a rule are wanted."""
        return (not self.select or any(_names(word, rule) for word in self.select)) and not any(
            _names(word, rule) for word in self.ignore
        )


@dataclass(frozen=True)
class Checked:
    """What was read, what was found in it, and what could not be read."""

    files: tuple[SourceFile, ...]
    findings: tuple[Finding, ...]
    unread: tuple[SourceFile, ...]


def all_rules() -> list[rules.Described]:
    """Every rule, of Python and of scripts, in the order of their ids."""
    return sorted((*rules.PYTHON, *SCRIPTS), key=lambda one: one.rule.id)


def check(paths: Sequence[str | Path], selection: Selection) -> Checked:
    """Read files and folders, and return what the rules find. Raises UsageError for a path that does not exist."""
    from .processes import found_in  # reads trees of Python: not needed for --help
    from .python import without_collection

    files = collect(paths)
    by_path = {file.path: file for file in files}
    wanted = {one.rule.id for one in all_rules() if selection.has(one.rule)}
    with without_collection():
        found = found_in(files)
        gc.freeze()  # the trees of many files are not looked through again before the process ends
    kept = sorted(
        replace(one, docs=SITE + one.docs)
        for one in set(found)
        if one.rule in wanted and not _ignored(one, by_path[one.file].text)
    )
    # The rules of scripts and those of Python may both see a port: one line is told of it once.
    once = {(one.file, one.cell, one.line, one.rule, one.message): one for one in reversed(kept)}
    return Checked(tuple(files), tuple(sorted(once.values())), tuple(file for file in files if file.unread))


def selection_of(select: Iterable[str], ignore: Iterable[str], paths: Sequence[str | Path]) -> Selection:
    """Return what the command line asks for, else `[tool.ddp-scaffold.check]` of the nearest pyproject.toml.

    Raises UsageError for a word that names no rule.
    """
    settings = _configured(Path(paths[0]) if paths else Path())
    chosen = {
        "select": _words(select) or settings.get("select", ()),
        "ignore": _words(ignore) or settings.get("ignore", ()),
    }
    known = [one.rule for one in all_rules()]
    for option, words in chosen.items():
        for word in words:
            if not any(_names(word, rule) for rule in known):
                raise UsageError(
                    f"{option}: {word!r} names no rule",
                    ("Use an id (DDP553), its beginning (DDP5), a name or a severity."),
                )
    return Selection(tuple(chosen["select"]), tuple(chosen["ignore"]))


def _words(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(word.strip() for text in given for word in text.split(",") if word.strip())


def _names(word: str, rule: Rule) -> bool:
    return rule.id.startswith(word.upper()) or word in (rule.name, rule.severity)


def _configured(path: Path) -> dict[str, tuple[str, ...]]:
    """Read the section with patterns: Python 3.10 has no reader of TOML, and the section has lists of words only."""
    start = path.resolve() if path.is_dir() else path.resolve().parent
    for folder in (start, *start.parents):
        try:
            text = (folder / "pyproject.toml").read_text("utf-8")
        except (OSError, ValueError):
            continue
        section = SECTION.search(text)
        if section is None:
            return {}
        found = {}
        for match in OPTION.finditer(section.group(1)):
            if match.group(1) not in ("select", "ignore"):
                where = f"{folder / 'pyproject.toml'}, [tool.ddp-scaffold.check]"
                raise UsageError(f"{where}: there is no {match.group(1)}", "It may have select and ignore.")
            found[match.group(1)] = tuple(re.findall(r"[\"']([^\"'\n]*)[\"']", re.sub(r"#.*", "", match.group(2))))
        return found
    return {}


def _ignored(finding: Finding, text: str) -> bool:
    """Whether `# ddp: ignore[RULE]` stands in the line, or alone in the line above it."""
    lines = text.splitlines() if not finding.cell else []
    for number in (finding.line - 1, finding.line - 2):
        if not 0 <= number < len(lines):
            continue
        line = lines[number]
        match = IGNORED.search(line)
        if match is None or (number == finding.line - 2 and not line.lstrip().startswith("#")):
            continue
        named = match.group(1)
        if named is None or any(_names(word.strip(), _rule(finding)) for word in named.split(",") if word.strip()):
            return True
    return False


def _rule(finding: Finding) -> Rule:
    return next(one.rule for one in all_rules() if one.rule.id == finding.rule)
