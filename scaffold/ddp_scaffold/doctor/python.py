"""What the project's Python has: torch, CUDA, NCCL. Read from the metadata of packages; nothing is imported."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .line import Line
from .machine import TIMEOUT_S, driver

# The least driver of CUDA: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1
# (450, 525 and 580), and the second number, as 450.80.02, from the release notes of the CUDA Toolkit.
LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
ASK = "import sys, sysconfig; print(sys.version.split()[0]); print(sysconfig.get_paths()['purelib'])"


@dataclass(frozen=True)
class Python:
    """An interpreter, and where its packages are."""

    path: Path
    version: str
    packages: Path


def find_python(project: Path) -> Python | None:
    """Return the Python of a project: VENV, its .venv, the activated environment, or the first one on PATH."""
    candidates = [
        os.environ.get("VENV"),
        str(project / ".venv"),
        os.environ.get("VIRTUAL_ENV"),
        os.environ.get("CONDA_PREFIX"),
    ]
    paths = [Path(folder, "bin", "python") for folder in candidates if folder]
    paths += [Path(folder, "python3") for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for path in paths:
        if not path.exists():
            continue
        try:
            done = subprocess.run(
                [str(path), "-I", "-c", ASK], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.SubprocessError):
            continue
        lines = done.stdout.splitlines()
        if done.returncode == 0 and len(lines) == 2:
            return Python(path, lines[0], Path(lines[1]))
    return None


def installed(packages: Path, pattern: str) -> tuple[str, str]:
    """Return name and version of the first package whose metadata folder has such a name, or two empty texts."""
    for folder in sorted(packages.glob("*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if re.fullmatch(pattern, name.lower().replace("_", "-")):
            return name, version
    return "", ""


def torch_lines(project: Path) -> list[Line]:
    """Return what is installed, and whether torch, CUDA, NCCL and driver fit each other."""
    python = find_python(project)
    if python is None:
        return [
            Line("software", "Python", "none found", note="Set VENV to the project's environment.", level="warning")
        ]
    lines = [Line("software", "Python", python.version, str(python.path))]
    _, version = installed(python.packages, "torch")
    built = _built(python.packages / "torch" / "version.py")
    if not version and not built.get("__version__"):
        note = "Install the project's dependencies there, or set VENV to where they are."
        return [*lines, Line("software", "torch", "not installed", str(python.packages), note, "info")]
    lines.append(Line("software", "torch", built.get("__version__") or version, "torch/version.py"))
    cuda, hip = built.get("cuda", ""), built.get("hip", "")
    lines.append(_backend(cuda, hip, driver()))
    name, nccl = installed(python.packages, r"nvidia-nccl-cu\d+")
    if nccl:
        lines.append(_nccl(name, nccl, cuda))
    elif cuda:
        lines.append(Line("software", "NCCL", "within torch, or of the system", str(python.packages)))
    elif hip:
        lines.append(Line("software", "RCCL", "within torch", "torch/lib"))
    return lines


def _built(path: Path) -> dict[str, str]:
    """The assignments of torch/version.py that are texts."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return {}
    return dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))


def _backend(cuda: str, hip: str, version: str) -> Line:
    """What torch is built for, against the driver."""
    if hip:
        return Line("software", "ROCm", hip, "torch/version.py")
    if not cuda:
        note = "A driver is here, and this torch is built for CPUs: install one for CUDA." if version else ""
        return Line("software", "CUDA", "none: built for CPUs", "torch/version.py", note, "warning" if note else "ok")
    needed = LEAST_DRIVER.get(int(cuda.split(".")[0])) if cuda.split(".")[0].isdigit() else None
    has = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if needed and has and has < needed:
        least = ".".join(map(str, needed))
        note = (
            f"CUDA {cuda} needs driver {least} or newer, and {version} is here: torch finds no GPU. Use an older torch."
        )
        return Line("software", "CUDA", cuda, "torch/version.py", note, "warning")
    return Line("software", "CUDA", cuda, "torch/version.py")


def _nccl(name: str, version: str, cuda: str) -> Line:
    """NCCL of the wheel against the CUDA that torch is built for."""
    wheel = re.sub(r".*cu", "", name.lower())
    note = ""
    if cuda and wheel != cuda.split(".")[0]:
        note = f"This NCCL is built for CUDA {wheel}, and torch for {cuda}: install torch again in a new environment."
    elif version.startswith(("2.27", "2.28")):
        note = "If a hang goes away with NCCL_NVLS_ENABLE=0, update: 2.29 fails in place of hanging."
    level = "warning" if cuda and wheel != cuda.split(".")[0] else "info" if note else "ok"
    return Line("software", "NCCL", version, name, note, level)  # type: ignore[arg-type]
