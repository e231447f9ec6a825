"""`ddp-scaffold explain`: who failed first, and why, from whatever a job has left.

`--json` prints one object (version 1), design section 5:

    {"version": 1, "verdict": {"kind", "first_ranks": [ranks] or null, "phase", "confidence": "certain" | "likely" |
     "unknown", "summary", "evidence": [{"file", "line", "text"}], "advice": [texts], "needs": [texts]},
     "ranks": [{"rank", "role", "host", "phase", "collective", "exit", "last_seen"}],
     "timeline": [{"rank", "start", "end", "phase", "waiting", "label"}], "sources": [files]}

With `--redact` it is {"version": 1, "files": [files]}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import _output
from .._errors import UsageError

if TYPE_CHECKING:
    from ..explain.explanation import Explanation


def explain(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Logs: files, folders, patterns, or - for stdin.", show_default=False),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the answer as one page, with a picture.")
    ] = None,
    redact: Annotated[
        Path | None,
        typer.Option("--redact", metavar="DIR", help="Instead, copy the logs there without names, paths and secrets."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which rank of a crashed or hung job failed first, and why.

    Reads what any PyTorch job left: output of torchrun, srun, Ray or Kubernetes, logs of single ranks, NCCL's and the
    scheduler's messages, flight-recorder dumps; or runs/<id> of a generated project, alone. Give it all that there is:
    the line that names a rank usually names a victim.

    Examples:

    \b
      ddp-scaffold explain slurm-123.out
      ddp-scaffold explain logs/ --json
      kubectl logs job/train | ddp-scaffold explain -

    Exit codes: 0 explained, also where the answer is `unknown`; 2 the input cannot be used.
    """
    from ..explain.explain import explain as answer_of
    from ..explain.text import tell

    if redact:
        _redact(paths, redact, as_json)
        return
    notes: tuple[str, ...] = ()
    if run := _run_directory(paths):
        from ..explain.run_directory import explain as repeat

        answer = repeat(run)
    else:
        answer, notes = answer_of(paths)
    if html:
        _write_page(html, answer)
    if as_json:
        _output.say_json({"version": 1, **answer.to_json()})
    else:
        tell(answer)
    for note in notes[:10]:
        _output.note(note)


def _run_directory(paths: Sequence[str]) -> Path | None:
    """Return the run directory of a generated project, if that is what is to be explained."""
    from ..explain.run_directory import is_run_directory

    return Path(paths[0]) if len(paths) == 1 and is_run_directory(Path(paths[0])) else None


def _write_page(file: Path, answer: Explanation) -> None:
    from ..explain.html import render

    try:
        file.write_text(render(answer), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.", "Name another file.") from error
    _output.note(f"{file} has the page.")


def _redact(paths: Sequence[str], directory: Path, as_json: bool) -> None:
    from ..explain.redact import redact

    try:
        written, notes = redact(paths, directory)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}.", "Name what can be read, and a new folder.") from error
    if as_json:
        _output.say_json({"version": 1, "files": [str(file) for file in written]})
    else:
        _output.say(f"{len(written)} files in {directory}, without names, paths and secrets that are known as such.")
        _output.say("Read them before you post them.")
    for note in notes[:10]:
        _output.note(note)
