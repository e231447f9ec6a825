"""`ddp-scaffold explain`: who failed first, and why, from whatever a job has left.

`--json` prints one object (version 1), design section 5:

    {"version": 1, "verdict": {"kind", "first_ranks": [ranks] or null, "phase", "confidence": "certain" | "likely" |
     "unknown", "summary", "evidence": [{"file", "line", "text"}], "advice": [texts], "needs": [texts]},
     "ranks": [{"rank", "role", "host", "phase", "collective", "exit", "last_seen"}],
     "timeline": [{"rank", "start", "end", "phase", "waiting", "label"}], "sources": [files]}

Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import _output


def explain(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Logs: files, folders, patterns, or - for stdin.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which rank of a crashed or hung job failed first, and why.

    Reads what any PyTorch job left: output of torchrun, srun, Ray or Kubernetes, logs of single ranks, NCCL's and the
    scheduler's messages. Give it all that there is: the line that names a rank usually names a victim.

    Examples:

    \b
      ddp-scaffold explain slurm-123.out
      ddp-scaffold explain logs/ --json
      kubectl logs job/train | ddp-scaffold explain -

    Exit codes: 0 explained, also where the answer is `unknown`; 2 the input cannot be used.
    """
    from ..explain.explain import explain as answer_of
    from ..explain.text import tell

    answer, notes = answer_of(paths)
    if as_json:
        _output.say_json({"version": 1, **answer.to_json()})
    else:
        tell(answer)
    for note in notes[:10]:
        _output.note(note)
