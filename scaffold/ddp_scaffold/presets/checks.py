"""What no single field of a preset shows: fields that contradict each other, or what the scripts do with them."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator

from .schema import EnvLine, Preset

LAUNCHERS = {
    "none": ("torchrun",),
    "slurm": ("srun", "torchrun", "ibrun"),
    "pbs": ("mpiexec",),
    "kubernetes": ("torchrun",),
    "skypilot": ("torchrun",),
}
# What pods alone have.
OF_PODS = (
    *("gpu_resource", "pod_resources", "pod_annotations", "node_selector"),
    *("tolerations", "capabilities", "host_paths", "sidecar"),
)
# What SkyPilot alone is asked for.
OF_SKYPILOT = ("sky_infra", "sky_accelerator", "sky_spot", "sky_multi_node", "sky_network_tier", "sky_store")

# What one option of Slurm is called in short: a site forbids it under either name.
SHORT = {
    "-A": "--account",
    "-B": "--extra-node-info",
    "-C": "--constraint",
    "-c": "--cpus-per-task",
    "-G": "--gpus",
    "-J": "--job-name",
    "-m": "--distribution",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-w": "--nodelist",
    "-x": "--exclude",
}
# What the batch script writes itself, mostly from answers: of two lines, one would be lost in silence.
WRITTEN = {
    *("--account", "--cpus-per-task", "--job-name", "--nodes", "--ntasks", "--ntasks-per-node", "--open-mode"),
    *("--output", "--partition", "--qos", "--requeue", "--signal", "--time"),
}
INTERFACES = {"NCCL_SOCKET_IFNAME": "nccl_socket_ifname", "GLOO_SOCKET_IFNAME": "gloo_socket_ifname"}

# What an account pattern may be: alternatives of single characters and classes, each so many times, and at most three
# of them any number of times. `re` tries out every way to match, and a preset may come from anywhere: of these there
# are few. The template has the same expression, in questions/account.jinja.
_ONE = r"(?:[A-Za-z0-9_.@-]|\\[dw.@-]|\[\^?(?:[A-Za-z0-9_.@-]|\\[dw.@-])+\])"
_FIXED = rf"(?:{_ONE}(?:\{{[0-9]{{1,2}}\}})?)*"
_OPEN = rf"{_ONE}(?:[*+?]|\{{[0-9]{{0,2}},[0-9]{{0,2}}\}})"
_ALTERNATIVE = rf"\^?{_FIXED}(?:{_OPEN}{_FIXED}){{0,3}}\$?"
SIMPLE = re.compile(rf"{_ALTERNATIVE}(?:\|{_ALTERNATIVE})*")
NOT_SIMPLE = (
    "must be of characters, classes like [a-z], \\d or \\w, counts like {4}, at most three of * + ? {2,4} in each"
    " alternative, and | between alternatives; write groups out: ab-[0-9]+|cd-[0-9]+"
)


def contradictions(preset: Preset) -> Iterator[tuple[str, str]]:
    """Yield every contradiction in a preset: the path of the field to look at, and the reason."""
    scheduler, launcher = preset.scheduler.value, preset.launcher.value
    if launcher not in LAUNCHERS[scheduler]:
        yield "launcher.value", f"with scheduler {scheduler} it must be {' or '.join(LAUNCHERS[scheduler])}"
    yield from _gpus(preset)
    yield from _options(preset)
    yield from _limits(preset)
    yield from _account(preset)
    yield from _network(preset)
    yield from _environment(preset)
    for name in OF_PODS:
        if scheduler != "kubernetes" and getattr(preset, name) is not None:
            yield name, "is not used: only Kubernetes has pods"
    for name in OF_SKYPILOT:
        if scheduler != "skypilot" and getattr(preset, name) is not None:
            yield name, "is not used: only SkyPilot rents"
    container = preset.container.value if preset.container else None
    if container and not any("{image}" in word for word in [*container.srun_flags, *container.command]):
        yield "container.value", "no word holds {image}: the image that is asked for would not be used"


def future(preset: Preset, today: datetime.date) -> Iterator[tuple[str, str]]:
    """Yield the days that are still to come. Only `presets check` asks: a wrong clock must not disable a preset."""
    latest = today + datetime.timedelta(days=1)  # it may be tomorrow already where the file was written
    for field, value in preset:
        facts = {f"{field}.{number}": item for number, item in enumerate(value)} if isinstance(value, list) else {}
        for path, fact in {field: value, **facts}.items():
            day = value if field == "verified_on" else getattr(fact, "verified_on", None)
            if day is not None and day > latest:
                yield path if field == "verified_on" else f"{path}.verified_on", f"{day} is in the future"


def _gpus(preset: Preset) -> Iterator[tuple[str, str]]:
    gpus = preset.gpus_per_node.value
    for name, fact in (("gpu_order", preset.gpu_order), ("cpu_masks", preset.cpu_masks)):
        if fact is None:
            continue
        if gpus is None:
            yield f"{name}.value", "needs gpus_per_node: it has one entry for each of them"
        elif len(fact.value) != gpus:
            yield f"{name}.value", f"has {len(fact.value)} entries for {gpus} GPUs a node"
    order = preset.gpu_order.value if preset.gpu_order else []
    if len(set(order)) < len(order):
        yield "gpu_order.value", "names a GPU twice"


def _options(preset: Preset) -> Iterator[tuple[str, str]]:
    slurm = preset.scheduler.value == "slurm"
    forbidden = {_long(flag, slurm) for flag in (preset.forbidden_flags.value if preset.forbidden_flags else ())}
    request = preset.gpu_request.value if preset.gpu_request else None
    if request is not None and preset.scheduler.value == ("slurm" if request == "ngpus" else "pbs"):
        yield "gpu_request.value", f"{request} is an option of the other scheduler, not of {preset.scheduler.value}"
    if preset.chunk is not None and preset.scheduler.value != "pbs":
        yield "chunk", "is not used: only PBS has chunks"
    if request is not None and f"--{request}" in forbidden:
        yield "gpu_request.value", f"asks with --{request}, which is among the forbidden_flags"
    for name, fact in (("directives", preset.directives), ("launch_flags", preset.launch_flags)):
        for number, option in enumerate(fact.value if fact else ()):
            flag = _long(option, slurm)
            if flag in forbidden:
                yield f"{name}.value.{number}", f"{option} is among the forbidden_flags"
            if slurm and name == "directives" and flag in WRITTEN:
                yield f"{name}.value.{number}", f"{option}: the batch script has a line for {flag} already"


def _long(option: str, slurm: bool) -> str:
    """Return the name of an option without its value, of Slurm in the long form."""
    name = re.split("[= ]", option)[0]
    return SHORT.get(name, name) if slurm else name


def _limits(preset: Preset) -> Iterator[tuple[str, str]]:
    seen = set()
    for number, fact in enumerate(preset.limits):
        limit = fact.value
        if limit.max_nodes is not None and limit.min_nodes > limit.max_nodes:
            yield f"limits.{number}.value.min_nodes", f"{limit.min_nodes} is more than max_nodes, {limit.max_nodes}"
        key = (limit.by, limit.name, limit.min_nodes, limit.max_nodes)
        if key in seen:
            yield f"limits.{number}.value", f"{limit.by} {limit.name} stands there twice with the same nodes"
        seen.add(key)
    for by, default in (("partition", preset.partition), ("qos", preset.qos)):
        names = {fact.value.name for fact in preset.limits if fact.value.by == by}
        if default is not None and default.value is not None and names and default.value not in names:
            yield f"{by}.value", f"{default.value} is not among the limits, which name {', '.join(sorted(names))}"


def _account(preset: Preset) -> Iterator[tuple[str, str]]:
    account = preset.account.value if preset.account else None
    if account is None or account.pattern is None:
        return
    try:
        compiled = re.compile(account.pattern) if SIMPLE.fullmatch(account.pattern) else None
    except re.error as error:
        yield "account.value.pattern", f"is not a regular expression: {error}"
        return
    if compiled is None:
        yield "account.value.pattern", NOT_SIMPLE
    elif account.example is not None and not compiled.fullmatch(account.example):
        yield "account.value.example", f"{account.example} does not match the pattern {account.pattern}"


def _network(preset: Preset) -> Iterator[tuple[str, str]]:
    rule = preset.master_addr.value if preset.master_addr else "first-host"
    if rule == "first-host-suffix" and preset.master_suffix is None:
        yield "master_suffix", "is missing: master_addr is first-host-suffix"
    if preset.master_suffix is not None and rule == "first-host":
        yield "master_suffix", "is not used: master_addr is neither first-host-suffix nor first-host-ip"


def _environment(preset: Preset) -> Iterator[tuple[str, str]]:
    for group, lines in (("env", preset.env), ("recovery", preset.recovery)):
        for number, line in enumerate(lines):
            where = f"{group}.{number}"
            if line.min_nodes is not None and line.max_nodes is not None and line.min_nodes > line.max_nodes:
                yield f"{where}.min_nodes", f"{line.min_nodes} is more than max_nodes, {line.max_nodes}"
            if _least_plugin(line) > _most_plugin(line):
                yield f"{where}.min_plugin", f"{line.min_plugin} is more than max_plugin, {line.max_plugin}"
            if group == "env" and line.name in INTERFACES:
                yield f"{where}.name", f"belongs into the field {INTERFACES[line.name]}"
            earlier = (n for n in range(number) if _overlap(lines[n], line))
            if group == "env" and (first := next(earlier, None)) is not None:
                yield f"{where}.name", f"{line.name} is set by env.{first} already, and both can hold for one job"


def _overlap(one: EnvLine, other: EnvLine) -> bool:
    """Tell whether both lines can hold for one job."""
    most = min(line.max_nodes or 1_000_000 for line in (one, other))
    least = max(line.min_nodes or 1 for line in (one, other))
    elsewhere = one.partition and other.partition and one.partition != other.partition
    # Words of models: no name has two of them.
    another = one.gpu and other.gpu and one.gpu.lower() != other.gpu.lower()
    versions = max(map(_least_plugin, (one, other))) <= min(map(_most_plugin, (one, other)))
    return one.name == other.name and least <= most and versions and not elsewhere and not another


def _least_plugin(line: EnvLine) -> tuple[float, ...]:
    return _numbers(line.min_plugin) if line.min_plugin else ()


def _most_plugin(line: EnvLine) -> tuple[float, ...]:
    """Return what no version is above: 1.5 takes 1.5.3 in."""
    return (*(_numbers(line.max_plugin) if line.max_plugin else ()), math.inf)


def _numbers(version: str) -> tuple[float, ...]:
    return tuple(int(number) for number in version.split("."))
