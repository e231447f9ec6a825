"""What was found when a preset was held against a machine: one line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# told: the machine says something that the preset leaves open, or does not state.
Outcome = Literal["agrees", "differs", "not looked at", "told"]


@dataclass(frozen=True)
class Finding:
    """One field of a preset, what it says, what the machine says or why it does not, and the tool that told."""

    field: str
    outcome: Outcome
    preset: str = ""
    machine: str = ""
    by: str = ""


def agrees_or_differs(field: str, stated: object, seen: object, by: str) -> Finding:
    """Return the finding about a value that both sides have."""
    return Finding(field, "agrees" if stated == seen else "differs", str(stated), str(seen), by)
