"""The environment of ranks held against what a preset promises: a list of texts, empty if all is as promised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from sandbox import BUILT_IN, IMAGE, PACKAGES, Sandbox, interface, product

from ddp_scaffold.presets.schema import EnvLine, Preset

RANK_VARIABLES = {  # the rank, and the rank within its node: launcher.py of a project reads them
    "srun": ("SLURM_PROCID", "SLURM_LOCALID"),
    "torchrun": ("RANK", "LOCAL_RANK"),
    "pals": ("PMI_RANK", "PMI_LOCAL_RANK"),
    "hydra": ("PMI_RANK", "MPI_LOCALRANKID"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def broken_promises(
    sandbox: Sandbox, ranks: list[dict[str, str]], numbered_by: str, per_node: int, cpus: int, partition: str
) -> list[str]:
    """Return what is not as promised, each once, whatever the number of ranks."""
    found = [text for env in ranks for text in _of_rank(sandbox, env, cpus, partition)]
    found += _numbers(sandbox, ranks, numbered_by, per_node)
    return sorted(set(found))


def refused(preset: Preset, options: dict[str, str], nodes: int, walltime: str) -> Iterator[str]:
    """Yield why the scheduler would not take a job, by the limits of the preset and by what it forbids."""
    partition = options.get("--partition", options.get("-q"))
    qos = options.get("--qos")
    for name, by in ((partition, "partition"), (qos, "qos")):
        limits = [fact.value for fact in preset.limits if fact.value.by == by]
        fitting = [limit for limit in limits if limit.name == name]
        if name is None or not limits:
            continue
        if not fitting:
            yield f"there is no {by} {name}"
        elif not any(limit.min_nodes <= nodes <= (limit.max_nodes or nodes) for limit in fitting):
            yield f"{by} {name} does not take {nodes} nodes"
        elif not any(seconds(walltime) <= seconds(limit.max_walltime or "999-00:00:00") for limit in fitting):
            yield f"{by} {name} does not take {walltime}"
    forbidden = preset.forbidden_flags.value if preset.forbidden_flags else []
    yield from (f"{flag} is refused there" for flag in forbidden if flag in options)
    if preset.account and preset.account.value.required and not {"--account", "-A"} & set(options):
        yield "no account is named"


def seconds(walltime: str) -> int:
    """Return a time of a preset or a script in seconds."""
    days, _, clock = walltime.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + rest


def applying(preset: Preset, nodes: int, partition: str) -> Iterator[EnvLine]:
    """Yield the lines of nccl.env that count on a site whose plugin has no version that can be read."""
    for line in preset.env:
        words = re.sub("[^A-Za-z0-9]", " ", product(preset)).lower().split()
        if (
            (line.min_nodes or 1) <= nodes <= (line.max_nodes or nodes)
            and line.partition in (None, partition)
            and (line.gpu is None or line.gpu.lower() in words)
            and not (line.min_plugin or line.max_plugin)
        ):
            yield line


def _of_rank(sandbox: Sandbox, env: dict[str, str], cpus: int, partition: str) -> Iterator[str]:
    preset, nodes = sandbox.preset, len(sandbox.nodes)
    wanted = "image" if sandbox.container else "venv"
    if env["SANDBOX_PYTHON"] != wanted:
        yield f"python is that of the {env['SANDBOX_PYTHON']}, not of the {wanted}"
    if sandbox.container and f"{sandbox.project}/{PACKAGES}" not in env.get("PYTHONPATH", "").split(":"):
        yield "the packages of .venv-image do not reach the ranks"
    promised = {"OMP_NUM_THREADS": str(cpus), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    promised |= {line.name: line.value for line in applying(preset, nodes, partition)}
    if preset.nccl_socket_ifname and preset.nccl_socket_ifname.value:
        promised["NCCL_SOCKET_IFNAME"] = preset.nccl_socket_ifname.value
    gloo = preset.gloo_socket_ifname.value if preset.gloo_socket_ifname else None
    promised["GLOO_SOCKET_IFNAME"] = gloo if gloo and gloo != "route" else interface(preset)
    for name, value in promised.items():
        if name in IMAGE and sandbox.container:
            continue
        expanded = re.sub(r"\$([A-Za-z_][A-Za-z0-9_]*)", lambda match: env.get(match[1], ""), value)
        if env.get(name) != expanded:
            yield f"{name} is {env.get(name, 'not set')}, not {expanded}"
    suffix = preset.master_suffix.value if preset.master_suffix else ""
    by_ip = preset.master_addr is not None and preset.master_addr.value == "first-host-ip"
    master = "10.0.0.1" if by_ip else f"{sandbox.nodes[0]}{suffix}"
    if env.get("MASTER_ADDR") != master:
        yield f"MASTER_ADDR is {env.get('MASTER_ADDR', 'not set')}, not {master}"
    if not re.fullmatch("[1-9][0-9]{3,4}", env.get("MASTER_PORT", "")):
        yield f"MASTER_PORT is {env.get('MASTER_PORT', 'not set')}"
    if any(name.startswith("SLURM_CPU_BIND") for name in env):
        yield "SLURM_CPU_BIND of the shell that submitted reaches the ranks"
    yield from _plugin(sandbox, env, promised)
    order = ",".join(map(str, preset.gpu_order.value)) if preset.gpu_order else ""
    devices = env.get("CUDA_VISIBLE_DEVICES") or env.get("ROCR_VISIBLE_DEVICES") or ""
    if order and devices != order and not devices.isdigit():  # a single one is the scheduler's choice
        yield f"the GPUs are {devices or 'in no order'}, not {order}"


def _plugin(sandbox: Sandbox, env: dict[str, str], promised: dict[str, str]) -> Iterator[str]:
    """A network that is forced needs its plugin where the loader looks, or NCCL ends at its init."""
    net = env.get("NCCL_NET", promised.get("NCCL_NET", ""))
    paths = env.get("LD_LIBRARY_PATH", "").split(":")
    place = sandbox.site.plugin_from if (sandbox.site.plugin_from or "").startswith("/") else None
    if net and net not in BUILT_IN and not {f"{sandbox.root}/plugin", place} & set(paths):
        yield f"NCCL_NET={net} is forced, and nothing puts a plugin on the library path"


def _numbers(sandbox: Sandbox, ranks: list[dict[str, str]], numbered_by: str, per_node: int) -> Iterator[str]:
    rank, local = RANK_VARIABLES[numbered_by]
    size = per_node * len(sandbox.nodes)
    if len(ranks) != size:
        yield f"{len(ranks)} ranks have started, not {size}"
    numbers = sorted(int(env.get(rank, "-1")) for env in ranks)
    if numbers != list(range(len(ranks))):
        yield f"{rank} has the values {numbers}"
    places = Counter((env["SANDBOX_HOST"], env.get(local)) for env in ranks)
    hosts = {host for host, _ in places}
    if hosts != set(sandbox.nodes) or len(places) != len(ranks):
        yield f"ranks and nodes do not fit: {len(places)} places on {sorted(hosts)}"
    if len({env.get("MASTER_PORT") for env in ranks}) > 1:
        yield "ranks have different MASTER_PORT"
