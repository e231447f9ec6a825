"""What `check` reports: one finding a place, each of a rule that has a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["hang", "wrong-result", "lost-work", "slow", "placebo", "hygiene"]


@dataclass(frozen=True)
class Rule:
    """A rule: its id (`DDP101`), a name in words with dashes, and how bad what it finds is."""

    id: str
    name: str
    severity: Severity


@dataclass(frozen=True, order=True)
class Finding:
    """A place where a rule fires. `line` and `column` count from 1; `cell` is a notebook's code cell, else 0.

    `message` says what will happen, on which ranks; `fix` says what to write instead, with this code's own names.
    """

    file: str
    line: int
    column: int
    rule: str
    severity: Severity
    message: str
    fix: str
    docs: str
    cell: int = 0
