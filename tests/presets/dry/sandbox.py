"""A directory that answers like a site: its tools, modules, queues, interfaces and containers, on this machine alone.

Nothing of the machine but the tools named in TOOLS is on the PATH of a job. What decides something by its text is in
recorded/, with its source; what is made here has a form that its tool documents, and values of the preset.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_scaffold.presets.schema import Preset

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
TOOLS = (
    "awk", "basename", "bash", "cat", "chmod", "cp", "cut", "date", "dirname", "env", "expr", "grep", "head", "id",
    "ls", "mkdir", "mktemp", "mv", "paste", "ps", "rm", "sed", "seq", "sh", "sleep", "sort", "ss", "stat", "tail",
    "tee", "timeout", "touch", "tr", "uniq", "wc", "xargs",
)  # fmt: skip
DEADLINE_S = 60
JOB = "4242"
# Variables of the image nvidia/cuda:11.8.0-base-ubuntu22.04: github.com/NVIDIA/pyxis tests/env.bats.
IMAGE = {"CUDA_VERSION": "11.8.0", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"}
PACKAGES = ".venv-image/lib/python3.12/site-packages"  # of the environment that is made inside an image
BUILT_IN = ("Socket", "IB")  # networks that NCCL has without a plugin
# How nvidia-smi -L and rocm-smi --showproductname call what presets name.
PRODUCTS = {
    "A100": "NVIDIA A100-SXM4-40GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "GH200": "NVIDIA GH200 120GB",
    "RTX": "Quadro RTX 5000",
    "L40S": "NVIDIA L40S",
    "MI250X": "AMD INSTINCT MI250X (MCM) OAM AC MBA",
}


@dataclass(frozen=True)
class Site:
    """What a site is like, beside its preset: the sources of each are in sites.yml."""

    known_modules: frozenset[str]
    mpiexec: str = "pals"
    routed: Mapping[str, str] = field(default_factory=dict)  # queue of qsub: queue where it runs
    plugin_from: str | None = None  # the module or path that brings the network plugin
    adapts: str | None = None  # a script of the site in each container: it brings the plugin, and runs what follows
    module_says: str = "lmod-unknown.txt"


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit code, its output, and the environments that were seen, by what ran there."""

    code: int
    output: str
    ranks: dict[str, list[dict[str, str]]]


def text_of(name: str) -> str:
    """Return a recording without the comment that names its source."""
    lines = (RECORDED / name).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("# "))


@dataclass(frozen=True)
class Sandbox:
    """A project on a site, ready for a job."""

    root: Path
    project: Path
    preset: Preset
    site: Site
    nodes: list[str]
    container: bool

    def tool(self, name: str, script: str) -> None:
        """Put a stand-in on the PATH."""
        path = self.root / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, script: Path, environment: Mapping[str, str]) -> Ended:
        """Run a batch script as the scheduler does on the first node, and end what it leaves behind."""
        log = self.root / "output.txt"
        with log.open("wb") as stream:
            job = subprocess.Popen(
                [shutil.which("bash") or "/bin/bash", script], env=dict(environment), cwd=self.root,
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = job.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                _end_session(job.pid)
                job.wait()
        ranks: dict[str, list[dict[str, str]]] = {}
        for path in sorted((self.root / "ranks").iterdir()):
            ranks.setdefault(path.name.split(".")[0], []).append(_environment_in(path))
        return Ended(code, log.read_text(errors="replace"), ranks)


def _environment_in(path: Path) -> dict[str, str]:
    pairs = (item.partition("=") for item in path.read_bytes().decode(errors="replace").split("\0") if item)
    return {name: value for name, _, value in pairs}


def _end_session(session: int) -> None:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rsplit(")", 1)[1].split()[3]) == session:
                os.kill(int(entry.parent.name), 9)
        except (OSError, ValueError):
            continue


def build(root: Path, launch: Path, base: Path, preset: Preset, site: Site, nodes: int, container: bool) -> Sandbox:
    """Make the sandbox: `launch` is the rendered folder, `base` a rendered project whose package it starts."""
    for name in ("bin", "ranks", "image", "image/workspace", "image/bin", "home", "plugin"):
        (root / name).mkdir(parents=True)
    project = root / "home" / "project"
    shutil.copytree(base, project, ignore=shutil.ignore_patterns("launch", "tests", ".git"))
    shutil.copytree(launch, project / "launch")
    hosts = [f"node{number:02}" for number in range(1, nodes + 1)]
    sandbox = Sandbox(root, project, preset, site, hosts, container)
    for name in TOOLS:
        if found := shutil.which(name):
            (root / "bin" / name).symlink_to(found)
    _python(sandbox, root / "image" / "bin", "image")
    if container:
        _host_python(sandbox)
        (project / PACKAGES).mkdir(parents=True)
    elif preset.uenv:  # .venv is on top of it: without the uenv's mount its python leads nowhere
        _python(sandbox, root / "uenv-image" / "bin", "venv")
        (project / ".venv" / "bin").mkdir(parents=True)
        for name in ("python", "python3"):
            (project / ".venv" / "bin" / name).symlink_to(root / "user-environment" / "bin" / name)
    else:
        _python(sandbox, project / ".venv" / "bin", "venv")
    venv = project / ".venv"
    (venv / "bin" / "activate").write_text(f"export VIRTUAL_ENV='{venv}' PATH='{venv}/bin':\"$PATH\"\n")
    _network(sandbox)
    _gpus(sandbox)
    _modules(sandbox)
    _paths(sandbox)
    _slurm(sandbox)
    _launchers(sandbox)
    return sandbox


def _python(sandbox: Sandbox, folder: Path, label: str) -> None:
    """A Python that notes the environment instead of starting preflight or training; all else is the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    root = sandbox.root
    note = f"export SANDBOX_PYTHON={label}; env -0 >'{root}/ranks'"
    code = f"exit $(cat '{root}/ends' 2>/dev/null || echo 0)"  # how training ends, if a test has written it there
    script = f"""#!/bin/sh
case "$*" in
"-m demo.ddp.preflight"*) {note}/preflight.$SANDBOX_HOST.$$; exit ;;
"-m demo.train"*) {note}/train.$SANDBOX_HOST.$$; {code} ;;
*launch/agent.py*) shift; exec '{sys.executable}' '{root}/bin/standin_site.py' torchrun "$@" ;;
esac
exec '{sys.executable}' "$@"
"""
    for name in ("python", "python3"):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def _host_python(sandbox: Sandbox) -> None:
    """The .venv of a container's host, by the commands of `new`: PyYAML, and nothing else that is not Python's own."""
    folder = sandbox.project / ".venv"
    for package in ("yaml", "_yaml"):
        if found := find_spec(package):
            source = Path(str(found.origin)).parent
            shutil.copytree(source, folder / "packages" / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "bin").mkdir(parents=True)
    script = f"""#!/bin/sh
export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{folder}/packages"
exec '{sys.executable}' -S "$@"
"""
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)


def interface(preset: Preset) -> str:
    """Return the interface by which nodes of a site reach each other, as far as the preset names one."""
    gloo = preset.gloo_socket_ifname.value if preset.gloo_socket_ifname else None
    nccl = preset.nccl_socket_ifname.value if preset.nccl_socket_ifname else None
    if gloo and gloo != "route":
        return gloo.split(",")[0]
    if nccl and not nccl.startswith("^"):
        name = nccl.lstrip("=").split(",")[0]
        return name if nccl.startswith("=") or name[-1].isdigit() else f"{name}0"
    return "eth0"


def _network(sandbox: Sandbox) -> None:
    """uname, hostname, getent and ip, each for the node that $SANDBOX_HOST names. `ip -o` has iproute2's form."""
    name = interface(sandbox.preset)
    suffix = sandbox.preset.master_suffix.value if sandbox.preset.master_suffix else None
    entries = [(f"10.0.0.{number}", host) for number, host in enumerate(sandbox.nodes, 1)]
    names = {host: address for address, host in entries}
    names |= {f"{host}{suffix}": address for address, host in entries if suffix}
    sandbox.tool("uname", 'case "$1" in -n) echo "$SANDBOX_HOST" ;; *) exec /bin/uname "$@" ;; esac')
    sandbox.tool("hostname", 'case "$1" in -d) echo site.example ;; *) echo "$SANDBOX_HOST" ;; esac')
    known = "\n".join(f"{host}|{address}) found={address} ;;" for host, address in names.items())
    own = "\n".join(f"{host}) own={address} ;;" for address, host in entries)
    sandbox.tool(
        "getent",
        f'found=; case "$2" in\n{known}\nesac\n[ -n "$found" ] || exit 2\n'
        'case "$1" in hosts) echo "$found        $2" ;; *) echo "$found        STREAM $2" ;; esac',
    )
    sandbox.tool(
        "ip",
        f'case "$SANDBOX_HOST" in\n{own}\nesac\ncase "$*" in\n'
        f'"-o address show to $own") printf "4: {name}    inet %s/24 brd 10.0.0.255 scope global {name}\\\\\\\\'
        '       valid_lft forever preferred_lft forever\\n" "$own" ;;\n'
        '"-o address show to "*) ;;\n'
        f'"-o route get "*) echo "$4 dev {name} src $own uid 0 \\\\    cache " ;;\n'
        "*) exit 1 ;;\nesac",
    )
    sandbox.tool("ldconfig", "exit 0")  # no plugin is known to the dynamic linker


def product(preset: Preset) -> str:
    """Return what the tools of the maker call the GPU of a preset, or nothing if it names none that is known."""
    stated = preset.gpu.value if preset.gpu else ""
    return next((name for word, name in PRODUCTS.items() if re.search(rf"\b{word}", stated)), "")


def _gpus(sandbox: Sandbox) -> None:
    count, name = sandbox.preset.gpus_per_node.value or 1, product(sandbox.preset)
    if not name:
        return
    if name.startswith("AMD"):
        # "Card series" until ROCm 6.0, then "Card Series": ROCm/rocm_smi_lib python_smi_tools/rocm_smi.py.
        lines = [f"GPU[{number}]\t\t: Card Series: \t\t{name}" for number in range(count)]
        (sandbox.root / "rocm.txt").write_text("\n".join(lines) + "\n")
        sandbox.tool("rocm-smi", f"exec cat '{sandbox.root}/rocm.txt'")
        return
    listed = [f"GPU {number}: {name} (UUID: GPU-{number:08x}-0000-0000-0000-000000000000)" for number in range(count)]
    (sandbox.root / "gpus.txt").write_text("\n".join(listed) + "\n")
    (sandbox.root / "names.txt").write_text(f"{name}\n" * count)
    sandbox.tool(
        "nvidia-smi",
        f"case \"$1\" in -L) exec cat '{sandbox.root}/gpus.txt' ;; *) exec cat '{sandbox.root}/names.txt' ;; esac",
    )


def _modules(sandbox: Sandbox) -> None:
    """A function `module`, in the environment as Lmod leaves it: it knows some modules, and fails for all others."""
    site, root = sandbox.site, sandbox.root
    (root / "unknown.txt").write_text(text_of(site.module_says))
    known = "|".join(f"'{name}'" for name in sorted(site.known_modules)) or "''"
    path = f"'{root}/plugin'\"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\""
    brings = f"'{site.plugin_from}') export LD_LIBRARY_PATH={path} ;;"
    (root / "module.sh").write_text(
        f"""conda() {{ echo "conda: command not found" >&2; return 127; }}
module() {{
  local name
  case $1 in use | purge | unload | swap) return 0 ;; load | add) shift ;; *) return 0 ;; esac
  for name in "$@"; do
    case $name in *conda* | *miniforge*) conda() {{ export CONDA_PREFIX='{root}/conda'; }} ;; esac
    case $name in
    {brings if site.plugin_from else ""}
    {known}) ;;
    *) sed "s|NAME|$name|" '{root}/unknown.txt' >&2; return 1 ;;
    esac
  done
}}
"""
    )


def _paths(sandbox: Sandbox) -> None:
    """Directories and scripts that a preset names below /opt and elsewhere are not on this machine: in the project's
    copy of the launch folder they stand for the same names below the sandbox."""
    preset, root = sandbox.preset, sandbox.root
    wanted = [fact.value.path for fact in preset.env_scripts]
    replaced = {path: f"{root}/site{path}" for path in wanted if path.startswith("/")}
    for path in replaced.values():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # gIB's script forces its network; on the host its directory is on the library path as well.
        Path(path).write_text("export NCCL_NET=gIB\n")
    script = sandbox.project / "launch" / "site.sh"
    if script.exists() and replaced:
        text = script.read_text()
        for path, there in replaced.items():
            text = text.replace(f'"{path}"', f'"{there}"')
        script.write_text(text)


def _slurm(sandbox: Sandbox) -> None:
    nodes = "\\n".join(sandbox.nodes)
    sandbox.tool(
        "scontrol",
        f'case "$*" in\n"show hostnames "*) printf "{nodes}\\n" ;;\n'
        '"show job --oneliner "*) echo "JobId=$4 JobName=demo EndTime=2030-01-01T00:00:00 Deadline=N/A" ;;\n'
        '"requeue "*) exit 0 ;;\n*) exit 1 ;;\nesac',
    )
    sandbox.tool("squeue", "echo RUNNING")
    sandbox.tool("scancel", "exit 0")


def _launchers(sandbox: Sandbox) -> None:
    preset, site, root = sandbox.preset, sandbox.site, sandbox.root
    flags = preset.container.value.srun_flags if preset.container and preset.container.value else []
    version = root / "mpiexec-version.txt"
    version.write_text(text_of(f"{site.mpiexec}-mpiexec-version.txt"))
    ours = {
        "root": str(root), "hosts": sandbox.nodes, "gpus": preset.gpus_per_node.value or 0,
        "asks_for_gpus": bool(preset.gpu_request and preset.gpu_request.value),
        "sees": preset.sees.value if preset.sees else "all",
        "accelerator": preset.accelerator.value if preset.accelerator else None,
        "srun_options": sorted({flag.lstrip("-").partition("=")[0] for flag in flags}
                               | {"container-workdir", "container-env", "container-mounts"}),
        "image_env": {**IMAGE, "PATH": f"{root}/image/bin:{root}/bin"}, "image_workdir": f"{root}/image/workspace",
        "home": str(root / "home"), "plugin": f"{root}/plugin", "mpiexec": site.mpiexec,
        "mpiexec_version": str(version), "adapts": site.adapts,
    }  # fmt: skip
    (root / "bin" / "site.json").write_text(json.dumps(ours))
    program = root / "bin" / "standin_site.py"
    program.write_text((HERE / "standin_site.py").read_text())
    for name in ("srun", "mpiexec", "ibrun", "apptainer", "singularity", "shifter", "podman-hpc"):
        sandbox.tool(name, f"exec '{sys.executable}' -S '{program}' {name} \"$@\"")


def batch_environment(sandbox: Sandbox) -> dict[str, str]:
    """What any batch script finds, whatever the scheduler. BASH_ENV brings `module`, as sites' profiles do."""
    root = sandbox.root
    names = {name for text in _directories(sandbox.preset) for name in re.findall(r"\$([A-Z_][A-Z0-9_]*)", text)}
    names = {name for name in names if not name.startswith(("SLURM_", "PBS_")) and name not in ("PWD", "HOME", "USER")}
    site = {name: str(root / "site" / name.lower()) for name in sorted(names)}
    for path in site.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    return {
        "PATH": str(root / "bin"), "HOME": str(root / "home"), "USER": "user", "LANG": "C.UTF-8",
        "BASH_ENV": str(root / "module.sh"), "SANDBOX_HOST": sandbox.nodes[0], **site,
    }  # fmt: skip


def _directories(preset: Preset) -> Iterator[str]:
    container = preset.container.value if preset.container else None
    yield from (preset.scratch.value or "",) if preset.scratch else ()
    yield from preset.library_paths.value if preset.library_paths else ()
    yield from preset.module_paths.value if preset.module_paths else ()
    yield from (*container.command, *container.srun_flags) if container else ()


def submit_slurm(sandbox: Sandbox, script: Path, **extra: str) -> Ended:
    """Run a script with the variables of sbatch: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES."""
    options = directives(script, "SBATCH")
    per_node = int(options["--ntasks-per-node"])
    cpus = options.get("--cpus-per-task", "")
    given: dict[str, Any] = {
        "SLURM_JOB_ID": JOB, "SLURM_SUBMIT_DIR": sandbox.project, "SLURM_JOB_NUM_NODES": len(sandbox.nodes),
        "SLURM_JOB_NODELIST": f"node[01-{len(sandbox.nodes):02}]", "SLURM_NTASKS": per_node * len(sandbox.nodes),
        "SLURM_JOB_PARTITION": options.get("--partition", "batch"), "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_JOB_ACCOUNT": options.get("--account", "demo"), "SLURM_JOB_NAME": "demo", "SLURM_LOCALID": 0,
        "SLURM_JOB_END_TIME": int(time.time()) + 3600, "SLURM_NODEID": 0, "SLURMD_NODENAME": sandbox.nodes[0],
        # Left by an srun in whose shell the job was submitted; sbatch passes it on (nebius/soperator PR 2316).
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    }  # fmt: skip
    given |= {"SLURM_CPUS_PER_TASK": cpus} if cpus else {}
    spool = sandbox.root / "slurm_script"
    shutil.copy(script, spool)
    base = batch_environment(sandbox)
    if "--uenv" in options:
        base |= _mounted(sandbox, options.get("--view"))
    environment = {**base, **{name: str(value) for name, value in given.items()}, **extra}
    return sandbox.run(spool, environment)


def _mounted(sandbox: Sandbox, view: str | None) -> dict[str, str]:
    """What uenv's plugin of Slurm does for a job: it mounts the image, and sets the environment of a view
    (eth-cscs/cscs-docs docs/software/uenv, docs/software/ml/pytorch.md: the default view has the network plugin)."""
    where = sandbox.root / "user-environment"
    if not where.exists():
        where.symlink_to(sandbox.root / "uenv-image")
    if view is None:
        return {}
    return {"PATH": f"{where}/bin:{sandbox.root}/bin", "LD_LIBRARY_PATH": f"{sandbox.root}/plugin"}


def submit_pbs(sandbox: Sandbox, script: Path, qstat: str = 'exec cat "$0.txt"', **extra: str) -> Ended:
    """Run a script with the variables of PBS; a file of hosts names each once. `qstat` is what that tool does."""
    options = directives(script, "PBS")
    submitted = options.get("-q", "workq")
    where = sandbox.site.routed.get(submitted, submitted)
    nodefile = sandbox.root / "nodes"
    nodefile.write_text("".join(f"{host}\n" for host in sandbox.nodes))
    values = {"JOB": f"{JOB}.standin", "QUEUE": where, "NODES": str(len(sandbox.nodes)),
              "SELECT": options.get("-l select", "2"), "WALLTIME": options.get("-l walltime", "01:00:00")}  # fmt: skip
    text = text_of("qstat-f.txt")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    (sandbox.root / "bin" / "qstat.txt").write_text(text)
    sandbox.tool("qstat", qstat)
    given = {"PBS_JOBID": f"{JOB}.standin", "PBS_O_WORKDIR": str(sandbox.project), "PBS_NODEFILE": str(nodefile),
             "PBS_QUEUE": where, "PBS_O_QUEUE": submitted, "PBS_ENVIRONMENT": "PBS_BATCH"}  # fmt: skip
    return sandbox.run(script, {**batch_environment(sandbox), **given, **extra})


def directives(script: Path, kind: str) -> dict[str, str]:
    """Return the options on the #SBATCH or #PBS lines of a script; of PBS, a resource under its own name."""
    found = {}
    for line in re.findall(rf"^#{kind} (.*)$", script.read_text(), re.MULTILINE):
        name, _, value = line.replace("=", " ", 1).partition(" ") if kind == "SBATCH" else line.partition(" ")
        if name == "-l":
            resource, _, amount = value.partition("=")
            name, value = f"-l {resource}", amount
        found[name] = value.strip()
    return found
