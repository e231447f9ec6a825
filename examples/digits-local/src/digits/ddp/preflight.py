"""Two minutes before the job: `python -m <package>.ddp.preflight`, started like the training itself.

Exit code 78 when something is wrong, 70 when not all ranks came.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic_settings import BaseSettings, SettingsConfigDict

from .agree import gather
from .clocks import Clocks
from .env import cpus_for_this_process, detect
from .errors import CONFIG, STALLED, ConfigError, RunFailed
from .loader import LoaderSettings
from .rendezvous import rendezvous
from .settings import RunSettings, load
from .setup import Dist, setup_distributed, shutdown
from .workers import room

log = logging.getLogger("ddp")
MEGABYTES = 64  # of one timed all_reduce


class PreflightSettings(BaseSettings):
    """The sections of configs/train.yaml that matter here; the others are left alone."""

    model_config = SettingsConfigDict(env_prefix="DDP_", env_nested_delimiter="__", extra="ignore")
    run: RunSettings = RunSettings()
    loader: LoaderSettings = LoaderSettings()
    clocks: Clocks = Clocks()


def main() -> None:
    """Join the other ranks, look at each machine, time a collective, print one table on rank 0."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    settings, _ = load(PreflightSettings, strict_variables=False)
    try:
        joined = setup_distributed(rendezvous(detect(), settings.clocks), settings.run.device)
    except (ConfigError, RunFailed) as error:
        print(f"preflight: {error}", file=sys.stderr, flush=True)
        os._exit(STALLED if isinstance(error, RunFailed) else CONFIG)
    rows = gather(joined, look(joined, settings.run.dir, settings.loader))
    problems = [f"{joined.who(row['rank'])}: {problem}" for row in rows for problem in row["problems"]]
    problems += differences(rows)
    if joined.rank == 0:
        print(table(rows))
        print("\n".join(f"problem: {problem}" for problem in problems) or "preflight: everything is in order")
    shutdown(joined)
    sys.exit(CONFIG if problems else 0)


def look(joined: Dist, run_dir: Path, loader: LoaderSettings) -> dict[str, Any]:
    """What this rank sees of its machine, and what is wrong with it."""
    problems = []
    shm = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").is_dir() else None
    _soft, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = room(joined, loader.prefetch, loader.batch_mb)
    workers = min(loader.workers, limits[0][0])
    for limit, why in limits:
        if limit < loader.workers and "CPUs" not in why:  # fewer CPUs are slower, and nothing else
            problems.append(f"{limit} of {loader.workers} loader workers fit: {why}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(b"x")
        free = f"{shutil.disk_usage(run_dir).free >> 30} GB"
    except OSError as error:
        problems.append(f"cannot write to {run_dir.resolve()}: {error}")
        free = "?"
    device = torch.cuda.get_device_name(joined.device) if joined.device.type == "cuda" else "CPU"
    return {
        "rank": joined.rank,
        "host": joined.place.host,
        "device": device,
        "cpus": cpus_for_this_process(joined.place),
        "shm_mb": shm,
        "files": files,
        "workers": f"{workers} of {loader.workers}",
        "disk": free,
        "p2p": peers(joined),
        "all_reduce": f"{timed_all_reduce(joined):.2f} GB/s",
        "torch": torch.__version__,
        "nccl": nccl_version(joined),
        "problems": problems,
    }


def differences(rows: list[dict[str, Any]]) -> list[str]:
    """Versions that must be equal everywhere and are not."""
    return [
        f"{name} differs between ranks: {', '.join(sorted({str(row[name]) for row in rows}))}"
        for name in ("torch", "nccl", "device")
        if len({row[name] for row in rows}) > 1
    ]


def peers(joined: Dist) -> str:
    """Which other GPUs of this node this one can reach directly: without any, traffic goes through host memory."""
    if joined.device.type != "cuda":
        return "-"
    mine, others = joined.device.index, range(torch.cuda.device_count())
    reachable = sum(torch.cuda.can_device_access_peer(mine, other) for other in others if other != mine)
    return f"{reachable} of {len(others) - 1}"


def nccl_version(joined: Dist) -> str:
    """'2.27.5', or '-' without GPUs."""
    if joined.device.type != "cuda":
        return "-"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def timed_all_reduce(joined: Dist, repeats: int = 5) -> float:
    """Gigabytes a second of the input through an all_reduce of 64 MB, the median of some."""
    values = torch.ones(MEGABYTES * (1 << 20) // 4, device=joined.device)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        dist.all_reduce(values)
        values.fill_(1.0)[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    return values.nbytes / sorted(seconds)[repeats // 2] / 1e9


def table(rows: list[dict[str, Any]]) -> str:
    """One line a rank, columns aligned."""
    names = [name for name in rows[0] if name != "problems"]
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)


if __name__ == "__main__":
    main()
