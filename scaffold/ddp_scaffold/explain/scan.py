"""Find the few lines that matter in a log of any size, in bounded memory and without decoding the others.

Each block of a log is searched for a few dozen short anchors, one after the other: a search for one literal is the
fastest thing that Python has, and one expression of all of them takes eight times as long. A line with an anchor is
then looked at for the marker words that hold this anchor. Measured in benchmarks/explain.py, also on a log whose lines
all differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

BLOCK = 1 << 20
AHEAD = 1 << 16  # bytes that a line may look ahead: a traceback
LONGEST_LINE = 1 << 14  # bytes; of what is longer, the part around the marker is taken
CONTEXT = 1 << 13  # bytes before a block that a line may look back at
DIGITS = b"0123456789"
MOST_SHAPES = 50_000
MOST_ALIKE = 8192  # lines of one shape that are looked at: as many as a job may have ranks in one file

Markers = Mapping[bytes, Sequence[bytes]]  # an anchor -> the marker words that hold it, none of them twice


@dataclass(frozen=True)
class Hit:
    """A line with a marker word, at `start` to `end` of the buffer that it was found in."""

    number: int
    buffer: bytes
    start: int
    end: int

    @property
    def raw(self) -> bytes:
        return self.buffer[self.start : self.end]

    def after(self, count: int) -> Sequence[bytes]:
        """Return up to so many lines that follow."""
        begin = self.buffer.find(b"\n", self.end) + 1
        if not begin:
            return []
        return self.buffer[begin : begin + AHEAD].split(b"\n", count)[:count]

    def before(self, count: int) -> Sequence[bytes]:
        """Return up to so many lines that stand before it."""
        end = self.start - 1
        return self.buffer[max(0, end - CONTEXT) : end].rsplit(b"\n", count)[-count:] if end > 0 else []


def markers(words: Iterable[bytes], anchors: Sequence[bytes]) -> Markers:
    """Return which words each anchor stands for. Raises ValueError where a word holds none of them."""
    found: dict[bytes, list[bytes]] = {}
    for word in words:
        anchor = next((each for each in anchors if each in word), None)
        if anchor is None:
            raise ValueError(f"no anchor in {word!r}")
        found.setdefault(anchor, []).append(word)
    return found


def hits(blocks: Iterable[bytes], marked: Markers, first_line: int = 1) -> Iterator[Hit]:
    """Yield the lines that have a marker word, in order. What a progress bar has ended by \\r counts as a line."""
    number, done, buffer = first_line, 0, b""
    seen: dict[bytes, int] = {}
    for block in blocks:
        buffer += block
        if len(buffer) - done < BLOCK + AHEAD:
            continue
        cut = max(buffer.rfind(b"\n", done, len(buffer) - AHEAD), buffer.rfind(b"\r", done, len(buffer) - AHEAD)) + 1
        if not cut:  # one line, longer than a block: a piece of it
            cut = len(buffer) - AHEAD
        yield from _found(buffer, done, cut, number, marked, seen)
        number += buffer.count(b"\n", done, cut)
        begin = max(0, cut - CONTEXT)
        buffer, done = buffer[begin:], cut - begin
    yield from _found(buffer, done, len(buffer), number, marked, seen)


def _found(buffer: bytes, start: int, stop: int, number: int, marked: Markers, seen: dict[bytes, int]) -> Iterator[Hit]:
    """Yield the hits that begin between `start` and `stop`."""
    lines: dict[int, int] = {}  # start -> end
    for anchor, words in marked.items():
        at = buffer.find(anchor, start, stop)
        while at >= 0:
            begin, end = _line(buffer, at, start)
            if begin not in lines and any(buffer.find(word, begin, end) >= 0 for word in words):
                lines[begin] = end
            at = buffer.find(anchor, max(end, at + 1), stop)
    counted = start
    for begin, end in sorted(lines.items()):
        number += buffer.count(b"\n", counted, begin)
        counted = begin
        shape = buffer[begin:end].translate(None, DIGITS)
        times = seen.get(shape, 0)
        if times >= MOST_ALIKE:
            continue
        if len(seen) > MOST_SHAPES:
            seen.clear()
        seen[shape] = times + 1
        yield Hit(number, buffer, begin, end)


def _line(buffer: bytes, at: int, first: int) -> tuple[int, int]:
    """Return where the line around a place begins and ends; of a very long one, the part around the place."""
    low, high = max(first, at - LONGEST_LINE // 4), at + LONGEST_LINE
    begin = max(buffer.rfind(b"\n", low, at), buffer.rfind(b"\r", low, at)) + 1
    end = buffer.find(b"\n", at, high)
    end = min(high, len(buffer)) if end < 0 else end
    overwritten = buffer.find(b"\r", at, end - 1)
    return begin or low, overwritten if overwritten >= 0 else end
