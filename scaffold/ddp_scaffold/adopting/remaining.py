"""What is left of adopting, for `check` in a repository that has been adopted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..template.given import ANSWERS_FILE
from .advice import Advice, advise, own_files

NAMES = ("code", "command", "source_folder", "package")


@dataclass(frozen=True)
class Remaining:
    """An adopted repository, and what is left in it."""

    root: Path
    advice: Advice


def remaining(paths: Sequence[str | Path]) -> list[Remaining]:
    """Return what is left in those of `paths` that are the folder of an adopted repository."""
    found = []
    for path in map(Path, paths):
        answers = _answers(path / ANSWERS_FILE)
        if answers.get("code") != "existing" or not answers.get("command") or not answers.get("package"):
            continue
        source, package = answers.get("source_folder", "."), answers["package"]
        folder = f"{package}/ddp" if source == "." else f"{source}/{package}/ddp"
        own = own_files(path, ours=[folder, "launch"])
        found.append(Remaining(path, advise(path, own, answers["command"], source, package)))
    return found


def _answers(path: Path) -> dict[str, str]:
    """The answers that adopting reads again; none where there is no such file, or one that cannot be read."""
    import yaml

    try:
        recorded = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {name: str(recorded[name]) for name in NAMES if name in recorded} if isinstance(recorded, dict) else {}
