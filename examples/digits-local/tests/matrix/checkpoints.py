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

import torch

from digits.config import Settings
from digits.ddp import checkpoint, load
from digits.ddp.session import Session, session

KILLS = 50
RUN_DIR = Path(os.environ.get("DDP_RUN__DIR", "runs"), os.environ.get("DDP_RUN__ID", "run"))


def write_until_killed(run: Session, keep: int, limit: int = 1_000_000, full_from: int = 1_000_000) -> None:
    """Load, then save step after step. From step `full_from` on no file can grow beyond 100 kB: a full disk."""
    layer = torch.nn.Linear(256, 256)
    loaded = (checkpoint.load(run.job, run.dir, {"layer": layer}) or {"step": 0})["step"]
    good = loaded == 0 or all(bool((parameter == loaded).all()) for parameter in layer.parameters())
    say(f"loaded {loaded} {'good' if good else 'BAD'}")
    for step in range(loaded + 1, loaded + 1 + limit):
        if step == full_from:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(step)
        written = checkpoint.save(run.job, run.dir, {"step": step}, {"layer": layer}, keep=keep)
        say(f"{'saved' if written else 'not saved'} {step}")


def say(text: str) -> None:
    """In one piece, and at once: the next moment may be the last."""
    os.write(1, f"{text}\n".encode())


class Writer:
    """A forked process that writes checkpoints, and what it has said so far."""

    def __init__(self, keep: int = 2, limit: int = 1_000_000, full_from: int = 1_000_000) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(writing, 1)
            settings, _ = load(Settings, ["--run.device", "cpu", "--log.tracker", "none"])
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


def saved(lines: Sequence[str]) -> int:
    """The last step that was saved, by a writer's own words."""
    steps = [int(line.split()[1]) for line in lines if re.fullmatch(r"saved \d+", line)]
    return max(steps, default=0)


def kills() -> list[str]:
    """SIGKILL at random moments: the next one loads what was saved last, or a later one that was complete already."""
    wrong, newest = [], 0
    dice = random.Random(0)
    for number in range(KILLS):
        writer = Writer()
        loaded = writer.first_line()
        step = int((re.findall(r"loaded (\d+) good", loaded) or [-1])[0])
        if not newest <= step <= newest + 1:
            wrong.append(f"start {number} said {loaded!r}, but {newest} was saved")
        time.sleep(dice.uniform(0, 0.05))
        newest = max(step, saved(writer.rest()))
    if newest < 10:
        wrong.append(f"only {newest} checkpoints were written between {KILLS} kills")
    return wrong


def two_writers() -> list[str]:
    """A job and its successor at once, in one directory: what is loaded afterwards is whole, and the newest."""
    writers = [Writer(), Writer()]
    for writer in writers:
        writer.first_line()
    time.sleep(2)
    newest = [saved(writer.rest()) for writer in writers]
    after = Writer(limit=0)
    loaded = after.first_line()
    after.rest(kill=False)
    step = int((re.findall(r"loaded (\d+) good", loaded) or [-1])[0])
    return [] if step >= max(newest) > 0 else [f"{newest} were saved, then one said {loaded!r}"]


def full_disk() -> list[str]:
    """No room from step 4 on (a limit on the size of files stands in): the run goes on, and step 3 is kept."""
    writer = Writer(limit=6, full_from=4)
    said = [writer.first_line(), *writer.rest(kill=False)]
    wanted = ["loaded 0 good", "saved 1", "saved 2", "saved 3", "not saved 4", "not saved 5", "not saved 6"]
    after = Writer(limit=0)
    loaded = after.first_line()
    after.rest(kill=False)
    return ([] if said == wanted else [f"said {said}"]) + ([] if loaded == "loaded 3 good" else [f"then {loaded!r}"])


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
    after = Writer(keep=4, limit=0)
    loaded = after.first_line()
    after.rest(kill=False)
    return [] if loaded == "loaded 1 good" else [f"said {loaded!r}"]


CHECKS: dict[str, Callable[[], list[str]]] = {
    check.__name__: check for check in (kills, two_writers, full_disk, damage)
}

if __name__ == "__main__":
    problems = CHECKS[sys.argv[1]]()
    print("\n".join(problems) or "as it must be")
    sys.exit(len(problems) > 0)
