"""Where a run is, and how its last attempt ended: what the launch scripts ask before and after training.

    python outcome.py directory DEFAULT_ID [training arguments]   prints the run directory, an absolute path
    python outcome.py new DEFAULT_ID [training arguments]         the same; a default that is taken gets -2, -3, ...
    python outcome.py setting NAME DEFAULT [training arguments]   prints the value that training will use
    python outcome.py ended RUN_DIRECTORY ATTEMPT LAUNCHER_CODE [EARLY]   prints exit code, restart or end, why
    python outcome.py rows RUN_DIRECTORY ATTEMPT                  prints kind, rank, phase, what to do, report
    python outcome.py again VARIABLES COMMAND...                  prints the line that goes on with this run
    python outcome.py refuse RUN_DIRECTORY ATTEMPT KIND WHAT REMEDY   leaves an outcome.json with exit code 78
    python outcome.py imported RUN_DIRECTORY ATTEMPT MODULE       leaves one with 1 where importing it fails

Launchers lose the exit code (torchrun turns every one into 1), so training also leaves it in outcome.json.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

OF_ONE_START = {"DDP_ATTEMPT", "DDP_FAULTS", "DDP_WALLTIME_END", "DDP_RUN__RESUME"}
LONGEST = 600  # characters of a reason in the last lines
ADVICE = {"rank_exception": "read the traceback of that rank, above and in the report"}  # the exception says the rest
SEEN_BY_TORCHRUN = ("rank_killed", "store_lost", "rendezvous_failed")  # how processes ended, which no rank may know
EXIT_CODES = {0: "done", 1: "failed", 70: "stalled", 75: "stopped", 78: "config"}


def setting(name: str, default: str, arguments: Sequence[str]) -> str:
    """What training will use for `run.id` or the like: command line before environment before file before default."""
    section, key = name.split(".")
    in_file = _section(Path(_given("--config", arguments) or "configs/train.yaml"), section)
    in_environment = os.environ.get(f"DDP_{section}__{key}".upper())
    return str(_given(f"--{name}", arguments) or in_environment or in_file.get(key) or default)


def _given(name: str, arguments: Sequence[str]) -> str:
    """The value of an option on the command line; the last one counts."""
    found = ""
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == name:
            found = value if equals else next(iter(arguments[number + 1 :]), "")
    return found


def is_trial(arguments: Sequence[str]) -> bool:
    """Whether it is a fast dev run, which has a directory of its own."""
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option == "--fast-dev-run":
            return (value if equals else following) != "0"
    return setting("train.fast_dev_run", "0", arguments) != "0"


def directory(default_id: str, arguments: Sequence[str]) -> Path:
    """The run directory that training will use."""
    run_id = setting("run.id", default_id, arguments)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        print(f"error: run.id {run_id!r} is not a directory name: use letters, digits and . _ -", file=sys.stderr)
        sys.exit(78)
    folder = Path(setting("run.dir", "runs", arguments))
    if is_trial(arguments) and folder.name != "fast-dev-run":
        folder /= "fast-dev-run"
    return (folder / run_id).absolute()


def new_directory(default_id: str, arguments: Sequence[str]) -> Path:
    """The same for a run that begins: a default that another start has taken, in the same second, gets a number."""
    path = directory(default_id, arguments)
    if setting("run.id", "", arguments):
        return path
    for number in range(2, 1000):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            path = path.with_name(f"{default_id}-{number}")
        except OSError:  # training will say it better
            return path
    return path


def refuse(run_directory: Path, attempt: int, kind: str, what: str, remedy: str) -> None:
    """Leave an outcome for what the script itself has found wrong."""
    _leave(run_directory, attempt, 78, kind, f"{what}\n  -> {remedy}")


def imported(run_directory: Path, attempt: int, module: str) -> None:
    """Where ranks have ended before they met, and importing their module fails: leave an outcome that says why.

    The import is tried again, as the only rank there is. What runs when it is imported must not begin to train.
    """
    sys.path[0] = os.getcwd()  # as with python -m
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    try:
        found = importlib.util.find_spec(module)
        if found and found.origin and "__main__" not in Path(found.origin).read_text(errors="replace"):
            return
        importlib.import_module(module)
    except Exception as error:
        said = " ".join(str(getattr(error, "msg", error)).split())
        reason = ": ".join(filter(None, [f"{type(error).__name__} in {_place(error)}", said]))
        _leave(run_directory, attempt, 1, "rank_exception", f"{reason}\n  -> {_remedy(error)}")


def _place(error: Exception) -> str:
    """'src/mine/model.py, line 7': the last line of this project that led to it, else the last one."""
    here = Path.cwd()
    frames = [(Path(frame.filename), frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((Path(error.filename), error.lineno or 0))
    ours = [(path, line) for path, line in frames if here in path.parents and "site-packages" not in path.parts]
    ours = [(path, line) for path, line in ours if path != Path(__file__).resolve()]
    path, line = (ours or frames)[-1]
    return f"{path.relative_to(here) if here in path.parents else path}, line {line}"


def _remedy(error: Exception) -> str:
    """What to do about an exception while importing."""
    top = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if top and importlib.util.find_spec(top) is None:
        return f"correct that import, or install {top} for {sys.executable} (VENV names another Python)"
    return f"correct that {'import' if isinstance(error, ImportError) else 'line'}; each rank's traceback stands above"


def _leave(run_directory: Path, attempt: int, code: int, kind: str, reason: str) -> None:
    verdict = {"outcome": EXIT_CODES[code], "restart": False, "exit_code": code, "kind": kind, "reason": reason}
    where = {"first_ranks": None, "phase": "init", "step": 0, "advice": "", "stacks": {}}
    content = {"version": 1, **verdict, **where, "attempt": attempt, "time": round(time.time(), 1)}
    aside = run_directory / f".outcome-{os.getpid()}.json"
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(content, indent=1))
        os.replace(aside, run_directory / "outcome.json")
        with open(run_directory / "attempts.jsonl", "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")  # a kill has cut its last line short
            file.write(json.dumps({"event": "end", **content}).encode() + b"\n")
    except OSError as error:
        print(f"[launch] outcome.json not written: {error}", file=sys.stderr)


def ended(run_directory: Path, attempt: int, launcher_code: int, stopped_early: bool = False) -> tuple[int, str, str]:
    """The exit code to act on (0, 1, 70, 75 or 78), whether the run may start again, and one line about it.

    What an earlier attempt wrote is not believed. Without an outcome.json of this attempt, the launcher's code decides,
    unless the script was asked to stop before the ranks had met.
    """
    try:
        outcome = json.loads((run_directory / "outcome.json").read_text())
        if outcome["attempt"] == attempt and outcome["exit_code"] in EXIT_CODES:
            reason, _ = _reason_and_remedy(outcome)
            code = outcome["exit_code"]
            return code, "restart" if outcome["restart"] else "end", f"{EXIT_CODES[code]}: {reason}"
        missing = f"outcome.json is of attempt {outcome['attempt']}"
    except FileNotFoundError:
        missing = "no outcome.json"
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = f"outcome.json cannot be used ({error!r})"
    if stuck := _out_of_python(run_directory, attempt):
        return 70, "restart", f"stalled: {missing}, and {stuck}"
    if stopped_early and launcher_code:
        return 75, "restart", "stopped: before training began"
    if launcher_code:
        print(_words_of_torchrun(run_directory, attempt), end="", file=sys.stderr)  # no rank has said more
    code = launcher_code if launcher_code in EXIT_CODES else 1
    what = f"{EXIT_CODES[code]}: {missing}, and the launcher ended with {launcher_code}"
    return code, "restart" if code in (70, 75) else "end", what


def rows(run_directory: Path, attempt: int) -> list[str]:
    """Where an attempt that did not end well began to do so, and what to do: nothing without its outcome.json."""
    try:
        outcome = json.loads((run_directory / "outcome.json").read_text())
        if outcome["attempt"] != attempt or outcome["exit_code"] == 0:
            return []
        blamed, phase, step = outcome.get("first_ranks"), outcome.get("phase"), outcome.get("step")
        _, remedy = _reason_and_remedy(outcome)
        report, own = run_directory / "report.md", next(_logs_of_torchrun(run_directory, attempt), None)
        found = {
            "kind": outcome.get("kind"),
            "rank": ", ".join(_with_hosts(run_directory, blamed)) if blamed else "",
            "where": f"phase {phase}, step {step}" if phase else "",
            "do": remedy or " ".join(str(outcome.get("advice") or "").split()) or ADVICE.get(outcome.get("kind"), ""),
            "report": report if report.is_file() else "",
            "see also": f"{own} (torchrun's own words)" if own and outcome.get("kind") in SEEN_BY_TORCHRUN else "",
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [f"[launch]   {name:<8}  {value}" for name, value in found.items() if value]


def again(also: Sequence[str], command: Sequence[str]) -> str:
    """The line that goes on with this run, from any directory: the command with the variables of this start.

    They are those of ddp/, and those in `also`; in the command, NAMES stands for their names. What asks for a start
    from nothing is left out.
    """
    names = sorted(name for name in os.environ if name.startswith("DDP_") or name in also)
    ours = {name: os.environ[name] for name in names if name not in OF_ONE_START and os.environ[name]}
    in_file = _section(Path(_given("--config", command) or "configs/train.yaml"), "run")
    if ours.get("DDP_RUN__DIR") == str(Path(in_file.get("dir") or "runs").absolute()):
        del ours["DDP_RUN__DIR"]
    if in_file.get("resume") is False:
        ours["DDP_RUN__RESUME"] = "true"
    words, kept = iter(command), list[str]()
    for word in words:
        if word == "--run.resume":
            next(words, "")
        elif not word.startswith("--run.resume="):
            kept.append(",".join(ours) if word == "NAMES" else word)
    variables = [f"{name}={shlex.quote(value)}" for name, value in ours.items()]
    return " ".join([f"cd {shlex.quote(os.getcwd())} &&", *variables, shlex.join(kept)])


def _reason_and_remedy(outcome: dict[str, Any]) -> tuple[str, str]:
    """One line each. An error of ours has its remedy behind an arrow; a long text of others is whole in the report."""
    reason, _, remedy = str(outcome.get("reason") or "no reason given").partition("\n  -> ")
    short = " ".join(reason.split())
    return short if len(short) <= LONGEST else f"{short[:LONGEST]} ...", " ".join(remedy.split())


def _with_hosts(run_directory: Path, ranks: Sequence[int]) -> list[str]:
    """'1 (n2)', as environment.txt of this start has them."""
    hosts: dict[str, str] = {}
    with suppress(OSError):
        text = (run_directory / "environment.txt").read_text()
        hosts = dict(re.findall(r"^rank (\d+) host (\S+)$", text, re.MULTILINE))
    return [f"{rank} ({hosts[str(rank)]})" if str(rank) in hosts else str(rank) for rank in ranks]


def _logs_of_torchrun(run_directory: Path, attempt: int) -> Iterator[Path]:
    """What agent.py has kept of this attempt, first that of this node."""
    folder, own = run_directory / "torchelastic", f"agent{os.environ.get('NODE_RANK') or 0}.log"
    paths = [*folder.glob("agent*.log"), *folder.glob(f"attempt{attempt}/agent*.log")]
    for path in sorted(paths, key=lambda path: (path.name != own, path)):
        if _last_part(path).startswith(f"{attempt},"):
            yield path


def _last_part(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").rpartition("=== attempt ")[2]
    return ""


def _words_of_torchrun(run_directory: Path, attempt: int) -> str:
    """All that it said, unless agent.py has printed it already."""
    path = next(_logs_of_torchrun(run_directory, attempt), None)
    text = _last_part(path).partition("\n")[2] if path else ""
    return "" if text.endswith("=== printed\n") else text


def _out_of_python(run_directory: Path, attempt: int) -> str:
    """Which ranks ended themselves because they could run no Python code, when that befell all of them at once."""
    ranks = []
    for path in sorted((run_directory / "stacks").glob("rank*.txt")):
        last = path.read_text(errors="replace").rpartition("=== attempt ")[2]
        if last.startswith(f"{attempt},") and "Timeout (" in last:
            ranks.append(path.stem.removeprefix("rank"))
    found = f"ranks {', '.join(ranks)} could run no Python code: stuck in C code that holds the GIL, or suspended"
    return f"{found}; their stacks are in {run_directory / 'stacks'}" if ranks else ""


def _section(config: Path, name: str) -> dict[str, Any]:
    """One section of the settings file. Whatever is wrong with the file, training will say it better."""
    if not config.is_file():
        return {}
    try:
        import yaml
    except ImportError:  # training needs it, too
        print(f"[launch] error: {sys.executable} has no PyYAML", file=sys.stderr)
        print("[launch]        install this project there, or set VENV to where it is installed", file=sys.stderr)
        sys.exit(78)
    try:
        content = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}


if __name__ == "__main__":
    if sys.argv[1] == "directory":
        print(directory(sys.argv[2], sys.argv[3:]))
    elif sys.argv[1] == "new":
        print(new_directory(sys.argv[2], sys.argv[3:]))
    elif sys.argv[1] == "again":
        print(again(sys.argv[2].split(","), sys.argv[3:]))
    elif sys.argv[1] == "rows":
        print("".join(f"{row}\n" for row in rows(Path(sys.argv[2]), int(sys.argv[3]))), end="")
    elif sys.argv[1] == "imported":
        imported(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "refuse":
        refuse(Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7])
    elif sys.argv[1] == "setting":
        print(setting(sys.argv[2], sys.argv[3], sys.argv[4:]))
    else:
        print(*ended(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), any(sys.argv[5:])))
