"""Numbers beside the metrics of real runs, what `auto` is on a CPU, and the last line of a run that can go on."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment

pytest.importorskip("torch")
SHORT = [
    *("--run.device", "cpu", "--log.tracker", "none", "--log.every_steps", "4", "--train.steps", "12"),
    *("--eval.every_steps", "100", "--sample.every_steps", "100", "--checkpoint.every_steps", "6"),
    *("--preempt.poll_s", "0.1"),
]


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits", "model": "custom"})


def run(command: str, project: Path, **variables: str) -> tuple[int, list[str]]:
    """Exit code and output, of a command as a user types it."""
    surroundings = environment(OMP_NUM_THREADS="1", **variables)
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, env=surroundings, text=True, timeout=200, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout.rstrip().splitlines()


def train(project: Path, run_id: str, faults: str) -> list[dict[str, Any]]:
    """The lines of training metrics of a run on two ranks with `faults`."""
    arguments = " ".join(SHORT)
    code, output = run(f"launch/torchrun.sh {arguments}", project, NPROC="2", DDP_RUN__ID=run_id, DDP_FAULTS=faults)
    assert code == 0, "\n".join(output)
    assert "auto: fp32  (configs/train.yaml)" in (project / "runs" / run_id / "settings.txt").read_text()
    lines = (project / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_ranks_wait_for(project: Path) -> None:
    slow_data = train(project, "data", "slow@rank=all,phase=data,seconds=0.2")
    slow_rank = train(project, "rank", "slow@rank=1,phase=forward,seconds=0.2")
    for rows in (slow_data, slow_rank):
        assert [row["step"] for row in rows] == [4, 8, 12]
        assert all(row["step_seconds"] >= 0.2 for row in rows)
        samples = [64, (3 * 64 + 8) / 4, 64]  # of a step; the eighth batch is what is left of the 456 of an epoch
        speeds = [number / row["step_seconds"] for number, row in zip(samples, rows, strict=True)]
        assert [row["samples_per_second"] for row in rows] == pytest.approx(speeds, rel=1e-3)
        assert all(0 <= row[name] <= 1 for row in rows for name in ("data_wait_share", "rank_wait_share"))
        assert [row["checkpoint_seconds"] > 0 for row in rows] == [False, True, False], "after step 6, for step 8"
        times = [(row["elapsed_seconds"], row["time"]) for row in rows]
        assert times == sorted(times)
        assert all(row["learning_rate"] > 0 for row in rows)
        assert not {"mfu", "tflops_per_gpu", "peak_memory_gib"} & set(rows[0]), "there is no GPU"
    assert all(row["data_wait_share"] > 0.5 > row["rank_wait_share"] for row in slow_data)
    assert all(row["rank_wait_share"] > 0.5 > row["data_wait_share"] for row in slow_rank), "of rank 0"
    report = (project / "runs" / "rank" / "report.md").read_text()
    assert "| waiting for other ranks, share of a step |" in report
    assert "rank_wait_share" not in report, "it has a table of its own"


LAUNCHES = {
    "script": "launch/torchrun.sh",
    "torchrun": "python -m torch.distributed.run --standalone --nproc-per-node 2 -m digits.train",
    "plain": "python -m digits.train",
}


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("start", LAUNCHES)
def test_the_line_that_goes_on_goes_on(project: Path, start: str, tmp_path: Path) -> None:
    """Also where another python is first on the PATH, and on the GPUs that were given, whichever a rank has taken."""
    (project / "src/digits/__init__.py").write_text(
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("LOCAL_RANK", "7")\n'
    )
    variables = {
        "NPROC": "2",
        "MAX_RESTARTS": "0",
        "PYTHONPATH": str(project / "src"),
        "DDP_RUN__ID": f"stopped-{start}",
    }
    given = "CUDA_VISIBLE_DEVICES=3,5 DDP_TRAIN__CLIP_NORM=0.5"
    typed = f"{given} {LAUNCHES[start]} {' '.join(SHORT)} --train.steps 400 --run.resume false"
    code, output = run(typed, project, DDP_FAULTS="term@rank=0,step=7", **variables)
    assert code == (1 if start == "torchrun" else 75), "\n".join(output)
    if start == "torchrun":  # its own table comes after whatever a rank says
        told = output.index("to go on from the newest checkpoint:") + 1
    else:
        told = len(output) - 1
        assert "to go on from the newest checkpoint:" in output[-2]
    assert " CUDA_VISIBLE_DEVICES=3,5 " in output[told]
    assert "DDP_TRAIN__CLIP_NORM=0.5" in output[told]
    run_dir = project / "runs" / f"stopped-{start}"
    stopped = json.loads((run_dir / "outcome.json").read_text())
    assert stopped["outcome"] == "stopped"

    bare = environment(OMP_NUM_THREADS="1")
    if start != "script":  # which takes VENV, .venv or the python on the PATH, at each start
        other = tmp_path / "bin/python"
        other.parent.mkdir()
        other.write_text("#!/bin/sh\nexit 9\n")
        other.chmod(0o755)
        bare["PATH"] = f"{other.parent}:{bare['PATH']}"
    elsewhere = subprocess.run(
        ["bash", "-c", output[told]], cwd=tmp_path, env=bare, text=True, timeout=200, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert elsewhere.returncode == 0, elsewhere.stdout
    assert "resumed from" in elsewhere.stdout
    assert json.loads((run_dir / "outcome.json").read_text())["outcome"] == "done"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in lines if row["step"] > stopped["step"] + 1 and "loss" in row)  # one step has no time
    assert 0 < first["step_seconds"] < first["elapsed_seconds"], "of this start, without what came before its steps"


@pytest.mark.slow
def test_another_precision_than_at_the_last_start_is_told(project: Path, tmp_path: Path) -> None:
    script = """
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from digits.ddp.start.logs import describe, log_to_console
place = SimpleNamespace(rank=0, host="n0", attempt=0, launcher="none")
log_to_console(place)
job = lambda precision: SimpleNamespace(place=place, hosts=("n0",), precision=precision)
for precision, value in (("bf16", "auto"), ("bf16", "auto"), ("fp32", "auto"), ("fp32", "bf16"), ("fp32", "auto")):
    describe(Path(sys.argv[1]), job(precision), [("train.precision", value, "x"), ("train.steps", "3", "default")])
    (Path(sys.argv[1]) / "checkpoints" / "step_00000003").mkdir(parents=True, exist_ok=True)
"""
    surroundings = {**os.environ, "PYTHONPATH": str(project / "src")}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(told) == 1, "only where `auto` is another one than at the start before"
    assert "is auto, which is fp32 here and was bf16 at the last start" in told[0]
    assert "set train.precision to bf16" in told[0]


def test_no_gpu_is_in_the_table_of_peaks_twice(project: Path) -> None:
    """Python takes the last of two equal keys without a word."""
    tree = ast.parse((project / "src/digits/ddp/trace/flops.py").read_text())
    (table,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "PEAKS")
    names = [key.value for key in table.keys]
    assert len(names) == len(set(names)) > 20
