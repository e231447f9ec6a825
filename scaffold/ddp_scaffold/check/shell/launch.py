"""What a script asks of the scheduler, and which launcher starts what: numbers only where they are certain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .reader import Assignment, Command, Script
from .words import Word, tokens

STARTERS = {"srun": "srun", "mpirun": "mpi", "mpiexec": "mpi", "ibrun": "mpi", "aprun": "mpi", "jsrun": "mpi"}
PREFIXES = {"exec", "time", "nohup", "command", "stdbuf", "numactl", "nice", "timeout", "singularity", "apptainer"}
CONTAINERS = {
    "singularity",
    "apptainer",
    "singularity_wrapper",
    "shifter",
    "podman-hpc",
    "xvfb-run",
}  # the program is behind
# Options of srun without a value, or with one only behind `=`.
SRUN_FLAGS = {
    *(
        "--exclusive",
        "--exact",
        "--unbuffered",
        "-u",
        "--label",
        "-l",
        "--overlap",
        "--kill-on-bad-exit",
        "-K",
        "--pty",
    ),
    *(
        "--multi-prog",
        "--container-writable",
        "--container-mount-home",
        "--no-container-mount-home",
        "--container-remap-root",
    ),
    *("--no-container-entrypoint", "--no-container-remap-root", "--verbose", "-v", "--quiet", "-Q", "--no-kill", "-k"),
    *(
        "--contiguous",
        "--overcommit",
        "-O",
        "--oversubscribe",
        "-s",
        "--spread-job",
        "--use-min-nodes",
        "--wait-for-nodes",
    ),
    *(
        "--disable-status",
        "-X",
        "--preserve-env",
        "-E",
        "--no-requeue",
        "--requeue",
        "-H",
        "--hold",
        "--resv-ports",
        "-vv",
    ),
}
TORCHRUN_FLAGS = {"--standalone", "-m", "--module", "--no-python", "--run-path", "--use-env", "--virtual-local-rank"}
VARIABLE = re.compile(r'"?\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})"?')
TEXT_ONLY = {"echo", "printf", "cat", "which", "command", "type"}


@dataclass(frozen=True)
class Launch:
    """A command that starts training processes. `unsure` where a variable may hold more options than are seen."""

    command: Command
    starter: str  # srun, mpi, or empty
    starter_options: Mapping[str, str]
    program: str  # torchrun, launch (torch.distributed.launch), python, shell, other
    options: Mapping[str, str]  # of torchrun, with dashes: {"--nproc-per-node": "8"}
    arguments: tuple[str, ...]  # of the training program
    unsure: bool
    target: str = ""  # the file or the module that is started, as it is written

    @property
    def by_torchrun(self) -> bool:
        return self.program in ("torchrun", "launch")


@dataclass(frozen=True)
class Job:
    """A script's request, None where it is not known."""

    script: Script
    scheduled: bool  # there are directives that a scheduler reads
    nodes: int | None
    tasks_per_node: int | None
    gpus_per_node: int | None
    cpus_per_task: int | None
    exclusive: bool
    launches: tuple[Launch, ...]
    sources_unknown: bool  # a file of one's own is sourced, which may set or trap anything

    @property
    def several_nodes(self) -> bool | None:
        """Whether more than one node takes part; None where it is not known."""
        if self.nodes is not None:
            return self.nodes > 1
        if self.launches and all("--standalone" in launch.options for launch in self.launches):
            return False
        return None

    def number(self, raw: str) -> int | None:
        """What a word of the script is as a number."""
        return number_of(
            self.script, raw, {"nodes": self.nodes, "gpus": self.gpus_per_node, "tasks": self.tasks_per_node}
        )


def read_job(script: Script) -> Job:
    """Find the request and the launches of a script."""
    wanted = {directive.option: directive.value for directive in script.active}
    nodes = _count(wanted.get("--nodes", wanted.get("-N", "")))
    tasks = _count(wanted.get("--ntasks-per-node", wanted.get("--tasks-per-node", "")))
    total = _count(wanted.get("--ntasks", wanted.get("-n", "")))
    if tasks is None and total and nodes and total % nodes == 0:
        tasks = total // nodes
    gpus = _gpus(wanted, nodes, tasks)
    cpus = _count(wanted.get("--cpus-per-task", wanted.get("-c", "")))
    pbs = next((one.value for one in script.active if one.scheduler == "PBS" and "select=" in one.value), "")
    if pbs and "+" not in pbs:
        match = re.search(r"select=(\d+)", pbs)
        nodes = int(match.group(1)) if match else None
        found = re.search(r":ngpus=(\d+)", pbs)
        gpus = int(found.group(1)) if found else None
    return Job(
        script,
        scheduled=bool(script.active),
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_task=cpus,
        exclusive="--exclusive" in wanted,
        launches=tuple(launch for command in script.commands if (launch := _launch(script, command)) is not None),
        sources_unknown=any(_sources_unknown(command) for command in script.named("source", ".")),
    )


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d+", text) else None


def _gpus(wanted: Mapping[str, str], nodes: int | None, tasks: int | None) -> int | None:
    """GPUs of each node: `--gpus-per-node=a100:4`, `--gres=gpu:4`, `--gpus=8` on two nodes, `--gpus-per-task=1`."""
    last = re.compile(r"(?:.*:)?(\d+)$")
    if match := last.match(wanted.get("--gpus-per-node", "")):
        return int(match.group(1))
    gres = re.search(r"(?:^|,)(?:gres/)?gpu(?::[\w.-]+)*?:(\d+)(?:\(|,|$)", wanted.get("--gres", ""))
    if gres:
        return int(gres.group(1))
    if (match := last.match(wanted.get("--gpus", wanted.get("-G", "")))) and nodes:
        return int(match.group(1)) // nodes if int(match.group(1)) % nodes == 0 else None
    if (match := last.match(wanted.get("--gpus-per-task", ""))) and tasks:
        return int(match.group(1)) * tasks
    return None


def _sources_unknown(command: Command) -> bool:
    """Whether a sourced file may set variables or traps: not an activated environment or the shell's own files."""
    target = command.words[1].raw if len(command.words) > 1 else ""
    own = r"activate\b|bashrc|profile|conda\.sh|mamba\.sh|modules|lmod|/etc/|setvars\.sh|spack"
    return not re.search(own, target)


def number_of(script: Script, raw: str, known: Mapping[str, int | None]) -> int | None:
    """Return the number that a word stands for: written, or a variable that is set once, for all, to a number."""
    text = raw.strip("\"'")
    if text.isdigit():
        return int(text)
    match = VARIABLE.fullmatch(raw)
    name = (match.group(1) or match.group(2)) if match else ""
    of_slurm = {
        "SLURM_NNODES": "nodes",
        "SLURM_JOB_NUM_NODES": "nodes",
        "SLURM_GPUS_ON_NODE": "gpus",
        "SLURM_GPUS_PER_NODE": "gpus",
        "SLURM_NTASKS_PER_NODE": "tasks",
    }
    if name in of_slurm:
        return known.get(of_slurm[name])
    one = assigned_once(script, name)
    if one is None:
        return None
    if one.value.raw.startswith(("$", '"$')) and one.name not in one.value.raw:
        return number_of(script, one.value.raw, known)
    return int(one.literal) if one.literal is not None and one.literal.isdigit() else None


def assigned_once(script: Script, name: str) -> Assignment | None:
    """Return the only assignment to a variable, if it holds on every path."""
    found = [one for one in script.assignments if one.name == name]
    if len(found) != 1 or found[0].conditional or re.search(rf"\b(?:read|mapfile|unset)\b.*\b{name}\b", script.text):
        return None
    return found[0]


def _launch(script: Script, command: Command) -> Launch | None:
    """Return what a command launches, or None if it launches no training."""
    words, unsure = _expanded(script, command.words)
    words = _without_prefixes(words)
    if not words or words[0].raw in TEXT_ONLY:
        return None
    starter = ""
    starter_options: dict[str, str] = {}
    name = _name(words[0])
    if name in STARTERS:
        starter = STARTERS[name]
        starter_options, words, ends = _options(words[1:], SRUN_FLAGS, mpi=starter == "mpi")
        unsure = unsure or ends
        words = _without_prefixes(words)
    if not words:
        return None
    program, rest = _program(words)
    if program in ("torchrun", "launch"):
        options, rest, ends = _options(rest, TORCHRUN_FLAGS, dashes=True)
        arguments = tuple(word.raw for word in rest[1:])
        target = rest[0].raw if rest else ""
        return Launch(command, starter, starter_options, program, options, arguments, unsure or ends, target)
    if program == "python" or (starter and program in ("shell", "other")):
        given = tuple(word.raw for word in rest)
        target = next((raw for raw in given if not raw.startswith("-")), "")
        return Launch(command, starter, starter_options, program, {}, given, unsure, target)
    return None


WHICH_TORCHRUN = re.compile(r"(?:`|\$\()\s*which torchrun\s*[`)]")


def _name(word: Word) -> str:
    return (word.literal or word.raw.rsplit("/", 1)[-1].strip('"')).rsplit("/", 1)[-1]


def _expanded(script: Script, words: Sequence[Word], depth: int = 3) -> tuple[list[Word], bool]:
    """Put in the words of variables that are set once; tell whether there are others that may hold several words."""
    found: list[Word] = []
    unsure = False
    for number, word in enumerate(words):
        match = VARIABLE.fullmatch(word.raw)
        value_of_option = number and words[number - 1].raw.startswith("-") and "=" not in words[number - 1].raw
        if match is None or (word.raw.startswith('"') and "[" not in word.raw):
            found.append(word)
            continue
        one = assigned_once(script, match.group(1) or match.group(2))
        inner = one.value.raw if one is not None else ""
        if one is None or (inner[:1] not in ("(", '"', "'") and re.search(r"[$`]", inner)):
            unsure = unsure or not value_of_option
            found.append(word)
            continue
        if inner.startswith(("(", '"', "'")):
            inner = inner[1:-1]
        parts = [Word(token.word.raw, word.line, word.column) for token in tokens(inner) if token.kind == "word"]
        more, not_all = _expanded(script, parts, depth - 1) if depth else (parts, True)
        found += more
        unsure = unsure or not_all
    return found, unsure


def _without_prefixes(words: Sequence[Word]) -> list[Word]:
    """Leave out `exec`, `time`, `timeout 1h`, `apptainer exec --nv image`: what stands behind them is the program."""
    rest = list(words)
    while rest and _name(rest[0]) in PREFIXES | CONTAINERS:
        container = _name(rest[0]) in CONTAINERS
        limit = _name(rest[0]) == "timeout"
        rest.pop(0)
        if container:
            place = next((at for at, word in enumerate(rest) if _program_name(word)), len(rest))
            return rest[place:]
        while rest and rest[0].raw.startswith("-"):
            rest.pop(0)
        if limit and rest:
            rest.pop(0)
    return rest


def _program_name(word: Word) -> bool:
    return re.fullmatch(r"torchrun|python[\d.]*|bash|sh|accelerate|deepspeed", _name(word)) is not None


def _program(words: Sequence[Word]) -> tuple[str, list[Word]]:
    """Return what is started, and the words behind it."""
    name = _name(words[0])
    raw = [word.raw for word in words]
    if name == "torchrun":
        return "torchrun", list(words[1:])
    if re.fullmatch(r"python[\d.]*", name) and len(raw) > 1 and WHICH_TORCHRUN.fullmatch(raw[1]):
        return "torchrun", list(words[2:])
    if re.fullmatch(r"python[\d.]*", name) or VARIABLE.fullmatch(raw[0]):  # `$PYTHON -m torch.distributed.run`
        for number, word in enumerate(raw[1:6], 1):
            if word == "-m" and number + 1 < len(raw):
                module = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "launch"}.get(
                    raw[number + 1]
                )
                if module:
                    return module, list(words[number + 2 :])
                break
            if not word.startswith("-") and raw[number - 1] not in ("-W", "-X"):
                break
        if name.startswith("python"):
            return "python", list(words[1:])
    if name in ("bash", "sh", "zsh"):
        return "shell", list(words[1:])
    return "other", list(words)


def _options(
    words: Sequence[Word], flags: set[str], *, dashes: bool = False, mpi: bool = False
) -> tuple[dict[str, str], list[Word], bool]:
    """Split options from what stands behind them; tell whether a variable there may hold more options."""
    options: dict[str, str] = {}
    rest, unsure = list(words), False
    if mpi:  # options of several values: the program is found by its name
        place = next((at for at, word in enumerate(rest) if _program_name(word)), 0)
        for number, word in enumerate(rest[:place]):
            options[word.raw] = rest[number + 1].raw if number + 1 < place else ""
        return options, rest[place:], False
    while rest:
        raw = rest[0].raw
        if VARIABLE.fullmatch(raw):  # `srun $ARGS python`: what it holds is not known
            unsure = True
            rest.pop(0)
            continue
        if not raw.startswith("-"):
            break
        rest.pop(0)
        name, equals, value = raw.partition("=")
        if not name.startswith("--") and len(name) > 2 and not dashes:  # -N2
            name, equals, value = name[:2], "=", name[2:]
        if dashes and name.startswith("--"):
            name = name.replace("_", "-")
        if not equals and name not in flags and rest:
            value = rest.pop(0).raw
        options[name] = value
    return options, rest, unsure
