"""A script as commands, directives and assignments, each with its place. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .words import Token, Word, tokens, unquoted

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)", re.ASCII)
OPENING = {"if": "if", "while": "loop", "until": "loop", "for": "loop", "select": "loop", "case": "case", "{": "group"}
CLOSING = {"fi": "if", "done": "loop", "esac": "case", "}": "group"}
BETWEEN = {"then", "else", "elif", "do", "!", "time", "coproc"}
ENDS = {"\n", ";", "&", "&&", "||", "|", "|&", "(", ")", ";;", ";&", ";;&"}
DIRECTIVE = re.compile(r"#(\s*)(SBATCH|PBS)\s+(\S.*?)\s*$")
Scope = Literal["shell", "exported", "command"]


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`: for the shell alone, for its children as well, or for one command."""

    name: str
    value: Word
    line: int
    column: int
    scope: Scope
    conditional: bool  # within an if, a loop, a case, a function, or behind && or ||

    @property
    def literal(self) -> str | None:
        """The value, or None where it depends on something else."""
        return self.value.literal


@dataclass(frozen=True)
class Command:
    """A simple command. `blocks` are the constructs around it, from outside in; `before` and `after` are operators."""

    words: tuple[Word, ...]
    blocks: tuple[str, ...]
    before: str
    after: str

    @property
    def name(self) -> str:
        """The program, without its folder; empty where a variable decides."""
        literal = self.words[0].literal
        return literal.rsplit("/", 1)[-1] if literal else ""

    @property
    def line(self) -> int:
        return self.words[0].line

    @property
    def column(self) -> int:
        return self.words[0].column

    @property
    def conditional(self) -> bool:
        """Whether it may be passed over."""
        return any(block != "group" for block in self.blocks) or self.before in ("&&", "||")

    def literals(self) -> list[str]:
        """The words, with what is not known as it is written."""
        return [word.raw if word.literal is None else word.literal for word in self.words]


@dataclass(frozen=True)
class Directive:
    """A line for the scheduler, as `#SBATCH --nodes=2`: `option` is `--nodes`, `value` is `2`."""

    scheduler: Literal["SBATCH", "PBS"]
    option: str
    value: str
    line: int
    column: int
    spaced: bool  # `# SBATCH`, which the scheduler takes for a comment
    late: bool  # below the first command, where the scheduler no longer looks
    raw: str


@dataclass(frozen=True)
class Script:
    """What a file says."""

    path: str
    text: str
    commands: tuple[Command, ...]
    assignments: tuple[Assignment, ...]
    directives: tuple[Directive, ...]

    @property
    def active(self) -> list[Directive]:
        """The directives that the scheduler reads."""
        return [one for one in self.directives if not one.spaced and not one.late]

    def named(self, *names: str) -> list[Command]:
        """The commands with one of these names."""
        return [command for command in self.commands if command.name in names]


def read_script(path: str, text: str, line: int = 1) -> Script:
    """Read a shell script, or a part of another file that begins in this line."""
    commands, comments = _commands(tokens(text, line))
    assignments: list[Assignment] = []
    simple: list[Command] = []
    for command in commands:
        found, rest = _assignments(command)
        assignments += found
        if rest is not None:
            simple.append(rest)
    first = min((command.line for command in commands), default=len(text) + 1)
    directives = [directive for comment in comments for directive in _directives(comment, first)]
    assignments = _exported_later(assignments, simple)
    return Script(path, text, tuple(simple), tuple(assignments), tuple(directives))


class _Parsing:
    """The commands so far, the words of the next one, and the constructs around it."""

    def __init__(self) -> None:
        self.found: list[Command] = []
        self.comments: list[Word] = []
        self.words: list[Word] = []
        self.blocks: list[str] = []
        self.before = "\n"
        self.in_pattern = False  # within a case, before the `)` of its pattern

    def operator(self, mark: str) -> None:
        if self.in_pattern:
            self.in_pattern = mark != ")"
            self.words, self.before = [], "\n"
            return
        if mark == "(" and len(self.words) == 1:  # name()
            self.blocks.append("function")
            self.words = []
            return
        if self.words:
            self.found.append(Command(tuple(self.words), tuple(self.blocks), self.before, mark))
        elif mark == ")" and self.blocks[-1:] == ["function"]:
            return
        if mark == "(":
            self.blocks.append("subshell")
        elif mark == ")" and "subshell" in self.blocks:
            self.blocks.remove("subshell")
        self.in_pattern = mark in (";;", ";&", ";;&") and "case" in self.blocks
        self.words, self.before = [], mark

    def word(self, word: Word) -> None:
        mark = word.raw
        if self.in_pattern and mark != "esac":
            return
        if not self.words and _keyword(mark, self.blocks):
            self.in_pattern = False
            if mark in ("case", "for", "select"):
                self.words = [word]
            return
        if self.words and self.words[0].raw == "case" and mark == "in":
            self.words, self.in_pattern = [], True
            return
        self.words.append(word)


def _commands(stream: Iterator[Token]) -> tuple[list[Command], list[Word]]:
    """Return the commands, and the comments."""
    parsing = _Parsing()
    for token in stream:
        if token.kind == "comment":
            parsing.comments.append(token.word)
        elif token.kind == "operator" and token.word.raw in ENDS:
            parsing.operator(token.word.raw)
        elif token.kind == "word" and not token.glued:
            parsing.word(token.word)
    parsing.operator("\n")
    return [one for one in parsing.found if one.words[0].raw not in ("for", "select", "case")], parsing.comments


def _keyword(mark: str, blocks: list[str]) -> bool:
    """Take a reserved word at the beginning of a command: tell whether it is one, and note what opens and closes."""
    if mark == "function":
        blocks.append("function")
        return False
    if mark in OPENING:
        if mark != "{" or blocks[-1:] != ["function"]:  # a function's body closes the function
            blocks.append(OPENING[mark])
        return True
    if mark in CLOSING:
        wanted = CLOSING[mark]
        if blocks[-1:] == [wanted]:
            blocks.pop()
        elif mark == "}" and "function" in blocks:
            del blocks[len(blocks) - 1 - blocks[::-1].index("function") :]
        return True
    return mark in BETWEEN


def _assignments(command: Command) -> tuple[list[Assignment], Command | None]:
    """Return what a command assigns, and the command without that; None if nothing is left."""
    names = command.literals()
    if names[0] in ("export", "declare", "typeset", "local", "readonly"):
        exported = names[0] == "export" or any(re.fullmatch(r"-\w*x\w*", word) for word in names[1:])
        scope: Scope = "exported" if exported else "shell"
        return [_assigned(word, scope, command) for word in command.words[1:] if ASSIGNMENT.match(word.raw)], command
    if names[0] == "setenv" and len(names) == 3:
        name, value = command.words[1:]
        return [Assignment(name.raw, value, name.line, name.column, "exported", command.conditional)], command
    count = 0
    while count < len(names) and ASSIGNMENT.match(command.words[count].raw):
        count += 1
    if count == len(names):
        return [_assigned(word, "shell", command) for word in command.words], None
    before = [_assigned(word, "command", command) for word in command.words[:count]]
    rest = replace(command, words=command.words[count:])
    if rest.name == "env":
        words = list(rest.words[1:])
        while words and (words[0].raw.startswith("-") or ASSIGNMENT.match(words[0].raw)):
            word = words.pop(0)
            if ASSIGNMENT.match(word.raw):
                before.append(_assigned(word, "command", command))
            elif word.raw in ("-u", "--unset", "-C", "-S") and words:
                words.pop(0)
        rest = replace(rest, words=tuple(words) or rest.words)
    return before + _given_as_options(rest), rest


def _given_as_options(command: Command) -> list[Assignment]:
    """What a launcher or a container is told to set: `-x A=b` of Open MPI, `-e A=b` of docker, `--export=ALL,A=b`."""
    found = []
    names = command.literals()
    for number, word in enumerate(command.words[:-1]):
        following = command.words[number + 1]
        by_option = {"mpirun": ("-x", "-genv"), "mpiexec": ("-x", "-genv"), "docker": ("-e", "--env")}
        if word.raw not in by_option.get(command.name, ()):
            continue
        if ASSIGNMENT.match(following.raw):
            found.append(_assigned(following, "command", command))
        elif word.raw == "-genv" and number + 2 < len(names):
            value = command.words[number + 2]
            where = (following.line, following.column)
            found.append(Assignment(following.raw, value, *where, "command", command.conditional))
    return found


def _assigned(word: Word, scope: Scope, command: Command) -> Assignment:
    match = ASSIGNMENT.match(word.raw)
    name = match.group(1) if match else word.raw
    value = word.raw[match.end() :] if match else ""
    offset = match.end() if match else 0
    return Assignment(
        name, Word(value, word.line, word.column + offset), word.line, word.column, scope, command.conditional
    )


def _exported_later(assignments: list[Assignment], commands: list[Command]) -> list[Assignment]:
    """`A=b` and somewhere `export A`, or `set -a`: what is set so reaches the children, too."""
    exported: set[str] = set()
    everything = False
    for command in commands:
        names = command.literals()
        if names[0] == "export":
            exported |= {name for name in names[1:] if "=" not in name}
        elif names[0] == "set":
            everything = everything or "-a" in names[1:] or "allexport" in names[1:]
    return [
        replace(one, scope="exported") if one.scope == "shell" and (everything or one.name in exported) else one
        for one in assignments
    ]


def _directives(comment: Word, first: int) -> list[Directive]:
    """Return what a comment says to the scheduler; `first` is the line of the first command."""
    match = DIRECTIVE.match(comment.raw)
    if match is None or comment.column != 1:
        return []
    scheduler: Literal["SBATCH", "PBS"] = "SBATCH" if match.group(2) == "SBATCH" else "PBS"
    spaced, late, rest = bool(match.group(1)), comment.line > first, match.group(3)
    found = []
    words = [token.word.raw for token in tokens(rest) if token.kind == "word"]
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        if not word.startswith("-"):
            continue
        option, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:  # -N2
            option, equals, value = word[:2], "=", word[2:].lstrip("=")
        if not equals and number < len(words) and not words[number].startswith("-"):
            value = words[number]
            number += 1
        found.append(
            Directive(
                scheduler,
                option,
                value if unquoted(value) is None else str(unquoted(value)),
                comment.line,
                comment.column,
                spaced,
                late,
                comment.raw,
            )
        )
    return found


def read_settings(path: str, text: str) -> Script:
    """Read an environment file: `NAME=value` lines, each of which reaches a process."""
    script = read_script(path, text)
    return replace(script, assignments=tuple(replace(one, scope="exported") for one in script.assignments))
