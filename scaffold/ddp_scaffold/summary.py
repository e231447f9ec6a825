"""What follows from the answers: for people before anything is written, and as JSON."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._errors import ScaffoldError
from .facts import is_old
from .own_preset import ANSWER
from .questions import Question, is_default
from .render import Rendered, copier_settings

ANSWERS_FILE = ".copier-answers.yml"

# The order that the clocks must keep, and the answer that holds each, in seconds.
CLOCKS = {
    "loader": "loader_timeout_s",
    "stall": "stall_limit_s",
    "collective": "collective_timeout_s",
    "guard": "guard_deadline_s",
}

# What starts a training, the scheduler's script before the one that runs on this machine.
STARTS = {"launch/train.sbatch": "sbatch", "launch/train.pbs": "qsub", "launch/torchrun.sh": "bash"}


def describe(
    dest: str, destination: Path, staged: Path, files: Sequence[str], rendered: Rendered, command: str
) -> dict[str, Any]:
    """Return the object that `new --json` prints; see `commands/new.py`. `dest` is the destination as it was typed.

    Raises ScaffoldError if the rendered project does not record where it came from.
    """
    import yaml

    recorded = yaml.safe_load((staged / ANSWERS_FILE).read_text("utf-8")) if ANSWERS_FILE in files else {}
    if "_commit" not in recorded:
        raise ScaffoldError(
            f"the template records no commit in {ANSWERS_FILE}",
            "Its projects could never be updated; the template must be in git and hold that file.",
        )
    facts = rendered.facts
    scripts = [name for name in files if name.startswith("launch/") and name.endswith((".sh", ".sbatch", ".pbs"))]
    return {
        "version": 1,
        "destination": str(destination),
        "answers": rendered.answers,
        "command": command,
        "files": list(files),
        "next": [f"cd {shlex.quote(dest)}", "python -m pip install -e .", _start(scripts, rendered.answers)],
        "template": {"source": recorded["_src_path"], "commit": recorded["_commit"]},
        "follows": {
            "package": facts.get("package"),
            "tracker": None if "command" in rendered.answers else facts.get("tracker"),
            "world_size": _world_size(rendered.answers),
            "max_restarts": facts.get("max_restarts"),
            "clocks_s": {clock: facts.get(name) for clock, name in CLOCKS.items()},
            "scripts": scripts,
            "place": _place(facts),
            "needs": needs(facts),
        },
    }


def summary(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labelled lines for the object of `describe`."""
    follows, answers, files = result["follows"], result["answers"], result["files"]
    world = follows["world_size"] or "counted at the start: one a GPU, or 2 without GPUs"
    if "nodes" in answers:
        nodes, gpus = answers["nodes"], answers["gpus_per_node"]
        plural = "s" if nodes != 1 else "", "s" if gpus != 1 else ""
        world = f"{world} ({nodes} node{plural[0]} x {gpus} GPU{plural[1]})"
    metrics = (
        ""
        if "command" in answers
        else "runs/<id>/metrics.jsonl" + ("" if follows["tracker"] == "none" else f" and {follows['tracker']}")
    )
    place = follows["place"] or {}
    old = place.get("verified_on") and is_old(datetime.date.fromisoformat(place["verified_on"]), datetime.date.today())
    warning = "; MORE THAN A YEAR AGO: check it with the site's pages" if old else ""
    where = f"{place['title']}, {place['status']}, verified {place['verified_on']}{warning}" if place else ""
    folders = Counter(name.partition("/")[0] if "/" in name else "top level" for name in files)
    rows = [
        ("place", where),
        ("still needed", "; ".join(follows["needs"])),
        ("package", _package(answers)),
        ("starts", f"python {answers['command']}" if "command" in answers else ""),
        ("processes", str(world)),
        ("clocks", " < ".join(f"{clock} {seconds} s" for clock, seconds in follows["clocks_s"].items())),
        ("restarts", f"at most {follows['max_restarts']}, from the last checkpoint"),
        ("metrics", "" if "command" in answers else metrics),
        ("scripts", ", ".join(follows["scripts"]) or "none"),
        ("files", f"{len(files)}: " + ", ".join(f"{folder} {count}" for folder, count in folders.items())),
        ("template", f"{result['template']['source']} at {result['template']['commit']}"),
    ]
    return [(label, text) for label, text in rows if text]


def equivalent_command(
    dest: str,
    default_name: str,
    template: str | None,
    questions: Mapping[str, Question],
    rendered: Rendered,
    own: str | None,
    read: Callable[[str], str],
) -> str:
    """Return the command that gives the same project without questions, quoted for a shell.

    It spells out what differs from the template's defaults, and what the user's copier settings preset, which others
    do not have. `default_name` is the project's name if no other is given, `own` the path of the user's preset file;
    `read` returns a file of the template.
    """
    import yaml

    preset_by_user = copier_settings().defaults
    words = ["ddp-scaffold", "new", dest, "-y"]
    for name, value in rendered.answers.items():
        if (name == "project_name" and value == default_name) or (name == ANSWER and own is not None):
            continue
        if name not in preset_by_user and is_default(questions[name], rendered.facts, read):
            continue
        if name == "code":
            words.append("--into-existing")
            continue
        if name == "preset" and own is not None:
            value = own
        elif isinstance(value, (dict, list)):
            value = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=2**31).strip()
        words += [f"--{name}", str(value)] if name in ("preset", "model") else ["--set", f"{name}={value}"]
    if template is not None:
        words += ["--template", template]
    return shlex.join(words)


def _package(answers: Mapping[str, Any]) -> str:
    """Return where the package is; beside existing code, what of it comes from the template."""
    folder = answers.get("source_folder", "src")
    path = f"{answers.get('package')}" if folder == "." else f"{folder}/{answers.get('package')}"
    return f"{path}/ddp" if "command" in answers else path


def _place(facts: Mapping[str, Any]) -> dict[str, str] | None:
    """Return what the preset says of itself, or None for a template that has no such presets."""
    preset = facts.get("preset_data")
    names = ("name", "title", "status", "verified_on")
    return {name: str(preset.get(name)) for name in names} if isinstance(preset, dict) else None


def needs(facts: Mapping[str, Any]) -> list[str]:
    """Return what a job there will be refused without, and no answer has given."""
    known = facts.get("known") or {}
    account = known.get("account")
    pbs = known.get("scheduler") == "pbs"
    found = []
    if not facts.get("partition") and known.get("partition"):
        found.append(f"a partition: {known['partition']} does not take {facts.get('nodes')} nodes")
    elif pbs and not facts.get("partition") and known.get("limits"):
        found.append("a queue (--set partition=..., or qsub -q NAME for each job)")
    if not account or not account.get("required") or facts.get("account"):
        return found
    submit, option = ("qsub", "-A ") if pbs else ("sbatch", "--account=")
    return [
        *found,
        f"an account (--set account=..., or {submit} {option}{account.get('example') or 'NAME'} for each job)",
    ]


def _world_size(answers: Mapping[str, Any]) -> int | None:
    """Return the number of processes, or None if they are counted when training starts."""
    if "nodes" in answers:
        return int(answers["nodes"]) * int(answers["gpus_per_node"])
    return int(answers["nproc"]) if str(answers.get("nproc")).isdecimal() else None


def _start(scripts: Sequence[str], answers: Mapping[str, Any]) -> str:
    """Return the command that starts a training: with the launch script of the scheduler, if there is one."""
    for script, command in STARTS.items():
        if script in scripts:
            return f"{command} {script}"
    return f"python -m {answers['package']}.train"
