"""Files with one JSON object a line, of which a kill, a full disk or a power failure may have spoilt some."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

LARGEST = 1e300  # beyond which a number is not finite, or cannot be drawn


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add objects to a file, on lines of their own: joined to one that was cut short, the first would be lost with it.

    Raises:
        OSError: it cannot be written.
    """
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        file.write(lines)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects in a file, in their order. A line that holds none is left out.

    Raises:
        OSError: it cannot be read.
    """
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of such an object is a number that can be compared, formatted and drawn."""
    return isinstance(value, (int, float)) and -LARGEST < value < LARGEST
