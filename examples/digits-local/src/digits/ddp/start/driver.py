"""Whether NVIDIA's driver is too old for this build of torch, which then sees no GPU: training would go on, on the CPU.

A build for CUDA 13 needs driver 580 or later, and one for CUDA 12 any from 525 on (docs.nvidia.com/deploy/
cuda-compatibility, minor version compatibility). torch of PyPI is built for CUDA 13 since 2.11 (pytorch PR #177975);
that for CUDA 12.6 is on an index of PyTorch's own, up to 2.14 (pytorch issues #190355, #190385).
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

from .findings import Finding

OLDEST = {12: 525, 13: 580}  # the first driver of each release of CUDA
INDEX = {12: "https://download.pytorch.org/whl/cu126"}  # where the newest builds are that such a driver runs
VERSION = Path("/proc/driver/nvidia/version")


def check_driver(
    torch: str, cuda: str | None, served: tuple[int, int] | None = None, devices: Path = Path("/dev")
) -> Finding | None:
    """A problem if this host has NVIDIA's GPUs and their driver is of an older CUDA than this torch is built for.

    `torch` and `cuda`: the version, and torch.version.cuda, which is None for other builds. `served`: the newest CUDA
    that the driver serves, asked of it where it is left out.
    """
    built = int(cuda.partition(".")[0]) if cuda else 0
    if built not in OLDEST or not any(devices.glob("nvidia[0-9]*")):
        return None
    newest = served or newest_cuda()
    if newest is None or newest[0] >= built:
        return None
    is_what = f"its NVIDIA driver{_version()} is for CUDA {newest[0]}.{newest[1]}"
    what = f"{is_what}, and torch {torch} is built for CUDA {cuda}, which needs driver {OLDEST[built]} or later"
    index = INDEX.get(newest[0])
    other = f"python -m pip install --force-reinstall torch --index-url {index}" if index else "have the driver updated"
    return Finding(what, f"{other}; or set run.device to cpu", blocks=True)


def newest_cuda() -> tuple[int, int] | None:
    """(12, 4), as the driver's library says (cuDriverGetVersion: 12040); None where there is none."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return (number.value // 1000, number.value % 1000 // 10) if number.value else None


def _version() -> str:
    """' 550.163.01', as the kernel's module says, or nothing."""
    with suppress(OSError):
        if found := re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", VERSION.read_text(errors="replace")):
            return f" {found[1]}"
    return ""
