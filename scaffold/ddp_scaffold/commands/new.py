"""`ddp-scaffold new`: ask, show what follows, render, and make the first commit.

`--json` prints one object (version 1):

    {"version": 1, "destination": absolute path, "answers": {question: value},
     "command": the same run without questions, "files": [relative paths],
     "next": [commands to type], "template": {"source": URL or path, "commit": tag or commit},
     "follows": {"package", "tracker", "world_size": number or null (counted at the start), "max_restarts",
                 "clocks_s": {"loader", "stall", "collective", "guard"}, "scripts": [relative paths],
                 "place": {"name", "title", "status", "verified_on"} or null, "needs": [texts]}}

With --into-existing also "kept": [paths that stay as they are], "notes": [texts], "sketch": [lines of a main function],
"changes": [{"file", "line", "text", "why", "instead", "must"}], "findings": [what `check --format json` prints],
"unknown": [texts: what keeps the loop out of the patch], "patch": [lines of adopt.patch], "unfit": text, empty if fit.

or, on failure, {"error": {"message", "hint", "exit_code"}}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import _output
from .._errors import file_path


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
      ddp-scaffold new denoiser -y --preset generic-slurm --set nodes=4
      ddp-scaffold new denoiser --preset ./mycluster.yml
      ddp-scaffold new again --answers denoiser/.copier-answers.yml --dry-run
      ddp-scaffold new . --into-existing --preset generic-slurm

    Questions that --set answers:

    \b
      project_name package model tracker max_restarts collective_timeout_s
      without a scheduler: nproc
      Slurm: launcher qos
      Slurm and PBS: nodes gpus_per_node cpus_per_task partition walltime
                     account modules container_image
      Kubernetes: nodes gpus_per_node cpus_per_task partition container_image
                  kubernetes_kind kubernetes_namespace runs_claim memory
                  shm_size grace_s tolerations secret pull_secret run_as
      SkyPilot: nodes gpus_per_node sky_infra sky_accelerator use_spot
                network_tier disk_gb runs_store sky_secrets grace_s
      with --into-existing: source_folder command
      preset, by name: --preset (`ddp-scaffold presets list`)
      model, by name: adversarial-diffusion causal-lm classifier custom
                      diffusion masked-lm rectified-flow retrieval

    Exit codes: 0 done; 1 error or declined; 2 wrong usage or answer; 130 interrupted. Whatever the failure, nothing is
    left behind.
    """
    from ..creating.create import Request, create
    from ..creating.summary import show_end

    ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    request = Request(
        dest=dest,
        preset=preset,
        model=model,
        pairs=tuple(pairs or ()),
        answers=answers,
        template=template,
        into_existing=into_existing,
        dry_run=dry_run,
        ask=ask,
    )
    project = create(request, ctx.obj)
    # Without questions all is printed at the end: a reader that leaves early, as `| head` does, stops nothing.
    if as_json:
        _output.say_json(project.to_json())
    else:
        show_end(project, shown=ask, dry_run=dry_run)
