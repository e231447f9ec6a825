"""A run that saves beside training: `python saving_script.py WHAT`, with a project on PYTHONPATH and DDP_FAULTS."""

from __future__ import annotations

import sys
import time

import torch
from saved.config import Settings  # type: ignore[import-not-found]
from saved.ddp import checkpoint, load, step_done  # type: ignore[import-not-found]
from saved.ddp.saving import host_memory, writer  # type: ignore[import-not-found]
from saved.ddp.session import session  # type: ignore[import-not-found]

what = sys.argv[1]
settings, _ = load(Settings, ["--run.device", "cpu", "--log.tracker", "none"])
with session(settings.run, settings.clocks, settings.log, settings.preempt) as run:
    layer = torch.nn.Linear(200, 200)
    objects = {"layer": layer}
    checkpoint.load(run.job, run.dir, objects)
    if what == "no memory":
        host_memory.available = lambda: 1000.0
    for step in (1, 2):
        step_done(step, 0)
        if what == "agrees" and step == 2:
            while run.job.rank == 0 and not writer._newest[0].done.is_set():  # the write of step 1 fails
                time.sleep(0.01)
            run.agreement.poll(step)  # says so, to be heard at the next poll
        if what == "logs":
            run.metrics.scalars(step, {"loss": torch.tensor(float(step))})
        assert checkpoint.save(run.job, run.dir, {"step": step}, objects, keep=5)
        if what == "logs":
            print("lines", (run.dir / "metrics.jsonl").read_text().count("loss"), flush=True)
        print("copied", (run.dir / f"checkpoints/step_{step:08d}").is_dir(), flush=True)
        if what == "agrees" and step == 2:
            run.agreement.poll(step)
    if what == "loads":
        print("loaded", checkpoint.load(run.job, run.dir, objects)["step"], flush=True)
    if what == "raises":
        raise ValueError("after the save")
