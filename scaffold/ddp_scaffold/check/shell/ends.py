"""The rules on directives, signals, requeueing and restarts, and on the syntax of settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from ..findings import Finding
from .launch import Job
from .reader import Script
from .rules import finding

NUMBERS = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT", "1": "HUP"}
COUNTED = re.compile(
    r"SLURM_RESTART_COUNT|(?:max|num)_?(?:restart|requeue|retr|attempt|resub)|"
    r"(?:restart|requeue|retr(?:y|ies)|attempt|resub)\w*[\"}\]]*\s*(?:-ge|-gt|-lt|-le|>=?|<=?)\s",
    re.IGNORECASE,
)
FOREVER = re.compile(r"^([ \t]*)while[ \t]+(?:true|:|\[\[?[ \t]+1[ \t]+\]\]?)[ \t]*(?:;[ \t]*do)?[ \t]*$")
SETTING = r"(?:NCCL|TP|TORCH|GLOO|TORCHELASTIC|MASTER|CUDA|OMP|PYTORCH|RANK|WORLD)\w*"
SPACED = re.compile(rf"^([ \t]*)(export[ \t]+)?({SETTING})([ \t]+=[ \t]*|=[ \t]+(?=[\w\"'/^]))(\S+)[ \t]*$")


def ending_rules(job: Job) -> list[Finding]:
    """Return what is wrong with directives, signals and restarts."""
    parts = (_directives, _signal, _requeue, _retry, _restarts)
    return [one for part in parts for one in part(job)]


def _directives(job: Job) -> Iterator[Finding]:
    """Lines that the scheduler takes for comments, or does not reach, or reads as they are written."""
    script = job.script
    seen: set[int] = set()
    spaced = [one for one in script.directives if one.spaced and not one.late and one.option.startswith("-")]
    all_spaced = bool(spaced) and not script.active
    for one in script.directives:
        if one.line in seen:
            continue
        where = (script.path, one.line, one.column)
        if one.spaced and one in spaced and _is_job(script):
            seen.add(one.line)
            fix = f"Write #{one.scheduler}, without the space."
            if all_spaced:
                message = (
                    f"`# {one.scheduler}` is a comment: the job gets the cluster's defaults in place of {one.option}."
                )
                yield finding("DDP550", where, message, fix)
            else:
                message = f"`# {one.scheduler}` is a comment: {one.option} is not asked for."
                yield finding(
                    "DDP650", where, message, f"{fix[:-1]}; if it is off on purpose, ##{one.scheduler} says so."
                )
        elif one.late and not one.spaced:
            seen.add(one.line)
            message = f"The scheduler stops reading at the first command: {one.option} below it is not asked for."
            yield finding("DDP551", where, message, "Move the line above the first command.")
        elif one.scheduler == "SBATCH" and not one.spaced and re.search(r"\$\{?\w", one.value):
            seen.add(one.line)
            message = f"sbatch puts in no variables: {one.option} is {one.value!r} as it stands."
            fix = f"Pass {one.option} on the command line of sbatch, or use its own patterns (%j, %x, %u)."
            yield finding("DDP552", where, message, fix)


def _is_job(script: Script) -> bool:
    suffix = PurePosixPath(script.path).suffix
    return bool(script.active) or suffix in (".sbatch", ".slurm", ".pbs", ".job") or "SLURM_" in script.text


def _signal(job: Job) -> Iterator[Finding]:
    """`--signal`: who gets it, and who is there to take it."""
    asked = next((one for one in job.script.active if one.option == "--signal"), None)
    match = re.fullmatch(r"(?:([RB]+):)?(?:SIG)?(\w+?)(?:@\d+)?", asked.value) if asked else None
    if asked is None or match is None or not job.launches:
        return
    to_batch, name = "B" in (match.group(1) or ""), NUMBERS.get(match.group(2), match.group(2)).upper()
    traps = [
        command
        for command in job.script.named("trap")
        if any(NUMBERS.get(word, word).upper().removeprefix("SIG") == name for word in command.literals()[2:])
    ]
    where = (job.script.path, asked.line, asked.column)
    if not to_batch:
        direct = [one for one in job.launches if one.starter == "srun" and one.by_torchrun and not one.unsure]
        if name in ("USR1", "USR2") and any("--signals-to-handle" not in one.options for one in direct):
            message = (
                f"Slurm sends SIG{name} to torchrun, which has no handler for it and dies: its ranks go on as orphans, "
                "until Slurm kills them, and save nothing."
            )
            yield finding("DDP352", where, message, f"Use --signal=B:{name} and a trap that signals the ranks.")
        return
    replaced = any(command.words[0].raw == "exec" and len(command.words) > 1 for command in job.script.commands)
    if not traps:
        if not job.sources_unknown and not replaced:
            message = (
                f"SIG{name} comes to this script alone (B:), which has no trap for it: bash dies, Slurm ends the job, "
                "and no rank gets to save a checkpoint."
            )
            fix = f"Add a trap for {name} that signals the ranks, start them with `&`, and `wait`."
            yield finding("DDP350", where, message, fix)
        return
    in_background = any(command.after == "&" for command in job.script.commands) or job.script.named("wait")
    if not in_background and not any(trap.conditional for trap in traps) and not job.sources_unknown:
        message = (
            f"bash runs the trap for {name} only when the command that it waits for has ended: while training runs in "
            "the foreground, the signal does nothing, and the time limit kills all ranks."
        )
        here = (job.script.path, traps[0].line, traps[0].column)
        yield finding("DDP351", here, message, "Start training with `&`, and `wait $!` behind it.")


def _requeue(job: Job) -> Iterator[Finding]:
    """A job that puts itself into the queue again, whatever ended it, for ever."""
    if COUNTED.search(job.script.text) or not job.launches:  # without training it is a job like cron's
        return
    own = {PurePosixPath(job.script.path).name, "$0", "${BASH_SOURCE[0]}", "${0}"}
    for command in job.script.commands:
        words = command.literals()
        requeues = words[:2] == ["scontrol", "requeue"] or (
            words[0] == "trap" and "scontrol requeue" in " ".join(words[1:2])
        )
        again = words[0] == "sbatch" and not command.conditional and any(word.strip('"') in own for word in words[1:])
        if (requeues or again) and (job.scheduled or requeues):
            message = (
                "Nothing counts how often this job is put into the queue again: "
                "one that fails at once does so for ever."
            )
            fix = "Stop at a number: compare ${SLURM_RESTART_COUNT:-0}, which Slurm counts for a requeued job."
            yield finding("DDP353", (job.script.path, command.line, command.column), message, fix)


def _retry(job: Job) -> Iterator[Finding]:
    """`while true; do torchrun ...; done` without a way out."""
    lines = job.script.text.splitlines()
    for number, line in enumerate(lines):
        match = FOREVER.match(line)
        if match is None:
            continue
        end = next((at for at in range(number + 1, len(lines)) if lines[at].startswith(f"{match.group(1)}done")), None)
        if end is None:
            continue
        body = lines[number + 1 : end]
        started = [launch for launch in job.launches if number + 1 < launch.command.line <= end]
        if started and not any(re.search(r"\b(?:break|exit|return|exec|kill)\b", text) for text in body):
            message = (
                "Training is started again whatever ended it, for ever: a wrong setting burns the whole allocation."
            )
            fix = (
                "Leave the loop at success and after some attempts, and at once at "
                "an exit code that a retry cannot change."
            )
            yield finding("DDP354", (job.script.path, number + 1, len(match.group(1)) + 1), message, fix)


def _restarts(job: Job) -> Iterator[Finding]:
    """`--max-restarts`: the ranks of the next attempt read the addresses of the last one in the agent's store."""
    if job.sources_unknown or "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in job.script.text:
        return
    for launch in job.launches:
        count = job.number(launch.options.get("--max-restarts", ""))
        dynamic = "--standalone" in launch.options or launch.options.get("--rdzv-backend", "") == "c10d"
        if launch.by_torchrun and count and dynamic:
            message = (
                "All attempts share the store of torchrun's agent, and the next one reads the addresses that the last "
                "one left there: of 12 restarts on gloo, 10 failed (torch 2.13; NCCL: pytorch#135712, #167288)."
            )
            where = (job.script.path, launch.command.line, launch.command.column)
            yield finding("DDP355", where, message, "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: 0 of 10 failed with it.")


def syntax_rules(script: Script) -> Iterator[Finding]:
    """`export NAME = value`: for the shell these are three words."""
    commands = {command.line for command in script.commands}
    for number, line in enumerate(script.text.splitlines(), 1):
        match = SPACED.match(line)
        if match is None or number not in commands | {one.line for one in script.assignments}:
            continue
        name, value = match.group(3), match.group(5)
        if match.group(4).startswith("=") and re.search(r"\s", line[match.start(5) :].strip()):
            continue
        message = f"The shell takes the words around the `=` apart: {name} does not get the value {value}, on any rank."
        where = (script.path, number, match.start(3) + 1)
        yield finding("DDP559", where, message, f"Write {name}={value}, without spaces.")
