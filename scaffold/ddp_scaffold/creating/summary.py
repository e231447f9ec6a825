"""What follows from the answers: typed, as JSON, and for people before anything is written."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import _output
from .._errors import ScaffoldError
from ..adopting.advice import Change
from ..adopting.existing import Adoption
from ..adopting.patch import PATCH
from ..presets.facts import is_old, met_hangs, needs, provided_by
from ..template.copier_calls import copier_settings
from ..template.given import ANSWERS_FILE
from ..template.own_preset import ANSWER
from ..template.questions import Question, is_default
from ..template.render import Rendered
from .steps import STARTED, next_steps

# PyPI's torch is for CUDA 13 since 2.11 (pytorch PR #177975): docs.nvidia.com/deploy/cuda-compatibility has the driver.
TORCH_NOTE = (
    "pip takes torch from PyPI, on Linux its build for CUDA 13, which needs NVIDIA's driver 580 or later. With an older"
    " one, install torch first, with --index-url https://download.pytorch.org/whl/cu126; other builds:"
    " https://pytorch.org"
)
ROCM_NOTE = (
    "This machine has AMD GPUs, and pip's default torch is the CUDA build, which finds none of them: install ROCm's"
    " build first, with the --index-url that https://pytorch.org names for the ROCm that is installed there."
)

# The order that the clocks must keep, and the answer that holds each, in seconds.
CLOCKS = {
    "loader": "loader_timeout_s",
    "stall": "stall_limit_s",
    "collective": "collective_timeout_s",
    "guard": "guard_deadline_s",
}


@dataclass(frozen=True)
class Follows:
    """What follows from the answers."""

    package: str | None
    tracker: str | None
    world_size: int | None  # None: counted when training starts
    max_restarts: int | None
    clocks_s: Mapping[str, Any]
    scripts: list[str]
    place: Mapping[str, str] | None  # what the preset says of itself
    needs: list[str]  # what a job there will be refused without
    hangs: list[str]  # open hangs of the place that these answers run into


@dataclass(frozen=True)
class Origin:
    """The template, as the project records it."""

    source: str
    commit: str


@dataclass(frozen=True)
class Project:
    """A project that was rendered, written or not. The fields are those of `new --json`; see `commands/new.py`."""

    destination: str
    answers: Mapping[str, Any]
    command: str
    files: list[str]
    next: list[str]
    template: Origin
    follows: Follows
    job: list[tuple[str, str]]  # what a job is asked for with, labelled
    torch: str  # which build of torch to take, in words; empty where nothing is to be said
    adoption: Adoption | None = None

    def adopted(self, adoption: Adoption) -> Project:
        """Return the project as one beside code that exists, which takes other commands to go on."""
        return replace(self, next=adoption.next, adoption=adoption)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `new --json` prints."""
        fields = {"version": 1, **asdict(self)}
        adoption = fields.pop("adoption")
        del fields["job"], fields["torch"]  # they stand among the answers and the commands
        return {**fields, **(adoption or {})}


def describe(
    dest: str, destination: Path, staged: Path, files: Sequence[str], rendered: Rendered, command: str
) -> Project:
    """Return the project in `staged`. `dest` is the destination as it was typed.

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
    scripts = [name for name in files if name.startswith("launch/") and name.endswith(STARTED)]
    follows = Follows(
        package=facts.get("package"),
        tracker=None if "command" in rendered.answers else facts.get("tracker"),
        world_size=_world_size(rendered.answers),
        max_restarts=facts.get("max_restarts"),
        clocks_s={clock: facts.get(name) for clock, name in CLOCKS.items()},
        scripts=scripts,
        place=_place(facts),
        needs=needs(facts),
        hangs=met_hangs(facts),
    )
    return Project(
        destination=str(destination),
        answers=rendered.answers,
        command=command,
        files=list(files),
        next=next_steps(dest, scripts, rendered.answers, facts),
        template=Origin(recorded["_src_path"], recorded["_commit"]),
        follows=follows,
        job=_job(facts, rendered.answers),
        torch=_torch_note(facts),
    )


def show(project: Project) -> None:
    """Print what follows from the answers, and the command that gives the same."""
    _output.rows("What follows from the answers", summary(project))
    _output.shell("The same without questions:", [project.command])


def show_changes(adoption: Adoption) -> None:
    """Print what else follows for code that exists: what is wrong in it, and which of its lines to change."""
    for path in adoption.kept:
        _output.note(f"kept: {path} exists, and stays as it is")
    _show_findings(adoption)
    must = [change for change in adoption.changes if change.must]
    may = [change for change in adoption.changes if not change.must]
    _output.say()
    done = f"{PATCH} changes them: `git apply {PATCH}`" if adoption.patch else "ddp-scaffold changes none of them"
    _output.say_filled(f"Lines of your own code that must change, in the order of work: {len(must)} ({done})")
    show_places(must)
    if adoption.unknown:
        _output.say()
        _output.say_filled(
            f"There is no patch of your loop, since this is not recognised: {'; '.join(adoption.unknown)}"
        )
    if may:
        _output.say()
        _output.say_filled(f"What may change as well: {len(may)} (`ddp-scaffold check` lists what is left)")
        show_places(may)
    if adoption.sketch:
        _output.commands("What the main function then looks like:", adoption.sketch)


def _show_findings(adoption: Adoption) -> None:
    if not adoption.findings:
        return
    _output.say()
    _output.say_filled(f"What `ddp-scaffold check` finds in it: {len(adoption.findings)}")
    for one in adoption.findings:
        _output.say()
        _output.say(f"  {one.file}:{one.line}  {one.rule} {one.severity}")
        _output.say_filled(f"    why      {one.message}", indent=13)
        _output.say_filled(f"    instead  {one.fix}", indent=13)


def show_places(changes: Sequence[Change]) -> None:
    """Print lines to change, each with why and what to write."""
    for change in changes:
        _output.say()
        _output.say(f"  {change.file}:{change.line}  {change.text}")
        _output.say_filled(f"    why      {change.why}", indent=13)
        _output.say_filled(f"    instead  {change.instead}", indent=13)


def show_end(project: Project, *, shown: bool, dry_run: bool) -> None:
    """Print what was written, or would be, and the commands to go on with; first the summary, unless it was shown."""
    if not shown:
        show(project)
    if project.adoption:
        show_changes(project.adoption)
    if dry_run:
        _output.commands(
            f"{len(project.files)} files would be written to {_output.near(project.destination)}:", project.files
        )
        return
    _output.shell(f"{len(project.files)} files written to {_output.near(project.destination)}. Next:", project.next)
    if not project.adoption and project.torch:
        _output.say()
        _output.say_filled(project.torch)
    if project.follows.needs and not project.adoption:
        _output.say()
        for need in project.follows.needs:
            _output.say_filled(f"Still needed: {need}")


def summary(project: Project) -> list[tuple[str, str]]:
    """Return labelled lines for a project."""
    follows, answers, files = project.follows, project.answers, project.files
    world = str(follows.world_size or "counted at the start: one a GPU, or 2 without GPUs")
    if "nodes" in answers:
        nodes, gpus = answers["nodes"], answers["gpus_per_node"]
        plural = "s" if nodes != 1 else "", "s" if gpus != 1 else ""
        world = f"{world} ({nodes} node{plural[0]} x {gpus} GPU{plural[1]})"
    metrics = (
        ""
        if "command" in answers
        else "runs/<id>/metrics.jsonl" + ("" if follows.tracker == "none" else f" and {follows.tracker}")
    )
    place = follows.place or {}
    old = place.get("verified_on") and is_old(datetime.date.fromisoformat(place["verified_on"]), datetime.date.today())
    warning = "; MORE THAN A YEAR AGO: check it with the site's pages" if old else ""
    where = f"{place['title']}, {place['status']}, verified {place['verified_on']}{warning}" if place else ""
    folders = Counter(name.partition("/")[0] if "/" in name else "top level" for name in files)
    rows = [
        ("place", where),
        ("still needed", "; ".join(follows.needs)),
        ("MAY HANG", "; ".join(follows.hangs)),
        *project.job,
        ("package", _package(answers)),
        ("starts", f"python {answers['command']}" if "command" in answers else ""),
        ("processes", world),
        ("clocks", " < ".join(f"{clock} {seconds} s" for clock, seconds in follows.clocks_s.items())),
        ("restarts", f"at most {follows.max_restarts}, from the last checkpoint"),
        ("metrics", "" if "command" in answers else metrics),
        ("scripts", ", ".join(follows.scripts) or "none"),
        ("files", f"{len(files)}: " + ", ".join(f"{folder} {count}" for folder, count in folders.items())),
        ("template", f"{project.template.source} at {project.template.commit}"),
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


def _world_size(answers: Mapping[str, Any]) -> int | None:
    """Return the number of processes, or None if they are counted when training starts."""
    if "nodes" in answers:
        return int(answers["nodes"]) * int(answers["gpus_per_node"])
    return int(answers["nproc"]) if str(answers.get("nproc")).isdecimal() else None


def _torch_note(facts: Mapping[str, Any]) -> str:
    """Return what to say of torch's builds, unless the commands say it or something else brings torch."""
    known = facts.get("known") or {}
    given = provided_by(facts, "torch") not in (None, "pip")
    if known.get("torch_index") or given or facts.get("container_image"):
        return ""
    return ROCM_NOTE if known.get("accelerator") == "rocm" else TORCH_NOTE


def _job(facts: Mapping[str, Any], answers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a job is asked for with; nothing where there is no scheduler."""
    if "walltime" not in answers:
        return []
    known = facts.get("known") or {}
    pbs = known.get("scheduler") == "pbs"
    required = bool((known.get("account") or {}).get("required"))
    return [
        ("account", answers.get("account") or ("none named yet" if required else "none named: your default")),
        *([] if "qos" not in answers else [("QoS", answers["qos"] or "none named: the cluster's default")]),
        ("queue" if pbs else "partition", answers.get("partition") or "none named: the cluster's default"),
        ("time", f"{answers['walltime']} for each job"),
    ]
