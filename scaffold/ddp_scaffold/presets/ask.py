"""The questions of `presets init`: what a machine cannot tell, or did not."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from .._errors import fill
from .checks import LAUNCHERS
from .draft import ANSWERED, NOT_KNOWN, Draft
from .load import find
from .probe_python import NO_MODULES

REFUSED = len("Error: ")  # what typer puts before the reason
LONG = 56  # columns of a question that leaves room for its default and an answer in the same line
NOT_ASKED_FOR = "none"  # the answer to gpu_request that stands for null
REQUESTS = {
    "slurm": ("gpus-per-node", "gres", "gpus-per-task", "gpus", NOT_ASKED_FOR),
    "pbs": ("ngpus", NOT_ASKED_FOR),
}
SCHEDULERS = ("none", "slurm", "pbs", "kubernetes")


@dataclass(frozen=True)
class Ask:
    """One question; `choices` are empty for free text. `default` is taken for an empty answer; None: left open."""

    field: str
    text: str
    choices: Sequence[str] = ()
    default: str = ""
    number: bool = False


def ask_open(draft: Draft) -> None:
    """Ask for what the draft does not hold. Raises typer.Abort if the input ends."""
    typer.echo("\nWhat is still open; an empty answer leaves it so, or takes the one in [ ].")
    if "scheduler" not in draft.facts:
        _ask(draft, Ask("scheduler", "Scheduler", SCHEDULERS, "none"))
    scheduler = draft.value("scheduler")
    if scheduler == "none":
        _ask(draft, Ask("scratch", "Directory for caches, like /scratch/$USER"))
        return
    if scheduler == "kubernetes":
        for question in (
            Ask("partition", "Local queue of Kueue"),
            Ask("gpus_per_node", "GPUs on each node", number=True),
            Ask("cpus_per_task", "CPU cores for each GPU", number=True),
        ):
            if draft.value(question.field) is None:
                _ask(draft, question)
        return
    launchers = LAUNCHERS[scheduler]
    place = "Queue" if scheduler == "pbs" else "Partition"
    questions = [
        Ask("partition", f"{place} for GPU jobs{_limited(draft)}"),
        Ask("gpus_per_node", "GPUs on each node", number=True),
        Ask("cpus_per_task", "CPUs for each GPU, as the scheduler counts them", number=True),
    ]
    if len(launchers) > 1:
        questions.append(Ask("launcher", "What starts the ranks", launchers, launchers[0]))
    requests = REQUESTS[scheduler]
    questions += [
        Ask("gpu_request", "How a job asks for GPUs", requests, requests[0]),
        Ask("nccl_socket_ifname", f"Interface for NCCL on compute nodes{_seen(draft)}"),
        Ask("account", "Must a job name an account", ("yes", "no")),
        Ask("modules", f"Modules that a job loads{_pythons(draft)}"),
        Ask("internet", "Internet on compute nodes", ("open", "nat", "proxy", "none")),
        Ask("scratch", "Directory for caches, like /scratch/$USER or $SCRATCH"),
    ]
    for question in questions:
        if draft.value(question.field) is None and not (question.field == "modules" and NO_MODULES in draft.not_found):
            _ask(draft, question)
        if question.field == "partition":
            _ask_longest_time(draft)


def _ask_longest_time(draft: Draft) -> None:
    """Ask how long a job may run in the partition that is named, unless that is known of it."""
    name = draft.value("partition")
    if name is None or any(limit["value"]["name"] == name for limit in draft.limits):
        return

    def take(text: str) -> str:
        if not (text := text.strip()):
            draft.missing(f"limits: {NOT_KNOWN}")
            return text
        try:
            draft.add("limits", {"name": name, "max_walltime": text}, ANSWERED, "seen")
        except ValueError as error:
            raise typer.BadParameter("write it as 24:00:00, or 2-00:00:00 for two days") from error
        return text

    typer.prompt(f"Longest time of a job in {name}, like 24:00:00", default="", show_default=False, value_proc=take)


def settle(draft: Draft) -> None:
    """Choose the preset that the draft extends, and make the fields fit it that depend on the scheduler."""
    scheduler = draft.value("scheduler") or "none"
    bases = {"none": "local", "slurm": "generic-slurm", "pbs": "generic-pbs", "kubernetes": "generic-kubernetes"}
    draft.extends = bases[scheduler]
    if draft.value("accelerator") == "rocm" and scheduler == "kubernetes":
        draft.extends = "generic-kubernetes-amd"
    if scheduler == "pbs":
        draft.add("launcher", "mpiexec", "PBS has no launcher of its own; MPI's is what its sites use", "inferred")
        if find(draft.extends) is None:
            draft.extends = "generic-slurm"
            if "gpu_request" not in draft.facts:
                draft.add("gpu_request", None, NOT_KNOWN, "inferred")


def _limited(draft: Draft) -> str:
    """Return the partitions that were found, for a question, as many as fit into its line."""
    names = ", ".join(dict.fromkeys(limit["value"]["name"] for limit in draft.limits))
    return f" ({textwrap.shorten(names, 40, placeholder=' ...')})" if names else ""


def _pythons(draft: Draft) -> str:
    """Return which modules of Python there are if python3 is too old, for a question."""
    lines = [line for line in draft.not_found if line.startswith("python: ")]
    return f" ({lines[0].removeprefix('python: ')})" if lines else ""


def _seen(draft: Draft) -> str:
    """Return what is known of the interfaces here, for a question."""
    fact = draft.facts.get("nccl_socket_ifname")
    return f" ({fact['source'].partition(';')[0]})" if fact else " (NCCL chooses if it is left open)"


def _ask(draft: Draft, question: Ask) -> None:
    """Ask one question, again if the schema does not allow the answer."""

    def take(text: str) -> str:
        text = text.strip()
        if not text:
            if question.field not in draft.facts:
                draft.missing(f"{question.field}: {NOT_KNOWN}")
            return text
        if question.choices:
            meant = [choice for choice in question.choices if choice.startswith(text)]
            if text not in meant and len(meant) != 1:
                raise typer.BadParameter(f"choose one of {', '.join(question.choices)}")
            text = text if text in meant else meant[0]
        try:
            draft.add(question.field, _value(question, text), ANSWERED, "seen")
        except ValueError as error:
            raise typer.BadParameter(fill(str(error), indent=REFUSED, first=REFUSED)) from error
        return text

    choices = f" ({', '.join(question.choices)})" if question.choices else ""
    text = fill(f"{question.text}{choices}", indent=2)
    text += "\n " if len(text.splitlines()[-1]) > LONG else ""  # the answer has a line of its own
    typer.prompt(text, default=question.default, show_default=bool(question.default), value_proc=take)


def _value(question: Ask, text: str) -> Any:
    """Return the value that an answer stands for. Raises ValueError if it is no number where one is needed."""
    if question.number:
        if not text.isdecimal() or not text.isascii() or len(text) > 6:
            raise ValueError("that is not a whole number")
        return int(text)
    if question.field == "modules":
        return text.split()
    if question.field == "account":
        return {"required": text == "yes"}
    return None if question.field == "gpu_request" and text == NOT_ASKED_FOR else text
