"""Plain DDP under torchrun, after PyTorch's tutorial on fault tolerance: a snapshot that is overwritten, and resumed.

https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count

import fault
import task
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

SNAPSHOT = "snapshot.pt"


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.TIMEOUT_S))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, extra = DDP(task.Network()), DDP(task.auxiliary())
    optimizer = torch.optim.AdamW([*model.parameters(), *extra.parameters()], lr=1e-3)
    data = task.digits()
    sampler: DistributedSampler[object] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, task.BATCH, sampler=sampler, drop_last=True, num_workers=fault.workers())

    step = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT)
        model.module.load_state_dict(snapshot["model"])
        extra.module.load_state_dict(snapshot["extra"])
        optimizer.load_state_dict(snapshot["optimizer"])
        step = snapshot["step"]
        fault.resumed(step)

    for epoch in count(step // len(loader)):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            fault.begin(step)
            optimizer.zero_grad()
            fault.forward(step)
            loss = F.cross_entropy(model(images), labels) + F.cross_entropy(fault.bypass(extra)(images), labels)
            fault.spoil(loss, step).backward()
            if fault.alone(step):
                dist.barrier()
            optimizer.step()
            if not fault.skips(step):
                mean = fault.misshapen(loss.detach(), step)
                dist.all_reduce(mean, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            step += 1
            if step % task.SAMPLE_EVERY == 0:
                if rank == 0:
                    fault.sample()
                dist.barrier()
            if step % task.SAVE_EVERY == 0 and rank == 0:
                fault.saving(step, model, extra)
                parts = {"model": model.module, "extra": extra.module, "optimizer": optimizer}
                torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, SNAPSHOT)
            if step == task.STEPS:
                fault.finished(step, model, extra)
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
