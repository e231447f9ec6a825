"""What the wizard says about the place that was chosen: a few lines of facts, and how old they are."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .schema import Limit, Preset

OLD_DAYS = 365  # older facts come with a warning
EXAMPLE_IMAGE = "registry.example.com/"  # how the default answer of container_image begins, for pods
EXAMPLE_STORE = re.compile(r"[a-z0-9]+://my-bucket/.*|my-volume")  # the default answer of runs_store
SHOWN = 4  # so many limits; `presets show` prints all
HOW = {
    "torchrun": "srun starts one torchrun on each node",
    "srun": "srun starts one task a GPU",
    "ibrun": "ibrun starts one torchrun on each node",
    "mpiexec": "mpiexec starts one rank a GPU",
}
INTERNET = {
    "open": "open on compute nodes",
    "nat": "on compute nodes, behind NAT",
    "proxy": "on compute nodes, by a proxy",
    "none": "none on compute nodes",
}


def tell(data: Any, own: bool, today: datetime.date | None = None) -> tuple[str, list[tuple[str, str]]] | None:
    """Return a title and labelled lines for a merged preset as the template has it, or None if it is of another schema.

    `own` is for a preset file of the user's own, which `presets show` does not find by name.
    """
    from pydantic import ValidationError

    try:
        preset = Preset.model_validate(data)
    except ValidationError:  # of a fork: the questions tell what there is
        return None
    today = today or datetime.date.today()
    jobs = preset.scheduler.value != "none"  # a laptop has no compute nodes, whose network one has to know
    hangs = len(preset.hangs) + len(preset.recovery)
    lines = [
        ("hardware", _hardware(preset)),
        ("launcher", _launcher(preset)),
        ("interface", _interface(preset) if jobs else ""),
        ("internet", _open(preset.internet, INTERNET) if jobs else ""),
        ("limits", _limits([fact.value for fact in preset.limits])),
        ("hangs", f"{hangs} known, with what helps" if hangs else ""),
        ("status", f"{preset.status}, verified {preset.verified_on}, {age(preset.verified_on, today)}"),
    ]
    if not own:
        lines.append(("more", f"ddp-scaffold presets show {preset.name}"))
    if is_old(preset.verified_on, today):
        lines.append(("WARNING", "verified more than a year ago: check it with the site's pages before the first job"))
    return f"{preset.name}: {preset.title}", [(label, text) for label, text in lines if text]


def is_old(verified_on: datetime.date, today: datetime.date) -> bool:
    """Tell whether facts of that day need a warning."""
    return (today - verified_on).days > OLD_DAYS


def age(verified_on: datetime.date, today: datetime.date) -> str:
    """Return how long ago a day was, in words: 12 days ago, 4 months ago, 2 years ago."""
    days = (today - verified_on).days
    if days < 1:
        return "today"
    for unit, length in (("year", 365.25), ("month", 30.44), ("day", 1)):
        count = int(days / length)
        if count >= 2 or (count == 1 and unit != "year"):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "today"


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
    if account and account.get("required") and not facts.get("account"):
        submit, option = ("qsub", "-A ") if pbs else ("sbatch", "--account=")
        example = account.get("example") or "NAME"
        found.append(f"an account (--set account=..., or {submit} {option}{example} for each job)")
    if known.get("scheduler") == "skypilot" and EXAMPLE_STORE.fullmatch(str(facts.get("runs_store") or "")):
        found.append(
            "a bucket or volume of yours for runs (--set runs_store=s3://NAME/FOLDER, or launch/train.sky.yaml)"
        )
    if known.get("scheduler") == "kubernetes" and str(facts.get("container_image") or "").startswith(EXAMPLE_IMAGE):
        found.append("an image of yours (--set container_image=REGISTRY/NAME:1, or launch/kube.py submit --image)")
    return found + _too_many_gpus(facts) + _unprovided(facts)


def _too_many_gpus(facts: Mapping[str, Any]) -> list[str]:
    """Return which answers ask a partition's nodes for more GPUs than they have."""
    asked = facts.get("gpus_per_node") or 1
    for limit in (facts.get("known") or {}).get("limits") or ():
        most = limit.get("gpus_per_node")
        if (
            most
            and limit.get("by", "partition") == "partition"
            and limit["name"] == facts.get("partition")
            and asked > most
        ):
            cpus = f" --set cpus_per_task={limit['cpus_per_task']}" if limit.get("cpus_per_task") else ""
            return [f"{limit['name']} has {most} GPUs a node, not {asked}: --set gpus_per_node={most}{cpus}"]
    return []


def met_hangs(facts: Mapping[str, Any]) -> list[str]:
    """Return the open hangs of the place that a job with these answers runs into."""
    nodes = facts.get("nodes") or 1
    ranks = nodes * (facts.get("gpus_per_node") or 1)
    inside = bool(facts.get("container_image"))
    return [
        f"{hang['value']} ({hang['source']})"
        for hang in (facts.get("preset_data") or {}).get("hangs") or ()
        if hang.get("open")
        and (hang.get("min_ranks") or 1) <= ranks
        and (hang.get("min_nodes") or 1) <= nodes
        and hang.get("container") in (None, inside)
    ]


def provided_by(facts: Mapping[str, Any], what: str) -> str | None:
    """Return who provides a thing under these answers, as in `Need.by`, or None if that is left to the user."""
    listed = _listed(facts, what)
    return next((need["by"] for need in listed if _is_provided(need, facts)), None)


def _listed(facts: Mapping[str, Any], what: str) -> list[Mapping[str, Any]]:
    facts_of_needs = (facts.get("preset_data") or {}).get("needs") or ()
    return [fact["value"] for fact in facts_of_needs if fact["value"]["what"] == what]


def _is_provided(need: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    name, inside = need.get("name") or "", bool(facts.get("container_image"))
    if need["by"] == "module":
        loaded = str(facts.get("modules") or "").split()
        return any(not name or module == name or module.startswith(f"{name}/") for module in loaded)
    uenv = bool((facts.get("known") or {}).get("uenv"))
    given = {"site": True, "container": inside, "uenv": uenv and not inside, "pip": not inside, "user": False}
    return given[need["by"]]


def _unprovided(facts: Mapping[str, Any]) -> list[str]:
    """Return what the preset lists as needed and nothing among the answers brings, with the line to add."""
    found = []
    several = (facts.get("nodes") or 1) > 1
    for what in ("python", "torch", "plugin", "interface"):
        listed = _listed(facts, what)
        if not listed or provided_by(facts, what) or (what in ("plugin", "interface") and not several):
            continue
        ways = [_way(need) for need in listed]
        found.append(f"{what}: {', or '.join(dict.fromkeys(filter(None, ways)))}")
    container = (facts.get("known") or {}).get("container") or {}
    if facts.get("container_image") and container.get("packages"):
        found.append(f"the project's packages in the image: {container['packages']}")
    return found


def _way(need: Mapping[str, Any]) -> str:
    """Return how to have something that one may have from there."""
    if need.get("add"):
        return str(need["add"])
    name = need.get("name") or "NAME"
    return {"module": f"--set modules='... {name}'", "container": f"--set container_image={name}"}.get(need["by"], "")


def _launcher(preset: Preset) -> str:
    if preset.scheduler.value == "none":
        return "torchrun starts the ranks, without a scheduler"
    if preset.scheduler.value == "kubernetes":
        return "kubernetes: torchrun starts the ranks of each pod"
    if preset.scheduler.value == "skypilot":
        return "skypilot: torchrun starts the ranks of each node that it rents"
    return f"{preset.scheduler.value}: {HOW[preset.launcher.value]}"


def _hardware(preset: Preset) -> str:
    gpus, cpus = preset.gpus_per_node.value, preset.cpus_per_task.value
    node = f"{gpus} GPU{'s' if gpus > 1 else ''} a node" if gpus else ""
    counted = ", ".join(part for part in (node, f"{cpus} CPUs a GPU" if cpus else "") if part)
    return ": ".join(part for part in (counted, preset.gpu.value if preset.gpu else "") if part)


def _interface(preset: Preset) -> str:
    nccl, gloo = preset.nccl_socket_ifname, preset.gloo_socket_ifname
    parts = []
    if nccl is not None:
        parts.append(f"NCCL {nccl.value or 'chooses'}")
    if gloo is not None:
        route = "the one on the route to the first node"
        parts.append(f"gloo {route if gloo.value == 'route' else gloo.value or 'chooses'}")
    return ", ".join(parts)


def _open(fact: Any, words: Mapping[str, str]) -> str:
    """Return the value of a fact in words; nothing where it is unknown."""
    return "" if fact is None or fact.value is None else words[fact.value]


def _limits(limits: Sequence[Limit]) -> str:
    shown = "; ".join(_limit(limit) for limit in limits[:SHOWN])
    return shown + (f"; and {len(limits) - SHOWN} more" if limits[SHOWN:] else "")


def _limit(limit: Limit) -> str:
    nodes = ""
    if limit.max_nodes is not None:
        one = limit.min_nodes == limit.max_nodes
        count = str(limit.max_nodes) if one else f"{limit.min_nodes} to {limit.max_nodes}"
        nodes = f"{count} node{'s' if limit.max_nodes > 1 else ''}"
    elif limit.min_nodes > 1:
        nodes = f"{limit.min_nodes} nodes or more"
    allowed = ", ".join(part for part in (nodes, limit.max_walltime or "") if part)
    return f"{limit.name}: {allowed}" if allowed else limit.name
