"""Find the few lines that matter in a log of any size, in bounded memory and without decoding the others.

A search for each of 150 marker words, or one expression of all of them, reads 5 to 20 MB a second. So each block of a
log is first cut into words of letters, and only the markers whose rarest word is among those are searched for. Lines
that only differ in their digits, as those of a training loop, are cut once. Measured in benchmarks/explain.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

BLOCK = 1 << 20
WINDOW = 1 << 16  # bytes that are cut into words together
SAMPLE = 1 << 12  # bytes of a window by which one sees whether its lines are alike
AHEAD = 1 << 16  # bytes that a line may look ahead: a traceback
LONGEST_LINE = 1 << 14  # bytes; of what is longer, the part around the marker is taken
LOOK_BACK = 3000  # bytes before a marker that are taken of a long line: less than `decode` keeps of it
LOOK_AHEAD = 900  # bytes behind a marker of a long line that `decode` keeps as well
CONTEXT = 1 << 13  # bytes before a block that a line may look back at
DIGITS = b"0123456789"
LETTERS = bytes(byte if chr(byte).isalpha() and byte < 128 else ord(" ") for byte in range(256))
COLOUR = b"m"  # the end of an escape sequence, "\x1b[31m", which stands before a word without a space
# words that lines of any program may have: no keys, where a marker has another word
COMMON = frozenset(
    b"because checkpoint complete connect device error failed found gradient gradients group kill last loss memory"
    b" network peer process rank signal size store time training world".split()
)
MOST_SHAPES = 50_000
MOST_ALIKE = 8192  # lines of one shape that are looked at: as many as a job may have ranks in one file


@dataclass(frozen=True)
class Markers:
    """What to search for: `always`, and a marker of `keyed` where its key is a word of the block."""

    always: re.Pattern[bytes]
    keyed: Mapping[bytes, Sequence[bytes]]
    keys: frozenset[bytes]

    def places(self, buffer: bytes, start: int, stop: int) -> Iterator[int]:
        """Yield where markers stand, the same line several times perhaps."""
        found = self.always.search(buffer, start, stop)
        while found:
            yield found.start()
            found = self.always.search(buffer, _beyond(buffer, found.end(), stop), stop)
        for key in self.keys.intersection(_different(buffer[start:stop]).translate(LETTERS).split()):
            for marker in self.keyed[key]:
                at = buffer.find(marker, start, stop)
                while at >= 0:
                    yield at
                    at = buffer.find(marker, _beyond(buffer, at + len(marker), stop), stop)


def markers(words: Iterable[bytes], always: bytes) -> Markers:
    """Return markers by their keys. `always` is an expression of what may end a longer word ("KeyError:").

    It should begin with a rare letter: then Python looks for that by memchr.

    The key is the longest word of letters; capitals count for more, since they are rarer. So a marker must begin and
    end with whole words: "oom kill" is not found in "oom killer".
    """
    keyed: dict[bytes, list[bytes]] = {}
    for marker in words:
        key = max(re.findall(rb"[A-Za-z]+", marker.translate(None, DIGITS)), key=_rarity)
        for form in (key, COLOUR + key):
            keyed.setdefault(form, []).append(marker)
    return Markers(re.compile(always), keyed, frozenset(keyed))


def _beyond(buffer: bytes, at: int, stop: int) -> int:
    """Return where to look on behind a marker: on the next line, or where what is kept of a very long one ends.

    Else a line that is nothing but markers would be read as often as it has some.
    """
    end = min(at + LOOK_AHEAD, stop)
    for separator in (b"\n", b"\r"):
        found = buffer.find(separator, at, end)
        end = found if found >= 0 else end
    return end


def _different(window: bytes) -> bytes:
    """Return a window without its digits; where its first lines are alike then, also without those that repeat."""
    shapes = window.translate(None, DIGITS)
    sample = shapes[:SAMPLE].split(b"\n")
    if 2 * len(set(sample)) > len(sample):
        return shapes
    return b"\n".join(set(shapes.split(b"\n")))


def _rarity(word: bytes) -> tuple[bool, int]:
    return word not in COMMON and len(word) > 2, len(word) + 3 * (word != word.lower())


@dataclass(frozen=True)
class Hit:
    """A line with a marker, at `start` to `end` of the buffer that it was found in."""

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


def hits(blocks: Iterable[bytes], marked: Markers, stop: int | None = None) -> Iterator[Hit]:
    """Yield the lines that have a marker, in order. What a progress bar has ended by \\r counts as a line.

    Lines that begin `stop` bytes or more behind the begin are only looked at from those before.
    """
    number, done, buffer, before = 1, 0, b"", 0  # `before`: bytes that are no longer in the buffer
    seen: dict[int, int] = {}
    for block in blocks:
        buffer += block
        if len(buffer) - done < BLOCK + AHEAD:
            continue
        cut = max(buffer.rfind(b"\n", done, len(buffer) - AHEAD), buffer.rfind(b"\r", done, len(buffer) - AHEAD)) + 1
        if not cut:  # one line, longer than a block: a piece of it
            cut = len(buffer) - AHEAD
        if stop is not None and before + cut >= stop:
            break
        yield from _found(buffer, done, cut, number, marked, seen)
        number += buffer.count(b"\n", done, cut)
        begin = max(0, cut - CONTEXT)
        buffer, done, before = buffer[begin:], cut - begin, before + begin
    end = len(buffer) if stop is None else min(len(buffer), stop - before)
    yield from _found(buffer, done, end, number, marked, seen)


def _found(buffer: bytes, start: int, stop: int, number: int, marked: Markers, seen: dict[int, int]) -> Iterator[Hit]:
    """Yield the hits between `start` and `stop`."""
    lines: dict[int, int] = {}  # start -> end
    for first, last in _windows(buffer, start, stop):
        for at in marked.places(buffer, first, last):
            begin, end = _line(buffer, at, start)
            lines[begin] = end
    counted = start
    for begin, end in sorted(lines.items()):
        number += buffer.count(b"\n", counted, begin)
        counted = begin
        shape = hash(buffer[begin:end].translate(None, DIGITS))  # of a long line the shape itself would cost memory
        times = seen.get(shape, 0)
        if times >= MOST_ALIKE:
            continue
        if len(seen) > MOST_SHAPES:
            seen.clear()
        seen[shape] = times + 1
        yield Hit(number, buffer, begin, end)


def _windows(buffer: bytes, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield pieces that end with a line, small enough that the words of one do not cost a search of many others."""
    while start < stop:
        end = buffer.find(b"\n", start + WINDOW, stop) + 1 or stop
        yield start, end
        start = end


def _line(buffer: bytes, at: int, first: int) -> tuple[int, int]:
    """Return where the line around a place begins and ends; of a very long one, the part around the place."""
    low, high = max(first, at - LOOK_BACK), at + LONGEST_LINE
    begin = max(buffer.rfind(b"\n", low, at), buffer.rfind(b"\r", low, at)) + 1
    end = buffer.find(b"\n", at, high)
    end = min(high, len(buffer)) if end < 0 else end
    overwritten = buffer.find(b"\r", at, end - 1)
    return begin or low, overwritten if overwritten >= 0 else end
