"""From a launched process to a working process group: store, device, groups, warm-up; and the way out."""

from __future__ import annotations

import errno
import os
import re
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..clocks import Clocks, seconds
from ..errors import ConfigError, RunFailed
from ..polling import poll
from ..ranks import rank_on
from .driver import check_driver
from .launcher import Place
from .plugin import check_plugin


@dataclass(frozen=True)
class Job:
    """What a rank knows about its job. `store`: waiting off the collective clock; `control`: decisions, over gloo."""

    place: Place
    clocks: Clocks
    store: dist.Store
    hosts: tuple[str, ...]
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    backend: str = "gloo"
    control: dist.ProcessGroup | None = None
    precision: str = "fp32"  # what `auto` stands for: bf16 if the GPU of every rank has it

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    def who(self, rank: int) -> str:
        """'rank 3 (n2)', for messages."""
        return rank_on(rank, self.hosts[rank])


Dist = Job  # the name before release 0.5, for evaluate.py and adopted code of that time


def connect_store(place: Place, clocks: Clocks, *, serve: bool) -> dist.Store:
    """A new client of the job's key-value store; with `serve`, rank 0 also serves it unless torchrun's agent does.

    Each thread that may wait needs a client of its own: one blocked call holds a TCPStore client's lock.
    The prefix keeps a restarted attempt from reading the keys of the last one: torchrun's agent keeps its store.

    Raises:
        ConfigError: the port is taken.
        RunFailed: nobody answers at MASTER_ADDR within `clocks.init_s`.
    """
    if place.world_size == 1:
        return dist.HashStore()
    where = f"{place.master_addr}:{place.master_port}"
    is_server = serve and place.rank == 0 and not place.agent_store
    unreachable = f"rank {place.rank} on {place.host} cannot reach the store at {where} within {clocks.init_s:g} s: "
    timeout = seconds(clocks.init_s)
    made: Future[dist.Store] = Future()

    def make() -> None:
        try:
            address = (place.master_addr, place.master_port)
            made.set_result(dist.TCPStore(*address, None, is_server, timeout, wait_for_workers=False))
        except BaseException as error:
            made.set_exception(error)

    # In a thread: where another program listens and says nothing, TCPStore waits for ever (torch 2.13).
    threading.Thread(target=make, daemon=True).start()
    try:
        store = made.result(clocks.init_s + 1)
    except FutureTimeout:
        raise RunFailed(f"{unreachable}whatever listens there does not answer, so it is another program") from None
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        if is_server and (os.strerror(errno.EADDRINUSE) in str(error) or "EADDRINUSE" in str(error)):
            raise ConfigError(f"port {where} is in use already", "choose another MASTER_PORT", "port_in_use") from error
        problem = f"{unreachable}rank 0 did not start, MASTER_ADDR is wrong, or a firewall closes the port"
        raise RunFailed(problem) from error
    return dist.PrefixStore(f"attempt{place.attempt}", store)


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # which GPUs a process may use


def choose_device(place: Place, wanted: str) -> torch.device:
    """The GPU of this local rank, or the CPU. `wanted` is auto, cpu or cuda (which is also ROCm's name).

    Raises:
        ConfigError: there are no GPUs, or fewer than tasks on this node, or the driver shows none of those named, or
            is too old for this torch.
    """
    visible = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    looked_for = visible == 0 and wanted != "cpu" and not hidden()
    if looked_for and (old := check_driver(torch.__version__, torch.version.cuda)):
        raise ConfigError(old.what, old.remedy)
    named = next((f"{name}={os.environ[name]}" for name in VISIBLE if os.environ.get(name, "-1") not in ("", "-1")), "")
    if wanted == "auto" and visible == 0 and named and (torch.version.cuda or torch.version.hip):
        # Two equal numbers, or one too high, and CUDA shows no GPU at all: training would go on, on the CPU.
        raise ConfigError(f"{named} names GPUs, and torch sees none on {place.host}", "correct it, or set run.device")
    if wanted == "cpu" or (wanted == "auto" and visible == 0):
        return torch.device("cpu")
    if visible == 0:
        problem = f"run.device is cuda, but {place.host} shows no GPU to rank {place.rank}"
        raise ConfigError(problem, "set run.device to cpu or auto")
    if visible == 1 and place.launcher != "torchrun":
        return torch.device("cuda", 0)  # the scheduler binds one GPU to each task
    if place.local_rank >= visible:
        raise ConfigError(
            f"{place.local_world_size} tasks on {place.host}, but only {visible} GPUs are visible to rank {place.rank}",
            "start as many processes a node as it has GPUs",
        )
    return torch.device("cuda", place.local_rank)


def hidden() -> bool:
    """Whether somebody has hidden the GPUs on purpose."""
    return any(os.environ.get(name, "0") in ("", "-1") for name in VISIBLE)


def setup_distributed(job: Job, device: str = "auto") -> Job:
    """Make the process groups: device first, then init with timeout and device_id, control group, barrier, warm-up.

    Why this order (sources: ddp-scaffold's documentation, page facts):
    - without a current device, barrier() and object collectives pick one, and several ranks can pick the same;
    - `device_id` makes NCCL connect inside init, under that phase's clock, and tells nccl2 (default from torch 2.15)
      its GPU;
    - `new_group` and `monitored_barrier` do not inherit a timeout: their default is 30 minutes;
    - the warm-up collective makes connections fail here, not after an hour of reading data.

    Raises:
        ConfigError: no usable device, no network plugin though NCCL_NET names one, or another library has made the
            process group first.
    """
    if dist.is_initialized():
        raise ConfigError(
            "a library made the default process group before setup_distributed()",
            "import and start that library after the session begins, or let it use this process group",
        )
    place, clocks = job.place, job.clocks
    chosen = choose_device(place, device)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        for finding in check_plugin() if place.world_size > 1 else ():
            raise ConfigError(f"{place.who}: {finding.what}", finding.remedy, finding.kind)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", job.store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=seconds(clocks.collective_s),
            device_id=chosen if chosen.type == "cuda" else None,
        )
    except dist.DistBackendError as error:
        if "Duplicate GPU detected" not in str(error):  # NCCL init.cc: "rank 1 and rank 0 both on CUDA device 1b000"
            raise
        both = re.search(r"Duplicate GPU detected ?: ?(.*)", str(error))
        problem = f"two ranks have the same GPU: NCCL says '{both and both[1]}' on {job.who(place.rank)}"
        remedy = "give each rank a GPU of its own; NCCL takes MIG instances of one GPU for one"
        raise ConfigError(problem, remedy, "device_mapping") from error
    control = dist.new_group(backend="gloo", timeout=seconds(clocks.guard_s))  # decisions wait for slow ranks, too
    assert isinstance(control, dist.ProcessGroup)  # never the non-member marker: the group holds all ranks
    dist.monitored_barrier(control, timeout=seconds(clocks.init_s), wait_all_ranks=True)

    ones = torch.ones(1, device=chosen)
    dist.all_reduce(ones)
    if int(ones.item()) != place.world_size:
        got = f"{place.world_size} ones to {ones.item():g}"
        raise RunFailed(f"the warm-up all_reduce summed {got}: the transport corrupts data")
    return replace(job, device=chosen, backend=backend, control=control)


def meet(job: Job) -> None:
    """Wait for every rank, on the control group; rank 0 names those that do not come within `clocks.collective_s`."""
    dist.monitored_barrier(job.control, timeout=seconds(job.clocks.collective_s), wait_all_ranks=True)


def shutdown(job: Job) -> None:
    """The orderly way out, for the success path only: destroy the groups; rank 0, which may serve the store, goes last.

    Never call it on an error path: the other ranks are in a collective, and destroying the group hides who failed.
    """
    if dist.is_initialized():  # user code may have destroyed it after its last step
        dist.destroy_process_group()
    job.store.add("gone", 1)
    if job.rank == 0:
        poll(lambda: job.store.add("gone", 0) >= job.world_size, job.clocks.silent_s, pause_s=0.02)
