"""What an update tells: before it touches anything, and at its end."""

from __future__ import annotations

from .. import _output
from .answers import SETTLED
from .result import Result


def tell(result: Result) -> None:
    """Print what an update would do, or does."""
    news = result.news
    for note in result.notes:
        _output.note(note)
    if news.since != news.until:
        _output.say(f"From {news.since} to {news.until}")
    for entry in news.gained:
        _output.say()
        _output.say(f"{entry.version} ({entry.date})" if entry.date else entry.version)
        for line in entry.text.splitlines():
            _output.say(f"  {line}".rstrip())
    settled = {name for name in news.new_answers if name in SETTLED}
    for names, how in ((settled, ""), (news.new_answers.keys() - settled, " (--set changes them)")):
        answered = [f"{name} = {value}" for name, value in news.new_answers.items() if name in names]
        if answered:
            _output.commands(f"New questions, answered by their defaults{how}:", answered)
    _output.say()
    if result.changes:
        _output.table(("change", "file"), [(change, path) for path, change in result.changes.items()], keep_first=True)
    else:
        _output.say("No file changes.")
    if result.carried:
        carried = [f"{old} -> {now}" for old, now in result.carried.items()]
        _output.commands("Moved, with what both sides changed in it:", carried)
    if result.left_out:
        left_out = [f"{path} ({why})" for path, why in result.left_out.items()]
        _output.commands("Changed by the release, but not in your project:", left_out)
    if result.diff is not None:
        _output.say()
        for line in result.diff.splitlines():
            _output.say(line)


def finish(result: Result) -> None:
    """Print what was done, and what is left to do."""
    news, conflicts = result.news, result.conflicts
    if result.outcome is None:  # nothing was tried, so nothing was told
        for note in result.notes:
            _output.note(note)
    if not result.applied:
        if not result.changes and result.diff is None:
            _output.say(f"{news.project} is at {news.until}: nothing to do.")
        return
    if conflicts:
        edit = [f"$EDITOR {' '.join(conflicts)}", f"git add {' '.join(conflicts)}", "git commit"]
        files = f"{len(conflicts)} files" if conflicts[1:] else "one file"
        _output.commands(f"Both sides changed the same lines of {files}. Choose between the markers:", edit)
        return
    if result.tested:
        _output.say()
        _output.say(f"The project's tests: {result.tested}{'' if result.tested == 'passed' else ', there are none'}.")
    message = f"ddp-scaffold {news.until}" if news.since != news.until else "Change answers of ddp-scaffold"
    _output.shell("All changes are staged. Next:", ["git diff --staged", f"git commit -m '{message}'"])
