"""From an exception to a verdict: what went wrong, whether it began on this rank, and what to do."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import (
    CONFIG,
    FAILED,
    STALLED,
    CheckpointFailed,
    ConfigError,
    DataFailed,
    Diverged,
    KindName,
    NonFinite,
    RunFailed,
)
from ..kinds import KINDS, Verdict
from ..loading.fetch import loader_failure
from ..start.groups import Job
from ..trace.gradients import named
from ..trace.heartbeat import beat
from ..trace.lines import users

HERE = str(Path(__file__).parents[1])
# What PyTorch says when a peer has gone. The rank that reads it is a victim.
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "failed to pass monitoredBarrier",
)

# An error on this rank's GPU. PyTorch raises it at whatever call comes next; NCCL and cuBLAS find it as well.
GPU_FAILED = ("CUDA error", "Cuda failure", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error")
GPU_FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable and others of the GPU itself (CUDA runtime API).
GPU_BROKEN = ("uncorrectable ECC", "uncorrectable NVLink", "hardware error")
LATE_ADVICE = (
    "run the step again with CUDA_LAUNCH_BLOCKING=1, which the CUDA driver reads: then each call waits for its kernel, "
    "and the traceback shows the line. Asserts are mostly an index out of range: compare labels and token numbers "
    "with the size of the embedding"
)
NO_ANSWER = (
    "nobody answers questions in a job: log in before it, or set the variable that the library reads instead "
    "(WANDB_MODE=offline, HF_TOKEN)"
)
ONE_SAMPLE = "Expected more than 1 value per channel when training"  # torch/nn/functional.py
ONE_SAMPLE_ADVICE = (
    "BatchNorm needs two values a channel, and this batch has one sample, as the last of an epoch can: set "
    "loader.drop_last to true, which leaves it out"
)
UNFINISHED = "Expected to have finished reduction in the prior iteration"  # torch's reducer.cpp
UNFINISHED_ADVICE = (
    "use every parameter in each forward, on all ranks (add 0 * parameter.sum() to the loss), freeze the others before "
    "DDP is made, or wrap with find_unused_parameters"
)


def peer_lost(error: BaseException) -> bool:
    """Whether this rank only noticed that another one has gone, or that the network between them has."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return not _says(error, GPU_FAILED)
    return isinstance(error, RuntimeError) and any(text in _text(error) for text in PEER_LOST) and _from_pytorch(error)


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return any(text in _text(error) for text in texts)


def _from_pytorch(error: BaseException) -> bool:
    """Whether PyTorch raised it: user code, too, meets broken pipes and servers that time out."""
    frame = list(traceback.walk_tb(error.__traceback__))[-1:]
    return any(part in each.f_code.co_filename for each, _ in frame for part in ("/torch/", HERE))


def _text(error: BaseException) -> str:
    """What it says, if it can be made to: `__str__` is user code, and may be endless."""
    try:
        return str(error)[:4000]
    except Exception:
        return "(its text cannot be made)"


def verdict_of(error: BaseException, job: Job) -> Verdict:
    """The outcome that an exception in the training loop of this rank stands for."""
    text = _text(error)
    code, advice = FAILED, _advice(error, text)
    kind: KindName = "rank_exception"
    if isinstance(error, ConfigError):
        code, kind = CONFIG, error.kind
    elif isinstance(error, torch.OutOfMemoryError):
        kind = "cuda_oom"
    elif isinstance(error, Diverged):
        kind, advice = error.kind, error.advice
    elif isinstance(error, NonFinite):
        kind = "nonfinite_loss"
    elif isinstance(error, CheckpointFailed):
        kind = "checkpoint_failed"
    elif isinstance(error, DataFailed):
        kind = error.kind
    elif isinstance(error, RuntimeError) and _says(error, GPU_FAILED):
        code, kind, advice = _gpu_failed(text)
        text = f"{text}\n{_late()}"
    elif UNFINISHED in text:
        advice, text = UNFINISHED_ADVICE, f"{_left_out(text)}{text}"
    elif "DataLoader worker" in text:  # of a loader beside ours PyTorch tells by a signal handler, whatever runs then
        kind = loader_failure(text)
    elif isinstance(error, RunFailed):
        code, kind = STALLED, "unknown"
        advice = "look at the log of rank 0, which says more"
    elif peer_lost(error):
        code, kind = STALLED, "network_unreachable"
    where = f"(phase {beat.phase}, step {beat.step})"
    problem, arrow, remedy = _with_lines(text, error).partition("\n  -> ")
    reason = f"{job.who(job.rank)} raised {type(error).__name__}: {problem} {where}{arrow}{remedy}"
    if kind in ("divergent_weights", "nonfinite_loss"):  # all ranks raise it at once
        reason = f"{text} {where}"
    if kind == "checkpoint_failed":  # so do they what rank 0, which writes, has told them
        reason = f"{job.who(0)}: {text} {where}"
    stacks = {str(job.rank): "".join(traceback.format_exception(error))[-20000:]}
    first = _began_on(error, job, code, kind)
    return Verdict(code, kind, reason, first, beat.phase, beat.step, advice or KINDS[kind].advice, stacks)


def _advice(error: BaseException, text: str) -> str:
    """What to do about an exception whose kind does not say enough, or ""."""
    if isinstance(error, EOFError) and "when reading a line" in text:  # input() without a terminal
        return NO_ANSWER
    return ONE_SAMPLE_ADVICE if isinstance(error, ValueError) and ONE_SAMPLE in text else ""


def _began_on(error: BaseException, job: Job, code: int, kind: KindName) -> list[int] | None:
    """The ranks with which it began, if that is known."""
    if isinstance(error, Diverged):
        return error.ranks
    if isinstance(error, NonFinite):
        return error.ranks or None
    if kind == "checkpoint_failed":
        return [0]
    # A wrong setting is nobody's, whichever rank is the first to say so.
    return None if code == CONFIG or kind in ("network_unreachable", "unknown", "nonfinite_loss") else [job.rank]


def _with_lines(text: str, error: BaseException) -> str:
    """What was raised, and where: the user's lines at the end of its first line, which is all that torchrun shows."""
    if isinstance(error, ConfigError) or not (lines := users(error)):
        return text
    first, newline, rest = text.partition("\n")
    return f"{first} at {lines}{newline}{rest}"


def _gpu_failed(text: str) -> tuple[int, KindName, str]:
    """Exit code, kind and, where the kind's own does not say enough, advice for an error on this rank's GPU."""
    if any(part in text for part in GPU_BROKEN):
        return STALLED, "hardware_fault", ""
    if any(part in text for part in GPU_FULL):
        return FAILED, "cuda_oom", ""
    return FAILED, "rank_exception", LATE_ADVICE


def _late() -> str:
    """CUDA runs behind the host: what raises is the first call after the error, and not the one that caused it."""
    if beat.complete == 0:
        return f"CUDA reports errors late: the kernel that failed was launched in step {beat.step} or before"
    span = f"after step {beat.complete}, the last that the GPU is known to have finished, and by step {beat.step}"
    return f"CUDA reports errors late: the kernel that failed was launched {span}"


def _left_out(text: str) -> str:
    """The names of the parameters of which PyTorch tells the numbers only."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    names = named([int(number) for number in found[1].split()]) if found else []
    return f"the last backward gave no gradient to {', '.join(names[:8])}: " if names else ""
