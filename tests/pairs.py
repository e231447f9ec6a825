"""Pairwise coverage: few rows in which every pair of values of two options occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], dear: Callable[[Row], float]
) -> list[Row]:
    """Rows of one value an option, so that each pair of values that some allowed row has is in one of them.

    Greedy, and the same at every call: the row that adds most pairs comes next; `dear` is taken off, so that rows that
    take long are used where they are needed.
    """
    rows = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    rows = [row for row in rows if allowed(row)]
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        useful = [row for row in rows if missing & _pairs(row)]
        best = max(useful, key=lambda row: len(missing & _pairs(row)) - dear(row))
        chosen.append(best)
        missing -= _pairs(best)
        rows.remove(best)
    return chosen


def _pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(sorted(row.items()), 2))
