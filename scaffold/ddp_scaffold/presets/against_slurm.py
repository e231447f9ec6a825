"""Partitions, QOS, limits and nodes of a preset, held against what Slurm or PBS prints here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from .findings import Finding, agrees_or_differs
from .probe_slurm import NAME, NO_LIMIT, groups, walltime
from .schema import Limit, Preset


def compare_slurm(preset: Preset, said: Mapping[str, str], silent: Sequence[str]) -> Iterator[Finding]:
    """Yield what Slurm's tools say about the preset. Lines of another form than Slurm's are not believed."""
    if version := re.search(r"^slurm(?:-wlm)? ([0-9][0-9.]{1,15})", said.get("sinfo --version", "")):
        yield Finding("scheduler", "agrees", "slurm", f"Slurm {version[1]}", "sinfo --version")
    else:
        yield Finding("scheduler", "not looked at", "slurm", _why(silent, "sinfo"))
    text = said.get("scontrol show partition", "")
    partitions = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines()]
    by_name = {each["PartitionName"]: each for each in partitions if NAME.fullmatch(each.get("PartitionName", ""))}
    yield from _partitions(preset, by_name, _why(silent, "scontrol show partition"))
    yield from _nodes(preset, said, silent)
    rows = [line.split("|") for line in said.get("sacctmgr show qos", "").splitlines()]
    yield from _qos(preset, {row[0]: row[1] for row in rows if len(row) == 2 and NAME.fullmatch(row[0])}, silent)


def compare_pbs(preset: Preset, said: Mapping[str, str], silent: Sequence[str]) -> Iterator[Finding]:
    """Yield what PBS says about the queues of the preset."""
    text = said.get("qstat -Q -f", "")
    queues = {}
    for part in re.split(r"^Queue: ", text, flags=re.MULTILINE)[1:]:
        name = part.partition("\n")[0].strip()
        if NAME.fullmatch(name):
            queues[name] = dict(re.findall(r"^ +([A-Za-z_.]+) = (\S+)", part, re.MULTILINE))
    if not queues:
        yield Finding("scheduler", "not looked at", "pbs", _why(silent, "qstat"))
    else:
        yield Finding("scheduler", "agrees", "pbs", "PBS", "qstat -Q -f")
    for limit in _limits(preset, "partition"):
        queue = queues.get(limit.name)
        if not queues:
            yield Finding(f"limits.{limit.name}", "not looked at", machine=_why(silent, "qstat"))
        elif queue is None:
            yield Finding(f"limits.{limit.name}", "differs", "a queue", "no such queue", "qstat -Q -f")
        elif queue.get("enabled") == "False" or queue.get("started") == "False":
            yield Finding(f"limits.{limit.name}", "differs", "a queue", "it takes or starts no jobs", "qstat -Q -f")
        else:
            longest = queue.get("resources_max.walltime", "")
            yield _longest(limit, walltime(longest), "qstat -Q -f", known=bool(longest))


def _partitions(preset: Preset, found: Mapping[str, Mapping[str, str]], why: str) -> Iterator[Finding]:
    by = "scontrol show partition"
    default = preset.partition.value if preset.partition else None
    limits = _limits(preset, "partition")
    if not found:
        names = {f"limits.{limit.name}": "" for limit in limits} | ({"partition": default} if default else {})
        yield from (Finding(name, "not looked at", stated, why) for name, stated in names.items())
        return
    if default:
        there = default in found
        yield Finding("partition", "agrees" if there else "differs", default, "there" if there else "gone", by)
    for limit in limits:
        partition = found.get(limit.name)
        title = f"limits.{limit.name}"
        if partition is None:
            yield Finding(title, "differs", "a partition", "no such partition", by)
            continue
        state = partition.get("State", "UP")
        if state in ("DOWN", "DRAIN", "INACTIVE"):
            yield Finding(title, "differs", "a partition", f"its state is {state}", by)
        longest = partition.get("MaxTime", "")
        endless = longest.upper() in NO_LIMIT
        yield _longest(limit, walltime(longest), by, known=endless or walltime(longest) is not None)
        most = partition.get("MaxNodes", "")
        if limit.max_nodes and re.fullmatch("[1-9][0-9]{0,5}", most) and int(most) < limit.max_nodes:
            yield Finding(f"{title}.max_nodes", "differs", str(limit.max_nodes), most, by)
    unnamed = sorted(set(found) - {limit.name for limit in limits})
    if limits and unnamed:
        yield Finding("limits", "told", "", f"also: {', '.join(unnamed[:20])}", by)


def _longest(limit: Limit, seen: str | None, by: str, known: bool) -> Finding:
    """Compare the longest time of a job. `seen` is None for no limit; a shorter one in a QOS does not show here."""
    title = f"limits.{limit.name}.max_walltime"
    if not known:
        return Finding(f"limits.{limit.name}", "agrees", "there", "there", by)
    if limit.max_walltime is None:
        return Finding(title, "told", "", seen or "no limit", by)
    stated = walltime(limit.max_walltime)
    if seen is None or (stated and _seconds(stated) < _seconds(seen)):
        return Finding(title, "told", limit.max_walltime, f"{seen or 'no limit'}; a QOS may be shorter", by)
    return agrees_or_differs(title, stated, seen, by)


def _nodes(preset: Preset, said: Mapping[str, str], silent: Sequence[str]) -> Iterator[Finding]:
    """Compare GPUs and CPUs of the nodes of the default partition, or of those of the limits."""
    wanted = {preset.partition.value} if preset.partition and preset.partition.value else set()
    wanted = wanted or {limit.name for limit in _limits(preset, "partition")}
    found = [group for group in groups(said.get("sinfo", "")) if group.gpus]
    found = [group for group in found if not wanted or group.partition in wanted]
    counts = {
        "gpus_per_node": (preset.gpus_per_node, {str(group.gpus) for group in found}),
        "cpus_per_node": (preset.cpus_per_node, {group.cpus.rstrip("+") for group in found}),
    }
    for title, (fact, seen) in counts.items():
        if fact is None or fact.value is None:
            continue
        if not seen:
            why = _why(silent, "sinfo") if "sinfo" not in said else "sinfo shows no GPUs in these partitions"
            yield Finding(title, "not looked at", str(fact.value), why)
        else:
            outcome = "agrees" if str(fact.value) in seen else "differs"
            yield Finding(title, outcome, str(fact.value), " or ".join(sorted(seen)), "sinfo")  # type: ignore[arg-type]


def _qos(preset: Preset, found: Mapping[str, str], silent: Sequence[str]) -> Iterator[Finding]:
    by = "sacctmgr show qos"
    default = preset.qos.value if preset.qos else None
    limits = _limits(preset, "qos")
    for name in dict.fromkeys([*([default] if default else []), *(limit.name for limit in limits)]):
        if not found:
            yield Finding(f"qos.{name}", "not looked at", "", _why(silent, by))
        elif name not in found:
            yield Finding(f"qos.{name}", "differs", "a QOS", "no such QOS", by)
        else:
            limit = next((limit for limit in limits if limit.name == name), Limit(name=name, by="qos"))
            longest = walltime(found[name])
            yield _longest(limit, longest, by, known=longest is not None)


def _limits(preset: Preset, by: str) -> list[Limit]:
    """Return the limits of partitions or of QOS; of those with one name, which count nodes, the longest."""
    longest: dict[str, Limit] = {}
    for limit in (fact.value for fact in preset.limits if fact.value.by == by):
        before = longest.get(limit.name)
        if before is None or _seconds(limit.max_walltime or "") > _seconds(before.max_walltime or ""):
            longest[limit.name] = limit
    return list(longest.values())


def _seconds(clock: str) -> int:
    days, _, rest = clock.rpartition("-")
    if not re.fullmatch(r"[0-9]+:[0-9]{2}:[0-9]{2}", rest):
        return 0
    hours, minutes, seconds = map(int, rest.split(":"))
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def _why(silent: Sequence[str], tool: str) -> str:
    """Return why a tool said nothing that can be used."""
    program = tool.split(" ")[0]
    lines = [line for line in silent if line.startswith(tool)] or [line for line in silent if line.startswith(program)]
    return lines[0] if lines else f"{tool}: what it prints cannot be read"
