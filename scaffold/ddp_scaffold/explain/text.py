"""The answer for a person."""

from __future__ import annotations

from .. import _output
from .explanation import Evidence, Explanation

MOST_ROWS = 32


def tell(answer: Explanation) -> None:
    """Print the verdict, its evidence, what to do, and a row for each rank."""
    verdict = answer.verdict
    ranks = ", ".join(map(str, verdict.first_ranks)) if verdict.first_ranks else "not known"
    _output.rows(
        f"{verdict.kind} ({verdict.confidence})",
        [("first", f"rank {ranks}"), *([("phase", verdict.phase)] if verdict.phase else [])],
    )
    _output.say_filled(verdict.summary)
    for title, lines in (
        ("Evidence", [f"{_place(line)}: {line.text}" for line in verdict.evidence]),
        ("Do", verdict.advice),
        ("Needed to say more", verdict.needs),
    ):
        if lines:
            _output.say()
            _output.say(title + ":")
            for line in lines:
                _output.say_filled(f"  {line}", indent=4)
    if answer.ranks:
        _output.say()
        shown = sorted(answer.ranks, key=lambda row: (row.role != "culprit", row.rank))[:MOST_ROWS]
        _output.table(
            ("rank", "role", "host", "collective", "exit"),
            [(str(row.rank), row.role, row.host, row.collective, row.exit) for row in shown],
        )
        if len(answer.ranks) > len(shown):
            _output.say(f"... and {len(answer.ranks) - len(shown)} more ranks: --json has all of them")


def _place(line: Evidence) -> str:
    return f"{line.file}:{line.line}" if line.line else line.file
