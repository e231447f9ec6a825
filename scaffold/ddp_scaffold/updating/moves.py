"""Which files of a project its template has moved since.

The template lists what it moves below the package (`templates/moves.yml`), for at the old path a module may stay that
only leads to the new one. Of a template without the list, git tells, by what the files hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from packaging.version import Version

from ..template.source import Template
from . import compare
from .changelog import version
from .recorded import Recorded, Refused

LIST = "templates/moves.yml"


def listed(template: Template, recorded: Recorded, target: str) -> dict[str, str] | None:
    """Return what the template says it has moved, by old path in the project; None if it says nothing.

    Of several releases, the moves are put together. Raises Refused if the list cannot be read.
    """
    if recorded.commit == target:
        return {}
    answers = {name: given.text for name, given in {**recorded.answers, **recorded.renamed}.items()}
    template = replace(template, ref=target)
    if "package" not in answers or not template.has(LIST):
        return None
    try:
        releases = parse(template.read(LIST))
    except ValueError as error:
        raise Refused(f"the template's {LIST} cannot be used: {error}", "Correct it there, or --to another.") from error
    folder = PurePosixPath(answers.get("source_folder", "src"), answers["package"])
    found = since(version(recorded.commit), releases)
    return {str(folder / old): str(folder / new) for old, new in found.items()}


def parse(text: str) -> list[tuple[Version, dict[str, str]]]:
    """Return the moves of each release, oldest first: paths below the package. Raises ValueError."""
    import yaml

    from ..presets.yaml_text import BoundedText

    try:
        entries = yaml.load(text, BoundedText) or []
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    found: dict[Version, dict[str, str]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        moves = entry.get("moves") if isinstance(entry, dict) else None
        release = version(str(entry.get("release"))) if isinstance(entry, dict) else None
        if release is None or not isinstance(moves, dict) or entry.keys() != {"release", "moves"}:
            raise ValueError(f"an entry is not {{release: 1.2.3, moves: {{old: new}}}}: {str(entry)[:80]}")
        if release in found:
            raise ValueError(f"two entries for {release}")
        if not all(isinstance(new, str) and _is_path(old) and _is_path(new) for old, new in moves.items()):
            raise ValueError(f"{release}: paths are below the package, without . or ..")
        if len(set(moves.values())) < len(moves):
            raise ValueError(f"{release}: two files move to one path")
        found[release] = moves
    return sorted(found.items())


def _is_path(text: str) -> bool:
    return bool(text) and text == str(PurePosixPath(text)) and not {"/", ".", ".."} & set(PurePosixPath(text).parts)


def since(last: Version | None, releases: Iterable[tuple[Version, Mapping[str, str]]]) -> dict[str, str]:
    """Return the moves of the releases after `last`, as if they were one; the list of a release names no later one.

    Of a commit that was no release nobody knows where it stands: then all count, and what is there decides.
    """
    found: dict[str, str] = {}
    for release, moves in releases:
        if last is None or last < release:
            # What stands at an old path since is another file, so the first move from there is the one that counts.
            found = {**moves, **{first: moves.get(end, end) for first, end in found.items()}}
    return {old: new for old, new in found.items() if old != new}


def of_release(repository: Path, made: str, updated: str, listed: Mapping[str, str] | None) -> dict[str, str]:
    """Return what has moved between an untouched project and the same after the update."""
    found = compare.moves(repository, made, updated) if listed is None else listed
    before, after = compare.paths(repository, made), compare.paths(repository, updated)
    return {
        old: new for old, new in found.items() if old in before and new in after and (new not in before or new in found)
    }
