"""Whether the network plugin that NCCL_NET forces is there: else NCCL ends in its own init, without the path it took.

NCCL opens `NCCL_NET_PLUGIN` as it stands, then `libnccl-net-NAME.so`, or without one `libnccl-net.so` (NCCL 2.30
src/plugin/plugin_open.cc), RCCL also `librccl-net.so`. File names are looked at first; a library is opened only where
none of them is in sight.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .findings import Finding

BUILT_IN = ("ib", "socket")  # of NCCL itself (src/transport/net_ib/common.cc, net_socket.cc), whatever the case
STATIC = "STATIC_PLUGIN"  # linked into the program
CACHE = Path("/etc/ld.so.cache")
TRUSTED = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")  # ld.so(8); Debian has folders of an architecture below
CALLERS = ("libnccl.so", "librccl.so", "libtorch_cuda.so", "libtorch_hip.so")  # torch may have NCCL linked into it


def check_plugin(environ: Mapping[str, str] = os.environ, cache: Path = CACHE) -> list[Finding]:
    """A problem if NCCL_NET names a plugin and the dynamic loader will find none."""
    net, plugin = environ.get("NCCL_NET", ""), environ.get("NCCL_NET_PLUGIN", "")
    if not net or net.lower() in BUILT_IN or STATIC in plugin.upper().split(","):
        return []
    forced = f"NCCL_NET={net} names a network plugin"
    way_out = "load the module that has it, or put its directory on LD_LIBRARY_PATH; for TCP, set NCCL_NET=Socket"
    if plugin.lower() == "none":
        return [Finding(f"{forced}, and NCCL_NET_PLUGIN=none forbids all", "unset one of them", blocks=True)]
    directories = [*_of_variable(environ), *_of_callers(), *_trusted()]
    wanted = [name.strip() for name in plugin.split(",") if name.strip()]
    if any(_is_there(name, directories, cache) for name in wanted or [""]):
        return []
    files = " or ".join(dict.fromkeys(file for name in wanted or [""] for file in _files(name)))
    looked = ":".join(dict.fromkeys(directories))
    return [Finding(f"{forced}, and no {files} is in {looked}, nor in {cache}", way_out, blocks=True)]


def _files(name: str) -> list[str]:
    """The names that are tried for a value of NCCL_NET_PLUGIN, empty for none: patterns, as versions may follow."""
    if not name:
        return ["libnccl-net*.so*", "librccl-net*.so*"]
    return [name] if "/" in name else [name, f"libnccl-net-{name}.so", f"librccl-net-{name}.so"]


def _is_there(name: str, directories: Sequence[str], cache: Path) -> bool:
    if "/" in name:
        return Path(name).exists()
    files = _files(name)
    if any(next(Path(directory).glob(file), None) for directory in directories for file in files):
        return True
    content = b""
    with suppress(OSError):
        content = cache.read_bytes()
    if any(file.partition("*")[0].encode() in content for file in files):
        return True
    # What libraries have of their own to look in (RPATH) no list holds. With no file there is nothing that this starts.
    return any(_opens(file.replace("*", "")) for file in files)


def _opens(file: str) -> bool:
    with suppress(OSError):
        ctypes.CDLL(file)
        return True
    return False


def _of_variable(environ: Mapping[str, str]) -> list[str]:
    """The directories of LD_LIBRARY_PATH; an empty entry is the current one."""
    value = environ.get("LD_LIBRARY_PATH", "")
    return [directory or "." for directory in value.replace(";", ":").split(":")] if value else []


def _of_callers(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Where the libraries lie that would open the plugin: their RPATH has that directory, in wheels and in conda."""
    lines: Iterable[str] = ()
    with suppress(OSError):
        lines = maps.read_text().splitlines()
    found = {line[line.index("/") :] for line in lines if "/" in line and any(name in line for name in CALLERS)}
    folders = dict.fromkeys(str(Path(path).parent) for path in sorted(found))
    beside = [str(each) for folder in folders for each in Path(folder).parents[1].glob("nvidia/nccl/lib")]
    return [*folders, *beside]


def _trusted() -> Iterator[str]:
    for directory in TRUSTED:
        yield directory
        yield from (str(folder) for folder in Path(directory).glob("*-linux-gnu"))
