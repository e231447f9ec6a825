"""Who writes to a run directory: one start at a time, known by `owner.json` in it.

    python -m <package>.ddp.start.owner RUN_DIRECTORY PID

takes it for the launch script PID; exit code 78 if it is taken

It is no lock: what a kill leaves behind says only where to look for a sign of life. On the same host that is the
process; elsewhere, the age of the heartbeats. A restart or a requeue of the same job takes the directory over at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CONFIG, RunTaken
from ..polling import poll
from ..processes import CLAIM as CLAIM
from ..processes import JOBS, began, space

QUIET_S = 90.0  # an owner on another host, without a sign of life for so long, is gone: heartbeats come every 30 s


@dataclass(frozen=True)
class Owner:
    """A process that has taken a run directory.

    `began` tells it from a later one with the same number, `space` from that of another container on the same host.
    """

    token: str
    host: str
    space: str
    pid: int
    began: str
    job: str
    attempt: int
    quiet_s: float = QUIET_S

    def describe(self) -> str:
        """'process 4711 on n1, job 17, attempt 0'."""
        return f"process {self.pid} on {self.host}{f', job {self.job}' if self.job else ''}, attempt {self.attempt}"


def claim(run_dir: Path, pid: int, attempt: int, quiet_s: float = QUIET_S) -> Owner:
    """Take the run directory for process `pid` of this host, unless this process's launch script has it already.

    Raises:
        RunTaken: another start has it and is alive.
        OSError: the directory cannot be written to.
    """
    host, place, birth = socket.gethostname(), space(), began(pid)
    token = f"{host}.{place}.{pid}.{birth}"
    mine = Owner(token, host, place, pid, birth, _job(), attempt, max(quiet_s, QUIET_S))
    run_dir.mkdir(parents=True, exist_ok=True)
    path, aside = run_dir / "owner.json", run_dir / f".owner-{host}-{pid}.json"
    aside.write_text(json.dumps(asdict(mine)))
    try:
        while True:
            with suppress(FileExistsError):
                os.link(aside, path)  # one of several that try at once gets it, on shared file systems, too
                return mine
            owner = _read(path)
            if owner and owner.token == os.environ.get(CLAIM):
                return owner
            if owner and _alive(run_dir, owner, mine, aside.stat().st_mtime):
                raise RunTaken(
                    f"run {run_dir.name} is going on already: {owner.describe()} writes to {run_dir}",
                    "give this start another id (run.id, DDP_RUN__ID), or end that one first",
                )
            _take_away(path, owner, aside)
    finally:
        aside.unlink(missing_ok=True)


def new_directory(runs: Path, name: str) -> str:
    """Make a directory of this name, or with -2, -3 and so on: several starts may come in one second."""
    for number in range(1, 1000):
        unique = name if number == 1 else f"{name}-{number}"
        with suppress(FileExistsError):
            (runs / unique).mkdir(parents=True)
            return unique
    raise FileExistsError(f"{runs} has a thousand runs named {name}")


def held_by_another(run_dir: Path) -> bool:
    """Whether a start other than this one's is writing there, as far as that can be told without waiting."""
    owner = _read(run_dir / "owner.json")
    if owner is None or owner.token == os.environ.get(CLAIM):
        return False
    if owner.job and owner.job == _job():
        return False
    if (owner.host, owner.space) == (socket.gethostname(), space()):
        return began(owner.pid) == owner.began != ""
    return time.time() - _last_heartbeat(run_dir) < owner.quiet_s


def release(run_dir: Path) -> None:
    """Give back what this very process has taken: a start on another host need not wait for a sign of life then."""
    owner = _read(run_dir / "owner.json")
    here = (socket.gethostname(), space(), os.getpid())
    if owner and (owner.host, owner.space, owner.pid) == here:
        (run_dir / "owner.json").unlink(missing_ok=True)


def _alive(run_dir: Path, owner: Owner, mine: Owner, now: float) -> bool:
    """Whether `owner` still is. Waits for a sign of life where only that can tell. `now` is the file system's time."""
    if owner.job and owner.job == mine.job and owner.attempt < mine.attempt:
        return False  # the same job, requeued: Slurm has ended what it had started before
    if (owner.host, owner.space) == (mine.host, mine.space):
        return began(owner.pid) == owner.began != ""
    taken = (run_dir / "owner.json").stat().st_mtime
    seen = max(taken, _last_heartbeat(run_dir))
    until = time.monotonic() + min(owner.quiet_s, seen + owner.quiet_s - now)
    if until > time.monotonic():
        print(f"the run was started by {owner.describe()}: looking whether it still is", file=sys.stderr, flush=True)
    claim = run_dir / "owner.json"
    poll(lambda: not claim.exists() or _last_heartbeat(run_dir) > seen, until - time.monotonic(), pause_s=1)
    return claim.exists() and _last_heartbeat(run_dir) > seen


def _take_away(path: Path, dead: Owner | None, aside: Path) -> None:
    """Remove what a dead owner left. Of several that do so at once, none removes the claim of one that came before."""
    old = aside.with_suffix(".old")
    with suppress(FileNotFoundError):
        os.rename(path, old)
        if _read(old) != dead:
            with suppress(FileExistsError):
                os.link(old, path)
        old.unlink()


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _last_heartbeat(run_dir: Path) -> float:
    """When a rank has last written its heartbeat there."""
    found = [0.0]
    for path in (run_dir / "heartbeats").glob("rank*.json"):
        with suppress(OSError):
            found.append(path.stat().st_mtime)
    return max(found)


def _job() -> str:
    return next((os.environ[name] for name in JOBS if os.environ.get(name)), "")


def main() -> None:
    """Take a directory for a launch script, and print what its ranks must have in LAUNCH_CLAIM."""
    try:
        owner = claim(Path(sys.argv[1]), int(sys.argv[2]), int(os.environ.get("DDP_ATTEMPT") or 0))
    except RunTaken as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CONFIG)
    except OSError as error:
        print(f"error: the run directory {sys.argv[1]} cannot be made: {error}", file=sys.stderr)
        print("  -> make room there, or name another with DDP_RUN__DIR", file=sys.stderr)
        sys.exit(CONFIG)
    print(owner.token)


if __name__ == "__main__":
    main()
