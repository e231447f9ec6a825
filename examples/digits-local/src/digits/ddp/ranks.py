"""How ranks are named in every message, so that people and `grep` find them: 'rank 3 (n2)'."""

from __future__ import annotations

from collections.abc import Sequence


def rank_on(rank: int, host: str) -> str:
    """'rank 3 (n2)'."""
    return f"rank {rank} ({host})"


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """'rank 3 (n2)' or 'ranks 0-7 (n1, n2)', with at most four hosts."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    where = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} ({where})"


def ranges(numbers: Sequence[int]) -> str:
    """'0-3, 6' for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
