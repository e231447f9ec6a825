"""What preflight has found: one line that says what is wrong, one that says what to do, and of which ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import KindName
from ..ranks import named


@dataclass(frozen=True)
class Finding:
    """A problem (exit code 78), or with `warning` only something to know.

    With a problem that `blocks` no process group can be made: all is reported without trying. With one that leaves the
    rank `alone`, it cannot meet the others at all, and ends at once. `ranks`: none for all.
    """

    what: str
    remedy: str
    warning: bool = False
    blocks: bool = False
    alone: bool = False
    ranks: tuple[int, ...] = ()
    kind: KindName = "launcher_misconfig"  # of the outcome


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Equal findings of several ranks as one, problems first."""
    known: dict[Finding, tuple[int, ...]] = {}
    for finding in findings:
        alike = replace(finding, ranks=())
        known[alike] = (*known.get(alike, ()), *finding.ranks)
    found = [replace(alike, ranks=tuple(sorted(set(ranks)))) for alike, ranks in known.items()]
    return sorted(found, key=lambda finding: finding.warning)


def text(finding: Finding, hosts: Sequence[str]) -> str:
    """'problem: rank 3 (n2): what' and '  -> what to do'."""
    who = f"{named(finding.ranks, hosts)}: " if finding.ranks else ""
    return f"{'warning' if finding.warning else 'problem'}: {who}{finding.what}\n  -> {finding.remedy}"
