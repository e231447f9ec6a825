"""Which Python and which torch a job may have here: python3, conda and the module command are asked, nothing is loaded.

What a login node has, compute nodes have as a rule, but not always; the sources name where it was seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .draft import Draft

LEAST_PYTHON = (3, 10)  # of projects: templates/project/pyproject.toml.jinja
# It runs with any Python 3, and imports no torch, which takes long where files are read for the first time.
_ASK_PYTHON = """\
import os, sys
from importlib.util import find_spec
sys.path[:] = [path for path in sys.path if path]
conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
whose = "venv" if sys.prefix != sys.base_prefix else "conda" if conda else "site"
torch = "unknown" if find_spec("torch") else "none"
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    pass
makes = "venv" if find_spec("venv") and find_spec("ensurepip") else "bare"
print("python %d.%d" % sys.version_info[:2], whose, makes)
print("torch", torch)
"""
# `module` is a function of interactive shells; /etc/profile defines it elsewhere.
_ASK_MODULES = """\
command -v module >/dev/null || source /etc/profile >/dev/null
if command -v module >/dev/null; then echo "ddp-scaffold: module"; module -t avail; else echo "ddp-scaffold: none"; fi
true
"""
PYTHON = {"python3": ("python3", "-c", _ASK_PYTHON)}
SOFTWARE = {"conda": ("conda", "--version"), "module avail": ("bash", "-c", f"exec 2>&1\n{_ASK_MODULES}")}
# What is told in the line on Python, or is no news.
QUIETLY = {f"{name}: not installed here" for name in ("python3", "conda", "bash")}
NO_MODULES = "modules: there is no module command here"
SHOWN = 6  # names in one line

_ANSWER = re.compile(
    r"^python (\d{1,2})\.(\d{1,2}) (site|conda|venv) (venv|bare)\ntorch (none|unknown|[0-9][0-9A-Za-z.+]{0,39})$",
    re.MULTILINE,
)
_MODULE = re.compile(r"^ *([A-Za-z0-9_+][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_.+-]+){0,5})/?(?: ?\((?:default|D|L|,)+\))? *$")
_PYTHONS = re.compile(r"(cray-)?python[0-9.]*|(ana|mini)conda[0-9]*|miniforge[0-9]*|mamba(forge)?|conda", re.IGNORECASE)
_TORCHES = re.compile(r"(py|lib)?-?(py)?torch(-(gpu|cuda|rocm|ddp|ml))?", re.IGNORECASE)


@dataclass(frozen=True)
class Python:
    """What python3 says of itself."""

    version: tuple[int, int]
    whose: str  # site, conda or venv
    makes_venv: bool
    torch: str  # a release, "unknown", or empty

    @property
    def is_active(self) -> bool:
        """Tell whether it is one of an environment that the user has activated."""
        return self.whose == "venv" or (self.whose == "conda" and bool(os.environ.get("CONDA_PREFIX")))


def probe_python(draft: Draft, said: Mapping[str, str], silent: Sequence[str], here: str, cluster: bool) -> None:
    """Take in who provides Python and torch, and say what is missing. `cluster`: modules count."""
    found = _modules(said.get("module avail", ""))
    pythons, torches = _named(found, _PYTHONS), _named(found, _TORCHES)
    loaded = _loaded() if cluster else []
    bring = [name for name in loaded if _is(name, _PYTHONS) or _is(name, _TORCHES)]
    python = _answer(said.get("python3", ""))
    if python is None or python.version < LEAST_PYTHON:
        ways = [f"modules: {_some(pythons)}"] if pythons else ["no module of Python was seen"] if cluster else []
        ways += ["conda is there"] if "conda" in said else []
        _too_old(draft, _seen(python, said, silent, here), ways, cluster)
        python = None
    seen = _seen(python, said, silent, here)
    if python and bring:
        draft.probed("modules", loaded, f"loaded on {here} when this file was made")
    for name in bring if python else []:
        draft.need({"what": "python", "by": "module", "name": _family(name)}, f"{seen}, with {name} loaded")
    if python and not bring:
        draft.need({"what": "python", "by": "site", "name": "python3"}, seen)
    if python and not python.makes_venv:
        draft.missing(f"python: {seen}, but makes no .venv: it has no ensurepip (of Debian, the package python3-venv)")
    _torch(draft, python, seen, bring, torches, here)
    if cluster and "module avail" in said and "ddp-scaffold: module" not in said["module avail"]:
        draft.missing(NO_MODULES)


def _answer(text: str) -> Python | None:
    match = _ANSWER.search(text)
    if match is None:
        return None
    torch = "" if match[5] == "none" else match[5]
    return Python((int(match[1]), int(match[2])), match[3], match[4] == "venv", torch)


def _seen(python: Python | None, said: Mapping[str, str], silent: Sequence[str], here: str) -> str:
    """Return what was seen of python3, in words."""
    if python:
        active = ", of an environment that is active" if python.is_active else ""
        return f"python3 on {here} is {'.'.join(map(str, python.version))}{active}"
    if "python3" in said:
        return f"what python3 on {here} prints cannot be read"
    why = next((line for line in silent if line.startswith("python3: ")), "not installed")
    return f"there is no python3 on {here}" if "not installed" in why else f"{why} ({here})"


def _too_old(draft: Draft, seen: str, ways: Sequence[str], cluster: bool) -> None:
    """Take in that python3 is none for a project, and where another may come from."""
    least = ".".join(map(str, LEAST_PYTHON))
    if cluster:
        way = f"a module with Python {least} or later: --set modules=NAME; or one of yours: VENV=DIR for each job"
        draft.need({"what": "python", "by": "module", "add": f"{way}. Here: {'; '.join(ways)}"}, seen)
    else:
        draft.need({"what": "python", "by": "user", "add": f"Python {least} or later"}, seen)
    draft.missing("; ".join([f"python: {seen}, and projects need {least}", *ways]))


def _torch(
    draft: Draft, python: Python | None, seen: str, bring: Sequence[str], torches: Sequence[str], here: str
) -> None:
    """Take in torch: of the modules that are loaded, of python3 itself, of modules that one may load, or of pip."""
    release = python.torch if python else ""
    source = f"{seen}, and has torch{'' if release == 'unknown' else f' {release}'}"
    bringers = [name for name in bring if _is(name, _TORCHES)] or ([] if python and python.is_active else bring)
    if release and bringers:
        for name in bringers:
            draft.need({"what": "torch", "by": "module", "name": _family(name)}, source)
        return
    if release and python and python.whose == "site":
        draft.need({"what": "torch", "by": "site", "name": "that of python3"}, source)
        return
    if release:
        draft.missing(f"torch: {source}, which a job has only if it activates that environment (VENV=DIR)")
    for name in torches[:SHOWN]:
        need = {"what": "torch", "by": "module", "name": _family(name), "add": f"--set modules='{name}'"}
        draft.need(need, f"module avail on {here} shows {_some(torches)}")
    if torches:
        draft.need({"what": "torch", "by": "pip"}, "docs.pytorch.org/get-started/locally", "inferred")
    if draft.value("accelerator") == "rocm":
        draft.missing("torch_index: which index of pip has a build of torch for this machine's ROCm")


def _modules(text: str) -> list[str]:
    """Return the names that a terse list of modules holds, of Lmod or of Tcl modules, each once."""
    found = (_MODULE.match(line) for line in text.splitlines()[:100_000] if len(line) <= 120)
    return list(dict.fromkeys(match[1] for match in found if match))


def _loaded() -> list[str]:
    """Return the modules that are loaded, in their order; none if one of them has no name of known form."""
    names = [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name]
    return names if len(names) <= 60 and all(len(name) <= 120 and _MODULE.match(name) for name in names) else []


def _is(name: str, words: re.Pattern[str]) -> bool:
    return any(words.fullmatch(part) for part in name.split("/"))


def _named(names: Iterable[str], words: re.Pattern[str]) -> list[str]:
    """Return the newest of the modules of each name that the pattern knows; of Python none that is too old."""
    newest: dict[str, str] = {}
    for name in names:
        version = re.search(r"(?i)python[^/]*/(\d{1,4})\.(\d{1,4})\b", name)
        old = version and (int(version[1]), int(version[2])) < LEAST_PYTHON
        if not _is(name, words) or old:
            continue
        family = _family(name)
        if family not in newest or _order(name) > _order(newest[family]):
            newest[family] = name
    return list(newest.values())


def _order(name: str) -> list[tuple[int, str]]:
    """Return what sorts versions: 3.9 before 3.12."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"[0-9]{1,9}|[^0-9]+", name)]


def _family(name: str) -> str:
    """Return a module's name without its version: lang/Python of lang/Python/3.12.3."""
    family, _, version = name.rpartition("/")
    return family if family and re.match(r"v?[0-9]", version) else name


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
