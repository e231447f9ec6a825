"""One case of the matrix: start it, wait for its end, and compare what it has left with what it must leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .cases import CLOCKS, Case
from .config import write_config

PROJECT = Path(__file__).parents[2]
LIMIT_S = 150.0  # seconds a case may take before it counts as a hang
MEASURED = ("time", "_seconds", "_per_second", "_share", "_gib", "_per_gpu", "mfu")  # ends of names in metrics.jsonl


@dataclass(frozen=True)
class Result:
    """What became of a case. `late_s`: seconds from the deadline to the last exit, None where nothing had to end."""

    case: Case
    codes: dict[str, int | None]  # of each rank, or of each process that was started by hand
    outcome: dict[str, Any]
    output: str  # everything printed, and the report
    late_s: float | None
    left: list[str]  # process ids
    wrong: list[str]

    def row(self) -> dict[str, Any]:
        """For the table and for --json."""
        named = self.outcome.get("first_ranks")
        ended = f"{self.outcome.get('kind', '-')} ({self.outcome.get('exit_code', '-')})"
        return {
            "row": self.case.row,
            "fault": self.case.name,
            "injected": self.case.faults.split(";")[0] or "-",
            "exit codes": ", ".join(f"{rank}: {code}" for rank, code in self.codes.items()),
            "ended": "-" if self.case.check else ended,
            "named": "-" if named is None else f"rank {', '.join(map(str, named))}",
            "late_s": "-" if self.late_s is None else f"{self.late_s:.1f}",
            "left": ", ".join(self.left) or "nothing",
            "right": "; ".join(self.wrong) or "yes",
        }


def run(case: Case, runs: Path, device: str = "cpu") -> Result:
    """Run the case in a directory of its own below `runs`. On GPUs there are two ranks, one each."""
    if device == "cuda" and case.processes > 2:
        case = case.model_copy(update={"processes": 2, "ranks": None})  # of two that differ, either may be wrong
    name = f"{case.row:02d}-" + "".join(letter if letter.isalnum() else "-" for letter in case.name.lower())
    run_dir, codes_file, log_file = runs / name, runs / f"{name}.codes", runs / f"{name}.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    codes_file.unlink(missing_ok=True)
    _prepare(case, run_dir)
    environment = _environment(case, run_dir)
    with open(log_file, "w") as log:
        processes = [
            subprocess.Popen(
                command, cwd=PROJECT, env=environment | own, stdout=log, stderr=log, start_new_session=True
            )
            for command, own in _commands(case, codes_file, device)
        ]
        codes = {str(number): _wait(process) for number, process in enumerate(processes)}
    ended = time.time()
    left = survivors(run_dir)
    while left and time.time() < ended + 5:  # a loader worker that was just starting needs a moment to notice
        time.sleep(0.2)
        left = survivors(run_dir)
    for pid in left:  # of this run only, and after they were noted
        os.kill(int(pid), signal.SIGKILL)
    if codes_file.exists() and None not in codes.values():
        codes = json.loads(codes_file.read_text())
    report, outcome_file = run_dir / "report.md", run_dir / "outcome.json"
    outcome = json.loads(outcome_file.read_text()) if outcome_file.is_file() else {}
    files = [log_file, *(run_dir / "logs").glob("*.log"), report]
    output = "".join(path.read_text() for path in files if path.is_file())
    began = injected_at(run_dir)
    late = None if began is None or outcome.get("exit_code") in (0, 75) else ended - began - case.deadline_s
    wrong = _wrong(case, codes, outcome, log_file.read_text(), output, run_dir)
    if case.same_losses and _losses(run_dir) != _losses(_undisturbed(runs, device)):
        wrong.append("other losses than without the fault")
    return Result(case, codes, outcome, output, late, left, wrong + (["left processes"] if left else []))


def _wrong(
    case: Case, codes: dict[str, int | None], outcome: dict[str, Any], printed: str, output: str, run_dir: Path
) -> list[str]:
    """What is not as it must be."""
    if None in codes.values():
        return ["hung"]
    if case.check:
        return [] if codes == {"0": 0} else ["see the output"]
    wrong = []
    if outcome.get("kind") not in {case.kind, case.or_kind} - {""} or outcome.get("exit_code") not in case.codes:
        wrong.append(f"expected {case.kind} {sorted(case.codes)}")
    if outcome.get("first_ranks") != case.ranks:
        wrong.append(f"expected ranks {case.ranks}")
    if case.exits and codes != case.exits:
        wrong.append(f"expected exit codes {case.exits}")
    if not case.exits and any((code == 0) != (outcome.get("exit_code") == 0) for code in codes.values()):
        wrong.append("not every rank says so with its exit code")
    wrong += [f"does not say {text!r}" for text in case.says if text not in output]
    if case.warns and (times := printed.count(case.warns)) != 1:
        wrong.append(f"warns {times} times")
    if case.root_cause and not _root_cause(printed).startswith(case.root_cause):
        wrong.append(f"torchrun's root cause is {_root_cause(printed)[:100]!r}")
    if outcome.get("exit_code") == 75 and not (run_dir / f"checkpoints/step_{outcome['step']:08d}").exists():
        wrong.append("no checkpoint of the step at which it stopped")
    return wrong


def _root_cause(printed: str) -> str:
    """'rank 1: what the table shows of it', of the last part of torchrun's table."""
    fields = {}
    for line in printed.rpartition("Root Cause")[2].splitlines():
        name, colon, value = line.partition(":")
        fields[name.strip()] = value.strip() if colon else ""
    return f"rank {fields.get('rank', '?').split(' ')[0]}: {fields.get('traceback', '')}"


_undisturbed_lock = threading.Lock()


def _undisturbed(runs: Path, device: str) -> Path:
    """The run directory of a training without a fault, which is made if there is none."""
    run_dir = runs / "undisturbed"
    with _undisturbed_lock:  # several cases may want it at once
        if not run_dir.exists():
            run(Case(row=0, name="undisturbed"), runs, device)
            (runs / "00-undisturbed").rename(run_dir)
    return run_dir


def _losses(run_dir: Path) -> dict[int, dict[str, float]]:
    """What each step has computed, last: after a restart some are made again. What clocks and memory say differs."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses: dict[int, dict[str, float]] = {}
    for row in rows:
        computed = {name: value for name, value in row.items() if not name.endswith(MEASURED)}
        losses.setdefault(row["step"], {}).update(computed)
    return losses


def _prepare(case: Case, run_dir: Path) -> None:
    (run_dir / "logs").mkdir(parents=True)
    if case.in_the_way:
        (run_dir / case.in_the_way).write_text("a file where a directory is needed")
    if case.full:
        os.symlink("/dev/full", run_dir / case.full)


def _environment(case: Case, run_dir: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    given = {name: str(int(time.time() + float(text))) if text[0] == "+" else text for name, text in case.env.items()}
    faults = {"DDP_FAULTS": case.faults} if case.faults else {}
    paths = [PROJECT / "src", PROJECT / "tests", PROJECT / "tests" / "matrix" / "fakes", os.environ.get("PYTHONPATH")]
    own = {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",  # the ranks share the cores; equal thread counts keep sums equal to the bit
        "DDP_RUN__DIR": str(run_dir.parent),
        "DDP_RUN__ID": run_dir.name,
    }
    return {**clean, **given, **faults, **own}


def _commands(case: Case, codes_file: Path, device: str) -> list[tuple[list[str], dict[str, str]]]:
    """The processes to start, and what each has in its environment beside the rest."""
    if case.check:
        return [([sys.executable, "-m", "matrix.checkpoints", case.check], {})]
    words = ["--config", str(write_config(codes_file.with_suffix(".yaml")))]
    words += ["--run.device", device, "--train.steps", "24", "--log.every_steps", "5", "--log.tracker", "none"]
    words += [word for section in ("eval", "sample", "checkpoint") for word in (f"--{section}.every_steps", "10")]
    words += [word for name, seconds in CLOCKS.items() for word in (f"--clocks.{name}_s", str(seconds))]
    words += ["--preempt.poll_s", "0.2", *case.args]
    target = ["-m", "matrix.programs", case.program] if case.program else ["-m", "digits.train"]
    if case.script:
        return [(["bash", "launch/torchrun.sh", *words], {"NPROC": str(case.processes)})]
    if case.by_hand:
        return [([sys.executable, *target, *words], own) for own in _variables(case)]
    torchrun = [sys.executable, str(Path(__file__).with_name("torchrun.py")), str(codes_file), *case.torchrun]
    torchrun += ["--nproc-per-node", str(case.processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [([*torchrun, "--local-addr", "127.0.0.1", *target, *words], {})]


def _variables(case: Case) -> list[dict[str, str]]:
    """What a launcher would set for each process, changed as the case says. A `taken` port stays so until we end."""
    server = socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    if not any("taken" in own.values() for own in case.by_hand):
        server.close()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    _kept.append(server)
    processes = []
    for given in case.by_hand:
        own = {name: port if value == "taken" else str(value) for name, value in given.items()}
        processes.append({**common, "LOCAL_RANK": own["RANK"], **own})
    return processes


_kept: list[socket.socket] = []


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def injected_at(run_dir: Path) -> float | None:
    """When the first fault was put in, by the logs of the ranks."""
    texts = [path.read_text() for path in (run_dir / "logs").glob("rank*.log") if path.is_file()]
    lines = [line for text in texts for line in text.splitlines() if " injecting " in line]
    times = [datetime.strptime(line.split(" rank")[0], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
    return max(times, default=None)


def survivors(run_dir: Path) -> list[str]:
    """Processes that still have this run's variables in their environment."""
    wanted = {f"DDP_RUN__ID={run_dir.name}".encode(), f"DDP_RUN__DIR={run_dir.parent}".encode()}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted <= set(path.read_bytes().split(b"\0")):
                found.append(path.parent.name)
        except OSError:
            continue
    return found
