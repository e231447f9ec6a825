"""A run whose rank-0 work takes five times the collective timeout; started by test_train.py."""

import time

import torch

from digits.config import Settings
from digits.ddp.agree import total
from digits.ddp.clocks import Clocks
from digits.ddp.guard import Progress, on_rank0
from digits.ddp.session import session
from digits.ddp.settings import load

CLOCKS = Clocks(loader_s=0.5, stall_s=1, collective_s=2, guard_s=4, silent_s=3, beat_s=0.2)


def slow(progress: Progress) -> None:
    for part in range(50):
        time.sleep(5 * CLOCKS.collective_s / 50)
        progress(f"part {part + 1} of 50")


if __name__ == "__main__":
    settings, _ = load(Settings, [])
    with session(settings.run, CLOCKS, settings.log, settings.preempt) as run:
        began = time.monotonic()
        on_rank0(run.dist, "slow", slow)
        ranks = total(run.dist, torch.ones(1))
        if run.dist.rank == 0:
            print(f"all ranks went on after {time.monotonic() - began:.0f} s: {ranks.item():.0f}", flush=True)
