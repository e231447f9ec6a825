"""A run on a file system that is too small, then a little less so: `python full_disk_script.py MOUNTED`.

MOUNTED is a tmpfs that this process may mount anew with another size. Prints one JSON list for each size:
[kB that were free, written, step of the checkpoint that is loaded then, the weights are those of that step].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from saved.config import Settings  # type: ignore[import-not-found]
from saved.ddp import checkpoint, load, step_done  # type: ignore[import-not-found]
from saved.ddp.session import session  # type: ignore[import-not-found]

mounted = sys.argv[1]
STATE_KB = 257  # 256 x 256 + 256 numbers of 4 bytes


def resize(kb: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kb}k", mounted], check=True)


def used_kb() -> int:
    status = os.statvfs(mounted)
    return (status.f_blocks - status.f_bfree) * status.f_bsize // 1024


settings, _ = load(Settings, ["--run.device", "cpu", "--log.tracker", "none", "--run.dir", mounted, "--run.id", "run"])
with session(settings.run, settings.clocks, settings.log, settings.preempt) as run:
    layer = torch.nn.Linear(256, 256)
    for step, free_kb in enumerate((4 * STATE_KB, *range(0, 2 * STATE_KB, 24)), 1):
        step_done(step, 0)
        layer.weight.data.fill_(step)
        resize(used_kb() + free_kb)
        checkpoint.save(run.job, run.dir, {"step": step}, {"layer": layer}, keep=2)
        written = checkpoint.finish(run.job)
        resize(20 * STATE_KB)
        loaded = torch.nn.Linear(256, 256)
        at = checkpoint.load(run.job, run.dir, {"layer": loaded})["step"]
        print(json.dumps([free_kb, bool(written), at, bool((loaded.weight == at).all())]), flush=True)
