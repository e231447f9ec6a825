"""What adopting does to a repository that is installed: setuptools finds packages by itself, and finds launch/ too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Folders that setuptools does not take for packages (setuptools/discovery.py, FlatLayoutPackageFinder).
RESERVED = {
    *("ci", "bin", "debian", "doc", "docs", "documentation", "manpages", "news", "newsfragments", "changelog"),
    *("test", "tests", "unit_test", "unit_tests", "example", "examples", "scripts", "tools", "util", "utils"),
    *("python", "build", "benchmark", "benchmarks", "exercise", "exercises", "htmlcov", "tasks", "site_scons", "src"),
}
MODULES = {"setup", "conftest", "test", "tests", "example", "examples", "build", "noxfile", "tasks", "fabfile"}


@dataclass(frozen=True)
class Needed:
    """What pyproject.toml must say, and why."""

    before: bytes
    after: bytes
    line: int
    why: str
    instead: str


def needed(root: Path, package: str) -> Needed | None:
    """Return the change that keeps `pip install` working, or None if it needs none.

    Setuptools refuses a flat layout with more than one folder at the top that may be a package, and launch/ is one.
    """
    try:
        before = (root / "pyproject.toml").read_bytes()
        text = before.decode()
    except (OSError, UnicodeDecodeError):
        return None
    backend = re.search(r"^build-backend\s*=\s*[\"']([\w.:-]+)", text, re.MULTILINE)
    if backend and not backend[1].startswith("setuptools"):
        return None
    if not re.search(r"^\[project\]", text, re.MULTILINE) or re.search(
        r"^\[tool\.setuptools(?:\.packages.*|\.py-modules)?\]|^(?:packages|py-modules)\s*=", text, re.MULTILINE
    ):
        return None
    if (root / "src").is_dir() or (root / "setup.cfg").exists() or _says_packages(root / "setup.py"):
        return None
    found = _found(root)
    modules = sorted(path.stem for path in root.glob("*.py") if path.stem not in MODULES)
    if len(found) > 1 or (not found and len(modules) != 1):
        return None  # it could not be installed before
    names = ", ".join(f'"{each}*"' for each in sorted(found | {package}))
    lines = f"[tool.setuptools.packages.find]\ninclude = [{names}]\n"
    if not found:
        lines = f'[tool.setuptools]\npackages = []\npy-modules = ["{modules[0]}"]\n'
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = "" if text.endswith("\n") else newline
    after = f"{text}{gap}{newline}{lines.replace(chr(10), newline)}".encode()
    why = "setuptools finds packages by itself, and refuses to with launch/ beside them: pip install would fail"
    return Needed(before, after, len(text.splitlines()), why, f"add {' '.join(lines.split())}")


def _says_packages(path: Path) -> bool:
    try:
        return "packages" in path.read_text(errors="replace")
    except OSError:
        return False


def _found(root: Path) -> set[str]:
    return {
        path.name
        for path in root.iterdir()
        if path.is_dir() and path.name.isidentifier() and path.name not in RESERVED and not path.name.startswith("_")
    }
