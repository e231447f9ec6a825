"""`explain` on faults of a plain program under stock torchrun, three ranks on gloo: rank 1 is to blame each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_scaffold.explain.explain import explain

pytest.importorskip("torch")
pytestmark = [
    # eight times torchrun with three ranks, some until a timeout of eight seconds: two minutes on two busy CPUs
    pytest.mark.slow,  # `make test-more` and `make test-all` run it
    pytest.mark.timeout(120),
    pytest.mark.flaky(reruns=1, reason="timeouts of a few seconds, on a machine that may have other work"),
]
PROGRAM = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist

fault = sys.argv[1]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
steps = 12 if fault == "uneven" and rank == 1 else 20


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return steps

    def __getitem__(self, index):
        if fault == "worker" and rank == 1 and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


for step, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=int(fault == "worker")), 1):
    if rank == 1 and step == 6:
        if fault == "raise":
            raise ValueError("bad label")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "leave":
            sys.exit(0)
        if fault == "sleep":
            time.sleep(60)
    if fault == "monitored" and step == 6:
        if rank == 1:
            time.sleep(60)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))
    loss = model(batch).sum()
    loss.backward()
    print(f"[rank{rank}]: step {step}/{steps} loss {loss.item():.3f}", flush=True)
if fault == "uneven":
    dist.barrier()
"""
FAULTS = {
    "raise": ("rank_exception", "certain"),
    "kill": ("rank_killed", "certain"),
    "segfault": ("rank_killed", "certain"),
    "leave": ("missing_rank", "likely"),
    "sleep": ("missing_rank", "likely"),
    "monitored": ("missing_rank", "certain"),
    "worker": ("dataloader_worker_died", "certain"),
    "uneven": ("uneven_inputs", "likely"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rank_1_is_named(fault: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*launcher, "program.py", fault]
    with (tmp_path / "job.out").open("w") as file:
        subprocess.run(command, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=100)
    found = explain([str(tmp_path / "job.out")])[0].verdict
    log = (tmp_path / "job.out").read_text()
    assert ((found.kind, found.confidence), found.first_ranks) == (FAULTS[fault], (1,)), f"{found}\n{log}"
