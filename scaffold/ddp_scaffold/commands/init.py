"""`ddp-scaffold presets init`: a preset file for the user's own cluster, from what this machine and the user tell.

`--json` prints one object (version 1): {"version", "file", "extends", "found": {field: {"value", "source",
"confidence", "verified_on"}}, "limits": [the same], "not_found": [texts], "next": [one command]}. Keys may be added;
none is renamed within version 1.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import _output
from .._errors import ScaffoldError, UsageError, file_path, show

if TYPE_CHECKING:
    from ..presets.draft import Draft


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the cluster; the file becomes NAME.yml.")],
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Look at this machine: sinfo, scontrol, nvidia-smi, ip.")
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
    interfaces. Nothing is sent anywhere, and no file is written over.

    Exit codes: 0 done; 1 the file is there already or cannot be written; 2 wrong usage.
    """
    import datetime

    from ..presets.ask import ask, settle
    from ..presets.draft import Draft, write
    from ..presets.load import PresetError
    from ..presets.probe import probe as look

    _check_name(name)
    path = _path(name, output)
    draft = Draft(name, datetime.date.today())
    if probe:
        look(draft)
    told: set[str] = set()
    if not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty():
        _tell(draft, told)
        told = {*draft.facts, *draft.not_found, "limits"}
        ask(draft)
    settle(draft)
    try:
        write(draft, path)
    except FileExistsError as error:
        raise _exists(path) from error
    except PresetError as error:
        raise ScaffoldError(
            f"what was found makes no valid preset: {error.problems[0].field}: {error.problems[0].reason}",
            "Try --no-probe, and answer the questions.",
        ) from error
    next_command = f"ddp-scaffold new DEST --preset {shlex.quote(_typed(path))}"
    if as_json:
        _output.say_json(
            {
                "version": 1,
                "file": str(path.absolute()),
                "extends": draft.extends,
                "found": draft.facts,
                "limits": draft.limits,
                "not_found": draft.not_found,
                "next": [next_command],
            }
        )
        return
    _tell(draft, told)
    _output.commands(f"{_typed(path)} written; it extends {draft.extends}. Next:", [next_command])


def _check_name(name: str) -> None:
    import re

    from ..presets.load import find
    from ..template.own_preset import OWN

    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name) or len(name) > 60:
        raise UsageError(f"NAME {show(name)} is no name of a preset", "Write it as my-cluster: a-z, 0-9 and hyphens.")
    if name == OWN or find(name):
        raise UsageError(f"NAME: there is a preset {show(name)} already", f"Choose another name, like my-{name}.")


def _path(name: str, output: Path | None) -> Path:
    """Return the path of the file to write. Raises ScaffoldError if it is there already, UsageError for a wrong one."""
    path = Path(f"{name}.yml") if output is None else output / f"{name}.yml" if output.is_dir() else output
    if path.name != f"{name}.yml":
        raise UsageError(f"--output {show(str(output))} is not named like the preset", f"Call it {name}.yml.")
    if not path.parent.is_dir():
        raise UsageError(f"--output: {show(str(path.parent))} is not a directory", "Make it first.")
    if path.exists() or path.is_symlink():
        raise _exists(path)
    return path


def _exists(path: Path) -> ScaffoldError:
    return ScaffoldError(f"{show(str(path))} exists", "Remove it, or choose another NAME or --output.")


def _typed(path: Path) -> str:
    """Return a path as an argument that no shell and no option parser takes for anything else: ./name.yml."""
    return str(path) if path.is_absolute() or path.parent != Path() else f"./{path}"


def _tell(draft: Draft, told: set[str]) -> None:
    """Print what is known, and what was not found, but for what is told already."""
    facts = {name: fact for name, fact in draft.facts.items() if name not in told}
    rows = [(name, _value(fact["value"]), fact["confidence"], fact["source"]) for name, fact in facts.items()]
    if "limits" not in told:
        rows += [("limit", _limit(fact["value"]), fact["confidence"], fact["source"]) for fact in draft.limits]
    if rows:
        _output.table(("field", "value", "confidence", "source"), rows)
    missing = [line for line in draft.not_found if line not in told]
    if missing:
        _output.say()
        _output.say("Not found:")
        for line in missing:
            _output.say(f"  {line}")


def _value(value: object) -> str:
    from ..presets.fields import text
    from ..presets.schema import Account

    return text(Account(**value) if isinstance(value, dict) else value)


def _limit(limit: dict[str, object]) -> str:
    words = {"min_nodes": "from {} nodes", "max_nodes": "up to {} nodes", "max_walltime": "{}", "note": "{}"}
    parts = [word.format(limit[key]) for key, word in words.items() if key in limit]
    parts += ["preemptible"] if limit.get("preemptible") else []
    return f"{limit['name']}: {', '.join(parts) or 'no limit'}"
