"""`ddp-scaffold presets`: what is known about the places where a project can train, and how it is known.

`--json` prints one object (version 1): `list` {"version", "presets": [{"name", "title", "scheduler", "verified_on",
"file"}]}; `show` {"version", "preset": the file's fields}; `check` {"version", "files": [{"file", "ok", "problems":
[{"where", "field", "reason"}]}]}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import _output
from .._errors import ERROR, ScaffoldError, UsageError, file_path, show

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(help="List, show and check cluster presets.")


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the presets.

    Exit codes: 0 done; 1 a preset of this installation is broken.
    """
    from ..presets import files

    presets = [(path, _load(path)) for path in files()]
    if as_json:
        entries = [
            {
                "name": preset.name,
                "title": preset.title,
                "scheduler": preset.scheduler.value,
                "verified_on": preset.verified_on.isoformat(),
                "file": str(path),
            }
            for path, preset in presets
        ]
        _output.say_json({"version": 1, "presets": entries})
        return
    rows = [(p.name, p.scheduler.value, p.verified_on.isoformat(), p.title) for _, p in presets]
    _output.table(("preset", "scheduler", "verified", "title"), rows)


@app.command("show")
def show_preset(
    name: Annotated[str, typer.Argument(metavar="P", help="Name of a preset, or the path of a preset file.")],
    as_json: Json = False,
) -> None:
    """Show the fields of a preset, each with its source.

    `-` is a value that is left open on purpose; a field that is not listed is unknown.

    Exit codes: 0 done; 1 the preset is broken; 2 there is none of that name.
    """
    from ..presets import files, find
    from ..schema import Fact

    path = Path(name) if name.endswith((".yml", ".yaml")) else find(name)
    if path is None:
        known = ", ".join(file.stem for file in files())
        raise UsageError(f"P: there is no preset {show(name)}", f"Choose one of: {known}; or give the path of a file.")
    preset = _load(path)
    if as_json:
        _output.say_json({"version": 1, "preset": preset.model_dump(mode="json", exclude_unset=True)})
        return
    _output.say(f"{preset.name}: {preset.title} (verified on {preset.verified_on})")
    _output.say()
    facts = [(field, fact) for field, fact in preset if isinstance(fact, Fact)]
    rows = [
        (field, "-" if fact.value is None else str(fact.value), fact.confidence, fact.source) for field, fact in facts
    ]
    _output.table(("field", "value", "confidence", "source"), rows)


@app.command("check")
def check_presets(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", parser=file_path, help="Preset files.")],
    as_json: Json = False,
) -> None:
    """Check preset files and report every problem at once.

    Exit codes: 0 all are good; 1 problems were found.
    """
    from ..presets import PresetError, load

    found: dict[str, list[Any]] = {}
    for path in paths:
        try:
            load(path)
            found[str(path)] = []
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
            for line in problems or [f"{file}: ok"]:
                _output.say(str(line))
    if any(found.values()):
        raise typer.Exit(ERROR)


def _load(path: Path) -> Any:
    from ..presets import PresetError, load

    try:
        return load(path)
    except PresetError as error:
        more = f" (and {len(error.problems) - 1} more)" if error.problems[1:] else ""
        raise ScaffoldError(
            f"{error.problems[0]}{more}",
            f"See all problems with `ddp-scaffold presets check {shlex.quote(str(path))}`.",
        ) from error
