"""Checkpoints under attack: `python -m matrix.checkpoints CHECK`; prints what is wrong, and exits with 1 then.

Each writer is a forked process that goes through a whole session. Its weights tell the step, so a wrong load shows.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from digits.config import Settings
from digits.ddp import checkpoint, load_settings
from digits.ddp.saving.chosen import read_chosen
from digits.ddp.session import Session, session

KILLS = 50
RUN_DIR = Path(os.environ.get("DDP_RUN__DIR", "runs"), os.environ.get("DDP_RUN__ID", "run"))


def write_until_killed(run: Session, keep: int, limit: int = 1_000_000, full_from: int = 1_000_000) -> None:
    """Load, then save step after step. From step `full_from` on no file can grow beyond 100 kB: a full disk.

    A step is `begun` when training could go on, and `saved` when it is known to be on the disk, at the next one.
    """
    layer = torch.nn.Linear(256, 256)
    checkpoint.keep_best(SimpleNamespace(METRIC="found", HIGHER_IS_BETTER=False))
    loaded = (checkpoint.load(run.job, run.dir, {"layer": layer}) or {"step": 0})["step"]
    good = loaded == 0 or all(bool((parameter == loaded).all()) for parameter in layer.parameters())
    say(f"loaded {loaded} {'good' if good else 'BAD'}")
    for step in range(loaded + 1, loaded + 1 + limit):
        if step > loaded + 1:
            say(f"{'saved' if checkpoint.finish(run.job) else 'not saved'} {step - 1}")
        if step == full_from:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(step)
        checkpoint.rate(run.job, run.dir, step, {"found": found(step)})
        checkpoint.save(run.job, run.dir, {"step": step}, {"layer": layer}, keep=keep)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(-1)  # training goes on, and must not change what is being written
        say(f"begun {step}")
    if limit:
        say(f"{'saved' if checkpoint.finish(run.job) else 'not saved'} {loaded + limit}")


def found(step: int) -> float:
    """What an evaluation finds at a step: up and down, no two alike, so there is one best one."""
    return (step * 617) % 1009 / 1009


def say(text: str) -> None:
    """In one piece, and at once: the next moment may be the last."""
    os.write(1, f"{text}\n".encode())


class Writer:
    """A forked process that writes checkpoints, and what it has said so far."""

    def __init__(self, keep: int = 2, limit: int = 1_000_000, full_from: int = 1_000_000, faults: str = "") -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.environ["DDP_FAULTS"] = faults
            os.dup2(writing, 1)
            settings, _ = load_settings(Settings, ["--run.device", "cpu", "--log.tracker", "none"])
            with session(settings.run, settings.clocks, settings.log, settings.preempt) as run:
                write_until_killed(run, keep, limit, full_from)
            os._exit(0)
        os.close(writing)
        self.pipe = os.fdopen(reading)

    def first_line(self) -> str:
        """What it has loaded; empty if it ended without a word."""
        return self.pipe.readline().strip()

    def rest(self, kill: bool = True) -> list[str]:
        """End it, and return what else it has said."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        lines = self.pipe.read().splitlines()
        os.waitpid(self.pid, 0)
        return lines


def loads() -> int:
    """The step that a writer finds now; -1 if that is not what was saved."""
    writer = Writer(limit=0)
    said = writer.first_line()
    writer.rest(kill=False)
    return int((re.findall(r"loaded (\d+) good", said) or [-1])[0])


def saved(lines: Sequence[str]) -> int:
    """The last step that was saved, by a writer's own words."""
    steps = [int(line.split()[1]) for line in lines if re.fullmatch(r"saved \d+", line)]
    return max(steps, default=0)


def kills() -> list[str]:
    """SIGKILL at random moments: the next one loads what was saved last, or a later one that was complete already.

    The best one, whole, is there after each of them.
    """
    wrong, newest = [], 0
    dice = random.Random(0)
    for number in range(KILLS):
        writer = Writer()
        loaded = writer.first_line()
        step = int((re.findall(r"loaded (\d+) good", loaded) or [-1])[0])
        if not newest <= step <= newest + 1:
            wrong.append(f"start {number} said {loaded!r}, but {newest} was saved")
        time.sleep(dice.uniform(0, 0.1 if newest >= number // 4 else 1))  # a busy machine writes too little in 0.1 s
        newest = max(step, saved(writer.rest()))
        wrong += best_is_kept(newest) if newest else []
    if newest < 10:
        wrong.append(f"only {newest} checkpoints were written between {KILLS} kills")
    return wrong


def best_is_kept(newest: int) -> list[str]:
    """Whether the best of all steps up to `newest`, or a better one after it, can be loaded."""
    _, payload = read_chosen(RUN_DIR, "best", lambda _note: None)
    step, wanted = payload["counters"]["step"], min(range(1, newest + 1), key=found)
    whole = bool((payload["objects"]["layer"]["weight"] == step).all())
    return [] if whole and found(step) <= found(wanted) else [f"of {newest} steps {wanted} is the best, kept is {step}"]


def kills_at() -> list[str]:
    """SIGKILL while a state is copied, while the copy is written, before it is renamed: the one before is loaded."""
    wrong = []
    for number, place in enumerate(("copy", "write", "rename")):
        step = 3 * (number + 1)
        writer = Writer(faults=f"kill@step={step},phase=checkpoint:{place}")
        lines = [writer.first_line(), *writer.rest(kill=False)]
        if (newest := saved(lines)) != step - 1:
            wrong.append(f"killed in {place} at step {step}, it had saved {newest}")
        if (step_loaded := loads()) != newest:
            wrong.append(f"killed in {place}, {newest} was saved and {step_loaded} loaded")
    return wrong


def two_writers() -> list[str]:
    """A job and its successor at once, in one directory: what is loaded afterwards is whole, and the newest."""
    writers = [Writer(), Writer()]
    for writer in writers:
        writer.first_line()
    time.sleep(2)
    newest = [saved(writer.rest()) for writer in writers]
    step = loads()
    return [] if step >= max(newest) > 0 else [f"{newest} were saved, then one loaded {step}"]


def full_disk() -> list[str]:
    """No room from step 4 on (a limit on the size of files stands in): the run goes on, and step 3 is kept."""
    writer = Writer(limit=6, full_from=4)
    said = [writer.first_line(), *(line for line in writer.rest(kill=False) if not line.startswith("begun"))]
    wanted = ["loaded 0 good", "saved 1", "saved 2", "saved 3", "not saved 4", "not saved 5", "not saved 6"]
    step = loads()
    return ([] if said == wanted else [f"said {said}"]) + ([] if step == 3 else [f"then one loaded {step}"])


def damage() -> list[str]:
    """Three of four are damaged, each in another way: the fourth is loaded."""
    writer = Writer(keep=4, limit=4)
    writer.first_line()
    writer.rest(kill=False)
    flipped, cut, headless = (RUN_DIR / "checkpoints" / f"step_{step:08d}" for step in (4, 3, 2))
    content = bytearray((flipped / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (flipped / "state.pt").write_bytes(content)
    (cut / "state.pt").write_bytes((cut / "state.pt").read_bytes()[:1000])
    (headless / "manifest.json").unlink()
    step = loads()
    return [] if step == 1 else [f"loaded {step}"]


CHECKS: dict[str, Callable[[], list[str]]] = {
    check.__name__: check for check in (kills, kills_at, two_writers, full_disk, damage)
}

if __name__ == "__main__":
    problems = CHECKS[sys.argv[1]]()
    print("\n".join(problems) or "as it must be")
    sys.exit(len(problems) > 0)
