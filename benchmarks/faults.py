"""Put one fault after another into a generated project, and print what became of each.

    python benchmarks/faults.py PROJECT [--package digits] [--device cpu|cuda] [--ranks 2] [--only NAME] [--json FILE]

`python` must be able to run the project. Each row says how the run ended, who was named, the seconds from the deadline
that applies (for exceptions the fault itself) to the last exit, and what is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

STALL, SILENT, GUARD = 6, 4, 14  # seconds; the order of the clocks is loader 3 < stall < collective 12 < guard
CLOCKS = {"init_s": 60, "loader_s": 3, "stall_s": STALL, "collective_s": 12, "guard_s": GUARD, "silent_s": SILENT}


@dataclass(frozen=True)
class Case:
    """A fault, the kind of outcome it must have, the rank to be named, and the clock that rings."""

    name: str
    fault: str
    kind: str
    rank: int
    deadline_s: float


CASES = [
    Case("exception in forward", "raise@rank=1,step=50,phase=forward", "rank_exception", 1, 0),
    Case("exception in backward", "raise@rank=1,step=50,phase=backward", "rank_exception", 1, 0),
    Case("exception in the optimiser step", "raise@rank=0,step=50,phase=optim", "rank_exception", 0, 0),
    Case("exception in the data set", "raise@rank=1,step=50,phase=data", "rank_exception", 1, 0),
    Case("exception in evaluation", "raise@rank=1,step=100,phase=eval", "rank_exception", 1, 0),
    Case("exception in rank-0 sampling", "raise@rank=0,step=100,phase=guard:sample", "rank_exception", 0, 0),
    Case("exception in the checkpoint", "raise@rank=0,step=100,phase=guard:checkpoint", "rank_exception", 0, 0),
    Case("SIGKILL of rank 1", "kill@rank=1,step=50", "rank_killed", 1, SILENT),
    Case("SIGKILL of rank 0", "kill@rank=0,step=50", "rank_killed", 0, SILENT),
    Case("SIGSTOP of rank 1", "stop@rank=1,step=50", "rank_killed", 1, SILENT),
    Case("SIGSTOP of rank 0", "stop@rank=0,step=50", "rank_killed", 0, SILENT),
    Case("rank 1 sleeps in forward", "sleep@rank=1,step=50,phase=forward", "missing_rank", 1, STALL),
    Case("rank 0 sleeps in data", "sleep@rank=0,step=50,phase=data", "missing_rank", 0, STALL),
    Case("rank 1 sleeps in evaluation", "sleep@rank=1,step=100,phase=eval", "missing_rank", 1, STALL),
    Case("rank 0 sleeps in sampling", "sleep@rank=0,step=100,phase=guard:sample", "rank0_work", 0, GUARD),
]


def main() -> int:
    """Run the cases; exit code 1 when any row is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--package", default="digits")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("| fault | ended | named | seconds after the deadline | left running | as it must be |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        if options.only in case.name:
            rows.append(run(case, options))
            print("| " + " | ".join(str(value) for value in rows[-1].values()) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["right"] != "yes" for row in rows))


def run(case: Case, options: argparse.Namespace) -> dict[str, str]:
    """One run with one fault, watched until its launcher has ended."""
    run_id = f"fault-{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}"
    run_dir = options.project / "runs" / run_id
    shutil.rmtree(run_dir, ignore_errors=True)
    environment = os.environ | {"DDP_FAULTS": case.fault, "DDP_RUN__ID": run_id, "DDP_RUN__DIR": "runs"}
    environment["PYTHONPATH"] = f"{options.project.resolve() / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [
        "python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(options.ranks),
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", f"{options.package}.train"]
    command += ["--run.device", options.device, "--train.steps", "400", "--log.tracker", "none"]
    for section in ("eval", "sample", "checkpoint"):
        command += [f"--{section}.every_steps", "100"]
    for name, seconds in CLOCKS.items():
        command += [f"--clocks.{name}", str(seconds)]
    with open(options.project / f"{run_id}.log", "w") as log:
        launcher = subprocess.Popen(command, cwd=options.project, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            launcher.wait(timeout=150)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # torchrun ends its workers
            launcher.wait()
    ended = time.time()
    left = survivors(run_id)
    try:
        outcome = json.loads((run_dir / "outcome.json").read_text())
    except FileNotFoundError:
        outcome = {"outcome": "none", "exit_code": "-", "kind": "-", "first_ranks": "-"}
    began = injected_at(run_dir)
    late = f"{ended - began - case.deadline_s:.1f}" if began else "?"
    right = (
        (outcome["kind"], outcome["first_ranks"]) == (case.kind, [case.rank]) and launcher.returncode != 0 and not left
    )
    return {
        "fault": case.name,
        "ended": f"{outcome['outcome']} ({outcome['exit_code']})",
        "named": f"{outcome['kind']}, ranks {outcome['first_ranks']}",
        "late_s": late,
        "left": ", ".join(left) or "nothing",
        "right": "yes" if right else "NO",
    }


def injected_at(run_dir: Path) -> float | None:
    """When the fault was put in, by the log of the rank that met it."""
    for path in (run_dir / "logs").glob("rank*.log"):
        for line in path.read_text().splitlines():
            if " injecting " in line:
                return datetime.strptime(line.split(" rank")[0], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return None


def survivors(run_id: str) -> list[str]:
    """Processes that still have this run's variables in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"DDP_RUN__ID={run_id}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
