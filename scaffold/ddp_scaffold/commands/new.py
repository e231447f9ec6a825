"""`ddp-scaffold new`: ask, show what follows, render, and make the first commit.

`--json` prints one object (version 1):

    {"version": 1, "destination": absolute path, "answers": {question: value},
     "command": the same run without questions, "files": [relative paths],
     "next": [three commands to type], "template": {"source": URL or path, "commit": tag or commit},
     "follows": {"package", "tracker", "world_size": number or null (counted at the start), "max_restarts",
                 "clocks_s": {"loader", "stall", "collective", "guard"}, "scripts": [relative paths],
                 "place": {"name", "title", "status", "verified_on"} or null, "needs": [texts]}}

With --into-existing also "kept": [paths that stay as they are], "notes": [texts], "sketch": [lines of a main function],
"changes": [{"file", "line", "text", "why", "instead"}].

or, on failure, {"error": {"message", "hint", "exit_code"}}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import _output
from .._errors import ScaffoldError, file_path

TORCH_NOTE = "pip takes torch from PyPI, on Linux its CUDA build; for another, install torch first: https://pytorch.org"


def new(
    ctx: typer.Context,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Directory to make; its name becomes the project's.")],
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="P", help="Where it will train: a name, or a preset file.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="F", help="Model family.")] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="Answer a question; repeatable.")
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", metavar="FILE", parser=file_path, help="YAML file of answers; options win over it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults for what is not given.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; list the files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; implies -y.")] = False,
    into_existing: Annotated[
        bool, typer.Option("--into-existing", help="DEST holds your code: add ddp/, its tests and launch/ to it.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="T", envvar="DDP_SCAFFOLD_TEMPLATE", help="Path or URL of a fork."),
    ] = None,
) -> None:
    """Generate a project.

    On a terminal the open questions are asked, and nothing is written before you confirm the summary. Without a
    terminal, or with -y, defaults answer what is not given. DEST must not exist, or be empty. With --into-existing it
    is a repository with your own training code: no file of yours is changed, and you are told which lines to change.

    Examples:

    \b
      ddp-scaffold new denoiser
      ddp-scaffold new denoiser -y --preset generic-slurm --set nodes=4 --set walltime=12:00:00
      ddp-scaffold new denoiser --preset ./mycluster.yml
      ddp-scaffold new denoiser --answers ../other/.copier-answers.yml --dry-run
      ddp-scaffold new . --into-existing --preset generic-slurm

    Exit codes: 0 done; 1 error or declined; 2 wrong usage or answer; 130 interrupted. Whatever the failure, nothing is
    left behind.
    """
    from .. import own_preset, wizard
    from .._git import enclosing_work_tree, first_commit, require_git
    from ..adopting import existing
    from ..adopting.suggest import suggest
    from ..questions import check, from_file, from_options, load_questions
    from ..render import answer, check_destination, list_files, publishing, refuse_skipped
    from ..summary import describe, equivalent_command
    from ..template import open_template

    ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    given = from_options(preset, model, pairs or ())
    if answers is not None:
        given = own_preset.replace(from_file(answers), given)
    require_git()
    destination = existing.check_repository(dest) if into_existing else check_destination(dest)
    with open_template(template) as source, tempfile.TemporaryDirectory(prefix="ddp-scaffold-") as scratch:
        questions = load_questions(source.read("copier.yml"), source.read)
        given = existing.whose_code(given, questions, into_existing)
        data = check(given, questions)
        own = preset if preset is not None and own_preset.is_file(preset) else None
        if own is None and "preset" in given:
            own_preset.check_recorded(given["preset"].text, data.get(own_preset.ANSWER), given)
        guessed = {"project_name": destination.name}
        if into_existing:
            guessed = suggest(destination, source.read)
        suggestions = {name: value for name, value in guessed.items() if name not in data}
        start = wizard.Start(given, data, suggestions, own)
        if ask:
            first_try = partial(answer, source, Path(scratch, "early"), questions, render=False)
            start = wizard.prepare(start, questions, first_try, destination.name)
        # Rendered aside: until all is well and confirmed, the destination is not touched.
        staged = Path(scratch, "project")
        rendered = answer(source, staged, questions, start.data, start.suggestions, start.given, ask=ask)
        refuse_skipped(start.given, rendered)
        files, kept = list_files(staged), list[str]()
        if into_existing:
            files, kept = existing.sort_files(files, destination, rendered.answers)
        command = equivalent_command(dest, destination.name, template, questions, rendered, start.own, source.read)
        result = describe(dest, destination, staged, files, rendered, command)
        if into_existing:
            result |= existing.describe(dest, destination, kept, result)
        if source.has_uncommitted_changes():
            used = "used, under a commit that does not exist" if source.work_tree else "not used"
            _output.note(f"the template in {source.repository} has uncommitted changes; they are {used}")
        if ask:
            _tell(result)
            if not dry_run and not typer.confirm(f"\nWrite {len(files)} files to {destination}?", default=True):
                raise ScaffoldError("declined, nothing was written", "Run it again with other answers.")
        if not dry_run:
            if into_existing:
                existing.put(staged, destination, files)
            else:
                check_destination(dest)  # once more: the questions take their time
                outer = enclosing_work_tree(destination)
                with publishing(staged, destination) as project:
                    if outer is None:
                        first_commit(project, f"Start from ddp-scaffold {result['template']['commit']}")
            ctx.obj.written = destination
            if into_existing:
                _output.note("nothing is committed: do that, ddp-scaffold update needs it")
            elif outer is not None:
                _output.note(f"{outer} is a git work tree: commit the project there, copier update needs that")
    # Without questions all is printed at the end: a reader that leaves early, as `| head` does, stops nothing.
    if as_json:
        _output.say_json(result)
        return
    if not ask:
        _tell(result)
    if into_existing:
        _tell_changes(result)
    if dry_run:
        _output.commands(f"{len(files)} files would be written to {destination}:", files)
        return
    _output.commands(f"{len(files)} files written to {destination}. Next:", result["next"])
    if not into_existing:
        _output.say()
        _output.say(TORCH_NOTE)


def _tell(result: Mapping[str, Any]) -> None:
    from ..summary import summary

    _output.rows("What follows from the answers", summary(result))
    _output.commands("The same without questions:", [result["command"]])


def _tell_changes(result: Mapping[str, Any]) -> None:
    """Print what else follows for code that exists: which of its lines to change, and what it then looks like."""
    for path in result["kept"]:
        _output.note(f"kept: {path} exists, and stays as it is")
    for text in result["notes"]:
        _output.note(text)
    changes = result["changes"]
    _output.say()
    _output.say(f"Lines of your own code to change: {len(changes)} (ddp-scaffold changes none of them)")
    for change in changes:
        _output.say()
        _output.say(f"  {change['file']}:{change['line']}  {change['text']}")
        _output.say(f"    why      {change['why']}")
        _output.say(f"    instead  {change['instead']}")
    _output.commands("What the main function then looks like:", result["sketch"])
