"""What the console of rank 0 shows of a line of metrics, and what its log file has besides."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from digits.ddp.clocks import Clocks
from digits.ddp.meter import Moment
from digits.ddp.metrics import LogSettings, MetricLog
from digits.ddp.rank_state import RankState
from digits.ddp.start import logs
from digits.ddp.watch import monitor


def test_the_console_shows_what_one_looks_at_and_the_file_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs.log, "handlers", list[logging.Handler]())
    place = cast(Any, SimpleNamespace(rank=0, host="n1"))
    job = cast(Any, SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu")))
    (tmp_path / "logs").mkdir()
    numbers = {"step_seconds": 0.5, "samples_per_second": 64.0, "data_wait_share": 0.6, "rank_wait_share": 0.7}
    values = {"accuracy": 0.75, "grad_norm": 1.25, "d_loss": 0.25, "loss": 0.125, "nonfinite_steps": 0.0}
    logs.log_to_console(place)
    logs.log_to_file(tmp_path, place)
    metrics = MetricLog(job, tmp_path, LogSettings(tracker="none"))
    for skipped in (0.0, 2.0):
        metrics._write(20, values | {"nonfinite_steps": skipped}, numbers | {"learning_rate": 0.004}, Moment(0.0, 0.0))
    led = "step 20  loss 0.125  d_loss 0.25  0.5 s/step  64 samples/s  lr 0.004  accuracy 0.75"
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == [led, f"{led}  nonfinite_steps 2"]
    kept = (tmp_path / "logs" / "rank0.log").read_text()
    assert f"{led}  (grad_norm 1.25, nonfinite_steps 0, waits 60% for data, 70% for ranks)\n" in kept
    assert metrics.glance("loss") == {"loss": "0.125", "samples/s": "64"}

    logs.show_whole_lines(True)
    metrics.write(20, {"val_loss": 0.5, "grad_norm": 1.25})
    assert capsys.readouterr().err.endswith("step 20  val_loss 0.5  (grad_norm 1.25)\n")


def test_a_heartbeat_is_on_the_console_where_no_step_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs.log, "handlers", list[logging.Handler]())
    monkeypatch.setattr(monitor, "write_heartbeat", lambda job, run_dir: None)
    logs.log_to_console(cast(Any, SimpleNamespace(rank=0, host="n1")))
    job = SimpleNamespace(rank=0, world_size=2, clocks=Clocks())
    states = iter([RankState(0, "n1", step=step) for step in (0, 8, 8, 9)])
    shared = SimpleNamespace(job=job, run_dir=tmp_path, state=lambda: next(states))
    thread = monitor.HeartbeatThread(cast(Any, shared), dist.HashStore(), heartbeat_s=30)
    thread._compared = float("inf")  # no other rank to compare with
    for _ in range(4):
        thread._speak()
    steps = [line.split("step=")[1].split()[0] for line in capsys.readouterr().err.splitlines()]
    assert steps == ["0", "8"], "while it started, and while step 9 was long under way"
