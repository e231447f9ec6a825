"""Real training on the cluster: starting it, finding its ranks, and what a run leaves behind."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from launch_helpers import parent

STEPS = 120
ANSWERS = {
    "package": "digits",
    "preset": "generic-slurm",
    "nodes": 2,
    "gpus_per_node": 1,
    "cpus_per_task": 1,
    "walltime": "00:10:00",
    "max_restarts": 2,
    "tracker": "none",
}
# In the order that is checked, short, and patient with a neighbour that imports torch on the same two cores.
CLOCKS = {"init": 60, "loader": 20, "stall": 30, "collective": 40, "guard": 60, "silent": 6, "beat": 0.5}


def arguments(steps: int = STEPS, **clocks: float) -> list[str]:
    """What training is started with: on CPU, with short clocks. `init=12` sets clocks.init_s."""
    words = ["--run.device", "cpu", "--train.batch_size", "16", "--log.every_steps", "10", "--train.steps", str(steps)]
    return words + [word for name, value in {**CLOCKS, **clocks}.items() for word in (f"--clocks.{name}_s", str(value))]


def slow(seconds: float = 0.2, attempt: int = 0) -> str:
    """DDP_FAULTS that make each step of an attempt take at least so long: the rest of the run is mid-training."""
    return ";".join(f"sleep@step={step},seconds={seconds},attempt={attempt}" for step in range(STEPS))


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The starts and ends in attempts.jsonl."""
    return [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]


def ends(run_dir: Path) -> list[tuple[int, str, str]]:
    """How each attempt ended: number, outcome, kind."""
    return [(end["attempt"], end["outcome"], end["kind"]) for end in events(run_dir) if end["event"] == "end"]


def metric(run_dir: Path, name: str, which: int = -1) -> tuple[int, float]:
    """Step and value of one `name` in metrics.jsonl, by default the last."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    step, value = [(row["step"], row[name]) for row in rows if name in row][which]
    return int(step), float(value)


def newest(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint holds."""
    path = max((run_dir / "checkpoints").glob("step_*"))
    return dict(torch.load(path / "state.pt", map_location="cpu", weights_only=True))


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested states are not equal, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
        return [] if same_kind and one.numpy().tobytes() == other.numpy().tobytes() else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{where}.{index}")]
    return [] if type(one) is type(other) and one == other else [where]


def in_mid_training(job: Any, seconds: float = 60) -> None:
    """Wait until the job trains: metrics are written when all ranks have made ten steps."""
    metrics = job.run_dir / "metrics.jsonl"
    job.until(lambda: metrics.exists() and metrics.read_text(), f"{metrics}", seconds)


def processes_of(job: Any) -> list[str]:
    """The command lines of every process that carries the job's id in its environment."""
    mark, found = f"SLURM_JOB_ID={job.id}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile
            continue
    return found


def everything(result: Any) -> str:
    """What a failed assertion prints: the output of all attempts, and the logs of the ranks."""
    files = [result.run_dir / "attempts.jsonl", *sorted(result.run_dir.glob("logs/*.log"))]
    logs = [f"\n--- {file}\n{file.read_text()}" for file in files if file.exists()]
    return f"{result.state}, exit code {result.exit_code}, {result.restarts} restarts\n{result.output}{''.join(logs)}"


def other_end(result: Any, uninterrupted: Any) -> list[str]:
    """Where the end of a run is not that of an uninterrupted one, bit for bit: weights, optimiser, generators, loss."""
    one, other = newest(result.run_dir), newest(uninterrupted.run_dir)
    assert {"model", "optimizer"} <= one["objects"].keys()
    found = [part for part in ("objects", "rng") if differences(one[part], other[part])]
    found += [] if one["counters"]["step"] == other["counters"]["step"] == STEPS else ["step"]
    found += [] if metric(result.run_dir, "val_loss") == metric(uninterrupted.run_dir, "val_loss") else ["val_loss"]
    return found


def seconds_to_last_exit(job: Any, deadline: float) -> float:
    """Wait until no training process of the job is left; the seconds since `deadline`, on the monotonic clock."""
    job.until(lambda: not ranks_of(job.id), "the end of its ranks")
    return time.monotonic() - deadline


@dataclass(frozen=True)
class Rank:
    """One training process."""

    rank: int
    pid: int
    node: str

    @property
    def launchers(self) -> list[int]:
        """The processes of the job between slurmstepd and this one: torchrun and node.sh, or none."""
        found, pid = [], parent(self.pid)
        while pid > 1 and b"slurmstepd" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
            pid = parent(pid)
        return found


def ranks_of(job_id: str) -> list[Rank]:
    """The training processes of a job that run now, in the order of their ranks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            pairs = (pair.partition(b"=") for pair in (process / "environ").read_bytes().split(b"\0"))
            env = {name.decode(): value.decode(errors="replace") for name, _, value in pairs}
        except OSError:  # it has ended meanwhile
            continue
        if words[1:3] == [b"-m", b"digits.train"] and env.get("SLURM_JOB_ID") == job_id:
            found.append(Rank(int(env.get("RANK", env["SLURM_PROCID"])), int(process.name), env["SLURMD_NODENAME"]))
    return sorted(found, key=lambda one: one.rank)


def outcome_of(job: Any, attempt: int = 0) -> dict[str, Any]:
    """Wait for the end of an attempt in attempts.jsonl, which keeps it when the next one begins."""
    file = job.run_dir / "attempts.jsonl"

    def end() -> dict[str, Any] | None:
        ends = [one for one in events(job.run_dir) if one["event"] == "end"] if file.exists() else []
        return next((one for one in ends if one["attempt"] == attempt), None)

    return dict(job.until(end, f"the outcome of attempt {attempt}"))
