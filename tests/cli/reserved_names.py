"""Writes templates/questions/reserved.yml: `python tests/cli/reserved_names.py PYTHON3.10 ... PYTHON3.13`.

Run it where the project's dependencies are installed: what they bring is taken from their metadata. A test compares.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from packaging.requirements import Requirement

FILE = Path(__file__).parents[2] / "templates/questions/reserved.yml"
DEPENDENCIES = (
    "torch numpy pydantic pydantic-settings pyyaml tqdm tensorboard scikit-learn pillow pytest pytest-timeout "
    "pytest-xdist"
)

# What the metadata on one machine does not tell: directories of a project; CUDA's packages, which torch brings on
# Linux with GPUs; what wandb brings, the other tracker; the tools that a project is checked with; common neighbours.
MORE = """
configs ddp launch runs src test tests conftest
cuda functorch nvidia pytorch_triton torchaudio torchgen torchvision triton
annotated_doc attr attrs certifi charset_normalizer click eval_type_backport git gitdb gitpython idna platformdirs
protobuf psutil requests sentry_sdk six smmap urllib3 wandb wandb_gql wandb_graphql
hatch hatchling mypy mypy_extensions mypyc pip ruff
matplotlib pandas scipy
true false none
"""
HEADER = """
# Names that neither package nor project may have, with _ for - and in lower case: keywords and standard library of
# Python 3.10 to 3.13; modules and distributions that a project's dependencies bring; what its directories are called.
# Made by tests/cli/reserved_names.py, which says how; edit that.
""".strip()


def standard_library(python: str) -> set[str]:
    """Return the keywords and top-level modules of an interpreter."""
    code = "import keyword, sys; print(*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names)"
    return set(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def brought_by_dependencies() -> set[str]:
    """Return the modules and distributions that are installed for the project's dependencies, these included.

    Raises PackageNotFoundError if one is not installed.
    """
    closure: set[str] = set()
    waiting = DEPENDENCIES.split()
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop()).lower()
        if name in closure:
            continue
        closure.add(name)
        requirements = map(Requirement, importlib.metadata.requires(name) or [])
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    modules = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if closure & {re.sub("[-_.]+", "-", name).lower() for name in distributions}
    }
    return modules | closure


def can_be_asked_for(name: str) -> str | None:
    """Return a name as the file spells it, or None if no answer can be that name anyway."""
    name = name.lower().replace("-", "_")
    return name if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) else None


def main() -> None:
    found = set(MORE.split()) | brought_by_dependencies()
    for python in sys.argv[1:]:
        found |= standard_library(python)
    names = sorted(set(filter(None, map(can_be_asked_for, found))))
    lines = textwrap.wrap(json.dumps(names), width=119, break_long_words=False)
    FILE.write_text("\n".join([HEADER, *lines, ""]))


if __name__ == "__main__":
    main()
