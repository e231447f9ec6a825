"""`ddp-scaffold presets init`: a preset file for the user's own cluster, from what this machine and the user tell.

`--json` prints one object (version 1): {"version", "file", "extends", "found": {field: {"value", "source",
"confidence", "verified_on"}}, "limits": [the same], "storage": [the same], "needs": [the same], "not_found": [texts],
"next": [one command]}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import _output
from .._errors import file_path


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the cluster; the file becomes NAME.yml.")],
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="Look at this machine: sinfo, kubectl, nvidia-smi, python3, module and the like."
        ),
    ] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", parser=file_path, help="Where to write it: NAME.yml, or its directory."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; implies -y.")] = False,
) -> None:
    """Make a preset file for your own cluster.

    This machine is looked at first; on a terminal you are then asked for what is still open, and an empty answer
    leaves it so. Best run on a node of the cluster inside a job; a login node does not know the compute nodes'
    interfaces. Where kubectl answers, it is the cluster of its current context that is described. Nothing is sent
    anywhere else, and no file is written over.

    Exit codes: 0 done; 1 the file is there already or cannot be written; 2 wrong usage.
    """
    from ..presets.make import make, show_end

    ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    made = make(name, output, probe=probe, ask=ask)
    if as_json:
        _output.say_json(made.to_json())
    else:
        show_end(made)
