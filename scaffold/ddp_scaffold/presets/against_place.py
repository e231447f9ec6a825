"""Modules, paths, the network plugin and container runtimes of a preset, looked for on this machine.

Modules are loaded in a shell of their own, as a job does it, and what they add to the search path of libraries counts
when the plugin is looked for. Values of variables are not printed: they may hold the name of a user.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from .findings import Finding
from .probe import ask
from .schema import Preset

PLUGIN_VARIABLES = ("NCCL_NET", "NCCL_NET_PLUGIN")
BUILT_IN = ("Socket", "IB")  # networks of NCCL itself: github.com/NVIDIA/nccl src/transport/net_socket.cc, net_ib
RUNTIMES = ("apptainer", "singularity", "shifter", "podman-hpc", "enroot", "sarus", "docker", "uenv")
# What `module load` says of a name that is not there: Lmod, and Tcl modules, which may end with 0 then.
# github.com/TACC/Lmod src/MsgT / messageDir/en.lua (e_Failed_Load); github.com/envmodules/modules tcl/modfind.tcl.in.
UNKNOWN = re.compile(r"module\(s\) are unknown|Unable to locate a modulefile|cannot be loaded as requested")
MARK = "ddp-scaffold:"


def look_at_software(preset: Preset, srun_help: str | None, compute: bool) -> Iterator[Finding]:
    """Yield what is there of the modules, paths, plugin and containers that the preset names.

    `compute`: this is a node where ranks run; what is missing elsewhere may be there.
    """
    modules = preset.modules.value or [] if preset.modules else []
    paths = preset.module_paths.value if preset.module_paths else []
    said, silent = ask({"bash": ("bash", "-c", _shell(modules, paths))}) if modules or paths else ({}, [])
    reached = dict(re.findall(rf"^{MARK}(\S+) (.*)$", said.get("bash", ""), re.MULTILINE))
    for path in paths:
        yield _path("module_paths", path)
    for module in modules:
        yield _module(module, reached, silent)
    for path in preset.library_paths.value if preset.library_paths else []:
        yield _path("library_paths", path)
    for fact in preset.env_scripts:
        yield _path("env_scripts", fact.value.path)
    for name in ("scratch", "node_local"):
        stated = getattr(preset, name)
        if stated is None or stated.value is None:
            continue
        if name == "node_local" and not compute:
            yield Finding(name, "not looked at", stated.value, "it is on compute nodes: run this inside a job")
        else:
            yield _path(name, stated.value)
    for finding in _plugin(preset, reached.get("libraries", os.environ.get("LD_LIBRARY_PATH", ""))):
        elsewhere = f"{finding.machine} here; compute nodes may have one: run this inside a job"
        unsure = finding.outcome == "differs" and not compute
        yield replace(finding, outcome="not looked at", machine=elsewhere) if unsure else finding
    yield from _containers(preset, srun_help)


def _shell(modules: list[str], paths: list[str]) -> str:
    """Return a script that loads modules one after the other, and says how each went."""
    lines = [f"command -v module >/dev/null || source /etc/profile; command -v module >/dev/null || echo {MARK}none 1"]
    lines += [f'module use "{path}"' for path in paths]
    for module in modules:
        name = shlex.quote(module)
        lines.append(
            f'said=$(module load {name} 2>&1); code=$?; [ "$code" != 0 ] || module load {name} >/dev/null 2>&1;'
            f" echo {MARK}{name} $code ${{said//[$'\\n']/ }}"
        )
    return "\n".join([*lines, f'echo "{MARK}libraries ${{LD_LIBRARY_PATH:-}}"', "true"])


def _module(name: str, reached: Mapping[str, str], silent: list[str]) -> Finding:
    """Return whether a module was loaded. Of its own words only those that say it is unknown are looked for."""
    if "none" in reached:
        return Finding("modules", "not looked at", name, "there is no module command here")
    if name not in reached:
        return Finding("modules", "not looked at", name, next(iter(silent), "the shell said nothing"))
    code, _, words = reached[name].partition(" ")
    loaded = code == "0" and not UNKNOWN.search(words)
    return Finding("modules", "agrees" if loaded else "differs", name, "loads" if loaded else "does not load", "module")


def _path(title: str, path: str) -> Finding:
    """Return whether a path of a preset is there; a variable in it must be set. Its value is not shown."""
    for name in re.findall(r"\$([A-Z_][A-Z0-9_]*)", path):
        if not os.environ.get(name):
            return Finding(title, "not looked at", path, f"${name} is not set here")
    there = Path(os.path.expandvars(path)).exists()
    return Finding(title, "agrees" if there else "differs", path, "there" if there else "not there", "file system")


def _plugin(preset: Preset, libraries: str) -> Iterator[Finding]:
    """Yield whether the network plugin that the environment forces is where the loader looks."""
    forced = [line for line in preset.env if line.name in PLUGIN_VARIABLES and line.value not in BUILT_IN]
    folders = [Path(os.path.expandvars(folder)) for folder in libraries.split(":") if folder.startswith("/")]
    folders += [Path(path) for path in (preset.library_paths.value if preset.library_paths else []) if "$" not in path]
    said, _ = ask({"ldconfig": ("ldconfig", "-p")}) if forced and shutil.which("ldconfig") else ({}, [])
    names = {path.name for folder in dict.fromkeys(folders) for path in _plugins_in(folder)}
    names |= set(re.findall(r"lib[nr]ccl-net[A-Za-z0-9_.-]*\.so[0-9.]*", said.get("ldconfig", "")))
    for line in forced:
        seen = ", ".join(sorted(names)[:4]) or "no libnccl-net*.so or librccl-net*.so"
        by = "LD_LIBRARY_PATH after the modules, ldconfig"
        yield Finding(f"env.{line.name}", "agrees" if names else "differs", line.value, seen, by)


def _plugins_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if re.match(r"lib[nr]ccl-net.*\.so", path.name)]
    except OSError:
        return []


def _containers(preset: Preset, srun_help: str | None) -> Iterator[Finding]:
    """Yield whether the way into a container is there: a program, or an option of srun that a plugin adds."""
    there = [name for name in RUNTIMES if shutil.which(name)]
    container = preset.container.value if preset.container else None
    if container is None:
        if there:
            yield Finding("container", "told", "", ", ".join(there), "PATH")
        return
    for word in container.command[:1]:
        found = shutil.which(word) is not None
        yield Finding("container", "agrees" if found else "differs", word, ", ".join(there) or "none", "PATH")
    options = {flag.partition("=")[0] for flag in container.srun_flags if flag.startswith("--")}
    for option in sorted(options):
        if srun_help is None:
            yield Finding("container", "not looked at", f"srun {option}", "srun --help says nothing here")
        else:
            known = re.search(rf"{re.escape(option)}\b", srun_help) is not None
            outcome = "srun has it" if known else "srun has no such option"
            yield Finding("container", "agrees" if known else "differs", option, outcome, "srun --help")
