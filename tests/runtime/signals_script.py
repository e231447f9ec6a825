"""Run by test_signals.py: read two epochs with a loader's workers while every process of the job is sent stop signals.

signals_script.py START_METHOD
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from digits.ddp.clocks import Clocks
from digits.ddp.loader import LoaderSettings, batches, make_loader
from digits.ddp.loading import workers
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import detect
from digits.ddp.start.stop import SIGNALS, PreemptSettings, StopFlags
from torch.utils.data import TensorDataset

sent: set[tuple[int, int]] = set()
read = 0


def signal_all() -> None:
    """As Slurm without cgroups does, at each moment: to a fork server that still imports, to a worker's first ms."""
    mark = f"MARK={os.environ['MARK']}".encode()
    while read < 2:
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    for number in SIGNALS:
                        os.kill(int(path.parent.name), number)
                        sent.add((int(path.parent.name), number))
        time.sleep(0.02)


def main(start_method: str) -> None:
    """Print how many processes were sent signals, and what this one has noted."""
    global read
    flags = StopFlags(PreemptSettings())
    signal.default_int_handler = lambda *_: None  # type: ignore[assignment]  # Ctrl-C twice has its own meaning
    flags.install()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    job = Job(detect(), Clocks(loader_s=60), store, ("n1",))
    workers.room = lambda *_: [(2, "")]
    settings = LoaderSettings(workers=2, start_method=start_method)
    threading.Thread(target=signal_all, daemon=True).start()
    loader = make_loader(TensorDataset(torch.arange(64)), job, settings, batch_size=4)
    for epoch in range(2):
        seen = sum(len(batch) for (batch,) in batches(loader, job, epoch))
        assert seen == 64, seen
        read += 1
    print(f"read everything; {len({pid for pid, _ in sent})} processes, {flags.reason()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
