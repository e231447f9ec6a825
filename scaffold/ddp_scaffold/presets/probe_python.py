"""Which Python and which torch a job may have here: python3, conda and the module command are asked, nothing is loaded.

What a login node has, compute nodes have as a rule, but not always; the sources name where it was seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from .draft import Draft

LEAST_PYTHON = (3, 10)  # of projects: templates/project/pyproject.toml.jinja
# It runs with any Python 3, and imports no torch, which takes long where files are read for the first time.
_ASK_PYTHON = """\
import os, sys
from importlib.util import find_spec
sys.path[:] = [path for path in sys.path if path]
own = sys.prefix != sys.base_prefix or os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
torch = "unknown" if find_spec("torch") else "none"
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    pass
makes = "venv" if find_spec("venv") and find_spec("ensurepip") else "bare"
print("python %d.%d" % sys.version_info[:2], "own" if own else "site", makes)
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
    r"^python (\d{1,2})\.(\d{1,2}) (site|own) (venv|bare)\ntorch (none|unknown|[0-9][0-9A-Za-z.+]{0,39})$", re.MULTILINE
)
_MODULE = re.compile(r"^ *([A-Za-z0-9_+][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_.+-]+){0,5})/?(?: ?\((?:default|D|L|,)+\))? *$")
_PYTHONS = re.compile(r"(cray-)?python[0-9.]*|(ana|mini)conda[0-9]*|miniforge[0-9]*|mamba(forge)?|conda", re.IGNORECASE)
_TORCHES = re.compile(r"(py|lib)?-?(py)?torch(-(gpu|cuda|rocm|ddp|ml))?", re.IGNORECASE)


def probe_python(draft: Draft, said: Mapping[str, str], silent: Sequence[str], here: str, cluster: bool) -> None:
    """Take in who provides Python and torch, and say what is missing. `cluster`: modules count."""
    found = _modules(said.get("module avail", ""))
    pythons, torches = _named(found, _PYTHONS), _named(found, _TORCHES)
    loaded = _loaded() if cluster else []
    own = [name for name in loaded if _is(name, _PYTHONS) or _is(name, _TORCHES)]
    answer = _ANSWER.search(said.get("python3", ""))
    version = (int(answer[1]), int(answer[2])) if answer else None
    number = ".".join(map(str, version)) if version else ""
    enough = version is not None and version >= LEAST_PYTHON
    torch = answer[5] if answer and enough and answer[5] != "none" else ""
    if own and enough:
        draft.probed("modules", loaded, f"loaded on {here} when this file was made")
    least = ".".join(map(str, LEAST_PYTHON))
    seen = f"python3 on {here} is {number}" if version else f"there is no python3 on {here}"
    if "python3" in said and not version:
        seen = f"what python3 on {here} prints cannot be read"
    elif "python3" not in said and (word := next((line for line in silent if line.startswith("python3: ")), "")):
        seen = seen if "not installed" in word else f"{word} ({here})"
    _python(draft, seen, enough, own, pythons, cluster=cluster, conda="conda" in said, least=least, here=here)
    plain = answer is not None and answer[3] == "site"
    _torch(draft, seen, torch if plain or own else "", own, torches, here)
    if not enough:
        ways = [f"modules: {_some(pythons)}" if pythons else "no module of Python was seen" if cluster else ""]
        ways.append("conda is there" if "conda" in said else "")
        told = "; ".join(way for way in ways if way)
        draft.missing(f"python: {seen}, and projects need {least}{f'; {told}' if told else ''}")
    elif torch and not (plain or own):
        draft.missing(f"torch: {seen}, and has it in an environment that a job has only if it is activated there")
    if answer and enough and answer[4] == "bare":
        draft.missing(f"python: {seen}, but makes no .venv: it has no ensurepip (of Debian, the package python3-venv)")
    if cluster and "module avail" in said and "ddp-scaffold: module" not in said["module avail"]:
        draft.missing(NO_MODULES)


def _python(
    draft: Draft, seen: str, enough: bool, own: Sequence[str], pythons: Sequence[str], *,
    cluster: bool, conda: bool, least: str, here: str,
) -> None:  # fmt: skip
    if enough and own:
        for name in own:
            draft.need({"what": "python", "by": "module", "name": _family(name)}, f"{seen}, with {name} loaded")
    elif enough:
        draft.need({"what": "python", "by": "site", "name": "python3"}, seen)
    elif cluster:
        way = f"a module with Python {least} or later: --set modules=NAME"
        way += f"; on {here}: {_some(pythons)}" if pythons else ""
        way += "; or an environment of conda, which is there: VENV=DIR for each job" if conda else ""
        draft.need({"what": "python", "by": "module", "add": way}, seen)
    else:
        way = f"Python {least} or later; {seen}"
        draft.need({"what": "python", "by": "user", "add": way}, seen)


def _torch(draft: Draft, seen: str, torch: str, own: Sequence[str], torches: Sequence[str], here: str) -> None:
    """Take in torch: of the modules that are loaded, of python3 itself, of modules that one may load, or of pip."""
    if torch:
        given = [_family(name) for name in own if _is(name, _TORCHES)] or [_family(name) for name in own]
        text = "" if torch == "unknown" else f" {torch}"
        for name in given:
            draft.need({"what": "torch", "by": "module", "name": name}, f"{seen}, and has torch{text}")
        if not own:
            draft.need({"what": "torch", "by": "site", "name": f"torch{text}"}, f"{seen}, and has torch{text}")
        return
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
