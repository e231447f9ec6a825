"""How long the command line takes: `--help`, and `new -y` next to plain `copier copy` of the same template and answers.

    python benchmarks/cli.py [--runs 10] [--json FILE]

Times are medians of wall time over the runs, taken in turn within one session, so the ratio holds even where the
machine is slow. Needs the package installed, and runs from a git checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS_S = {"--help": 0.25, "new -y": 1.5}


def seconds(command: list[str], cwd: Path, environment: dict[str, str]) -> float:
    """Run a command and return its wall time. Raises CalledProcessError, with its output shown, if it fails."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return elapsed


def commit_of_working_tree(directory: Path, environment: dict[str, str]) -> Path:
    """Return a repository with the template and package as they are now, so that both tools render the same commit."""
    repo = directory / "template"
    repo.mkdir()
    for entry in ("copier.yml", "templates", "scaffold"):
        subprocess.run(["cp", "-R", str(ROOT / entry), str(repo / entry)], check=True)
    identity = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost", "-c", "commit.gpgSign=false"]
    for args in (["init", "-q"], ["add", "--all"], [*identity, "commit", "-q", "-m", "Template"]):
        subprocess.run(["git", *args], cwd=repo, env=environment, check=True)
    return repo


def measure(runs: int) -> dict[str, list[float]]:
    """Return the wall times of each command, in seconds."""
    python = sys.executable
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-benchmark-") as name:
        directory = Path(name)
        environment = {**os.environ, "COPIER_CACHE_DIR": str(directory / "cache"), "HOME": str(directory)}
        repo = commit_of_working_tree(directory, environment)
        environment["PYTHONPATH"] = str(repo / "scaffold")
        scaffold = [python, "-m", "ddp_scaffold"]
        commands: dict[str, Callable[[str], list[str]]] = {
            "--help": lambda _: [*scaffold, "--help"],
            "new -y": lambda dest: [*scaffold, "new", dest, "-y", "--preset", "local", "--set", "project_name=demo"],
            "copier copy": lambda dest: [
                *[python, "-m", "copier", "copy", "--quiet", "--defaults", "--vcs-ref", "HEAD"],
                *["--data", "preset=local", "--data", "project_name=demo", str(repo), dest],
            ],
        }
        for number in range(runs + 1):
            for label, command in commands.items():
                elapsed = seconds(command(f"{label.split()[0]}-{number}"), directory, environment)
                if number:  # the first round only fills caches: byte code, files
                    times.setdefault(label, []).append(elapsed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    times = measure(options.runs)
    medians = {label: statistics.median(values) for label, values in times.items()}
    print(f"{'command':<14}{'median':>9}{'min':>9}{'max':>9}  target")
    for label, values in times.items():
        target = f"{TARGETS_S[label]:.2f} s" if label in TARGETS_S else "-"
        print(f"{label:<14}{medians[label]:>7.3f} s{min(values):>7.3f} s{max(values):>7.3f} s  {target}")
    ratio = medians["new -y"] / medians["copier copy"]
    print(f"new -y / copier copy: {ratio:.2f} (new also checks, summarises, and makes the first commit)")
    if options.json:
        result = {
            "version": 1,
            "runs": options.runs,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "median_s": medians,
            "times_s": times,
            "new_over_copier_copy": ratio,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
