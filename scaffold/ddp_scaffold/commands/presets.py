"""`ddp-scaffold presets`: what is known about the places where a project can train, and how it is known.

`--json` prints one object (version 1):

    list   {"version", "presets": [{"name", "title", "scheduler", "launcher", "gpus_per_node", "gpu", "status",
           "keywords", "verified_on", "last_change": null or {"release", "day", "fields"}, "file"}]}
    show   {"version", "preset": the fields, with those that are taken over, "taken_from": {field: preset}, "file"}
    check  {"version", "files": [{"file", "ok", "problems": [{"where", "field", "reason"}]}]}
    diff   {"version", "preset", "from": {"release", "day"}, "to": the same, "resolution": "release", "differences":
           [{"field", "change": "added", "removed" or "changed", "from", "to"}], "extends"}
    probe  {"version", "preset", "verified_on", "probed_on", "place", "findings": [{"field", "outcome": "differs",
           "agrees", "not looked at" or "told", "preset", "machine", "by"}], "counts"}
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

    `-` for GPUs: the preset leaves them open. The last change is that between two releases.

    Exit codes: 0 done; 1 a preset of this installation is broken.
    """
    from ..presets.catalog import search, show_list
    from ..template.source import carried_releases

    presets = search(words or [], carried_releases)
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


@app.command("diff", cls=EdgeCommand)
def diff_preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a preset.")],
    start: Annotated[
        str | None, typer.Option("--from", metavar="DAY", help="A day or a release; else, before the last change.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="DAY", help="A day or a release; else, today.")] = None,
    as_json: Json = False,
) -> None:
    """Compare what a preset said on two days.

    The history is that of the releases, which this installation carries; a day stands for the newest release before
    its end. Needs git, and no network.

    Exit codes: 0 done, whether anything differs or not; 1 the history cannot be read; 2 no such preset, day or release.
    """
    from ..presets.compare import compare, show_comparison
    from ..template.source import carried_releases

    found = compare(name, start, end, carried_releases)
    if as_json:
        _output.say_json(found.to_json())
    else:
        show_comparison(found)


@app.command("probe", cls=EdgeCommand)
def probe_preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a preset, or the path of a preset file.")],
    as_json: Json = False,
) -> None:
    """Hold a preset against the machine that this runs on.

    Run it inside a job to see GPUs and interfaces as well. Nothing is sent anywhere, nothing is written; what is
    printed names partitions and no users or hosts, and can be sent as it is.

    Exit codes: 0 nothing differs; 1 something differs, or the preset is broken; 2 there is none of that name; 3 nothing
    of it could be looked at here.
    """
    from ..presets.against import hold, show_held
    from ..presets.catalog import by_name

    held = hold(by_name(name).preset)
    if as_json:
        _output.say_json(held.to_json())
    else:
        show_held(held)
    if code := held.exit_code():
        raise typer.Exit(code)


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
