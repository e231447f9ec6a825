"""Copies between GPUs of one node that reach each other directly (P2P). NCCL trusts them; data may arrive changed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch

from ..start.findings import Finding

COPY = 16 << 20  # bytes of a copy between two GPUs


def copies(gpus: int, environ: Mapping[str, str] = os.environ) -> tuple[str, list[Finding]]:
    """Copy between all pairs of this node's GPUs that reach each other directly, and compare what arrives.

    Returns:
        '56 of 56 pairs, 21 GB/s or more' and a problem for each pair whose data arrive changed.
    """
    if gpus < 2:
        return "-", []
    if environ.get("NCCL_P2P_DISABLE") == "1":
        return "off (NCCL_P2P_DISABLE)", []
    pairs = [(one, other) for one in range(gpus) for other in range(gpus) if one != other]
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    sent = torch.arange(COPY // 4, dtype=torch.int32)
    speeds, found = [], []
    for one, other in direct:
        try:
            source, target = sent.to(_gpu(one)), torch.zeros_like(sent, device=_gpu(other))
            target.copy_(source)  # the first one also opens the way
            _wait(one, other)
            began = time.perf_counter()
            target.copy_(source)
            _wait(one, other)
            speeds.append(COPY / (time.perf_counter() - began) / 1e9)
            same = torch.equal(target.cpu(), sent)
        except RuntimeError as error:  # GPUs in exclusive mode, for one
            why = str(error).splitlines()[0]
            return "?", [Finding(f"copies between GPUs could not be tried: {why}", "nvidia-smi -q -d COMPUTE", True)]
        if not same:
            what = f"data copied from GPU {one} to GPU {other} arrive changed: P2P is broken on this host"
            remedy = "IOMMU or PCIe ACS is usually on: have it switched off, or set NCCL_P2P_DISABLE=1 until then"
            found.append(Finding(what, remedy, blocks=True))
    slowest = f", {min(speeds):.0f} GB/s or more" if speeds else ""
    return f"{len(direct)} of {len(pairs)} pairs{slowest}", found


def _gpu(number: int) -> str:
    return f"cuda:{number}"


def _wait(one: int, other: int) -> None:
    torch.cuda.synchronize(one)
    torch.cuda.synchronize(other)
