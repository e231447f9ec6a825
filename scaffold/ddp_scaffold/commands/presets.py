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

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import _output
from .._errors import ERROR, ScaffoldError, UsageError, file_path, show
from . import init

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

NARROW = 110  # columns of a terminal; fewer do not hold all columns of `list`

app = typer.Typer(help="List, show, check and make cluster presets.")
app.command("init")(init.init)


@app.command("list")
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
    import datetime

    from ..presets.facts import age
    from ..presets.fields import gpus
    from ..presets.load import files

    presets = [(path, preset) for path in files() if _matches(preset := _load(path)[0], words or [])]
    if as_json:
        entries = [
            {
                "name": preset.name,
                "title": preset.title,
                "scheduler": preset.scheduler.value,
                "launcher": preset.launcher.value,
                "gpus_per_node": preset.gpus_per_node.value,
                "gpu": preset.gpu.value if preset.gpu else None,
                "status": preset.status,
                "keywords": preset.keywords,
                "verified_on": preset.verified_on.isoformat(),
                "file": str(path),
            }
            for path, preset in presets
        ]
        _output.say_json({"version": 1, "presets": entries})
        return
    today = datetime.date.today()
    terminal = sys.stdout.isatty()
    header = ("preset", "GPUs a node", "scheduler", "launcher", "verified", "status", "title")
    rows = []
    for _, p in presets:
        verified = age(p.verified_on, today) if terminal else p.verified_on.isoformat()
        rows.append((p.name, gpus(p), p.scheduler.value, p.launcher.value, verified, p.status, p.title))
    if terminal and shutil.get_terminal_size().columns < NARROW:
        columns = [header.index(name) for name in ("preset", "GPUs a node", "verified", "title")]
    else:
        columns = list(range(len(header)))
    lines = [tuple(line[column] for column in columns) for line in (header, *rows)]
    _output.table(lines[0], lines[1:], keep_first=True)
    if not rows:
        _output.note("no preset has these words; `ddp-scaffold presets init NAME` makes one for a cluster of your own")


@app.command("show")
def show_preset(
    name: Annotated[str, typer.Argument(metavar="P", help="Name of a preset, or the path of a preset file.")],
    as_json: Json = False,
) -> None:
    """Show the fields of a preset, each with its source.

    `-` is a value that is left open on purpose; a field that is not listed is unknown.

    Exit codes: 0 done; 1 the preset is broken; 2 there is none of that name.
    """
    import datetime
    import difflib

    from ..presets.facts import age, is_old
    from ..presets.fields import tables
    from ..presets.load import files, find

    path = Path(name) if name.endswith((".yml", ".yaml")) else find(name)
    if path is None:
        close = difflib.get_close_matches(name, [file.stem for file in files()], n=1)
        hint = "`ddp-scaffold presets list` shows them; or give the path of a preset file."
        raise UsageError(f"there is no preset {show(name)}", f"Did you mean {close[0]}? {hint}" if close else hint)
    preset, origins = _load(path)
    if as_json:
        merged = preset.model_dump(mode="json", exclude_unset=True)
        _output.say_json({"version": 1, "preset": merged, "taken_from": origins, "file": str(path)})
        return
    today = datetime.date.today()
    _output.say(f"{preset.name}: {preset.title}")
    _output.say(f"{preset.status}, verified on {preset.verified_on}, {age(preset.verified_on, today)}")
    if is_old(preset.verified_on, today):
        _output.say("WARNING: verified more than a year ago: check it with the site's pages before the first job")
    for table in tables(preset, origins):
        _output.say()
        _output.say(table.title)
        _output.table(table.header, table.rows)


@app.command("check")
def check_presets(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", parser=file_path, help="Preset files.")],
    as_json: Json = False,
) -> None:
    """Check preset files and report every problem at once.

    Exit codes: 0 all are good; 1 problems were found.
    """
    import datetime

    from ..presets.checks import future
    from ..presets.load import PresetError, Problem, load_preset

    found: dict[str, list[Problem]] = {}
    for path in paths:
        try:
            late = future(load_preset(path), datetime.date.today())
            found[str(path)] = [Problem(str(path), field, reason) for field, reason in late]
        except PresetError as error:
            found[str(path)] = error.problems
    if as_json:
        entries = [
            {
                "file": file,
                "ok": not problems,
                "problems": [{"where": p.file, "field": p.field, "reason": p.reason} for p in problems],
            }
            for file, problems in found.items()
        ]
        _output.say_json({"version": 1, "files": entries})
    elif sys.stdout.isatty():
        _output.table(
            ("file", "field", "result"),
            [
                row
                for file, problems in found.items()
                for row in ([(p.file, p.field, p.reason) for p in problems] or [(file, "", "ok")])
            ],
        )
    else:
        for file, problems in found.items():
            for line in [str(problem) for problem in problems] or [f"{file}: ok"]:
                _output.say(line)
    if any(found.values()):
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


def _matches(preset: Any, words: list[str]) -> bool:
    texts = [preset.name, preset.title, *preset.keywords, preset.gpu.value if preset.gpu else ""]
    return all(any(word.casefold() in text.casefold() for text in texts) for word in words)


def _load(path: Path) -> Any:
    """Return a preset, and where the fields come from that it takes over. Raises ScaffoldError."""
    from ..presets.load import PresetError, load_with_origins

    try:
        return load_with_origins(path)
    except PresetError as error:
        more = f" (and {len(error.problems) - 1} more)" if error.problems[1:] else ""
        raise ScaffoldError(
            f"{error.problems[0]}{more}",
            f"See all problems with `ddp-scaffold presets check {shlex.quote(str(path))}`.",
        ) from error
