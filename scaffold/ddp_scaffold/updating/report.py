"""What an update tells: before it touches anything, and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _output
from .answers import SETTLED


def tell(result: Mapping[str, Any]) -> None:
    """Print what an update would do, or does."""
    for note in result["notes"]:
        _output.note(note)
    if result["from"] != result["to"]:
        _output.say(f"From {result['from']} to {result['to']}")
    for entry in result["gained"]:
        _output.say()
        _output.say(f"{entry['version']} ({entry['date']})" if entry["date"] else entry["version"])
        for line in entry["text"].splitlines():
            _output.say(f"  {line}".rstrip())
    if result["new_answers"]:
        settled = {name for name in result["new_answers"] if name in SETTLED}
        for names, how in ((settled, ""), (result["new_answers"].keys() - settled, " (--set changes them)")):
            answered = [f"{name} = {value}" for name, value in result["new_answers"].items() if name in names]
            if answered:
                _output.commands(f"New questions, answered by their defaults{how}:", answered)
    _output.say()
    if result["files"]:
        _output.table(("change", "file"), [(file["change"], file["path"]) for file in result["files"]], keep_first=True)
    else:
        _output.say("No file changes.")
    if result["carried"]:
        carried = [f"{old} -> {now}" for old, now in result["carried"].items()]
        _output.commands("Moved, with what both sides changed in it:", carried)
    if result["left_out"]:
        left_out = [f"{entry['path']} ({entry['why']})" for entry in result["left_out"]]
        _output.commands("Changed by the release, but not in your project:", left_out)
    if result["diff"] is not None:
        _output.say()
        for line in result["diff"].splitlines():
            _output.say(line)


def finish(result: Mapping[str, Any], as_json: bool) -> None:
    """Print what was done, and what is left to do."""
    if as_json:
        _output.say_json(result)
        return
    if not result["files"] and not result["applied"]:
        if result["diff"] is None:
            _output.say(f"{result['project']} is at {result['to']}: nothing to do.")
        return
    if not result["applied"]:
        return
    conflicts = result["conflicts"]
    if conflicts:
        edit = [f"$EDITOR {' '.join(conflicts)}", f"git add {' '.join(conflicts)}", "git commit"]
        files = f"{len(conflicts)} files" if conflicts[1:] else "one file"
        _output.commands(f"Both sides changed the same lines of {files}. Choose between the markers:", edit)
        return
    if result["test"]:
        _output.say()
        _output.say(f"The project's tests: {result['test']}{'' if result['test'] == 'passed' else ', there are none'}.")
    message = f"ddp-scaffold {result['to']}" if result["from"] != result["to"] else "Change answers of ddp-scaffold"
    _output.commands("All changes are staged. Next:", ["git diff --staged", f"git commit -m '{message}'"])
