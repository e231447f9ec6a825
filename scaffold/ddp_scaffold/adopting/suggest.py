"""What an existing repository suggests: its package, the folder that holds it, and what starts its training."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from .advice import own_files

RESERVED = "templates/questions/reserved.yml"
COMMAND = re.compile(r"(?:-m )?[A-Za-z0-9_.][A-Za-z0-9_./-]*")
LAUNCHED = re.compile(rb"init_process_group|DistributedDataParallel")
GUARD = re.compile(rb"^if __name__ == [\"']__main__[\"']", re.MULTILINE)


def suggest(directory: Path, read: Callable[[str], str]) -> dict[str, str]:
    """Return answers that the repository suggests: project_name, source_folder, package and, if it is seen, command.

    `read` returns a file of the template.
    """
    import yaml

    reserved = yaml.safe_load(read(RESERVED))
    source_folder = "src" if (directory / "src").is_dir() else "."
    source = directory / source_folder
    declared = _declared_name(directory)
    packages = {entry.parent.name for entry in source.glob("*/__init__.py")}
    wanted = re.sub(r"[^A-Za-z0-9]+", "_", declared or directory.name).strip("_")
    if wanted not in packages:
        wanted = next(iter(packages)) if source_folder == "src" and len(packages) == 1 else wanted.lower()
    package = re.sub(r"^[0-9_]+", "", wanted)[:50] or "training"
    if package.lower() in reserved or (source / f"{package}.py").exists() or _is_installed(directory, source, package):
        package += "_ddp"
    suggested = {"project_name": _valid(declared or directory.name), "source_folder": source_folder, "package": package}
    command = _training_command(directory, source_folder, package)
    return suggested | ({"command": command} if command else {})


def _is_installed(directory: Path, source: Path, package: str) -> bool:
    """Tell whether a name is that of somebody else's package, which Python would find before a folder of ours.

    A folder without __init__.py comes after all packages that have one, wherever they are (PEP 420).
    """
    if (source / package / "__init__.py").exists():
        return False
    if any((directory / f"{package}{end}").exists() for end in ("/__init__.py", ".py")):
        return True
    with suppress(ImportError, ValueError, AttributeError):  # of a name that is half there
        found = find_spec(package)
        if found is not None and found.origin is not None:
            return True
    imports = re.compile(rb"^[ \t]*(?:from|import)[ \t]+" + package.encode() + rb"[ \t.,\n]", re.MULTILINE)
    return not (source / package).is_dir() and any(_has(directory / path, imports) for path in own_files(directory))


def _imports_beside(path: Path) -> bool:
    """Tell whether a file imports one beside it by its bare name, as it can only where it is started as a script."""
    with suppress(OSError):
        names = set(re.findall(rb"^(?:from|import)[ \t]+(\w+)", path.read_bytes(), re.MULTILINE))
        return any((path.parent / f"{name.decode()}.py").is_file() for name in names)
    return False


def _has(path: Path, pattern: re.Pattern[bytes]) -> bool:
    with suppress(OSError):
        return bool(pattern.search(path.read_bytes()))
    return False


def _declared_name(directory: Path) -> str:
    """Return `[project] name` of pyproject.toml, or an empty text. Python 3.10 has no tomllib."""
    try:
        text = (directory / "pyproject.toml").read_text("utf-8")
    except (OSError, ValueError):
        return ""
    section = re.search(r"^\[project\][ \t]*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = section and re.search(r"^name\s*=\s*[\"']([A-Za-z0-9._-]{1,60})[\"']", section[1], re.MULTILINE)
    return found[1] if found else ""


def _valid(text: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-0123456789")[:60].strip("-")
    return slug or "training"


def _training_command(directory: Path, source_folder: str, package: str) -> str:
    """Return what `python` may run to train: the script that makes a process group, else one called train or main."""
    files = own_files(directory)
    found = [path for path in files if _trains(directory / path)]
    if not found:
        folders = ("", "" if source_folder == "." else f"{source_folder}/", f"{source_folder}/{package}/")
        names = (f"{folder}{name}.py".removeprefix("./") for name in ("train", "main") for folder in folders)
        found = [path for path in names if path in files]
    found.sort(key=lambda path: ("train" not in path.rpartition("/")[2], path.count("/"), path))
    commands = (_command(directory, PurePosixPath(path), source_folder) for path in found)
    return next((command for command in commands if COMMAND.fullmatch(command)), "")


def _trains(path: Path) -> bool:
    with suppress(OSError):
        content = path.read_bytes()
        return bool(LAUNCHED.search(content) and GUARD.search(content))
    return False


def _command(directory: Path, path: PurePosixPath, source_folder: str) -> str:
    """Return the path, or -m and the module for a file inside of a package, which may use relative imports."""
    top = path
    while (directory / top.parent / "__init__.py").is_file() and top.parent != PurePosixPath("."):
        top = top.parent
    folder = top.parent.as_posix()
    if top == path and len(path.parts) > 1 and path.parts[0].isidentifier():
        above = re.compile(rb"^[ \t]*(?:from|import)[ \t]+" + path.parts[0].encode() + rb"\.", re.MULTILINE)
        if _has(directory / path, above):  # it says itself from where it is started
            return f"-m {'.'.join(path.with_suffix('').parts)}"
    if top == path or folder not in (".", source_folder) or _imports_beside(directory / path):
        return path.as_posix()
    module = path.relative_to(folder) if folder != "." else path
    return f"-m {'.'.join(module.with_suffix('').parts)}"
