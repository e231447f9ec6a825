"""How long an update takes: `ddp-scaffold update` next to plain `copier update`, and what the package weighs.

    python benchmarks/update.py [--runs 5] [--json FILE]

A project of the oldest release is brought to the newest, and one of the release before that, from the same repository.
Times are medians of CPU time over the runs, taken in turn within one session, so the ratio holds even where the
machine is slow or busy; wall times stand beside. Needs the package installed with its test dependencies, and runs from
a git checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "releases"))
import history  # noqa: E402 (a module of this repository)

URL = "https://github.com/ddp-scaffold/ddp-scaffold.git"
RATIO = 2.0  # the most that `ddp-scaffold update` may take of plain copier's time
WHEEL_MB = 2.0


class Took(NamedTuple):
    """Seconds."""

    cpu: float
    wall: float


def run(command: list[str], cwd: Path, environment: dict[str, str]) -> Took:
    """Run a command and return what it took. Raises CalledProcessError, with its output shown."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return Took(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed)


def measure(runs: int) -> dict[str, dict[str, list[Took]]]:
    """Return the times of both, by the release that the project is of."""
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-benchmark-") as name:
        history.unpack(Path(name, "history.git"))
        starts = sorted({history.versions()[0], history.versions()[-2]})  # of two releases in all, one start
        return {start: measure_from(start, runs, Path(name)) for start in starts}


def measure_from(start: str, runs: int, base: Path) -> dict[str, list[Took]]:
    """Return the times of both for a project of the release `start`."""
    times: dict[str, list[Took]] = {"copier update": [], "ddp-scaffold update": []}
    directory = base / start
    directory.mkdir()
    plain = {**os.environ, "COPIER_CACHE_DIR": str(directory / "cache")}
    identity = {f"GIT_{role}_{key}": "benchmark" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    plain |= identity | {"PYTHONPATH": str(ROOT / "scaffold"), "GIT_CONFIG_COUNT": "1"}
    redirected = plain | {
        "GIT_CONFIG_KEY_0": f"url.{base / 'history.git'}.insteadOf",
        "GIT_CONFIG_VALUE_0": URL,
    }
    plain.pop("GIT_CONFIG_COUNT")
    copier = [sys.executable, "-m", "copier"]
    copy = ["copy", "--quiet", "--defaults", "--vcs-ref", f"v{start}", "--data", "project_name=demo"]
    run([*copier, *copy, URL, "demo"], directory, redirected)
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "begin"]):
        run(["git", *words], directory / "demo", plain)
    update = ["update", "--quiet", "--defaults", "--vcs-ref", f"v{history.versions()[-1]}"]
    for number in range(runs + 1):  # the first fills plain copier's mirror, and does not count
        for label, command, environment in (
            ("copier update", [*copier, *update], redirected),
            ("ddp-scaffold update", [sys.executable, "-m", "ddp_scaffold", "update"], plain),
        ):
            project = directory / f"{label.split()[0]}-{number}"
            shutil.copytree(directory / "demo", project)
            run(["git", "status"], project, plain)
            took = run(command, project, environment)
            if number:
                times[label].append(took)
    return times


def wheel_mb() -> float:
    """Build the wheel and return its size."""
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-benchmark-") as name:
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", name, str(ROOT)]
        run(command, ROOT, dict(os.environ))
        return next(Path(name).glob("*.whl")).stat().st_size / 1e6


def main() -> None:
    """Print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds = {
        start: {label: Took(*map(statistics.median, zip(*values, strict=True))) for label, values in times.items()}
        for start, times in measure(options.runs).items()
    }
    ratios = {start: times["ddp-scaffold update"].cpu / times["copier update"].cpu for start, times in seconds.items()}
    size = wheel_mb()
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    for start, times in seconds.items():
        print(f"from {start} to {history.versions()[-1]}, medians of {options.runs} runs")
        for label, median in times.items():
            print(f"  {label:<20} {median.cpu:6.2f} s of CPU, {median.wall:6.2f} s")
        print(f"  ratio                {ratios[start]:6.2f} of CPU   (at most {RATIO})")
    print(f"wheel                  {size:6.2f} MB (below {WHEEL_MB})")
    if options.json:
        found = {
            "seconds": {
                start: {label: took._asdict() for label, took in times.items()} for start, times in seconds.items()
            },
            "ratio": ratios,
            "wheel_mb": size,
            "releases": history.versions(),
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
