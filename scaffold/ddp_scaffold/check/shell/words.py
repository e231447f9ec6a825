"""Shell text as words and operators, with their places. Nothing is expanded or run; what is not understood is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

OPERATOR = re.compile(r"&&|\|\||;;&|;&|;;|\|&|&>>|&>|[;|&()\n]")
REDIRECTION = re.compile(r"\d*(?:<<<|>>|>\||<&|>&|<>|<|>)")
HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.+-]+))")
BACKSLASH = "\\"


@dataclass(frozen=True)
class Word:
    """A word as it is written: quotes, `$` and backslashes are still in it."""

    raw: str
    line: int  # from 1
    column: int  # from 1

    @property
    def literal(self) -> str | None:
        """What the shell makes of it, or None where that depends on a variable or a command."""
        return unquoted(self.raw)


@dataclass(frozen=True)
class Token:
    """A word, an operator or a comment."""

    kind: Literal["word", "operator", "comment"]
    word: Word
    glued: bool = False  # a word that is the target of a redirection


class _Reader:
    """A place in the text, and the heredocs whose bodies begin after the line."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line, self.line_start = text, 0, 1, 0
        self.heredocs: list[tuple[str, bool]] = []

    def column(self) -> int:
        return self.at - self.line_start + 1

    def advance_to(self, end: int) -> str:
        """Move on, counting lines; return what was passed."""
        passed = self.text[self.at : end]
        newlines = passed.count("\n")
        if newlines:
            self.line += newlines
            self.line_start = self.at + passed.rfind("\n") + 1
        self.at = end
        return passed

    def skip_heredocs(self) -> None:
        """Pass the bodies of the heredocs that were announced: they are data."""
        for end, tabs in self.heredocs:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                body = self.advance_to(min(stop + 1, len(self.text))).rstrip("\n")
                if (body.lstrip("\t") if tabs else body) == end:
                    break
        self.heredocs = []


SPECIAL = re.compile(r"[$`~'\"\\]")


def tokens(text: str, line: int = 1, column: int = 1) -> Iterator[Token]:
    """Yield words, operators and comments. `line` and `column` say where the text begins in its file."""
    reader = _Reader(text)
    if line == column == 1:
        yield from _tokens(reader)
        return
    for token in _tokens(reader):
        here = token.word
        shift = column - 1 if here.line == 1 else 0
        yield Token(token.kind, Word(here.raw, here.line + line - 1, here.column + shift), token.glued)


def _tokens(reader: _Reader) -> Iterator[Token]:
    text, target = reader.text, False
    while reader.at < len(text):
        char = text[reader.at]
        if char in " \t" or text.startswith("\\\n", reader.at):
            reader.advance_to(reader.at + (1 if char in " \t" else 2))
            continue
        line, column = reader.line, reader.column()
        if char == "#":
            stop = text.find("\n", reader.at)
            raw = reader.advance_to(len(text) if stop < 0 else stop)
            yield Token("comment", Word(raw, line, column))
            continue
        redirects = char in "<>&" or char.isdigit()
        heredoc = HEREDOC.match(text, reader.at) if redirects else None
        if heredoc and not text.startswith("<<<", reader.at):
            end = next(part for part in heredoc.groups()[1:] if part is not None)
            reader.heredocs.append((end, bool(heredoc.group(1))))
            reader.advance_to(heredoc.end())
            continue
        redirection = REDIRECTION.match(text, reader.at) if redirects else None
        if redirection and not text.startswith(("<(", ">("), redirection.end() - 1):
            reader.advance_to(redirection.end())
            target = True
            continue
        marked = OPERATOR.match(text, reader.at) if char in ";|&()\n" else None
        if marked:
            operator = marked.group()
            reader.advance_to(marked.end())
            if operator in ("&>", "&>>"):
                target = True
                continue
            yield Token("operator", Word(operator, line, column))
            if operator == "\n":
                reader.skip_heredocs()
            continue
        raw = reader.advance_to(_word_end(text, reader.at))
        yield Token("word", Word(raw, line, column), target)
        target = False


def _word_end(text: str, at: int) -> int:
    """Return where the word that begins at `at` ends."""
    start = at
    while at < len(text):
        char = text[at]
        if char == BACKSLASH:
            if text.startswith("\\\n", at) and at > start:
                follows = text[at + 2 : at + 3]
                if follows in ("", " ", "\t", "\n"):
                    break
            at += 2
        elif char in "'\"`" or text.startswith(("$'", '$"', "$(", "${", "<(", ">("), at):
            at = _closed(text, at)
        elif char == "(" and at > start and text[at - 1] == "=":  # an array
            at = _balanced(text, at, "(", ")")
        elif char in " \t\n;&|()<>":
            break
        else:
            at += 1
    return min(max(at, start + 1), len(text))


def _closed(text: str, at: int) -> int:
    """Return the end of the quotation or expansion that begins at `at`; the end of the text if it is never closed."""
    if text.startswith("$'", at):
        return _after(text, at + 2, "'", escapes=True)
    if text[at] == "'":
        return _after(text, at + 1, "'", escapes=False)
    if text[at] == "`":
        return _after(text, at + 1, "`", escapes=True)
    if text.startswith("${", at):
        return _balanced(text, at + 1, "{", "}")
    if text.startswith(("$(", "<(", ">("), at):
        return _balanced(text, at + 1, "(", ")")
    at += 2 if text[at] == "$" else 1
    while at < len(text) and text[at] != '"':
        if text[at] == BACKSLASH:
            at += 2
        elif text[at] == "`" or text.startswith(("$(", "${"), at):
            at = _closed(text, at)
        else:
            at += 1
    return at + 1


def _after(text: str, at: int, mark: str, *, escapes: bool) -> int:
    while at < len(text) and text[at] != mark:
        at += 2 if escapes and text[at] == BACKSLASH else 1
    return at + 1


def _balanced(text: str, at: int, opening: str, closing: str) -> int:
    """Return the end of the bracket that opens at `at`."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == BACKSLASH:
            at += 2
            continue
        if char in "'\"`":
            at = _closed(text, at)
            continue
        if char == "#" and opening == "(" and text[at - 1] in " \t\n":  # a comment in a command substitution
            stop = text.find("\n", at)
            at = len(text) if stop < 0 else stop
            continue
        depth += (char == opening) - (char == closing)
        at += 1
        if depth == 0:
            return at
    return at


@lru_cache(maxsize=1 << 16)
def unquoted(raw: str) -> str | None:
    """Return a word without its quotes, or None if the shell would expand something in it."""
    if not SPECIAL.search(raw):
        return raw
    parts, at = [], 0
    while at < len(raw):
        char = raw[at]
        if char in "$`" or (char == "~" and at == 0):
            return None
        if char == "'":
            end = raw.find("'", at + 1)
            end = len(raw) if end < 0 else end
            parts.append(raw[at + 1 : end])
            at = end + 1
        elif char == '"':
            end = _closed(raw, at)
            inner = raw[at + 1 : end - 1]
            if re.search(r"(?<!\\)[$`]", inner):
                return None
            parts.append(re.sub(r"\\([\"$`\\])", r"\1", inner.replace("\\\n", "")))
            at = end
        elif char == BACKSLASH:
            parts.append("" if raw.startswith("\\\n", at) else raw[at + 1 : at + 2])
            at += 2
        else:
            parts.append(char)
            at += 1
    return "".join(parts)


def expansions(raw: str) -> set[str]:
    """Return the variables that the shell puts in where this word stands: not those in single quotes or escaped."""
    found, at, double = set(), 0, False
    while at < len(raw):
        char = raw[at]
        if char == BACKSLASH:
            at += 2
        elif char == '"':
            double = not double
            at += 1
        elif char == "'" and not double:
            at = _after(raw, at + 1, "'", escapes=False)
        elif match := re.compile(r"\$\{?(\w+)").match(raw, at):
            found.add(match.group(1))
            at = match.end()
        else:
            at += 1
    return found
