"""The rules for Python files and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..files import SourceFile
from ..findings import Finding


def findings(files: Sequence[SourceFile]) -> Iterator[Finding]:
    """Yield what is wrong in those of `files` that are Python or notebooks, which are read together as one program."""
    yield from ()
