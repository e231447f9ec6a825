"""`ddp-scaffold doctor`: machine and project in one table.

`--json` prints one object: {"version": 1, "lines": [{"section", "name", "value", "source", "note", "level"}]}; level is
ok, info or warning. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import _output
from .._errors import UsageError


def doctor(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="A project (default: this folder).")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show machine and project in one table: versions, GPUs, links, limits, variables, release, findings of check.

    It needs no GPU, no torch and no project, and changes nothing.

    Exit codes: 0 done, also with warnings; 2 there is no such folder.
    """
    from ..doctor.machine import machine
    from ..doctor.project import project_lines
    from ..doctor.python import torch_lines

    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder", "Name a project, or leave it out for this folder.")
    lines = [*machine(), *torch_lines(directory), *project_lines(directory)]
    if as_json:
        _output.say_json({"version": 1, "lines": [asdict(line) for line in lines]})
        return
    cells = [(line.section, line.name, line.value, line.source) for line in lines]
    _output.table(("", "what", "value", "from"), cells)
    noted = [line for line in lines if line.note]
    for line in noted:
        _output.say_filled(f"{line.level}: {line.name}: {line.note}", indent=4)
