"""What somebody changed in an answers file by hand, and how the same is done so that it reaches the other files.

The second line of the file holds a check of all others. In files of releases up to 0.3.1 it covers the answers only.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .._git import git, run_git
from ..template import own_preset
from ..template.source import is_public
from .answers import SETTLED
from .changelog import version
from .recorded import Recorded, Refused

LINE = re.compile(r"^# .*Checked by that command: ([0-9a-f]{16})$", re.MULTILINE)


def refuse_edits(project: Path, recorded: Recorded, override: str | None) -> None:
    """Raise Refused if an answers file is not as the template wrote it.

    A changed answer reaches no other file, and the next update would take the other files' old text for the user's;
    with another `_commit`, it would leave out what the releases in between bring. Another `_src_path` is accepted with
    `--template`, and if it is the public one: projects move, and nothing else says so.
    """
    text = (project / recorded.name).read_text(encoding="utf-8").replace("\r\n", "\n")
    if _fits(text):
        return
    if _answers_fit(text):
        _refuse_release_without_its_files(project, recorded)
        return
    versions = git("log", "--format=%H", "--", recorded.name, cwd=project).split()
    last = next((commit for commit in versions if _is_whole(_show(project, commit, recorded.name))), None)
    if last is None and not LINE.search(text):
        return  # a template that writes no check
    if last is None:
        raise Refused(
            f"{recorded.name} was edited by hand, which reaches no other file",
            "Put it back as the template wrote it, commit, then: ddp-scaffold update --set KEY=VALUE",
        )
    now, before = _content(text), _content(_show(project, last, recorded.name))
    changed = [key for key in {**before, **now} if now.get(key) != before.get(key)]
    if not changed or (changed == ["_src_path"] and (override is not None or is_public(recorded.source))):
        return
    raise Refused(
        f"{recorded.name} was edited by hand, which reaches no other file: {', '.join(changed)}",
        f"{_put_back(last, recorded.name)}; then: {_instead(recorded, changed, before, now)}",
    )


def _fits(text: str) -> bool:
    found = LINE.search(text)
    return found is not None and _digest(text, "#") == found[1]


def _answers_fit(text: str) -> bool:
    found = LINE.search(text)
    return found is not None and _digest(text, "#", "_") == found[1]


def _is_whole(text: str) -> bool:
    return _fits(text) or _answers_fit(text)


def _digest(text: str, *left_out: str) -> str:
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(left_out))
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _show(project: Path, commit: str, name: str) -> str:
    """Return the file as a commit has it; empty if it has none."""
    return run_git("show", f"{commit}:./{name}", cwd=project).stdout.replace("\r\n", "\n")


def _content(text: str) -> Mapping[str, Any]:
    import yaml

    from ..presets.yaml_text import BoundedText

    try:
        content = yaml.load(text, BoundedText)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _refuse_release_without_its_files(project: Path, recorded: Recorded) -> None:
    """Raise Refused if the recorded release came by a commit that changed no other file, in place of an older one.

    Here the check line says nothing on `_commit`. Each release so far changed files of every project.
    """
    versions = git("log", "--format=%H", "--", recorded.name, cwd=project).split()
    for commit in versions:
        before = _content(_show(project, f"{commit}^", recorded.name)).get("_commit")
        if before is None:
            return
        if before != recorded.commit:
            break
    else:
        return
    old, new = version(before), version(recorded.commit)
    if old is None or new is None or old > new:
        return
    names = git("diff", "--relative", "--name-only", "-z", f"{commit}^", commit, cwd=project).split("\0")[:-1]
    if all(PurePosixPath(name).match(".copier-answers*.yml") for name in names):
        raise Refused(
            f"{recorded.name}: _commit became {recorded.commit} without a file of that release (in {commit[:10]})",
            f"{_put_back(f'{commit}^', recorded.name)}; then: ddp-scaffold update",
        )


def _put_back(commit: str, name: str) -> str:
    return f"git checkout {commit} -- {name} && git commit -m 'Put {name} back'"


def _instead(recorded: Recorded, changed: list[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the command that makes the same changes, as far as that can be done, and what to do for the others."""
    words = ["ddp-scaffold", "update"]
    if recorded.cluster:
        words += ["--cluster", recorded.cluster]
    advice = []
    for key in changed:
        if key == "_src_path":
            words += ["--template", str(now.get(key))]
        elif key in SETTLED:
            advice.append(f"{key}: {SETTLED[key]}")
        elif key == own_preset.ANSWER:
            words += ["--preset", "./FILE.yml"]
            advice.append(f"FILE.yml holds what {key} is to be.")
        elif key == "preset" and now.get(key) == own_preset.OWN:
            continue  # the file says so
        elif not key.startswith("_") and key in now and (key in before or "preset" in changed):
            words += ["--set", f"{key}={now[key]}"]
    return " ".join([shlex.join(words), *(f"({text})" for text in advice)])
