"""What a run has learned: `python -m <package>.evaluate RUN` and `python -m <package>.sample RUN`, for any checkpoint.

One process, or several by torchrun. They read what the run has written, and put a file of their own beside it: a run
that is going on does not notice. The network, the data and what is measured are those of the project's own files, as
in training, with the settings of the run's last start.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset
from tqdm import tqdm

from .agree import from_rank0, gather
from .best import MANIFEST, best_of, checkpoints
from .errors import CONFIG, FAILED, ConfigError
from .export import settings_of
from .guard import Progress, on_rank0
from .kinds import Verdict
from .loader import batches, make_loader
from .restore import fill
from .rng import make_deterministic, seed_generators
from .saving import directory
from .saving.chosen import CHOICES, read_chosen, step_of
from .session import SessionSettings
from .start.arrival import arrive
from .start.elastic import tell_torchrun
from .start.groups import Job, meet, setup_distributed, shutdown
from .start.launcher import detect
from .start.logs import SETTINGS, log_to_console, say_last
from .start.rendezvous import rendezvous
from .start.settings import leaves, read_settings, settings_over, settings_table
from .storable import Refusal
from .trace.heartbeat import phase, progress, step_done

log = logging.getLogger("ddp")
PACKAGE = __name__.rpartition(".ddp.")[0]
TRIES = 3  # of all ranks to read one checkpoint: a run that is going on may remove it in between
SAY_S = 10.0  # between two lines that say how far drawing is
INTERRUPTED = 130  # as shells have it


@dataclass(frozen=True)
class _Run:
    """A run that is looked at, and how."""

    directory: Path
    which: str  # checkpoint
    settings: Any  # of the project
    changed: list[str]  # what is not as at its last start: 'eval.batch_size 64 -> 16 (command line)'
    rows: Sequence[tuple[str, str, str]]
    train: Any  # the project's train.py


@dataclass(frozen=True)
class _Loaded:
    """A checkpoint in the networks that it is for."""

    name: str  # step_00000150
    step: int
    of: str  # average or model: whose weights
    is_best: bool
    network: nn.Module
    data: Any  # the validation set


def evaluate_run(argv: Sequence[str] | None = None) -> None:
    """The command `python -m <package>.evaluate`. `argv` is what follows that. Exits with 78 if something is wrong."""
    parser = _parser("evaluate", "Evaluate a checkpoint of a run on the whole validation set, with the run's settings.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, what the file holds, and no text")
    _command(parser, argv, _evaluate)


def sample_run(argv: Sequence[str] | None = None) -> None:
    """The command `python -m <package>.sample`. `argv` is what follows that. Exits with 78 if something is wrong."""
    parser = _parser("sample", "Draw samples from a checkpoint of a run, with the run's settings.")
    what = "where to, sample-step_<N> in the run directory by default; the suffix is that of what is drawn"
    parser.add_argument("--out", type=Path, metavar="FILE", help=what)
    _command(parser, argv, _sample)


def _parser(name: str, what: str) -> argparse.ArgumentParser:
    """Options of both commands."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}.{name}",
        usage=f"python -m {PACKAGE}.{name} RUN [options] [--section.key value ...]",
        description=what,
        epilog=f"Any setting is an option as well: --{'sample.seed 1' if name == 'sample' else 'eval.batch_size 16'}. "
        f"python -m {PACKAGE}.train --help lists them. Several processes: torchrun --standalone --nproc-per-node 2 -m "
        f"{PACKAGE}.{name} RUN",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run directory, or the id of one")
    parser.add_argument("--checkpoint", default="last", metavar="WHICH", help=f"{CHOICES}; last by default")
    return parser


def _command(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, work: Callable[[argparse.Namespace, _Run, Job], None]
) -> None:
    """Read the command line, join the other ranks, do the work; one line and one exit code if that fails."""
    options, overrides = _split(parser, sys.argv[1:] if argv is None else argv)
    try:
        if parser.prog.endswith(".sample"):
            _part("sample", "draw")  # before train.py, which imports it
        run = _run(options, overrides)
        with _joined(run) as job:
            work(options, run, job)
    except ConfigError as error:
        _give_up(CONFIG, str(error))
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        _give_up(FAILED, f"{said}\n  -> lower --eval.batch_size, or choose a GPU with more free memory")
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        _give_up(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")


def _split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the settings: `--section.key value` or `--section.key=value`."""
    own, settings = list[str](), list[str]()
    rest = iter(argv)
    for word in rest:
        if re.match(r"--\w+\.", word):
            settings += [word] if "=" in word else [word, *(value for value in [next(rest, None)] if value is not None)]
        else:
            own.append(word)
    try:
        options, unknown = parser.parse_known_args(own)
    except SystemExit as stop:  # 0 after --help; else argparse has said what is wrong
        raise SystemExit(CONFIG if stop.code else 0) from None
    if unknown or not options.run:
        problem = f"{unknown[0]} is no option" if unknown else "which run?"
        say_last(f"error: {problem}\n  -> {parser.usage}; --help says more")
        raise SystemExit(CONFIG)
    return options, settings


def _give_up(code: int, text: str) -> None:
    """Say it once a host, leave it for torchrun's table, and end: others may wait in a collective for ever."""
    try:
        place = detect()
    except ConfigError:
        place = None
    if place is None or place.local_rank == 0 or code == FAILED:
        say_last(f"error: {text}" if place is None or place.rank == 0 else f"error on {place.who}: {text}")
    tell_torchrun(Verdict(code, "bad_settings" if code == CONFIG else "rank_exception", text))
    if place and place.rank == 0 and place.world_size > 1:
        time.sleep(1)  # its store goes with it, and the others may be about to read there what is wrong
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


def _part(name: str, *attributes: str) -> Any:
    """A module of the project, beside ddp/.

    Raises:
        ConfigError: it cannot be imported, or does not have these attributes.
    """
    try:
        found = import_module(f"{PACKAGE}.{name}")
    except ImportError as error:
        problem = f"{name}.py of {PACKAGE} cannot be imported: {error}"
        raise ConfigError(problem, f"correct it; {PACKAGE}.train must be importable, too") from error
    for attribute in attributes:
        if not hasattr(found, attribute):
            problem = f"{name}.py of {PACKAGE} has no `{attribute}`, which this command calls"
            raise ConfigError(problem, f"write it, or take back that of the template: git log -p -- '*/{name}.py'")
    return found


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> _Run:
    """Find the run, and merge its settings with what was asked for.

    Raises:
        ConfigError: there is no such run, or a setting is wrong.
    """
    train = _part("train", "Settings", "Learner", "build_datasets", "autocast", "with_precision")
    path = _find(options.run, train.Settings, overrides)
    try:
        own = settings_of(path, typed=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the settings in {path} cannot be read: {error}", "choose another run") from error
    if not own:
        is_checkpoint = (path / MANIFEST).is_file()
        remedy = "give the directory of a run that has started, runs/<id>"
        raise ConfigError(
            f"{path} has no {SETTINGS}, so it is no run directory",
            f"give {path.parents[1]}, and --checkpoint {step_of(path)}" if is_checkpoint else remedy,
        )
    limit = (own.get("loader") or {}).pop("eval_batches", 0)  # was for training: all is evaluated, if nobody asks again
    settings, origin = settings_over(train.Settings, own, f"the settings of {path}", overrides)
    before = {".".join(map(str, where)): value for where, value in leaves(own)}
    rows = settings_table(settings, origin)
    values = {".".join(map(str, where)): value for where, value in leaves(rows.values)}
    before["loader.eval_batches"] = limit
    changed = [
        f"{name} {before[name]} -> {value} ({origin[name]})"
        for name, value in values.items()
        if name in before and str(value) != str(before[name]) and name in origin and not name.startswith("run.")
    ]
    return _Run(path, options.checkpoint, settings, changed, rows, train)


def _find(name: str, settings_class: type[SessionSettings], overrides: Sequence[str]) -> Path:
    """The run directory: a path, or an id below the run.dir that training would have."""
    if Path(name).is_dir():
        return Path(name)
    settings, _ = read_settings(settings_class, overrides)
    runs = settings.run.dir
    if (runs / name).is_dir():
        return runs / name
    there = sorted(runs.glob("*/settings.txt"), key=lambda path: path.stat().st_mtime, reverse=True)
    newest = ", ".join(path.parent.name for path in there[:5])
    problem = f"there is no run {name}: neither {name} nor {runs / name} is a directory"
    raise ConfigError(problem, f"the newest in {runs}: {newest}" if newest else "give the path of a run directory")


@contextmanager
def _joined(run: _Run) -> Iterator[Job]:
    """The process group of all ranks, without a run directory: nothing is watched, claimed or logged to a file."""
    place = detect()
    log_to_console(place)
    settings = run.settings
    job = rendezvous(place, settings.clocks, run.rows, None, arrive(place, settings.run.device))
    if settings.run.deterministic:
        make_deterministic()
    job = setup_distributed(job, settings.run.device)
    yield job
    meet(job)
    shutdown(job)


def _load(run: _Run, job: Job) -> _Loaded:
    """Build what training builds, and fill the networks from the checkpoint; optimisers are left as they are.

    Raises:
        ConfigError: on all ranks: there is no such checkpoint, or it does not fit the settings.
    """
    settings = run.settings
    seed_generators(settings.run.seed)  # as training does, for data sets that draw
    learner = run.train.Learner(settings, job)
    _, data = run.train.build_datasets(settings.data)
    seed_generators(settings.run.seed + 1 + job.rank)
    networks = {name: each for name, each in learner.checkpoint_objects().items() if isinstance(each, nn.Module)}
    name, payload, is_best = _read(run, job)
    saved, path = payload["objects"], run.directory / "checkpoints" / name
    if missing := sorted(networks.keys() - saved.keys()):
        advice = "--train.ema 0 evaluates the weights themselves" if missing == ["average"] else "leave out settings"
        raise ConfigError(f"{path} holds no {', '.join(missing)}", advice)
    try:
        fill(networks, {each: saved[each] for each in networks}, path)
    except ConfigError as error:
        remedy = "leave out --model settings, or go back to the model.py that this run was trained with (git log)"
        raise ConfigError(str(error).partition("\n")[0], remedy) from error
    step = payload["counters"]["step"]
    step_done(step, payload["counters"].get("epoch", 0))
    of = "average" if "average" in networks else "model"
    return _Loaded(name, step, of, is_best, learner.eval_network, data)


def _read(run: _Run, job: Job) -> tuple[str, dict[str, Any], bool]:
    """Name and content of the chosen checkpoint, the same on all ranks, and whether it is the best."""
    root = run.directory / "checkpoints"
    problems: list[str] = []
    for _ in range(TRIES):
        found: tuple[str, dict[str, Any]] | None = None
        told: tuple[str, bool] | Refusal | None = None
        if job.rank == 0:
            try:
                found = read_chosen(run.directory, run.which, progress)
                best = best_of(checkpoints(root))
                told = found[0], best is not None and best[0].name == found[0]
            except ConfigError as error:
                told = Refusal(*str(error).split("\n  -> "))
        told = from_rank0(job, told)
        if isinstance(told, Refusal):
            raise told.error()
        assert told is not None
        name, problem = told[0], ""
        try:
            found = found or (name, directory.read(root / name, progress))
        except (OSError, directory.Damaged) as error:
            problem = f"{job.who(job.rank)} cannot read {root / name}, which rank 0 has read: {error}"
        problems = [each for each in gather(job, problem) if each]
        if not problems and found:
            return name, found[1], told[1]
    raise ConfigError(problems[0], f"put {run.directory} on a file system that all nodes share")


def _evaluate(options: argparse.Namespace, run: _Run, job: Job) -> None:
    """Measure, print, and write runs/<id>/evaluation-<checkpoint>.json."""
    evaluation = _part("evaluate", "evaluate", "METRIC")
    settings = run.train.with_precision(run.settings, job)
    loaded = _load(run, job)
    loader = make_loader(loaded.data, job, settings.loader, batch_size=settings.eval.batch_size, train=False)
    hidden = None if job.rank == 0 and sys.stderr is not None else True  # None: where stderr is no terminal
    shown = tqdm(batches(loader, job), "evaluating", _length(loader), leave=False, disable=hidden)
    with phase("eval"), run.train.autocast(settings.train, job.device):
        metrics = evaluation.evaluate(loaded.network, shown, job, settings.eval, progress)
        metrics = {name: float(value) for name, value in metrics.items()}  # they may be tensors, as while training
    shown.close()
    share = 0 if isinstance(loaded.data, IterableDataset) else len(cast(Any, loader.sampler))
    samples = sum(gather(job, share)) or None  # of a stream, nobody knows
    if job.rank == 0:
        found = {
            "version": 1,
            "run": run.directory.resolve().name,
            "checkpoint": loaded.name,
            "step": loaded.step,
            "best": loaded.is_best,
            "weights": loaded.of,
            "metric": evaluation.METRIC,
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
            "samples": samples,
            "world_size": job.world_size,
            "device": job.device.type,
            "changed_settings": run.changed,
            "time": round(time.time(), 3),
        }
        path = run.directory / f"evaluation-{loaded.name}.json"
        shown_path = path if _write(path, found) else None
        words = _in_words(_about(run, loaded), found, metrics, shown_path)
        print(json.dumps(found) if options.json else words)


def _in_words(about: str, found: Mapping[str, Any], metrics: Mapping[str, float], path: Path | None) -> str:
    width = max(map(len, metrics), default=0)
    lines = [about, *(f"  {name:<{width}}  {value:.6g}" for name, value in metrics.items())]
    ranks = "1 rank" if found["world_size"] == 1 else f"{found['world_size']} ranks"
    samples = f"{found['samples']} samples on " if found["samples"] is not None else "on "
    lines.append(f"{samples}{ranks}, {found['device']}{f'; written to {path}' if path else ''}")
    return "\n".join(lines)


def _about(run: _Run, loaded: _Loaded) -> str:
    """'runs/first, step 150 (the best one), averaged weights', and what was set otherwise."""
    remarks = [f"{run.directory}, step {loaded.step}{' (the best one)' if loaded.is_best else ''}"]
    remarks += ["averaged weights"] if loaded.of == "average" else []
    return "\n".join([", ".join(remarks), *(f"  set otherwise: {each}" for each in run.changed)])


def _length(of: Any) -> int | None:
    """Of a data set or loader; None of a stream, which does not know."""
    try:
        return len(of)
    except TypeError:
        return None


def _write(path: Path, content: Mapping[str, Any]) -> bool:
    """Whole or not at all. A run directory that cannot be written to, a colleague's, is a warning."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as error:
        log.warning("the result is not written to %s: %s", path, error)
        with suppress(OSError):
            partial.unlink()
        return False
    return True


def _sample(options: argparse.Namespace, run: _Run, job: Job) -> None:
    """Draw on rank 0, aside, and put what was drawn where it was asked for."""
    draw = _part("sample", "draw").draw
    settings = run.train.with_precision(run.settings, job)
    loaded = _load(run, job)
    default = f"sample-{loaded.name}"
    out = options.out or run.directory / default
    out = out / default if out.is_dir() else out

    def work(note: Progress) -> list[str] | Refusal:
        told = [time.monotonic()]

        def note_and_say(text: str) -> None:
            note(text)
            if time.monotonic() - told[0] > SAY_S:
                told[0] = time.monotonic()
                log.info("%s", text)

        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".sample-", dir=out.parent) as aside:
                with run.train.autocast(settings.train, job.device):
                    draw(loaded.network, loaded.data, settings.sample, job.device, note_and_say, Path(aside) / "sample")
                return [str(_put(path, out)) for path in sorted(Path(aside).iterdir())]
        except OSError as error:
            return Refusal(f"nothing is drawn to {out}: {error}", "give --out a file in a directory with room")

    files = from_rank0(job, on_rank0(job, "sample", work))
    if isinstance(files, Refusal):
        raise files.error()
    if not files:
        problem = f"draw in sample.py of {PACKAGE} has written no file"
        raise ConfigError(problem, "let it write to its argument `path` plus a suffix, as its docstring says")
    if job.rank == 0:
        print("\n".join([_about(run, loaded), *files]))


def _put(drawn: Path, out: Path) -> Path:
    """Move 'sample<rest>' to `out` with that rest in the place of its suffix, if it has the same."""
    rest = drawn.name.removeprefix("sample")
    target = out.with_name(f"{out.name.removesuffix(drawn.suffix)}{rest}")
    os.replace(drawn, target)
    return target
