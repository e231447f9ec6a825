"""The variables of torch.distributed, NCCL and gloo: the table of variables.yaml, and what is wrong with a setting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from .findings import Finding
from .shell.rules import finding

TABLE = Path(__file__).with_name("variables.yaml")
BOOLEANS = re.compile(r"y|yes|1|t|true|n|no|0|f|false", re.IGNORECASE)  # torch's c10d/Utils.hpp, getCvarBool
INTEGERS = re.compile(r"\s*[+-]?\d")  # std::stoi in getCvarInt: what follows the digits is not looked at
TRUE = re.compile(r"y|yes|1|t|true", re.IGNORECASE)


@dataclass(frozen=True)
class Harm:
    """What a value does: `values` is a regular expression of all of it."""

    rule: str
    values: str
    message: str
    fix: str
    cost: str = ""


@dataclass(frozen=True)
class Variable:
    """A row of the table."""

    name: str
    read_by: str  # torch, nccl, cuda or none
    source: str
    since: str = ""
    until: str = ""
    no_effect_since: str = ""
    renamed_to: str = ""
    values: str = ""
    default: str = ""
    meaning: str = ""
    instead: str = ""
    harms: tuple[Harm, ...] = ()


@dataclass(frozen=True)
class Table:
    """All variables by name, and the names that NCCL reads beside them."""

    variables: Mapping[str, Variable]
    also_nccl: frozenset[str]


@dataclass(frozen=True)
class Setting:
    """A variable that reaches a process, and where it is set. `value` is None where it depends on something else."""

    name: str
    value: str | None
    file: str
    line: int
    column: int


@dataclass(frozen=True)
class Releases:
    """The releases of torch that a project allows, as `(2, 5)`; None where there is no bound."""

    least: tuple[int, ...] | None = None
    most: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Project:
    """What the rest of the repository says about its variables."""

    torch: Releases = Releases()
    read: frozenset[str] = frozenset()  # names that the repository's own code reads
    uses_rpc: bool = True  # torch.distributed.rpc; True also where no Python was given
    files: frozenset[str] = frozenset()  # as POSIX text below the folder that was given
    ports: Mapping[str, int] = field(default_factory=dict)  # the first file of settings with one in each folder: others

    def has(self, path: str) -> bool:
        """Whether a file with this path, or with one that ends so, is in the repository."""
        below = f"/{path}"
        return any(name == path or name.endswith(below) for name in self._by_name.get(PurePosixPath(path).name, ()))

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.files:
            found.setdefault(name.rpartition("/")[2], []).append(name)
        return found


@dataclass
class Settings:
    """The settings that reach the same process."""

    all: list[Setting] = field(default_factory=list)

    def value(self, name: str) -> str | None:
        """The value of a variable, if it is set here and known."""
        return next((one.value for one in reversed(self.all) if one.name == name), None)

    def has(self, name: str) -> bool:
        return any(one.name == name for one in self.all)


@cache
def load_table() -> Table:
    """Read the table."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(TABLE.read_text(encoding="utf-8"), loader)
    variables = {}
    for row in content["variables"]:
        harms = tuple(Harm(**harm) for harm in row.pop("harms", ()))
        variables[row["name"]] = Variable(**row, harms=harms)
    return Table(variables, frozenset(content["also_nccl"]))


def release(text: str) -> tuple[int, ...]:
    """Return `2.10.1` as numbers that can be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])


def judge(settings: Sequence[Setting], project: Project, *, several_nodes: bool | None = None) -> list[Finding]:
    """Return what is wrong with settings that reach the same process. `several_nodes` is None where it is not known."""
    table, together = load_table(), Settings(list(settings))
    found: list[Finding] = []
    for setting in settings:
        variable = table.variables.get(setting.name)
        if variable is None:
            found += _mistyped(setting, table, project)
            continue
        one = _unread(setting, variable, project) or _bad_syntax(setting, variable)
        if one is not None:
            found.append(one)
            continue
        found += _renamed(setting, variable, project)
        found += _harmful(setting, variable, project, together, several_nodes)
    return found + _contradictions(together, project)


def _unread(setting: Setting, variable: Variable, project: Project) -> Finding | None:
    """A variable that nothing reads, in any release or in those that the project allows."""
    if setting.name in project.read:
        return None
    where = (setting.file, setting.line, setting.column)
    drop = variable.instead or "Take the line out."
    if variable.read_by == "none":
        if variable.renamed_to:
            message = (
                f"Nothing reads {setting.name} any more (last: NCCL {variable.until}): it changes nothing on any rank."
            )
            return finding("DDP554", where, message, f"The name of today is {variable.renamed_to}.")
        if variable.until:
            message = f"Nothing reads {setting.name} any more (last: {variable.until}): it changes nothing on any rank."
            return finding("DDP554", where, message, drop)
        message = f"Nothing reads {setting.name}, neither torch nor NCCL nor gloo: it changes nothing on any rank."
        return finding("DDP553", where, message, drop)
    if variable.no_effect_since and _at_least(project.torch.least, variable.no_effect_since):
        message = (
            f"{setting.name} has no effect since torch {variable.no_effect_since}: it changes nothing on any rank."
        )
        return finding("DDP554", where, message, drop)
    if variable.read_by == "torch" and variable.since and _below(project.torch.most, variable.since):
        old = next((row.name for row in load_table().variables.values() if row.renamed_to == setting.name), "")
        newest = ".".join(map(str, project.torch.most or ()))
        message = (
            f"torch reads {setting.name} since {variable.since}, and this project uses torch {newest}: no rank does."
        )
        return finding("DDP555", where, message, f"Set {old} in its place." if old else "Take the line out, or update.")
    return None


def _at_least(bound: tuple[int, ...] | None, text: str) -> bool:
    wanted = release(text)
    return bound is not None and bound[: len(wanted)] >= wanted


def _below(bound: tuple[int, ...] | None, text: str) -> bool:
    wanted = release(text)
    return bound is not None and len(bound) >= len(wanted) and bound[: len(wanted)] < wanted


def _bad_syntax(setting: Setting, variable: Variable) -> Finding | None:
    where, value = (setting.file, setting.line, setting.column), setting.value
    if value is None or value == "":
        return None
    if setting.name == "GLOO_SOCKET_IFNAME" and re.match(r"[\^=]", value):
        message = (
            f"gloo takes exact names: {value!r} is the syntax of NCCL_SOCKET_IFNAME, and with it every rank that "
            "makes a gloo group fails at the start, since no interface has that name."
        )
        return finding("DDP150", where, message, "Name the interface (as in `ip -brief addr`), or leave it unset.")
    if (
        re.fullmatch(r"(['\"\u2018\u2019\u201c\u201d]).*['\"\u2018\u2019\u201c\u201d]", value)
        and variable.read_by != "none"
    ):
        message = f"The quotes are a part of the value of {setting.name} here, and {variable.read_by} does not know it."
        return finding("DDP165", where, message, f"Write {setting.name}={value[1:-1]}.")
    wrong = (variable.values == "boolean" and not BOOLEANS.fullmatch(value)) or (
        variable.values == "integer" and not INTEGERS.match(value)
    )
    if wrong:
        kinds = {"boolean": "1 or 0 (y, yes, t, true; n, no, f, false)", "integer": "a whole number"}
        message = f"torch reads {setting.name} as {variable.values}: {value!r} ends every rank as it makes its group."
        return finding("DDP164", where, message, f"Use {kinds[variable.values]}.")
    return None


def _renamed(setting: Setting, variable: Variable, project: Project) -> list[Finding]:
    """An old name that is still read: with a warning, and only while the new one is not set as well."""
    if not variable.renamed_to or setting.name in project.read:
        return []
    new = load_table().variables[variable.renamed_to]
    since = new.since or "2.2"
    if not _at_least(project.torch.least, since):  # where an older torch may run, the old name is the right one
        return []
    message = f"{setting.name} is called {new.name} since torch {since}: each rank warns, and the new name wins if set."
    return [finding("DDP655", (setting.file, setting.line, setting.column), message, f"Set {new.name}.")]


def _harmful(
    setting: Setting, variable: Variable, project: Project, together: Settings, several_nodes: bool | None
) -> list[Finding]:
    where, found = (setting.file, setting.line, setting.column), []
    if setting.value is None:
        return []
    for harm in variable.harms:
        if not re.fullmatch(harm.values, setting.value, re.IGNORECASE):
            continue
        if setting.name == "TP_SOCKET_IFNAME" and project.uses_rpc:
            continue
        if setting.name == "NCCL_DEBUG_SUBSYS" and (together.value("NCCL_DEBUG") or "").upper() not in (
            "INFO",
            "TRACE",
        ):
            continue
        if setting.name == "NCCL_IB_DISABLE" and several_nodes is False:
            continue
        cost = f" Measured: {harm.cost}." if harm.cost and not harm.cost.startswith("370") else ""
        cost = cost or (f" Reported: {harm.cost}." if harm.cost else "")
        found.append(finding(harm.rule, where, f"{setting.name}={setting.value} {harm.message}.{cost}", harm.fix))
    if setting.name == "NCCL_SOCKET_IFNAME" and several_nodes and setting.value.lstrip("=") == "lo":
        message = (
            "NCCL_SOCKET_IFNAME=lo is the loopback: ranks on other nodes cannot be reached, and all wait for them."
        )
        found.append(finding("DDP156", where, message, "Name the interface between the nodes, or take the line out."))
    return found


# Where the first is set to such a value, the others change nothing. Source: ProcessGroupNCCL.cpp, NCCL user guide.
OVERRULED: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        TRUE.pattern,
        (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_DESYNC_DEBUG",
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "TORCH_NCCL_ENABLE_MONITORING",
        ),
        "no watchdog is started, which alone would read it",
    ),
    ("NCCL_IB_DISABLE", "1", ("NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"), "no InfiniBand is used"),
    ("NCCL_P2P_DISABLE", "1", ("NCCL_P2P_LEVEL",), "there is no peer-to-peer at any level"),
)


def _contradictions(together: Settings, project: Project) -> list[Finding]:
    """Pairs of which one makes the other pointless. Of several places, the last one counts."""
    found = []
    last = {setting.name: setting for setting in together.all}
    for name, values, others, reason in OVERRULED:
        value = together.value(name)
        if value is None or not re.fullmatch(values, value, re.IGNORECASE):
            continue
        for other in others:
            if other in last and other not in project.read and last[other].value is not None:
                setting = last[other]
                message = f"{other} has no effect on any rank beside {name}={value}: {reason}."
                where = (setting.file, setting.line, setting.column)
                found.append(finding("DDP556", where, message, f"Take out one of the two; better {name}."))
    subsystem = last.get("NCCL_DEBUG_SUBSYS")
    level = last.get("NCCL_DEBUG")
    if subsystem and subsystem.value and level and (level.value or "").upper() in ("WARN", "VERSION", "0"):
        where = (subsystem.file, subsystem.line, subsystem.column)
        message = f"NCCL_DEBUG_SUBSYS chooses among what NCCL_DEBUG=INFO prints; at {level.value} it changes nothing."
        found.append(
            finding("DDP556", where, message, "Take it out, or set NCCL_DEBUG=INFO while looking for a fault.")
        )
    for variable in load_table().variables.values():
        old, new = last.get(variable.name), last.get(variable.renamed_to)
        if (
            variable.read_by == "torch"
            and old
            and new
            and None not in (old.value, new.value)
            and old.value != new.value
        ):
            where = (old.file, old.line, old.column)
            message = f"{old.name}={old.value} is not what counts: {new.name}={new.value} is set as well, and wins."
            found.append(finding("DDP556", where, message, "Take the old name out."))
    return found


def _mistyped(setting: Setting, table: Table, project: Project) -> list[Finding]:
    """A name that is one or two letters away from one that is read. Plugins read names of their own: those are left."""
    name = setting.name
    if not re.match(r"(?:TORCH_NCCL|NCCL|GLOO|TORCH_FR|TORCH_DISTRIBUTED|TORCHELASTIC)_", name) or len(name) < 10:
        return []
    if name in table.also_nccl or name in project.read:
        return []
    known = [one for one in (*table.variables, *table.also_nccl) if _is_near(name, one)]
    if len(known) != 1 or table.variables.get(known[0], Variable(known[0], "nccl", "")).read_by == "none":
        return []
    message = f"Nothing reads {name}; {known[0]} is the name that is read. It changes nothing on any rank."
    return [finding("DDP557", (setting.file, setting.line, setting.column), message, f"Write {known[0]}.")]


def _is_near(one: str, other: str) -> bool:
    """Whether one letter is missing, extra or wrong, or two beside each other are swapped; digits are no letters."""
    if abs(len(one) - len(other)) > 1 or one == other or re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return False
    if len(one) == len(other):
        differ = [at for at, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs]
        swapped = len(differ) == 2 and one[differ[0] : differ[1] + 1] == other[differ[0] : differ[1] + 1][::-1]
        return len(differ) == 1 or (swapped and differ[1] == differ[0] + 1)
    short, long = sorted((one, other), key=len)
    return any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
