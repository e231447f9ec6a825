"""Find the few lines that matter in a log of any size, in bounded memory.

Nearly all lines of a log are alike but for their numbers. So each block of lines is stripped of its digits, and of
the shapes that remain those that have not been seen yet are searched for marker words. Only a line that has one is
decoded. Measured in benchmarks/explain.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

BLOCK = 1 << 20
AHEAD = 1 << 16  # bytes that a line may look ahead: a traceback
LONGEST_LINE = 1 << 16  # bytes; what is longer is cut into pieces, so that a line without end needs no memory
CONTEXT, MOST_AFTER = 40, 400  # lines
DIGITS = b"0123456789"
MOST_SHAPES = 50_000
MOST_ALIKE = 8192  # lines of one shape that are looked at: as many as a job may have ranks in one file


@dataclass(frozen=True)
class Hit:
    """A line with a marker word, among the lines of its block."""

    number: int
    raw: bytes
    lines: Sequence[bytes]
    index: int  # of the line in `lines`

    def after(self, count: int) -> Sequence[bytes]:
        """Return up to so many lines that follow."""
        return self.lines[self.index + 1 : self.index + 1 + count]

    def before(self, count: int) -> Sequence[bytes]:
        """Return up to so many lines that stand before it."""
        return self.lines[max(0, self.index - count) : self.index]


class Shapes:
    """Which shapes of lines have a marker word, remembered from file to file."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self.words = tuple(words)
        self.plain: set[bytes] = set()
        self.marked: dict[bytes, int] = {}  # how often it was seen in this file

    def begin_file(self) -> None:
        self.marked = dict.fromkeys(self.marked, 0)

    def learn(self, shapes: set[bytes]) -> None:
        """Sort new shapes into those with a marker word and those without."""
        if len(self.plain) + len(self.marked) > MOST_SHAPES:
            self.plain.clear()
            self.marked.clear()
        new = [shape for shape in shapes - self.plain if shape not in self.marked]
        if not new:
            return
        marked = {new[index] for index in self._with_a_word(new)}
        self.marked.update(dict.fromkeys(marked, 0))
        self.plain.update(shape for shape in new if shape not in marked)

    def _with_a_word(self, shapes: list[bytes]) -> set[int]:
        """Return the indexes of those that have a marker word.

        One search for each word: one expression of all words took four times as long on lines that all differ.
        """
        text = b"\n".join(shapes)
        begins = list(accumulate((len(shape) + 1 for shape in shapes), initial=0))
        found: set[int] = set()
        for word in self.words:
            at = text.find(word)
            while at >= 0:
                index = bisect_right(begins, at) - 1
                found.add(index)
                at = text.find(word, begins[index + 1])
        return found

    def interesting(self, shape: bytes) -> bool:
        """Tell whether a line of this shape has a marker word, and count it."""
        seen = self.marked.get(shape)
        if seen is None:
            return False
        self.marked[shape] = seen + 1
        return seen < MOST_ALIKE


def hits(blocks: Iterable[bytes], shapes: Shapes, first_line: int = 1) -> Iterator[Hit]:
    """Yield the lines that have a marker word, in order."""
    shapes.begin_file()
    number, rest = first_line, b""
    before: list[bytes] = []
    for block in blocks:
        buffer = rest + block
        if len(buffer) < BLOCK + AHEAD:
            rest = buffer
            continue
        cut = buffer.rfind(b"\n", 0, len(buffer) - AHEAD) + 1
        if not cut:  # one line, longer than a block: a piece of it
            cut = len(buffer) - AHEAD
        text, rest = buffer[:cut], buffer[cut:]
        yield from _block(text, rest, number, before, shapes)
        number += text.count(b"\n")
        before = text[-8192:].split(b"\n")[1:-1][-CONTEXT:]
    yield from _block(rest, b"", number, before, shapes)


def _block(text: bytes, ahead: bytes, number: int, before: list[bytes], shapes: Shapes) -> Iterator[Hit]:
    """Yield the hits of a block, whose lines are whole unless one is longer than the block."""
    stripped = text.translate(None, DIGITS).split(b"\n")
    found = set(stripped)
    if max(map(len, found)) > LONGEST_LINE:
        yield from _long_lines(text, number, shapes)
        return
    shapes.learn(found)
    if found.isdisjoint(shapes.marked):
        return
    own = text.split(b"\n")
    own.pop()  # behind the last newline; where there is none, the line is added again below
    if not text.endswith(b"\n"):
        own.append(text[text.rfind(b"\n") + 1 :])
    lines = [*before, *own, *ahead.split(b"\n")[:MOST_AFTER]]
    for index, shape in enumerate(stripped[: len(own)]):
        if shapes.interesting(shape):
            yield Hit(number + index, own[index], lines, len(before) + index)


def _long_lines(text: bytes, number: int, shapes: Shapes) -> Iterator[Hit]:
    """Yield the hits of a block in which a line is very long: each part that a progress bar has ended by itself.

    Of a part that is still too long only both ends are looked at, so that the effort stays in proportion.
    """
    for offset, line in enumerate(text.split(b"\n")):
        parts: list[bytes] = []
        for part in line.split(b"\r"):
            parts += [part] if len(part) <= LONGEST_LINE else [part[:4096], part[-4096:]]
        stripped = [part.translate(None, DIGITS) for part in parts]
        shapes.learn(set(stripped))
        for index, shape in enumerate(stripped):
            if shapes.interesting(shape):
                yield Hit(number + offset, parts[index], parts, index)
