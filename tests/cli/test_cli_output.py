"""Tables and labelled lines on terminals of any width: nothing is cut off or left out."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from ddp_scaffold import _output

HEADER = ("preset", "GPUs a node", "verified", "status", "title", "source", "nodes")
LINES = [
    ("coreweave-sunk", "8x H100 80 GB", "6 months ago", "documented", "CoreWeave SUNK (H100)", "a/long/path.md", "1"),
    ("cpu", "", "today", "community", "This machine's CPU", "https://example.org/" + "x" * 60, ""),
]
PAIRS = [("world size", "16 (4 nodes x 4 GPUs)"), ("interface", "x" * 70), ("more", "ddp-scaffold presets show cpu")]
WIDTHS = sorted({*range(10, 100, 3), *range(60, 72), 20, 120, 200})


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`shown(width, function, ...)` returns what a function prints on a terminal of that width."""

    def run(width: int, function: Callable[..., None], *args: object, **options: object) -> str:
        terminal = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr("sys.stdout", terminal)
        function(*args, **options)
        return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())

    return run


def letters(*texts: str) -> Counter[str]:
    """Count what is neither space nor frame."""
    return Counter(mark for text in texts for mark in text if not mark.isspace() and not "\u2500" <= mark <= "\u257f")


def cells(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return what must stand in a table that is printed as lines."""
    return [f"{label}: {cell}" for line in lines for label, cell in zip(header, line, strict=True) if cell]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("columns", [1, 3, 7])
@pytest.mark.parametrize("keep_first", [False, True])
def test_a_table_loses_nothing(shown, width, columns, keep_first):
    header, lines = HEADER[:columns], [line[:columns] for line in LINES]
    text = shown(width, _output.table, header, lines, keep_first=keep_first)
    assert "…" not in text
    if "─" in text:
        assert letters(text) == letters(*header, *(cell for line in lines for cell in line))
        assert max(map(len, text.splitlines())) <= width
    else:
        assert [line for line in text.splitlines() if line] == cells(header, lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("title", ["Result", "crusoe: Crusoe Cloud Slurm, InfiniBand (A100, H100, H200, B200)"])
def test_labelled_lines_lose_nothing(shown, width, title):
    text = shown(width, _output.rows, title, PAIRS)
    assert "…" not in text
    assert letters(text) == letters(title, *(word for pair in PAIRS for word in pair))
    assert "─" not in text or max(map(len, text.splitlines())) <= width


def test_frames_are_there_at_80_columns(shown):
    assert "─" in shown(80, _output.table, HEADER, LINES, keep_first=True)
    assert "─" in shown(80, _output.rows, "Result", PAIRS)
    assert "─" not in shown(20, _output.table, HEADER, LINES)
    assert "─" not in shown(20, _output.rows, "Result", PAIRS)
