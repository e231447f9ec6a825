#!/usr/bin/env python3
"""Trains a list or a grid of settings: one run after another, or as a Slurm job array. At the end, a table.

    launch/sweep.py train.learning_rate=1e-3,3e-3 train.batch_size=32,64    four runs
    launch/sweep.py train.learning_rate=1e-3,3e-3 train.steps=200           two runs of 200 steps
    launch/sweep.py configs/sweep.yaml --dry-run                            what a file asks for
    launch/sweep.py --table                                                 what has come out

Such a file, where `grid` and `list` may both stand, or one of them; its name is that of the sweep:

    grid: # every combination
      train.learning_rate: [1e-3, 3e-3]
      train.batch_size: [32, 64]
      train.steps: 200
    list: # each with every combination of the grid
      - {model.channels: 16, train.weight_decay: 0.01}
      - {model.channels: 32, train.weight_decay: 0.1}

Names and values are looked at before anything starts. A run is named after what differs, sweep-learning_rate_1e-3, and
is trained by torchrun.sh beside this script, whose variables (NPROC, MAX_RESTARTS, VENV) count here, too. One that
fails does not stop the others. Started again, a sweep leaves out the runs that are done, and goes on with the others
from their newest checkpoints. Ctrl-C (or SIGTERM, SIGHUP, SIGUSR1, SIGUSR2) asks the current run to save a checkpoint,
and ends the sweep; a second one goes to that run, too.

Exit codes: 0 all runs are done (with --slurm: submitted), 1 some are not, 75 stopped, 78 wrong configuration.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import outcome
import settings

LAUNCH = Path(__file__).resolve().parent
PROJECT = LAUNCH.parent
SOURCE = PROJECT / "src"
PACKAGE = SOURCE / "digits"
DONE, FAILED, STOPPED, CONFIG = 0, 1, 75, 78
LOWER_IS_BETTER = re.compile("loss|nll|err|error|perplexity|ppl|bits|fid|mae|mse|rmse|wer|cer")  # words of a name
BY = "SWEPT_BY"  # the variable by which a torchrun.sh is known to belong to a sweep: its process, and when that began
LONGEST_ID = 80  # characters; a file name may have 255

# Looks at lists of training arguments as training would. At the first that is wrong: exit code 78, what is wrong, and
# in the last line, which of them it was. If none is: a digest for each of all that it would be trained with.
CHECK = """
import hashlib, json, sys
from digits.config import Settings
from digits.ddp import load_settings
digests = []
for number, arguments in enumerate(json.load(sys.stdin)):
    try:
        values = load_settings(Settings, arguments)[0].model_dump(mode="json")
    except SystemExit as ended:
        print(number, file=sys.stderr)
        sys.exit(ended.code)
    values["run"].pop("id")
    digests.append(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
print(*digests, sep="\\n")
"""


@dataclass
class Run:
    """One run of a sweep: its id, what it sets (name to text), and its job in the last array that was submitted.

    `all_sha256` tells all settings, those of the settings file, of variables and of defaults as well; empty if unknown.
    """

    id: str
    settings: dict[str, str]
    job: str = ""
    all_sha256: str = ""

    def arguments(self, common: Sequence[str]) -> list[str]:
        """What training is given."""
        own = [word for name, value in self.settings.items() for word in (f"--{name}", value)]
        return [*common, "--run.id", self.id, *own]


@dataclass
class Sweep:
    """All runs that were ever asked for under one name, in a file beside the runs. `common` is --config, if given."""

    name: str
    common: list[str]
    config_sha256: str
    runs: list[Run]
    version: int = 1

    def save(self, path: Path) -> None:
        """Write it, so that a reader sees all of it or what was there before."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(asdict(self), indent=1) + "\n")
            os.replace(aside, path)
        except OSError as error:
            refuse(f"{path} cannot be written ({error.strerror})", "see its directory, and the space left there")


def refuse(what: str, remedy: str) -> NoReturn:
    """Exit code 78, and two lines."""
    print(f"[sweep] error: {what}\n[sweep]        {remedy}", file=sys.stderr)
    sys.exit(CONFIG)


def say(text: str) -> None:
    print(f"[sweep] {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- what is asked for


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message, f"see {LAUNCH.name}/sweep.py --help")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--train.steps=1,2` is taken for train.steps=1,2."""
    words = [word[2:] if re.match(r"--\w+\.[\w.]+=", word) else word for word in arguments]
    for word in words:
        if re.match(r"--\w+\.\w", word):
            refuse(f"{word} has no value", f"write {word[2:]}=VALUE, or {word[2:]}=VALUE,VALUE")
    if "--sbatch" in words[:-1]:  # argparse takes a value that begins with -- only behind an equals sign
        at = words.index("--sbatch")
        words[at : at + 2] = [f"--sbatch={words[at + 1]}"]
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = Parser(
        usage=f"{LAUNCH.name}/sweep.py [FILE] [NAME=VALUE,...]... [options]",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("given", nargs="*", metavar="...", help="a file, and NAME=VALUE,VALUE, which wins over it")
    parser.add_argument("--name", default="", help="of the sweep, before each run's (default: the file's, or sweep)")
    parser.add_argument("--config", default="", metavar="FILE", help="of all runs (default: configs/train.yaml)")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and start nothing")
    parser.add_argument("--stop-on-failure", action="store_true", help="start no other run after one that is not done")
    parser.add_argument("--slurm", action="store_true", help="submit train.sbatch as a job array, one job a run")
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help="with --slurm: at most N jobs at a time")
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help='more options of sbatch: "--time=1:00:00"')
    parser.add_argument("--table", action="store_true", help="print the table of the sweep and start nothing")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--metric", default="", help="of the table (default: METRIC in evaluate.py)")
    parser.add_argument("--element", nargs=2, help=argparse.SUPPRESS)  # train.sbatch asks: FILE NUMBER
    options = parser.parse_args(words)
    if (options.at_once or options.sbatch) and not options.slurm:
        refuse("--at-once and --sbatch are about jobs of Slurm", "add --slurm, or leave them out")
    if options.at_once < 0:
        refuse(f"--at-once {options.at_once} is no number of jobs", "give a number from 1, or leave it out")
    return options


def read(given: Sequence[str]) -> tuple[dict[str, list[str]], list[dict[str, str]], str]:
    """Grid and list, and the name of the file ("" without one). What stands on the command line wins over the file."""
    grid, listed, name = dict[str, list[str]](), list[dict[str, str]](), ""
    for word in given:
        if "=" not in word:
            if name:
                refuse(f"{word}: a second file", "give one, and single settings as NAME=VALUE")
            grid, listed, name = *read_file(Path(word)), Path(word).stem
    for word in given:
        setting, equals, values = word.partition("=")
        if equals:
            grid[setting] = split(values)
            if not setting or not all(grid[setting]):
                what = "the name" if not setting else "a value"
                refuse(f"{word}: {what} is missing", f"write {setting or 'NAME'}=VALUE,VALUE without spaces")
    for setting in grid:
        if any(setting in entry for entry in listed):
            refuse(f"{setting} stands in the list and in the grid or on the command line", "give it in one of them")
    return grid, listed, name


def read_file(path: Path) -> tuple[dict[str, list[str]], list[dict[str, str]]]:
    """Grid and list of a file. Values stay as they are written: 1e-3 is not 0.001 in the name of a run."""
    import yaml

    try:
        content = yaml.load(path.read_text(), yaml.BaseLoader)
    except FileNotFoundError:
        refuse(f"{path}: there is no such file, and it is no NAME=VALUE", "give a file or train.batch_size=32,64")
    except (OSError, ValueError, yaml.YAMLError) as error:
        refuse(f"{path} cannot be read: {' '.join(str(error).split())}", "correct the file")
    if not isinstance(content, dict) or not content or content.keys() - {"grid", "list"}:
        refuse(f"{path} does not consist of 'grid:' and 'list:'", f"{LAUNCH.name}/sweep.py --help shows such a file")
    grid, listed = content.get("grid") or {}, content.get("list") or []
    if not isinstance(grid, dict):
        refuse(f"{path}: grid is not a mapping", "write lines as 'train.batch_size: [32, 64]' below it")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and entry for entry in listed):
        refuse(f"{path}: list is not a list of mappings", "write lines as '- {train.batch_size: 32}' below it")
    values = {name: value if isinstance(value, list) else [value] for name, value in flat(grid)}
    for name, value in [*values.items(), *((name, [value]) for entry in listed for name, value in flat(entry))]:
        if not value or "" in value:
            refuse(f"{path}: {name} has no value", f"write {name}: VALUE, or in the grid {name}: [VALUE, VALUE]")
    return (
        {name: list(dict.fromkeys(map(as_text, value))) for name, value in values.items()},
        [{name: as_text(value) for name, value in flat(entry)} for entry in listed],
    )


def flat(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings with dots, also of sections that are written as in configs/train.yaml."""
    for name, value in section.items():
        if isinstance(value, dict) and "." not in name:
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def split(values: str) -> list[str]:
    """`1,2` is two values, `[1,2],[3,4]` as well."""
    found, depth = [""], 0
    for character in values:
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return list(dict.fromkeys(value.strip() for value in found))


def combinations(grid: Mapping[str, Sequence[str]], listed: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The settings of each run, entries of the list first."""
    products = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    every = [{**entry, **product} for entry in listed or [{}] for product in products]
    return [each for number, each in enumerate(every) if each not in every[:number]]


def varying(runs: Iterable[Mapping[str, str]]) -> list[str]:
    """The settings that are not the same in all runs."""
    each = list(runs)
    names = dict.fromkeys(name for one in each for name in one)
    return [name for name in names if len({one.get(name) for one in each}) > 1]


def named(name: str, every: Sequence[dict[str, str]]) -> list[Run]:
    """A run for each, whose id says what differs: safe for file names, short, and the same at every start."""
    differ = varying(every)
    keys = [setting.rpartition(".")[2] for setting in differ]
    short = {long: key if keys.count(key) == 1 else long for long, key in zip(differ, keys, strict=True)}

    def id_of(each: Mapping[str, str], marked: bool) -> str:
        told = [f"{short[setting]}_{each[setting]}" for setting in differ if setting in each]
        text = "-".join([name, *told])
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
        if not marked and plain == text and len(plain) <= LONGEST_ID:
            return plain
        digest = hashlib.sha256(json.dumps({setting: each.get(setting) for setting in differ}).encode()).hexdigest()
        return f"{plain[: LONGEST_ID - 7].rstrip('-')}-{digest[:6]}"

    ids = [id_of(each, False) for each in every]
    return [Run(id_of(each, ids.count(own) > 1), each) for each, own in zip(every, ids, strict=True)]


def check_names(every: Sequence[Mapping[str, str]], common: Sequence[str]) -> bool:
    """Refuse what is no setting. Returns whether train.py takes its settings as in a new project."""
    given = list(dict.fromkeys(name for each in every for name in each))
    if "run.id" in given:
        refuse("run.id cannot be given", "each run gets an id of its own; --name says how it begins")
    if "train.fast_dev_run" in given:
        refuse("train.fast_dev_run cannot be given", f"try one run first: {LAUNCH.name}/torchrun.sh --fast-dev-run")
    if "run.dir" in varying(every):
        refuse("run.dir cannot be swept", "give it one value: all runs of a sweep stand in one directory")
    names = settings.names_of(PACKAGE / "train.py")
    if names is None:
        return False
    if found := settings.problem(names, common, [name for name in os.environ if name.startswith("DDP_")]):
        refuse(*found)
    for name in given:
        if found := settings.problem(names, [*common, f"--{name}", ""], ()):
            refuse(found[0].removeprefix("--"), re.sub(r"--(?=\w+\.)", "", found[1]))
    return True


def checked(runs: Sequence[Run], common: Sequence[str], python: str) -> list[Run]:
    """The runs with `all_sha256`. The project's own Settings look at each, which takes an import of torch.

    Now, and not after hours of training.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("DDP_RUN__ID", "DDP_RUN__DIR")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [python, "-c", CHECK],
        input=json.dumps([run.arguments(common) for run in runs]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == CONFIG:
        *told, number = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        text = "\n".join(told).replace(" (from command line)", "").removeprefix("error: ")
        what, _, remedy = text.partition("\n  -> ")
        remedy = remedy.replace("run with --help", f"run python -m {PACKAGE.name}.train --help")
        refuse(f"{runs[int(number)].id}: {what}", remedy or "correct it")
    if done.returncode:
        say(f"values were not looked at: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        return list(runs)
    digests = done.stdout.split()[-len(runs) :]  # user code may print something before
    return [replace(run, all_sha256=digest) for run, digest in zip(runs, digests, strict=True)]


# ------------------------------------------------------------------------------------------------------ its record


def load(path: Path) -> Sweep:
    try:
        content = json.loads(path.read_text())
        return Sweep(**{**content, "runs": [Run(**run) for run in content["runs"]]})
    except FileNotFoundError:
        there = sorted(other.stem for other in path.parent.glob("*.json"))
        remedy = f"give --name, one of: {', '.join(there)}" if there else "start one, see --help"
        refuse(f"there is no sweep {path.stem} in {path.parent}", remedy)
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"{path} cannot be used ({error!r})", "move it away, and give the next sweep another --name")


def under_known_ids(asked: Sequence[Run], old: Sweep | None) -> list[Run]:
    """The runs under the ids that they had: with a second value of a setting, their names would have more in them.

    The same is what sets the same; then, what is trained with the same, a default that is given now for example.
    """
    found, left = list(asked), list(old.runs if old else [])
    for names in (lambda run: run.settings, lambda run: run.all_sha256):
        for number, run in enumerate(asked):
            before = next((each for each in left if names(run) and names(each) == names(run)), None)
            if before and found[number] is run:
                left.remove(before)
                found[number] = replace(run, id=before.id, job=before.job, settings=before.settings | run.settings)
    return found


def joined(old: Sweep | None, new: Sweep, directory: Path) -> Sweep:
    """The sweep with what it had before. Refuses a run that exists with other settings, or is none of a sweep's."""
    known = {run.id: run for run in old.runs} if old else {}
    for run in new.runs:
        before = known.get(run.id)
        if before is None and (directory / run.id).exists():
            refuse(f"{directory / run.id} is there, and no run of this sweep", "give the sweep another --name")
        known_alike = before is not None and before.all_sha256 == run.all_sha256 != ""
        if before is not None and before.settings != run.settings and not known_alike:
            differ = sorted({name for name, _ in before.settings.items() ^ run.settings.items()})
            was = ", ".join(f"{name}={before.settings.get(name, '(not given)')}" for name in differ)
            refuse(f"{run.id} was started with {was}", "start it with the same, or give this sweep another --name")
    if old is None:
        return new
    if old.common != new.common:
        was = shlex.join(old.common) or "no --config"
        refuse(f"the sweep was started with {was}", "start it with the same, or give this one another --name")
    if old.config_sha256 != new.config_sha256:
        say("the settings file has changed since this sweep began: runs that are done stay as they are")
    runs = known | {run.id: run for run in new.runs}  # in the order that they had: jobs of an array count them
    return Sweep(old.name, old.common, old.config_sha256, list(runs.values()))


# ------------------------------------------------------------------------------------------------- what has come out


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line, of which a kill may have cut the last one short."""
    found = []
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def state_of(directory: Path) -> str:
    """done, failed, ... of the last attempt; `no end` while one is going on or was killed; `-` before the first."""
    try:
        return str(json.loads((directory / "outcome.json").read_text())["outcome"])
    except (OSError, ValueError, KeyError, TypeError):
        return "no end" if (directory / "attempts.jsonl").exists() else "-"


def row_of(run: Run, directory: Path, metric: str, queue: Mapping[str, str]) -> dict[str, Any]:
    """What the table says of a run; None stands for what is not known."""
    measured = lines_of(directory / "metrics.jsonl")
    numbers = {line["step"]: line[metric] for line in measured if line.get(metric) is not None and "step" in line}
    values = [numbers[step] for step in sorted(numbers)]
    better = min if is_lower_better(metric)[0] else max
    events = lines_of(directory / "attempts.jsonl")
    seconds, began = 0.0, 0.0
    for event in events:
        if event.get("event") == "start":
            began = float(event.get("time") or 0)
        elif began:
            seconds, began = seconds + max(float(event.get("time") or 0) - began, 0.0), 0.0
    if began and measured:  # an attempt without an end: as far as its metrics go
        seconds += max(float(measured[-1].get("time") or 0) - began, 0.0)
    return {
        "run": run.id,
        "settings": run.settings,
        "outcome": queue.get(run.job) or state_of(directory),
        "best": better(values) if values else None,
        "last": values[-1] if values else None,
        "steps": max((line["step"] for line in measured if "step" in line), default=None),
        "seconds": round(seconds, 1) if events else None,
    }


def queued() -> dict[str, str]:
    """The jobs of this user's arrays that have not ended, `12_3`, and their states; none where there is no Slurm."""
    command = ["squeue", "--noheader", "--array", "--format=%F_%K %T", f"--user={os.getuid()}"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: state.lower() for name, state in (line.split() for line in shown.splitlines() if " " in line.strip())}


def table(sweep: Sweep, directory: Path, metric: str, as_json: bool) -> str:
    """A line for each run, the best one with a star; with `as_json` one array of objects. Says which way is better."""
    queue = queued() if any(run.job for run in sweep.runs) else {}
    rows = [row_of(run, directory / run.id, metric, queue) for run in sweep.runs]
    lower, said_by = is_lower_better(metric)
    if as_json:
        said = {"metric": metric, "lower_is_better": lower, "lower_is_better_by": said_by}
        return json.dumps([{**row, **said} for row in rows], indent=1)
    differ = varying(run.settings for run in sweep.runs)
    better = min if lower else max
    best = better((row["best"] for row in rows if row["best"] is not None), default=None)
    cells = [["", *differ, "outcome", f"{'lowest' if lower else 'highest'} {metric}", "last", "steps", "time", "run"]]
    for row in rows:
        numbers = ["-" if row[name] is None else f"{row[name]:.4g}" for name in ("best", "last")]
        minutes, seconds = divmod(round(row["seconds"] or 0), 60)
        took = "-" if row["seconds"] is None else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        steps = "-" if row["steps"] is None else str(row["steps"])
        mark = "*" if best is not None and row["best"] == best else ""
        told = [row["settings"].get(name, "-") for name in differ]
        cells.append([mark, *told, row["outcome"], *numbers, steps, took, row["run"]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join([*(line.rstrip() for line in padded), *guessed(metric, lower, said_by)])


def metric_to_watch() -> str:
    """METRIC of evaluate.py; `loss` where that is no plain text."""
    name = constant("METRIC")
    return name if isinstance(name, str) else "loss"


def is_lower_better(metric: str) -> tuple[bool, str]:
    """Whether it is, and who says so: HIGHER_IS_BETTER of evaluate.py, or the metric's name (val_loss), a guess."""
    higher = constant("HIGHER_IS_BETTER")
    if metric == metric_to_watch() and isinstance(higher, bool):
        return not higher, "HIGHER_IS_BETTER"
    return any(LOWER_IS_BETTER.fullmatch(word) for word in metric.lower().split("_")), "name"


def guessed(metric: str, lower: bool, said_by: str) -> list[str]:
    """The line below a table whose direction is a guess."""
    if said_by != "name":
        return []
    text = f"{metric} is taken to be best where it is {'lowest' if lower else 'highest'}, by its name"
    if metric != metric_to_watch():
        return [f"{text}: HIGHER_IS_BETTER in evaluate.py is about {metric_to_watch()}"]
    return [f"{text}: write HIGHER_IS_BETTER = {not lower}, or {lower}, below METRIC in evaluate.py"]


def constant(name: str) -> Any:
    """A constant of evaluate.py, read without importing it, since that imports torch; None if there is none."""
    try:
        tree = ast.parse((PACKAGE / "evaluate.py").read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if [ast.unparse(target) for target in node.targets] == [name]:
            return node.value.value
    return None


# ---------------------------------------------------------------------------------------------------------- the runs


def began(pid: int) -> str:
    """When a process of this host began, as the kernel counts; empty if there is none (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def left_behind(runs: Iterable[Run]) -> list[tuple[int, str]]:
    """Process and run id of each torchrun.sh that a sweep has started and outlived it: of a SIGKILL it learns nothing."""
    ids, found = {run.id for run in runs}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(LAUNCH / "torchrun.sh") not in words or os.getsid(int(folder.name)) != int(folder.name):
                continue  # of its children, those that are about to become another program have the same words
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        starter = next((each.partition("=")[2] for each in variables if each.startswith(f"{BY}=")), "")
        by, _, when = starter.partition(".")
        run_id = words[words.index("--run.id") + 1] if "--run.id" in words else ""
        if run_id in ids and when and began(int(by)) != when:
            found.append((int(folder.name), run_id))
    return found


class Current:
    """The run that is trained now, to which signals are passed on. `stopping` is the first signal's name."""

    def __init__(self) -> None:
        self.pid = 0
        self.stopping, self.told = "", False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is below nohup
                signal.signal(number, self._stop)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.stopping = self.stopping or signal.Signals(number).name
        if self.pid:
            self.told = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def train(self, run: Run, common: Sequence[str], output: TextIO) -> int:
        """The exit code of torchrun.sh, which has a session of its own: Ctrl-C in a terminal would reach it twice."""
        command = [str(LAUNCH / "torchrun.sh"), *run.arguments(common)]
        variables = os.environ | {BY: f"{os.getpid()}.{began(os.getpid())}"}
        process = subprocess.Popen(command, stdout=output, env=variables, start_new_session=True)
        self.pid = process.pid
        if self.stopping and not self.told:  # the signal came while it was started
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self.pid = 0
        return code

    def outlast(self, pid: int, run_id: str) -> None:
        """Wait for a run that a killed sweep has left behind: another one beside it would share its GPUs."""
        say(f"{run_id} is still trained by process {pid}, whose sweep was killed: waiting for its end")
        say("its lines are in logs/rank0.log of the run; Ctrl-C asks it to save a checkpoint and stop, too")
        self.pid, mine = pid, began(pid)
        while mine and began(pid) == mine:
            time.sleep(0.5)
        self.pid = 0


def train(sweep: Sweep, runs: Sequence[Run], directory: Path, stop_on_failure: bool, output: TextIO) -> int:
    """One run after another. Returns the exit code of the sweep."""
    current = Current()
    for pid, run_id in left_behind(sweep.runs):
        if not current.stopping:
            current.outlast(pid, run_id)
    left = [run for run in runs if state_of(directory / run.id) != "done"]
    if len(left) < len(runs):
        say(f"{len(runs) - len(left)} of {len(runs)} runs are done already")
    failed = False
    for number, run in enumerate(left, 1):
        if current.stopping or (stop_on_failure and failed):
            break
        if state_of(directory / run.id) == "done":  # by another sweep of this name, meanwhile
            continue
        say(f"run {number} of {len(left)}: {run.id}")
        if ended := current.train(run, sweep.common, output):
            failed = True
            say(f"{run.id} ended with {ended}")
    if current.stopping:
        say(f"got {current.stopping}: the sweep has stopped; the same command goes on with it")
        return STOPPED
    if failed and stop_on_failure:
        say("stopped after a run that is not done (--stop-on-failure); the same command goes on")
    return DONE if all(state_of(directory / run.id) == "done" for run in runs) else FAILED


def submit(sweep: Sweep, runs: Sequence[Run], directory: Path, options: argparse.Namespace, record: Path) -> int:
    """One job array, with a job for each run that is neither done nor in the queue. Prints the command of a dry run."""
    queue = queued()
    left = [run for run in runs if state_of(directory / run.id) != "done" and run.job not in queue]
    if not left:
        say("nothing to submit: all runs are done or in the queue")
        return DONE
    numbers = ",".join(str(sweep.runs.index(run) + 1) for run in left)
    array = f"--array={numbers}{f'%{options.at_once}' if options.at_once else ''}"
    more = shlex.split(options.sbatch)
    command = ["sbatch", "--parsable", array, f"--job-name={sweep.name}", "--output=slurm-%A_%a.out", *more]
    command += [f"{LAUNCH.name}/train.sbatch", "--sweep", str(record)]
    say(shlex.join(command))
    if options.dry_run:
        return DONE
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        refuse("there is no sbatch here", "submit from a login node of the cluster, or leave --slurm out")
    if done.returncode:
        refuse(f"sbatch ended with {done.returncode}", "its own message stands above; --sbatch gives it more options")
    job = done.stdout.strip().partition(";")[0]
    for run in left:
        run.job = f"{job}_{sweep.runs.index(run) + 1}"
    sweep.save(record)
    say(f"submitted {len(left)} jobs: squeue --array --jobs {job}; {LAUNCH.name}/sweep.py --table --name {sweep.name}")
    return DONE


def print_element(path: str, number: str) -> None:
    """The training arguments of a run, counted from 1, each with a zero byte behind it: for bash's mapfile."""
    sweep = load(Path(path))
    sys.stdout.write("".join(f"{word}\0" for word in sweep.runs[int(number) - 1].arguments(sweep.common)))


def use_python_of_the_project() -> str:
    """Go on in the Python that the launch scripts take, which has PyYAML; returns its path."""
    folder = Path(os.environ.get("VENV") or PROJECT / ".venv")
    python = folder / "bin" / "python"
    if os.environ.get("VENV") and not python.exists():
        refuse(f"VENV={folder} is not a virtual environment", "set VENV to one, or unset it to use .venv")
    if python.exists() and Path(sys.prefix).resolve() != folder.resolve():
        os.execv(python, [str(python), str(Path(__file__).resolve()), *sys.argv[1:]])
    try:
        import yaml  # noqa: F401
    except ImportError:
        refuse(f"{sys.executable} has no PyYAML", "install this project there, or set VENV to where it is installed")
    return sys.executable


def main() -> int:
    """The command."""
    options = options_of(sys.argv[1:])
    if options.element:
        print_element(*options.element)
        return DONE
    os.chdir(PROJECT)  # relative paths are the project's, as for torchrun.sh
    python = use_python_of_the_project()
    grid, listed, file_name = read(options.given)
    common = ["--config", options.config] if options.config else []
    every = combinations(grid, listed)
    checks_values = check_names(every, common)
    fixed = [word for name, value in every[0].items() for word in (f"--{name}", value)]
    directory = Path(outcome.setting("run.dir", "runs", [*common, *fixed]))
    name = options.name or file_name or "sweep"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,59}", name):
        refuse(f"--name {name!r} is no name of a file", "use letters, digits and . _ -, at most 60")
    record = directory / "sweeps" / f"{name}.json"
    metric = options.metric or metric_to_watch()
    if options.table:
        print(table(load(record), directory, metric, options.json))
        return DONE
    if not grid and not listed:
        refuse("no settings are given", f"for example {LAUNCH.name}/sweep.py train.batch_size=32,64; see --help")
    asked = named(name, every)
    if checks_values:
        asked = checked(asked, common, python)
    old = load(record) if record.exists() else None
    asked = under_known_ids(asked, old)
    file = Path(options.config or settings.DEFAULT_FILE)
    digest = hashlib.sha256(file.read_bytes() if file.is_file() else b"").hexdigest()
    sweep = joined(old, Sweep(name, common, digest, asked), directory)
    ids = {run.id for run in asked}
    runs = [run for run in sweep.runs if run.id in ids]
    if options.slurm and not (LAUNCH / "train.sbatch").exists():
        refuse(
            f"{LAUNCH.name}/ has no train.sbatch, and there are no job arrays for other schedulers",
            "leave --slurm out: one run after another, also within a job of yours (qsub -I)",
        )
    if options.dry_run:
        for run in runs:
            state = state_of(directory / run.id)
            print(f"{run.id}{'' if state == '-' else f', {state}'}\n    {shlex.join(run.arguments(common))}")
        return submit(sweep, runs, directory, options, record) if options.slurm else DONE
    sweep.save(record)
    if options.slurm:
        return submit(sweep, runs, directory, options, record)
    output = sys.stderr if options.json else sys.stdout
    code = train(sweep, runs, directory, options.stop_on_failure, output)
    print(table(sweep, directory, metric, options.json))
    return code


if __name__ == "__main__":
    sys.exit(main())
