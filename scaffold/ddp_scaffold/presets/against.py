"""A preset held against the machine that this runs on: what agrees, what differs, what could not be looked at.

Only words of known form are taken from what tools print, and no name of a user or host: the result is made to be sent.
A login node says nothing about the GPUs and interfaces of compute nodes; those are looked at inside a job only.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .. import _output
from . import against_slurm
from .against_place import look_at_software
from .findings import Finding, Outcome, agrees_or_differs
from .probe import GPUS, NETWORK, NOT_OF_THE_NETWORK, SLURM, ask
from .schema import Preset

ISSUE = "https://github.com/ddp-scaffold/ddp-scaffold/issues/new?template=preset.yml"
Place = Literal["a compute node", "a login node", "a machine without a scheduler"]
COMMANDS = {
    **SLURM,
    "sinfo --version": ("sinfo", "--version"),
    "sacctmgr show qos": ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall"),
    "srun --help": ("srun", "--help"),
}
PBS = {"qstat -Q -f": ("qstat", "-Q", "-f")}
HARDWARE = {
    **GPUS,
    "nvidia-smi --query-gpu": ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    "rocm-smi --showproductname": ("rocm-smi", "--showproductname", "--showdriverversion"),
    "lspci": ("lspci",),
    **NETWORK,
}
# What no tool tells without sending something, or without the user's name.
NOT_LOOKED_AT = {
    "internet": "a connection would have to be tried",
    "account": "accounts name people and projects",
    "requeue": "only a job that is requeued shows it",
    "preemption": "only a job that is pushed out shows it",
}


@dataclass
class Held:
    """The findings about one preset on one machine."""

    preset: Preset
    place: Place
    probed_on: datetime.date
    findings: list[Finding] = field(default_factory=list)

    def counts(self) -> Counter[Outcome]:
        """Return how many findings each outcome has."""
        return Counter(finding.outcome for finding in self.findings)

    def exit_code(self) -> int:
        """Return 1 if anything differs, 3 if nothing could be compared, else 0."""
        counts = self.counts()
        return 1 if counts["differs"] else 0 if counts["agrees"] else 3

    def to_json(self) -> dict[str, Any]:
        """Return the object that `presets probe --json` prints."""
        return {
            "version": 1,
            "preset": self.preset.name,
            "verified_on": self.preset.verified_on,
            "probed_on": self.probed_on,
            "place": self.place,
            "findings": [asdict(finding) for finding in self.findings],
            "counts": dict(self.counts()),
        }


def hold(preset: Preset) -> Held:
    """Ask this machine what the preset says of it. A tool that is not there, hangs or fails is named as such."""
    in_job = any(name in os.environ for name in ("SLURM_JOB_ID", "PBS_JOBID"))
    scheduler = preset.scheduler.value
    here = any(shutil.which(name) for name in ("sinfo", "scontrol", "qstat", "pbsnodes"))
    place: Place = "a compute node" if in_job else "a login node" if here else "a machine without a scheduler"
    held = Held(preset, place, datetime.date.today())
    if scheduler != "none" and place == "a machine without a scheduler":
        held.findings.append(Finding("scheduler", "not looked at", scheduler, "there is no scheduler on this machine"))
        return held  # another machine: what is not there says nothing about the preset
    compute = place == "a compute node" or (scheduler == "none" and not here)
    commands = {**(COMMANDS if scheduler == "slurm" else PBS if scheduler == "pbs" else {})}
    said, silent = ask({**commands, **(HARDWARE if compute else {})})
    if scheduler == "slurm":
        held.findings += against_slurm.compare_slurm(preset, said, silent)
    elif scheduler == "pbs":
        held.findings += against_slurm.compare_pbs(preset, said, silent)
    held.findings += _gpus(preset, said, silent) if compute else _unseen(preset, place)
    held.findings += _interfaces(preset, said, silent) if compute else []
    held.findings += look_at_software(preset, said.get("srun --help"), compute)
    held.findings += [
        Finding(name, "not looked at", machine=why) for name, why in NOT_LOOKED_AT.items() if getattr(preset, name)
    ]
    return held


def show_held(held: Held) -> None:
    """Print the findings: what differs first. Plain text in a pipe, to be sent as it is."""
    preset = held.preset
    _output.say(f"{preset.name}, verified on {preset.verified_on}, held against {held.place} on {held.probed_on}")
    order: tuple[Outcome, ...] = ("differs", "agrees", "told", "not looked at")
    rows = [
        (each.outcome, each.field, each.preset, each.machine, each.by)
        for outcome in order
        for each in held.findings
        if each.outcome == outcome
    ]
    _output.table(("outcome", "field", "preset", "machine", "by"), rows)
    counts = held.counts()
    _output.say(", ".join(f"{counts[outcome]} {outcome}" for outcome in order))
    if counts["differs"]:
        _output.note(f"send what differs, as it stands here: {ISSUE}")
    elif not counts["agrees"]:
        _output.note("nothing of this preset could be compared here: run it on that cluster, best inside a job")


def _unseen(preset: Preset, place: Place) -> list[Finding]:
    """Return the fields of compute nodes, which this place does not show."""
    names = ("gpu", "accelerator", "nccl_socket_ifname", "gloo_socket_ifname")
    why = f"{place} does not show it: run this inside a job"
    return [Finding(name, "not looked at", machine=why) for name in names if getattr(preset, name) is not None]


def _gpus(preset: Preset, said: Mapping[str, str], silent: list[str]) -> list[Finding]:
    """Compare the model of the GPUs, their kind, and on a machine without a scheduler their number."""
    found: list[Finding] = []
    names, driver, by = _models(said)
    if not names:
        lines = [line for line in silent if line.split(":")[0].split(" ")[0] in ("nvidia-smi", "rocm-smi", "lspci")]
        why = "; ".join(lines) or "no tool shows a GPU here"
        wanted = [name for name in ("accelerator", "gpu") if getattr(preset, name) and getattr(preset, name).value]
        return [Finding(name, "not looked at", machine=why) for name in wanted]
    kind = "cuda" if by.startswith("nvidia") else "rocm" if by.startswith("rocm") else ""
    if preset.accelerator and preset.accelerator.value and kind:
        found.append(agrees_or_differs("accelerator", preset.accelerator.value, kind, by))
    if preset.gpu:
        stated = preset.gpu.value
        words = set(re.findall(r"[A-Z]{1,4}[0-9]{1,4}[A-Z]?", stated))
        seen = " ".join(sorted(set(names)))
        same = any(re.search(rf"\b{re.escape(word)}\b", seen) for word in words)
        outcome: Outcome = "agrees" if same else "differs" if words else "told"
        found.append(Finding("gpu", outcome, stated, seen, by))
    if driver:
        found.append(Finding("driver", "told", "", driver, by))
    if preset.scheduler.value == "none" and preset.gpus_per_node.value:
        found.append(agrees_or_differs("gpus_per_node", preset.gpus_per_node.value, len(names), by))
    return found


def _models(said: Mapping[str, str]) -> tuple[list[str], str, str]:
    """Return the models of the GPUs, the driver's version, and the tool that told."""
    rows = re.findall(
        r"^([A-Za-z0-9][A-Za-z0-9 ._+-]{0,79}), *([0-9][0-9.]{0,19}) *$",
        said.get("nvidia-smi --query-gpu", ""),
        re.MULTILINE,
    )
    if rows:
        return [name for name, _ in rows], rows[0][1], "nvidia-smi"
    text = said.get("nvidia-smi -L", "")
    if listed := re.findall(r"^GPU \d+: ([A-Za-z0-9][A-Za-z0-9 ._+-]{0,79}) \(UUID", text, re.MULTILINE):
        return listed, "", "nvidia-smi -L"
    text = said.get("rocm-smi --showproductname", "")
    # "Card series" until ROCm 6.0, then "Card Series" (ROCm/rocm_smi_lib python_smi_tools/rocm_smi.py).
    series = re.findall(r"Card [Ss]eries:[ \t]*([A-Za-z0-9][A-Za-z0-9 ._+/\[\]-]{0,79})", text)
    version = re.search(r"Driver version:[ \t]*([0-9][0-9.]{0,19})", text)
    if series:
        return series, version[1] if version else "", "rocm-smi"
    maker = "(?:NVIDIA|Advanced Micro Devices)"
    pattern = rf"(?:3D|VGA compatible|Display) controller: ({maker}[A-Za-z0-9 ,.\[\]/_+-]{{0,79}})"
    return re.findall(pattern, said.get("lspci", "")), "", "lspci"


def _interfaces(preset: Preset, said: Mapping[str, str], silent: list[str]) -> list[Finding]:
    """Compare the names of interfaces with those that this node has, by NCCL's rules and by gloo's."""
    found = re.findall(r"^\d+: +([A-Za-z0-9_.-]{1,15})(?:@\S+)? +inet ", said.get("ip addr", ""), re.MULTILINE)
    names = [name for name in dict.fromkeys(found) if not NOT_OF_THE_NETWORK.match(name)]
    findings = []
    for title in ("nccl_socket_ifname", "gloo_socket_ifname"):
        fact: Any = getattr(preset, title)
        if fact is None:
            continue
        if not names:
            why = next((line for line in silent if line.startswith("ip")), "ip addr shows no interface of a network")
            findings.append(Finding(title, "not looked at", str(fact.value or "left open"), why))
        elif fact.value is None or fact.value == "route":
            findings.append(Finding(title, "told", fact.value or "left open", ", ".join(names), "ip addr"))
        else:
            fits = _fits(fact.value, names, exact=title == "gloo_socket_ifname")
            findings.append(Finding(title, "agrees" if fits else "differs", fact.value, ", ".join(names), "ip addr"))
    return findings


def _fits(wanted: str, names: list[str], exact: bool) -> bool:
    """Tell whether NCCL's selection (a prefix, =exact, ^excluded) or gloo's (exact names) finds an interface here."""
    parts = wanted.lstrip("^=").split(",")
    if exact or wanted.startswith("="):
        return any(name in parts for name in names)
    if wanted.startswith("^"):
        return any(not name.startswith(tuple(parts)) for name in names)
    return any(name.startswith(tuple(parts)) for name in names)
