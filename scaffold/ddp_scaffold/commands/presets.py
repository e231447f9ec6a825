"""`ddp-scaffold presets`: what is known about the places where a project can train, and how it is known.

`--json` prints one object (version 1):

    list   {"version", "presets": [{"name", "title", "scheduler", "launcher", "gpus_per_node", "gpu", "status",
           "keywords", "verified_on", "file"}]}
    show   {"version", "preset": the fields, with those that are taken over, "taken_from": {field: preset}, "file"}
    check  {"version", "files": [{"file", "ok", "problems": [{"where", "field", "reason"}]}]}
    init   see `init.py`

Keys may be added; none is renamed within version 1. `schema` prints a JSON Schema, whose form pydantic decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import _output
from .._errors import ERROR, EdgeCommand, file_path
from . import init

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(help="List, show, check and make cluster presets.")
app.command("init", cls=EdgeCommand)(init.init)


@app.command("list", cls=EdgeCommand)
def list_presets(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORD", help="Only those with all these words in name, title, keywords or GPU."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the presets, or those that a search finds.

    `-` for GPUs: the preset leaves them open.

    Exit codes: 0 done; 1 a preset of this installation is broken.
    """
    from ..presets.catalog import search, show_list

    presets = search(words or [])
    if as_json:
        _output.say_json({"version": 1, "presets": [found.entry() for found in presets]})
    else:
        show_list(presets)


@app.command("show", cls=EdgeCommand)
def show_preset(
    name: Annotated[str, typer.Argument(metavar="P", help="Name of a preset, or the path of a preset file.")],
    as_json: Json = False,
) -> None:
    """Show the fields of a preset, each with its source.

    `-` is a value that is left open on purpose; a field that is not listed is unknown.

    Exit codes: 0 done; 1 the preset is broken; 2 there is none of that name.
    """
    from ..presets.catalog import by_name, show_fields

    found = by_name(name)
    if as_json:
        _output.say_json(found.to_json())
    else:
        show_fields(found)


@app.command("check", cls=EdgeCommand)
def check_presets(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", parser=file_path, help="Preset files.")],
    as_json: Json = False,
) -> None:
    """Check preset files and report every problem at once.

    Exit codes: 0 all are good; 1 problems were found.
    """
    from ..presets.catalog import check_files, show_problems

    checked = check_files(paths)
    if as_json:
        _output.say_json({"version": 1, "files": [one.entry() for one in checked]})
    else:
        show_problems(checked)
    if any(one.problems for one in checked):
        raise typer.Exit(ERROR)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of preset files, for editors.

    Write it to a file (`ddp-scaffold presets schema > preset.schema.json`), and begin a preset file with
    `# yaml-language-server: $schema=preset.schema.json`.

    Exit codes: 0 done.
    """
    from ..presets.json_schema import json_schema

    _output.say_json(json_schema())
