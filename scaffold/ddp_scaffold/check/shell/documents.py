"""Commands that a README tells a user to type: launchers, ports and variables in its shell blocks, once per kind.

A command counts where it starts a file of this repository: another one is an example of something else. Documentation
that is made into a site describes a library, and stays out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..files import SourceFile
from ..findings import Finding
from ..variables import Project, Setting, judge
from .launch import read_job
from .reader import read_script
from .starts import as_said, as_typed

FENCE = re.compile(r"[ \t>]*(?:[-*+]|\d+[.)])?[ \t]*(`{3,}|~{3,})[ \t]*([^`\n]*)$")
BEFORE = r"(?:[ \t>]|[-*+][ \t]|\d+[.)][ \t])*"
PROMPT = r"(?:(?:\([\w.-]+\)[ \t]*)?(?:[\w.-]+@[\w.-]+:?\S*)?[$%][ \t]+|!)?"  # `!python` in notebooks and Colab
SETTINGS = r"(?:(?:export[ \t]+|env[ \t]+)?[A-Za-z_]\w*=(?:\"[^\"\n]*\"|'[^'\n]*'|\S*)[ \t]+(?:&&[ \t]*)?)*"
PYTHON = r"(?:python[\d.]*|\$\{?PYTHON\}?)"
OTHERS = "torchrun|accelerate|deepspeed|srun|mpirun|mpiexec|nohup|time|numactl|bash|sh|sbatch"
PROGRAMS = rf"(?:{PYTHON}|{OTHERS})[ \t]+\S"
COMMAND = re.compile(rf"({BEFORE}{PROMPT})({SETTINGS}{PROGRAMS}.*|(?:export[ \t]+)?[A-Za-z_]\w*=\S*[ \t]*)$")
LAUNCHER = rf"(?:{PYTHON}[ \t]+(?:-u[ \t]+|-W[ \t]+\w+[ \t]+)?-m[ \t]+torch\.distributed\.\w+|torchrun)"
LAUNCHED = rf"(?P<command>{SETTINGS}{LAUNCHER}[ \t]+[-\\][^`\n]*)"
INDENTED = re.compile(rf"(?: {{4,}}|[ \t>]*\t|[ \t]*>[ \t]*)[ \t]*{PROMPT}{LAUNCHED}$")
PREFORMATTED = re.compile(r"<pre\b.*?</pre>", re.DOTALL)
TAG = re.compile(r"</?(?:pre|code|b|i|span)\b[^<>\n]*>")
INLINE = re.compile(rf"`{PROMPT}{LAUNCHED}`")
PLACEHOLDER = re.compile(r"<[^<>\n|]{1,60}>|\{[^{}\n$]{1,60}\}|\[[^\[\]\n]{1,60}\]|\.\.\.+|\u2026")
SUBJECT = re.compile(
    r"torch\.distributed|torchrun|MASTER_PORT|main_process_port|master[_-]port|tcp://|NCCL_|TORCH_|GLOO_"
)
OF_A_SITE = re.compile(r"(?:^|/)(?:mkdocs\.ya?ml|docusaurus\.config\.\w+|docs?/(?:\w+/)?conf\.py|_toctree\.yml)$")
SITE = re.compile(r"(?:^|/)(?:docs?|documentation|website|site)/", re.IGNORECASE)
HISTORY = re.compile(r"(?:change|contribut|history|release|news|code_of|security|license)\w*\.md$", re.IGNORECASE)
# What a text says of the command below it: `# on 4 nodes`, `with 32 GPUs (4 nodes)`, and not `a single node`.
ON_NODES = re.compile(r"\b(\d{1,3}|two|three|four|eight|sixteen)[ -](?:\w+[ -])?(?:nodes|machines|hosts|servers)\b")
WORDS = {"two": 2, "three": 3, "four": 4, "eight": 8, "sixteen": 16}
ANOTHER_WAY = re.compile(
    r"single|one (?:node|machine)|\b1[ -](?:node|machine)|slurm|sbatch|srun|mpi|per node|if you|each node|every node"
)
ENDS_OF_PLACE = re.compile(r"(?:\.\./|\./)*")
SURE = ("DDP150", "DDP164", "DDP165", "DDP553", "DDP554", "DDP557")  # what a variable costs is told for scripts


def in_document(file: SourceFile, project: Project) -> Iterator[Finding]:
    """Yield what is wrong with the commands of a README, the first of each rule."""
    if not SUBJECT.search(file.text) or HISTORY.search(file.inside):
        return
    if SITE.search(file.inside) and any(OF_A_SITE.search(name) for name in project.files):
        return
    said: set[str] = set()
    for line, text in commands_of(file.text):
        if not SUBJECT.search(text):
            continue
        script = read_script(file.path, PLACEHOLDER.sub(_unknown, text), line)
        job = read_job(script)
        own = tuple(launch for launch in job.launches if is_own(launch.target, project))
        if not own:
            continue
        reach = [one for one in script.assignments if one.scope != "shell"]
        told = as_said(job, [(launch, said_nodes(file.text, launch.command.line)) for launch in own])
        settings = [Setting(one.name, one.literal, file.path, one.line, one.column) for one in reach]
        variables = (one for one in judge(settings, project) if one.rule in SURE)
        for one in sorted((*as_typed(job, own), *told, *variables)):
            if one.rule not in said:
                said.add(one.rule)
                yield one


def said_nodes(text: str, line: int) -> int:
    """Return on how many nodes a command is meant to run: what the heading, sentence or comment above it says."""
    lines = text.split("\n")[: line - 1]
    seen = 0
    while lines and seen < 3:
        above = lines.pop().strip().lower()
        if not above or above.startswith(("```", "~~~")):
            continue
        seen += 1
        if "python" in above or "torchrun" in above or above.endswith("\\") or ANOTHER_WAY.search(above):
            return 0
        if match := ON_NODES.search(above):
            return WORDS.get(match[1]) or int(match[1])
        if above.startswith("#"):
            return 0  # a heading or a comment that says something else
    return 0


def commands_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of each block, and of the text between blocks, with the line where that begins.

    Lines that are no commands are empty, so that each command keeps its line.
    """
    parts = [*_parts(text), *(_preformatted(text) if "<pre" in text else ())]
    for start, lines, fenced in parts:
        kept: list[str] = []
        goes_on = False
        for line in lines:
            taken = (line if goes_on else _in_block(line) if fenced else _in_prose(line)).rstrip()
            goes_on = taken.endswith("\\")  # with spaces behind it, too: nobody sees them in a document
            kept.append(taken)
        if any(kept):
            yield start, "\n".join(kept)


def _parts(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield the lines within each fence, and those between two, with the number of the first one."""
    fence, start = "", 1
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        mark = FENCE.match(line) if "```" in line or "~~~" in line else None
        if mark is None or (fence and (not mark[1].startswith(fence) or mark[2].strip())):
            continue
        yield start, lines[start - 1 : number - 1], bool(fence)
        fence, start = "" if fence else mark[1], number + 1
    yield start, lines[start - 1 :], bool(fence)


def _preformatted(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield the lines of each `<pre>` of HTML, without its tags."""
    for match in PREFORMATTED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, TAG.sub("", match[0]).split("\n"), True


def _in_block(line: str) -> str:
    """Return the command of a line in a fence, behind its prompt, or an empty text."""
    found = COMMAND.match(line)
    return " " * len(found[1]) + found[2] if found else ""


def _in_prose(line: str) -> str:
    """Return the command that stands in a line as code: indented, quoted, or between two backticks."""
    if "torch" not in line:
        return ""
    found = INLINE.search(line) or INDENTED.match(line)
    return " " * found.start("command") + found["command"] if found else ""


def _unknown(match: re.Match[str]) -> str:
    """Put a variable in the place of what a user has to fill in: it is as long, so that columns stay."""
    return "$" + "X" * (len(match[0]) - 1)


def is_own(target: str, project: Project) -> bool:
    """Tell whether a file of the repository is started, from whatever folder: by its path, or as a module."""
    name = target.strip("\"'")
    if not name or "$" in name:
        return False
    path = ENDS_OF_PLACE.sub("", name, count=1)
    path = path if path.endswith((".py", ".sh")) else path.replace(".", "/") + ".py"
    return project.has(path)
