"""Small edits of a Python file at the places of its syntax tree: what is not edited keeps its form and its comments."""

from __future__ import annotations

import ast
import codecs
import io
import re
import tempfile
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._git import git_bytes


class Text:
    """The text of a file, in lines that end in LF, and the edits of it."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self._edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
        self._deleted: dict[int, list[ast.stmt]] = {}
        self._blocks: dict[int, Sequence[ast.stmt]] = {}
        self._inserted: list[tuple[int, str]] = []
        self._indented: list[tuple[int, int, str]] = []  # first line, last line, what to put above
        self._gone: set[int] = set()  # numbers of lines that are deleted as a whole

    def place(self, line: int, column: int) -> tuple[int, int]:
        """Return (line from 0, character) of a place of `ast`, whose columns count bytes of UTF-8."""
        return line - 1, len(self.lines[line - 1].encode()[:column].decode(errors="ignore"))

    def start(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins; its decorators are not part of it."""
        return self.place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node ends."""
        return self.place(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put other text in the place of a node."""
        self._edits.append((self.start(node), self.end(node), text))

    def around(self, node: ast.expr, before: str, after: str) -> None:
        """Put text before and after an expression."""
        self._edits.append((self.start(node), self.start(node), before))
        self._edits.append((self.end(node), self.end(node), after))

    def span(self, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        """Put other text between two places."""
        self._edits.append((start, end, text))

    def insert_line(self, before: int, text: str) -> None:
        """Insert a line before the line `before`, which counts from 1."""
        self._inserted.append((before, text))

    def indentation(self, line: int) -> str:
        """The white space at the beginning of a line."""
        return re.match(r"[ \t]*", self.lines[line - 1])[0]  # type: ignore[index]  # it matches always

    def unit(self) -> str:
        """One level of indentation, as this file has it: that of the least indented statement."""
        lines = {
            node.lineno
            for node in ast.walk(ast.parse("\n".join(self.lines)))
            if isinstance(node, ast.stmt) and node.col_offset
        }
        found = {self.indentation(line) for line in lines if self.indentation(line)}
        return min(found, key=len, default="    ")

    def delete(self, node: ast.stmt, block: Sequence[ast.stmt]) -> None:
        """Delete a statement of `block`; where nothing else would be left, or more stands in its line, it is `pass`."""
        self._deleted.setdefault(id(block), []).append(node)
        self._blocks[id(block)] = block

    def indent(self, first: ast.stmt, last: ast.stmt, header: str) -> None:
        """Put the statements from `first` to `last` below a line `header`."""
        line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
        self._indented.append((line, last.end_lineno or last.lineno, header))

    def _inside_texts(self) -> set[int]:
        """Numbers of the lines that begin inside of a string."""
        found: set[int] = set()
        starts: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO("\n".join(self.lines)).readline):
            name = tokenize.tok_name[token.type]
            if name in ("FSTRING_START", "TSTRING_START"):
                starts.append(token.start[0])
            elif name in ("FSTRING_END", "TSTRING_END"):
                found.update(range(starts.pop() + 1, token.end[0] + 1))
            elif name == "STRING":
                found.update(range(token.start[0] + 1, token.end[0] + 1))
        return found

    def result(self) -> str:
        """Return the text with all edits."""
        self._settle_deletions()
        self._settle_lines()
        edits = sorted(enumerate(self._edits), key=lambda pair: (pair[1][0], pair[1][1] != pair[1][0], pair[0]))
        lines, out, at = self.lines, [], (0, 0)
        for _, (start, end, text) in edits:
            if start < at:
                continue  # inside of what another edit has replaced
            out += [self._between(lines, at, start), text]
            at = end
        out.append(self._between(lines, at, (len(lines) - 1, len(lines[-1]))))
        return "".join(out)

    @staticmethod
    def _between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
        if start[0] == end[0]:
            return lines[start[0]][start[1] : end[1]]
        return "\n".join([lines[start[0]][start[1] :], *lines[start[0] + 1 : end[0]], lines[end[0]][: end[1]]])

    def _settle_deletions(self) -> None:
        for key, nodes in self._deleted.items():
            empty = len({id(node) for node in nodes}) == len(self._blocks[key])
            for number, node in enumerate({id(node): node for node in nodes}.values()):
                start, end = self.start(node), self.end(node)
                before, after = self.lines[start[0]][: start[1]], self.lines[end[0]][end[1] :]
                alone = not before.strip() and not after.partition("#")[0].strip()
                if not alone or (empty and number == 0):
                    self._edits.append((start, end, "pass"))
                else:
                    self._edits.append(((start[0], 0), (min(end[0] + 1, len(self.lines) - 1), 0), ""))
                    self._gone.update(range(start[0] + 1, end[0] + 2))
        self._deleted.clear()

    def _settle_lines(self) -> None:
        unit, kept = self.unit(), self._inside_texts() if self._indented else set()
        ranges = sorted(self._indented, key=lambda each: (each[0], -each[1]))
        for before, text in self._inserted:
            depth = sum(first < before <= last for first, last, _ in ranges)
            self._edits.append(((before - 1, 0), (before - 1, 0), f"{unit * depth}{text}\n"))
        for number, (first, last, header) in enumerate(ranges):
            depth = sum(outer[0] <= first and last <= outer[1] for outer in ranges[:number])
            prefix = self.indentation(first) + unit * depth
            self._edits.append(((first - 1, 0), (first - 1, 0), f"{prefix}{header}\n"))
        for first, last, _ in ranges:
            for line in range(first, last + 1):
                if line not in kept and line not in self._gone and self.lines[line - 1].strip():
                    self._edits.append(((line - 1, 0), (line - 1, 0), unit))


def encoding_of(content: bytes) -> str:
    """Return the encoding that a file names or begins with, as Python finds it."""
    try:
        return tokenize.detect_encoding(io.BytesIO(content).readline)[0]
    except SyntaxError:
        return "latin-1"


def encoded(text: str, before: bytes) -> bytes:
    """Return new text as bytes, in the encoding and with the line ends that the file had before."""
    encoding = encoding_of(before)
    if b"\r\n" in before:
        text = text.replace("\n", "\r\n")
    content = text.encode(encoding.removesuffix("-sig") if encoding.endswith("-sig") else encoding)
    return codecs.BOM_UTF8 + content if before.startswith(codecs.BOM_UTF8) else content


def as_patch(changed: Mapping[str, tuple[bytes, bytes]]) -> bytes:
    """Return what `git apply` takes in the folder below which the paths are: of each path what was and what will be.

    Without git's own header lines the paths are those of the folder in which it is applied, however deep in a
    repository that is. Raises ScaffoldError if there is no git.
    """
    parts = []
    for path, (before, after) in sorted(changed.items()):
        with tempfile.TemporaryDirectory(prefix="ddp-scaffold-") as folder:
            for name, content in (("a", before), ("b", after)):
                target = Path(folder, name, path)
                target.parent.mkdir(parents=True)
                target.write_bytes(content)
            plain = ["-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.quotePath=true"]
            options = ["--no-index", "--no-prefix", "--no-ext-diff", "--no-color", "--no-textconv", "--text"]
            made = git_bytes(*plain, "diff", *options, "a", "b", cwd=Path(folder))
            _, header, rest = made.stdout.partition(b"\n--- ")
            parts.append(b"--- " + rest if header else b"")
    return b"".join(parts)
