"""The table of variables against an installed torch: its libraries and sources are searched, it is not imported."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .._errors import UsageError
from .variables import Variable, load_table, release

PREFIXES = (
    b"TORCH",
    b"NCCL_",
    b"GLOO_",
    b"TP_SOCKET",
    b"MASTER_",
    b"OMP_NUM",
    b"LOGLEVEL",
    b"USE_LIBUV",
    b"DCP_",
    b"PYTORCH_",
)
NAME = re.compile(rb"[A-Z][A-Z0-9_]*")
SOURCES = ("include/torch/csrc/distributed", "distributed")


@dataclass(frozen=True)
class Difference:
    """A name of which the table says something else than the files."""

    name: str
    text: str


@dataclass(frozen=True)
class Report:
    """What came out of it. `unknown` says what these files cannot tell."""

    torch: str
    folder: str
    checked: int
    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {"version": 1, **asdict(self)}


def find_torch(paths: Sequence[Path]) -> Path:
    """Return the folder of torch in one of `paths`: itself, site-packages, or an environment. Raises UsageError."""
    places = list(paths) or [
        Path(".venv"),
        *(Path(os.environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)),
    ]
    for place in places:
        for pattern in ("version.py", "torch/version.py", "lib/python3*/site-packages/torch/version.py"):
            found = sorted(place.glob(pattern))
            if found and (found[-1].parent / "distributed").is_dir():
                return found[-1].parent
    raise UsageError(
        f"there is no torch in {', '.join(map(str, places))}",
        ("Name its environment: ddp-scaffold check --variables .venv"),
    )


def version_of(torch: Path) -> str:
    """Return `__version__` of version.py, or an empty text."""
    match = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", (torch / "version.py").read_text("utf-8", "replace"))
    return match.group(1) if match else ""


def compare(torch: Path) -> Report:
    """Search all files of an installed torch, and of the NCCL beside it, for the names of the table."""
    version = version_of(torch)
    of_torch = set(_names_in(_files(torch)))
    libraries = sorted(torch.parent.glob("nvidia/nccl/lib/libnccl.so*")) + sorted(torch.glob("lib/libnccl.so*"))
    of_nccl = set(_names_in(libraries))
    cuda = any(torch.glob("lib/libtorch_cuda*"))
    differences, checked, of_cuda = [], 0, 0
    for variable in load_table().variables.values():
        if variable.read_by == "none":
            checked += 1
            where = "torch" if variable.name in of_torch else "NCCL" if variable.name in of_nccl else ""
            if where:
                differences.append(
                    Difference(variable.name, (f"the table says that nothing reads it, and {where} names it"))
                )
        elif variable.read_by == "torch":
            checked += 1
            text = _of_torch(variable, variable.name in of_torch, release(version))
            if text and not cuda and variable.name not in of_torch and variable.name.startswith("TORCH_NCCL_"):
                of_cuda, text = of_cuda + 1, ""  # read in nccl.cpp alone, which a build for CPUs has not
            differences += [Difference(variable.name, text)] if text else []
        elif variable.read_by == "nccl" and of_nccl:
            checked += 1
            if variable.name not in of_nccl:
                differences.append(
                    Difference(variable.name, ("the table says that NCCL reads it, and its library does not name it"))
                )
    unknown = [] if of_nccl else ["what NCCL reads: there is none beside this torch"]
    if of_cuda:
        unknown.append(f"{of_cuda} names that only a build for CUDA would have")
    return Report(version, str(torch), checked - of_cuda, tuple(differences), tuple(unknown))


def _of_torch(variable: Variable, named: bool, version: tuple[int, ...]) -> str:
    """What differs for a variable of torch; empty if nothing does."""
    expected = not variable.since or version[: len(release(variable.since))] >= release(variable.since)
    if named and not expected:
        return f"the table says that torch reads it since {variable.since}, and this one names it already"
    if not named and expected:
        return "the table says that torch reads it, and none of its files names it"
    return ""


def _files(torch: Path) -> Iterator[Path]:
    yield from sorted(torch.glob("lib/*.so*"))
    yield from sorted(torch.glob("lib/*.dylib"))
    yield from sorted(torch.glob("*.so"))
    for folder in SOURCES:
        for pattern in ("*.py", "*.hpp", "*.h"):
            yield from sorted((torch / folder).rglob(pattern))


def _names_in(files: Iterator[Path] | Sequence[Path]) -> Iterator[str]:
    """Yield the names with one of the prefixes that stand in files, read without loading them into memory."""
    for path in files:
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for prefix in PREFIXES:
                at = content.find(prefix)
                while at >= 0:
                    before = content[at - 1 : at] if at else b" "
                    match = NAME.match(content, at)
                    if match and not (before.isalnum() or before == b"_"):
                        yield match.group().decode()
                    at = content.find(prefix, at + len(prefix))
