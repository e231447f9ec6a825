"""A line of what `doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Line:
    """A fact. `note` says what does not fit, and what to do; `level` is `info` where that only helps to know."""

    section: str
    name: str
    value: str
    source: str = ""
    note: str = ""
    level: Literal["ok", "info", "warning"] = "ok"
