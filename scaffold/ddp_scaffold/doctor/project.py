"""The project: its release, its effective timeouts, the variables that are set and by whom, and what `check` finds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .. import __version__
from .._errors import ScaffoldError
from .line import Line

OURS = re.compile(
    r"(?:NCCL|TORCH|TORCHELASTIC|GLOO|PET|DDP)_\w+|(?:MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|CUDA_LAUNCH_BLOCKING)"
)
FILES = ("/etc/nccl.conf", "~/.nccl.conf")  # NCCL user guide, env.rst: values that no shell shows
CLOCKS = re.compile(r"^clocks:[ \t]*(?:#.*)?\n((?:[ \t]+.*\n|[ \t]*\n|#.*\n)*)", re.MULTILINE)


def project_lines(project: Path, environ: Mapping[str, str] = os.environ) -> list[Line]:
    """Return the lines of a project; in an empty folder, that there is none."""
    return [*_release(project), *_clocks(project, environ), *_variables(project, environ), *_check(project)]


def _release(project: Path) -> list[Line]:
    try:
        text = (project / ".copier-answers.yml").read_text("utf-8")
    except (OSError, ValueError):
        note = "To make one: ddp-scaffold new. To adopt this code: ddp-scaffold new . --into-existing."
        return [Line("project", "release", "no project of ddp-scaffold", note=note, level="info")]
    match = re.search(r"^_commit:[ \t]*[\"']?(\S+?)[\"']?[ \t]*$", text, re.MULTILINE)
    commit = match.group(1) if match else "unknown"
    newest = f"v{__version__}"
    numbers = [tuple(int(part) for part in re.findall(r"\d+", name)[:3]) for name in (commit, newest)]
    note = ""
    if re.match(r"v?\d+\.\d+", commit) and numbers[0] < numbers[1]:
        note = f"{newest} is out: ddp-scaffold update --dry-run shows what it brings."
    return [Line("project", "release", commit, ".copier-answers.yml", note, "info" if note else "ok")]


def _clocks(project: Path, environ: Mapping[str, str]) -> list[Line]:
    """The timeouts of configs/train.yaml, unless a DDP_CLOCKS__ variable has another."""
    try:
        text = (project / "configs" / "train.yaml").read_text("utf-8")
    except (OSError, ValueError):
        return []
    section = CLOCKS.search(text)
    found = (
        dict(re.findall(r"^[ \t]+(\w+):[ \t]*([^#\n]+?)[ \t]*(?:#.*)?$", section.group(1), re.MULTILINE))
        if section
        else {}
    )
    lines = []
    for name, value in found.items():
        variable = f"DDP_CLOCKS__{name.upper()}"
        source = f"{variable} in the environment" if variable in environ else "configs/train.yaml"
        lines.append(Line("project", f"clocks.{name}", environ.get(variable, value), source))
    return lines


def _variables(project: Path, environ: Mapping[str, str]) -> list[Line]:
    """Variables of torch, NCCL and gloo: of this environment, of launch/env, and of NCCL's own files."""
    from ..check.shell.reader import read_settings
    from ..check.variables import Project, Setting, judge

    settings = [
        Setting(name, value, "the environment", 0, 0) for name, value in sorted(environ.items()) if OURS.fullmatch(name)
    ]
    for path in [*sorted(project.glob("launch/env/nccl.env")), *(Path(os.path.expanduser(name)) for name in FILES)]:
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError, RuntimeError):
            continue
        shown = str(path.relative_to(project)) if path.is_relative_to(project) else str(path)
        known = {one.name for one in settings}
        settings += [
            Setting(one.name, one.literal, shown, one.line, 1)
            for one in read_settings(shown, text).assignments
            if one.name not in known
        ]
    wrong = {
        (one.file, one.line, name): f"{one.message} {one.fix}"
        for one in judge(settings, Project())
        for name in re.findall(r"\w+", one.message)
    }
    lines = []
    for one in settings:
        note = wrong.get((one.file, one.line, one.name), "")
        value = "(depends on the start)" if one.value is None else one.value
        lines.append(Line("variables", one.name, value, one.file, note, "warning" if note else "ok"))
    return lines


def _check(project: Path) -> list[Line]:
    from ..check.formats import summary
    from ..check.run import check, selection_of

    try:
        checked = check([project], selection_of((), (), [project]))
    except ScaffoldError as error:
        return [Line("project", "check", error.message, note=error.hint, level="warning")]
    note = f"ddp-scaffold check {project} lists them." if checked.findings else ""
    return [Line("project", "check", summary(checked), note=note, level="info" if note else "ok")]
