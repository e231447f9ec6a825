"""`ddp-scaffold new`: ask, show what follows, render, and make the first commit.

`--json` prints one object (version 1):

    {"version": 1, "destination": absolute path, "answers": {question: value},
     "command": the same run without questions, "files": [relative paths],
     "next": [three commands to type], "template": {"source": URL or path, "commit": tag or commit},
     "follows": {"package", "tracker", "world_size": number or null (counted at the start), "max_restarts",
                 "clocks_s": {"loader", "stall", "collective", "guard"}, "scripts": [relative paths]}}

or, on failure, {"error": {"message", "hint", "exit_code"}}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from .._errors import ScaffoldError, Session

TORCH_NOTE = "pip takes torch from PyPI, on Linux its CUDA build; for another, install torch first: https://pytorch.org"


def new(
    ctx: typer.Context,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Directory to make; its name becomes the project's.")],
    preset: Annotated[str | None, typer.Option("--preset", metavar="P", help="Where it will train.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="F", help="Model family.")] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="Answer a question; repeatable.")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", metavar="FILE", help="YAML file of answers; options win over it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults for what is not given.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; list the files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; implies -y.")] = False,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="T", envvar="DDP_SCAFFOLD_TEMPLATE", help="Path or URL of a fork."),
    ] = None,
) -> None:
    """Generate a project.

    On a terminal the open questions are asked, and nothing is written before you confirm the summary. Without a
    terminal, or with -y, defaults answer what is not given. DEST must not exist, or be empty.

    Examples:

    \b
      ddp-scaffold new denoiser
      ddp-scaffold new denoiser -y --preset generic-slurm --set nodes=4 --set walltime=12:00:00
      ddp-scaffold new denoiser --answers ../other/.copier-answers.yml --dry-run

    Exit codes: 0 done; 1 error or declined; 2 wrong usage or answer; 130 interrupted. Whatever the failure, nothing is
    left behind.
    """
    ctx.ensure_object(Session).as_json = as_json
    from .. import _output
    from .._git import enclosing_work_tree, first_commit, require_git
    from ..questions import check, from_file, from_options, load_questions
    from ..render import answer, check_destination, list_files, published, refuse_skipped
    from ..summary import describe, equivalent_command, summary
    from ..template import open_template

    ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    given = from_options(preset, model, pairs or ())
    if answers is not None:
        given = {**from_file(answers), **given}
    require_git()
    destination = check_destination(dest)
    with open_template(template) as source, tempfile.TemporaryDirectory(prefix="ddp-scaffold-") as scratch:
        questions = load_questions(source.read("copier.yml"))
        data = check(given, questions)
        suggestions = {} if "project_name" in data else {"project_name": destination.name}
        if ask and data:  # a wrong option is reported before the first question, not after the last one
            early = answer(source, Path(scratch, "early"), questions, data, suggestions, given, render=False)
            if "preset" in given:
                refuse_skipped(given, early)
        # Rendered aside: until all is well and confirmed, the destination is not touched.
        staged = Path(scratch, "project")
        rendered = answer(source, staged, questions, data, suggestions, given, ask=ask)
        refuse_skipped(given, rendered)
        files = list_files(staged)
        command = equivalent_command(dest, destination.name, template, questions, rendered)
        result = describe(dest, destination, staged, files, rendered, command)
        if source.has_uncommitted_changes():
            used = "used, under a commit that does not exist" if source.work_tree else "not used"
            _output.note(f"the template in {source.repository} has uncommitted changes; they are {used}")
        if not as_json:
            _output.rows("What follows from the answers", summary(result))
            if not dry_run:
                _output.commands("The same without questions:", [command])
        if ask and not dry_run and not typer.confirm(f"\nWrite {len(files)} files to {destination}?", default=True):
            raise ScaffoldError("declined, nothing was written", "Run it again with other answers.")
        if not dry_run:
            outer = enclosing_work_tree(destination)
            with published(staged, destination):
                if outer is None:
                    first_commit(destination, f"Start from ddp-scaffold {result['template']['commit']}")
            if outer is not None:
                _output.note(f"{outer} is a git work tree: commit the project there, copier update needs that")
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif dry_run:
        _output.commands(f"{len(files)} files would be written to {destination}:", files)
    else:
        _output.commands(f"{len(files)} files written to {destination}. Next:", result["next"])
        typer.echo(f"\n{TORCH_NOTE}")
