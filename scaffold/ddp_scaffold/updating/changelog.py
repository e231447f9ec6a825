"""What a project gains between two releases, from the CHANGELOG.md of the template."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+)(?: \((?P<date>[^)]*)\))?[ ]*$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One release: its text is Markdown, without the heading."""

    version: str
    date: str
    text: str


def gained(changelog: str, since: str, until: str) -> list[Entry]:
    """Return the entries of the releases after `since` up to `until` (tags), oldest first.

    Of a commit that was no release nobody knows where it stands, so its list is empty.
    """
    old, new = version(since), version(until)
    if old is None:
        return []
    found = list(HEADING.finditer(changelog))
    ends = [match.start() for match in found[1:]] + [len(changelog)]
    entries = [
        Entry(match["version"], match["date"] or "", changelog[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]
    wanted = [
        entry for entry in entries if old < Version(entry.version) and (new is None or Version(entry.version) <= new)
    ]
    return sorted(wanted, key=lambda entry: Version(entry.version))


def version(tag: str) -> Version | None:
    """Return the version that a tag names, or None if it names none."""
    try:
        return Version(tag)
    except InvalidVersion:
        return None
