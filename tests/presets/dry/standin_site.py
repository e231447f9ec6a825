#!/usr/bin/env python3
"""Stand-ins for what starts ranks on a cluster: srun, mpiexec, ibrun, torchrun, the programs of containers.

They start the tasks on "nodes" that are all this machine, with the environment that tasks would have there, and refuse
options that the real tool does not have. `site.json` beside the links says what the site is like. Rules by source:

srun        environment of tasks: https://slurm.schedmd.com/srun.html (OUTPUT ENVIRONMENT VARIABLES)
pyxis       image variables win unless --container-env names them (github.com/NVIDIA/pyxis tests/env.bats); the working
            directory is the image's unless --container-workdir (tests/workdir.bats, pyxis_slurmstepd.c); of the host,
            only what --container-mounts names is there (github.com/NVIDIA/enroot conf/enroot.conf.in: the home
            directory is not mounted unless the site or --container-mount-home says so)
apptainer   host variables pass, but PATH and LD_LIBRARY_PATH; APPTAINERENV_ and SINGULARITYENV_ win
            (github.com/apptainer/apptainer-userdocs environment_and_metadata.rst); a site's script in the image's place
            of a command sets more, and runs what follows (UKGovernmentBEIS/isambard_containers, of adapt.sh)
CSCS's      taken to be like pyxis; mounts, directory and annotations are those of the user's EDF, not known here
shifter     image variables win over the host's unless --env names them; its modules prepend (github.com/NERSC/shifter
            src: siteEnvPrepend of a ShifterModule)
podman-hpc  only what --env names, and the image's (docs.podman.io podman-run --env)
PALS        passes the environment whole; --depth is a known option (polaris user guide)
Open MPI    gives remote ranks only what -x names (docs.open-mpi.org mpirun, -x)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SITE: dict[str, Any] = json.loads(Path(__file__).with_name("site.json").read_text())
ROOT = Path(SITE["root"])
# Long options of srun: https://slurm.schedmd.com/srun.html. Those of plugins are in site.json.
SRUN = {
    "account", "acctg-freq", "bb", "bbf", "bcast", "begin", "cluster-constraint", "clusters", "comment",
    "constraint", "contiguous", "core-spec", "cores-per-socket", "cpu-bind", "cpu-freq", "cpus-per-gpu",
    "cpus-per-task", "deadline", "dependency", "disable-status", "distribution", "error", "exact", "exclude",
    "exclusive", "export", "extra-node-info", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "hint", "immediate", "input", "interactive", "jobid", "job-name",
    "kill-on-bad-exit", "label", "licenses", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mpi", "multi-prog",
    "network", "nice", "no-allocate", "no-kill", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-node", "ntasks-per-socket", "open-mode", "output", "overcommit", "overlap", "partition",
    "preserve-env", "priority", "propagate", "pty", "qos", "quiet", "reservation", "signal", "sockets-per-node",
    "spread-job", "switches", "threads-per-core", "time", "tres-bind", "tres-per-task", "unbuffered", "uid",
    "verbose", "wait", "wckey",
}  # fmt: skip
FLAGS = {
    "exclusive", "exact", "label", "overlap", "unbuffered", "verbose", "container-mount-home",
    "no-container-mount-home", "no-container-remap-root", "container-remap-root", "no-container-entrypoint",
}  # fmt: skip
# Those that the script or a preset may give, and some more. PALS: argonne-lcf/user-guides; Hydra: MPICH 4; mpirun(1).
MPIEXEC = {
    "pals": {"n", "np", "ppn", "depth", "cpu-bind", "env", "hostfile", "hosts", "line-buffer", "no-vni", "mem-bind"},
    "hydra": {"n", "np", "ppn", "bind-to", "map-by", "env", "genv", "genvall", "hosts", "f", "cpu-bind"},
    "openmpi": {"n", "np", "map-by", "bind-to", "x", "mca", "hostfile"},
}


def fail(tool: str, text: str) -> None:
    print(f"{tool}: {text}", file=sys.stderr)
    sys.exit(1)


def options(words: list[str], known: set[str], tool: str) -> tuple[dict[str, list[str]], list[str]]:
    """Split a command line into options and the command; an option that the tool does not have is refused."""
    found: dict[str, list[str]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        if name not in known:
            fail(tool, f"unrecognized option '--{name}'")
        if not equals and name not in FLAGS:
            value = rest.pop(0)
        found.setdefault(name, []).append(value)
    return found, rest


def srun(words: list[str]) -> int:
    given, command = options(words, SRUN | set(SITE["srun_options"]) | FLAGS, "srun")
    nodes = SITE["hosts"]
    per_node = int(given.get("ntasks-per-node", [os.environ["SLURM_NTASKS_PER_NODE"]])[0])
    size = int(given.get("ntasks", [str(per_node * len(nodes))])[0])
    container = {name: values for name, values in given.items() if name.startswith(("container-", "environment"))}
    tasks = []
    for rank in range(size):
        node, local = divmod(rank, per_node)
        env = {
            **os.environ,
            "SANDBOX_HOST": nodes[node],
            "SLURMD_NODENAME": nodes[node],
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": str(size),
            "SLURM_STEP_NUM_NODES": str(len(nodes)),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_SRUN_OPTIONS": " ".join(words[: len(words) - len(command)]),
        }
        one = per_node > 1 and ("gpus-per-task" in given or SITE["sees"] == "one")
        env |= visible(str(local) if one else ",".join(map(str, range(SITE["gpus"]))))
        tasks.append((env, container))
    return start(command, tasks)


def visible(devices: str) -> dict[str, str]:
    """What Slurm's gres plugin sets: https://slurm.schedmd.com/gres.html#GPU_Management."""
    if not SITE["gpus"] or not SITE["asks_for_gpus"]:
        return {}
    names = ("CUDA_VISIBLE_DEVICES",) if SITE["accelerator"] != "rocm" else ("ROCR_VISIBLE_DEVICES",)
    return dict.fromkeys(names, devices)


def start(command: list[str], tasks: list[tuple[dict[str, str], dict[str, list[str]]]]) -> int:
    """Start all tasks and return the first code that is not 0, of the lowest rank."""
    running = []
    for env, container in tasks:
        where = Path.cwd()
        if "container-image" in container:
            env, where = in_pyxis(env, container)
        elif "environment" in container:
            env = {**env, **SITE["image_env"]}
            env["LD_LIBRARY_PATH"] = f"{SITE['plugin']}:{env['LD_LIBRARY_PATH']}"  # by the EDF's annotation
        running.append(subprocess.Popen(command, env=env, cwd=where, stdin=subprocess.DEVNULL))
    codes = [each.wait() for each in running]
    return next((code % 256 for code in codes if code), 0)


def in_pyxis(env: dict[str, str], given: dict[str, list[str]]) -> tuple[dict[str, str], Path]:
    kept = {name for value in given.get("container-env", []) for name in value.split(",")}
    inside = {**env, **{name: value for name, value in SITE["image_env"].items() if name not in kept}}
    project = Path.cwd()
    pairs = [mount.split(":") for value in given.get("container-mounts", []) for mount in value.split(",")]
    mounts = [pair[min(1, len(pair) - 1)] for pair in pairs]  # SRC:DST:FLAGS, or one path for both
    mounts += [SITE["home"]] if "container-mount-home" in given else []
    there = any(project.is_relative_to(mount) for mount in mounts if mount)
    wanted = given.get("container-workdir", [SITE["image_workdir"]])[0]
    if Path(wanted) == project and not there:
        fail("slurmstepd: error: pyxis", f"couldn't chdir to {wanted}: No such file or directory")
    return inside, project if Path(wanted) == project else Path(SITE["image_workdir"])


def container(name: str, words: list[str]) -> int:
    """Run the command behind apptainer exec, singularity run, shifter or podman-hpc run as their rules have it."""
    rest = words[1:] if words and words[0] in ("exec", "run") else list(words)
    given: list[str] = []
    takes_value = {"--bind", "-B", "--env", "-e", "--volume", "-v", "--workdir", "-w", "--module"}
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        given.append(option)
        if option in takes_value:
            given.append(rest.pop(0))
    if name != "shifter":  # there the image is an option
        rest.pop(0)
    host, image = dict(os.environ), dict(SITE["image_env"])
    if name in ("apptainer", "singularity"):
        prefixes = ("SINGULARITYENV_",) if name == "singularity" else ("SINGULARITYENV_", "APPTAINERENV_")
        env = {**image, **{key: value for key, value in host.items() if key not in ("PATH", "LD_LIBRARY_PATH")}}
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (image.get("LD_LIBRARY_PATH"), "/.singularity.d/libs")))
        for prefix in prefixes:
            env |= {key.removeprefix(prefix): value for key, value in host.items() if key.startswith(prefix)}
    elif name == "shifter":
        named = [option.removeprefix("--env=") for option in given if option.startswith("--env=")]
        env = {**host, **image, **dict(item.split("=", 1) for item in named)}
        plugin = any("nccl" in option and "plugin" in option for option in given)
        env["LD_LIBRARY_PATH"] = ":".join([*([SITE["plugin"]] if plugin else []), env.get("LD_LIBRARY_PATH", "")])
    else:
        named = [given[number + 1] for number, option in enumerate(given) if option in ("--env", "-e")]
        named += [option.partition("=")[2] for option in given if option.startswith("--env=")]
        env = {**image}
        for item in named:
            key, equals, value = item.partition("=")
            whole = key.endswith("*")
            taken = [name for name in host if name == key or (whole and name.startswith(key[:-1]))]
            env |= {key: value} if equals else {name: host[name] for name in taken}
    env |= {key: value for key, value in host.items() if key.startswith("SANDBOX")}
    if rest[0] == SITE["adapts"]:
        rest.pop(0)
        env["LD_LIBRARY_PATH"] = f"{SITE['plugin']}:{env['LD_LIBRARY_PATH']}"
    os.execvpe(rest[0], rest, env)


def mpiexec(words: list[str]) -> int:
    if words == ["--version"]:
        print(Path(SITE["mpiexec_version"]).read_text(), end="")
        return 0
    kind = SITE["mpiexec"]
    given, command = options(words, MPIEXEC[kind], "mpiexec")
    size = int(given.get("n", given.get("np", ["1"]))[0])
    hosts = list(dict.fromkeys(Path(os.environ["PBS_NODEFILE"]).read_text().split()))
    per_node = int(given["ppn"][0]) if "ppn" in given else int(given["map-by"][0].split(":")[1])
    names = {"pals": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
             "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
             "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                         "OMPI_COMM_WORLD_LOCAL_SIZE")}[kind]  # fmt: skip
    tasks = []
    for rank in range(size):
        node, local = divmod(rank, per_node)
        base = dict(os.environ)
        if kind == "openmpi" and node:
            passed = {*given.get("x", []), "PATH", "HOME", "USER", "LD_LIBRARY_PATH"}
            base = {key: value for key, value in base.items() if key in passed or key.startswith("SANDBOX")}
        values = (rank, size, local, per_node)
        place = dict(zip(names, map(str, values), strict=True))
        tasks.append(({**base, **place, "SANDBOX_HOST": hosts[node], "SANDBOX_DEPTH": given.get("depth", [""])[0]}, {}))
    return start(command, tasks)


def ibrun(words: list[str]) -> int:
    """TACC's: as many tasks as sbatch was asked for, with MPI's variables; Slurm's stay those of the batch script."""
    command = words[2:] if words[0] in ("-np", "-n") else words
    per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for rank in range(per_node * len(SITE["hosts"])):
        host = SITE["hosts"][rank // per_node]
        tasks.append(({**os.environ, "SANDBOX_HOST": host, "PMI_RANK": str(rank)}, {}))
    return start(command, tasks)


def torchrun(words: list[str]) -> int:
    """launch/agent.py: the ranks of one node, with the variables of torchrun (torch.distributed.run, environment)."""
    given: dict[str, str] = {}
    rest = words[1:]  # after the log
    while rest and rest[0].startswith("--"):
        name = rest.pop(0)[2:]
        if name == "no-python":
            break
        given[name] = rest.pop(0)
    per_node, node = int(given["nproc-per-node"]), int(given["node-rank"])
    size = per_node * int(given["nnodes"])
    (Path(given["log-dir"]) / "ranks").mkdir(parents=True, exist_ok=True)
    tasks = []
    for local in range(per_node):
        names = {
            "RANK": node * per_node + local, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": per_node,
            "GROUP_RANK": node, "MASTER_ADDR": given["master-addr"], "MASTER_PORT": given["master-port"],
        }  # fmt: skip
        tasks.append(({**os.environ, **{key: str(value) for key, value in names.items()}}, {}))
    return start(rest, tasks)


def main() -> int:
    name = Path(sys.argv[0]).name
    words = sys.argv[1:]
    if name == Path(__file__).name:
        name, words = words[0], words[1:]
    known = {"srun": srun, "mpiexec": mpiexec, "ibrun": ibrun, "torchrun": torchrun}
    return known[name](words) if name in known else container(name, words)


if __name__ == "__main__":
    sys.exit(main())
