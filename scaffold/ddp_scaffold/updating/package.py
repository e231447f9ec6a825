"""The package, where its owner has given it another name.

An update compares paths. Under another name, all that a release fixes in the package would be for files that are not
there, and what it adds would name a package that is gone. So the new name becomes the recorded answer: then old and new
release are rendered with it, and plain copier finds the package, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from .._git import git
from ..template.given import Given
from .recorded import Recorded


def renamed(project: Path, recorded: Recorded) -> dict[str, Given]:
    """Return the answers that a renamed package changes; none if it is where it was made, or nobody knows where."""
    if "package" not in recorded.answers:  # another template
        return {}
    text = {name: given.text for name, given in recorded.answers.items()}
    before = PurePosixPath(text.get("source_folder", "src"), text["package"])
    files = git("ls-tree", "-r", "-z", "--name-only", "HEAD", cwd=project).split("\0")[:-1]
    if any(PurePosixPath(file).is_relative_to(before) for file in files):
        return {}
    found = {match[1] for match in map(re.compile(r"(?!tests/)(.+)/ddp/__init__\.py").fullmatch, files) if match}
    now = PurePosixPath(found.pop() if len(found) == 1 else ".")
    sources = ("src", ".") if text.get("code") == "existing" else ("src",)
    if not now.name or str(now.parent) not in sources:
        return {}
    changed = {"package": now.name, "source_folder": str(now.parent)}
    return {name: Given(value, str(now)) for name, value in changed.items() if name in text and text[name] != value}


def record(answers_file: Path, answers: Mapping[str, Given]) -> None:
    """Write changed answers into an answers file, for copier to render the old release with them."""
    if not answers:
        return
    text = answers_file.read_text(encoding="utf-8")
    for name, given in answers.items():
        text = re.sub(rf"^{name}: .*$", f'{name}: "{given.text}"', text, flags=re.MULTILINE)
    answers_file.write_text(text, encoding="utf-8")
