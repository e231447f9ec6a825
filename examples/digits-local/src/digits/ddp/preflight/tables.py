"""What preflight prints: machines, links, findings; or the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..ranks import ranges
from ..start.findings import Finding, text
from .compare import name, slowest
from .links import Link, by_host

MOST_ROWS = 16
MOST_PAIRS = 8  # rows of pairs, the slowest; all are in --json
COLUMNS = ("device", "gpus", "peers", "cpus", "workers", "shm_mb", "files", "disk_gb", "route", "ib")


@dataclass(frozen=True)
class Report:
    """All that rank 0 knows in the end. `whole`: every pair was measured. `offsets`: of clocks, in seconds."""

    hosts: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]
    seconds: float
    links: Sequence[Link] = ()
    whole: bool = True
    offsets: Mapping[str, float] | None = None

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.warning]


def plain(report: Report) -> str:
    """Tables and findings; the last line is the verdict."""
    versions = [f"{key} {value}" for key, value in report.rows[0]["versions"].items()]
    lines = [table(machines(report.rows)), "", "versions: " + ", ".join(versions).replace("toolkit ", "")]
    if report.offsets:
        far, by = max(report.offsets.items(), key=lambda item: abs(item[1]))
        lines.append(f"clocks: at most {abs(by) * 1e3:.1f} ms apart from rank 0's ({far})")
    if report.links:
        lines += ["", *links(report)]
    lines += ["", *(text(finding, report.hosts) for finding in report.findings)] if report.findings else []
    lines += ["", f"preflight took {report.seconds:.1f} s"]
    count, warnings = len(report.problems), len(report.findings) - len(report.problems)
    wrong = f"{count} problem{'s' if count > 1 else ''}, see above"
    order = "everything is in order"
    order += f", but for the {f'{warnings} warnings' if warnings > 1 else 'warning'} above" if warnings else ""
    return "\n".join([*lines, f"preflight: {wrong if count else order}"])


def as_json(report: Report, code: int) -> str:
    """One object; `version` counts changes of its form."""
    content = {"version": 1, "exit_code": code, **asdict(report)}
    content["slowest"] = [asdict(one) for one in slowest(report.links)]
    return json.dumps(content)


def machines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a rank, or on more than MOST_ROWS ranks a row a host with ranges."""
    if len(rows) <= MOST_ROWS:
        return [["rank", "host", *COLUMNS], *([_show(row[key]) for key in ("rank", "host", *COLUMNS)] for row in rows)]
    found = [["ranks", "host", *COLUMNS]]
    for host, ranks in by_host([row["host"] for row in rows]).items():
        found.append([ranges(ranks), host, *(_span([rows[rank][key] for rank in ranks]) for key in COLUMNS)])
    return found


def links(report: Report) -> list[str]:
    """The table of links, and the slowest of each kind."""
    groups = [link for link in report.links if link.kind in ("all", "node")]
    pairs = sorted((link for link in report.links if link.kind in ("ranks", "nodes")), key=lambda link: link.gb_s)
    shown = sorted(groups, key=lambda link: (link.kind != "all", link.gb_s))[:MOST_ROWS] + pairs[:MOST_PAIRS]
    cells = [["transfer", "between", "MB", "GB/s", "latency ms", "through"]]
    for link in shown:
        what = "both ways" if link.kind in ("ranks", "nodes") else "all_reduce"
        numbers = [f"{link.megabytes:.3g}", f"{link.gb_s:.3g}", f"{link.latency_ms:.3g}"]
        cells.append([what, name(link, report.hosts), *numbers, link.carrier])
    lines = [table(cells)]
    if more := len(report.links) - len(shown):
        lines.append(f"... and {more} others, no slower than their like above")
    kinds = {"node": "node", "ranks": "pair of ranks on a node", "nodes": "pair of nodes"}
    for one in slowest(report.links):
        compared = f", {one.ratio:.1f} times the median of {one.of}" if one.of > 1 else ""
        who = name(one.link, report.hosts)
        lines.append(f"slowest {kinds[one.link.kind]}: {who}, {one.link.gb_s:.3g} GB/s{compared}")
    if not report.whole:
        lines.append("not all pairs were measured: each rank met as many others as there were rounds")
    return lines


def table(cells: Sequence[Sequence[str]]) -> str:
    """Columns aligned."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _show(value: object) -> str:
    return "?" if value is None else str(value)


def _span(values: Sequence[object]) -> str:
    """'4-8' of numbers, else the different texts."""
    different = list(dict.fromkeys(values))
    numbers = [value for value in different if isinstance(value, int)]
    if len(different) > 1 and len(numbers) == len(different):
        return f"{min(numbers)}-{max(numbers)}"
    texts = [_show(value) for value in different]
    return " | ".join(texts[:3] + (["..."] if len(texts) > 3 else []))
