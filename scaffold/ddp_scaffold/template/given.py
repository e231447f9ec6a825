"""Answers as the user gave them, and as they stand in a file. Values are text until their question's type is known.

An answers file is read without YAML's guesses, under which `walltime: 12:00:00` would be the number 43200.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import UsageError, show

ANSWERS_FILE = ".copier-answers.yml"  # where a project records its answers; it can serve as an answers file, too
RECORDED_BY_COPIER = ("_commit", "_src_path")  # what copier itself writes there


@dataclass(frozen=True)
class Given:
    """An answer as the user wrote it, and where: `--set nodes`, or `answers.yml:3`."""

    text: str
    where: str
    plain: bool = True  # False: a mapping or list, in `text` as YAML


def from_file(path: Path) -> dict[str, Given]:
    """Return the answers in a YAML mapping of plain values. Raises UsageError that names the file and the line."""
    import yaml

    from ..presets.yaml_text import ANSWERS_BYTES, BoundedText

    if path.exists() and not (path.is_file() and path.stat().st_size <= ANSWERS_BYTES):
        most = f"{ANSWERS_BYTES >> 10} kB"
        raise UsageError(f"{path}: cannot be read: no file, or one of more than {most}", "Give --answers a YAML file.")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=BoundedText)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}", "Give --answers a YAML file.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "unreadable"
        raise UsageError(f"{where}: not valid YAML: {problem}", "Write one `key: value` a line.") from error
    except RecursionError as error:
        raise UsageError(f"{path}: is nested too deeply", "Write one `key: value` a line.") from error
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: is not a mapping of keys to values", "Write one `key: value` a line.")
    given: dict[str, Given] = {}
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{where}: a key must be plain text", "Write it as `key: value`.")
        if key.value in given:
            raise UsageError(f"{where}: {show(key.value)} is given twice", "Keep one of them.")
        if not isinstance(value, yaml.ScalarNode):
            given[key.value] = Given(_as_text(value, where), where, plain=False)
        elif key.value not in RECORDED_BY_COPIER:
            null = value.style is None and value.value in ("~", "null")
            given[key.value] = Given("" if null else value.value, where)
    return given


def _as_text(node: Any, where: str) -> str:
    """Return a mapping or list as YAML, its values as they stand in the file."""
    import yaml

    try:
        return str(yaml.serialize(node, Dumper=yaml.BaseDumper))
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply", "Write one `key: value` a line.") from error
