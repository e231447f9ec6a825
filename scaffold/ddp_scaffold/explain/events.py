"""What single lines say: the wording of torch 1.8 to 2.14, NCCL, gloo, torchelastic, schedulers and kernels.

Key on words, never on the line numbers of source files: these differ from release to release. Each recogniser has
marker words, without which its expression is not tried.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from .kinds import ADVICE, KINDS
from .lines import Line, Origin, decode, parse
from .scan import Hit, Markers, markers

LONGEST_TEXT = 400  # characters of a line that are kept as evidence
MOST_SAME, SAME = (
    2,
    2048,
)  # tracebacks of one file that are read if their first bytes are the same, rank and time included


@dataclass(frozen=True)
class Event:
    """Something a line says. `values` are the named groups of the recogniser's expression that took part."""

    name: str
    file: str
    line: int
    text: str
    origin: Origin
    clock: float | None = None
    collected: float | None = None
    values: Mapping[str, str] = field(default_factory=dict)

    def number(self, key: str) -> int | None:
        """Return a value as a whole number."""
        value = self.values.get(key)
        return int(value) if value is not None else None


@dataclass(frozen=True)
class Recogniser:
    """How a line is told from others."""

    name: str
    words: tuple[str, ...]  # one of them stands in the line
    pattern: re.Pattern[str]
    wraps: bool = False  # the text may have been wrapped by a terminal: following lines are joined to it


def _r(name: str, words: str, pattern: str, *, wraps: bool = False) -> Recogniser:
    return Recogniser(name, tuple(words.split("|")), re.compile(pattern), wraps)


WORK = (
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?:, (?:TensorShape=\[[^\]]*\], )?NumelIn=(?P<nin>\d+),"
    r" NumelOut=(?P<nout>\d+))?, Timeout\(ms\)=(?P<to>\d+)\)"
)
GROUP = (
    r"\[PG (?:ID (?P<id>\d+) PG GUID (?P<guid>\d+)(?:\((?P<desc>[^)]*)\))?|(?P<short>\d+)(?: \((?P<name>[^)]*)\))?)"
    r" Rank (?P<r>\d+)\]"
)
RECOGNISERS: tuple[Recogniser, ...] = (
    _r(
        "timeout",
        "Watchdog caught collective|timed out in blocking wait",
        r"(?:\[Rank (?P<r>\d+)\] )?(?:Watchdog caught collective operation timeout:|Work)\s*"
        + WORK
        + r"(?: ran for (?P<ran>\d+)| timed out in blocking wait)",
        wraps=True,
    ),
    _r(
        "group_status",
        "last enqueued|last completed",
        r"(?:" + GROUP + r").{0,250}?"
        r"(?:(?:watchdog at work|NCCL work|work sequence id): (?P<w>\d+),? ?(?:PG status: )?)?"
        r"[Ll]ast enqueued (?:NCCL )?work: (?P<e>-?\d+), last completed (?:NCCL )?work: (?P<c>-?\d+)",
        wraps=True,
    ),
    _r(
        "dump_from_peer",
        "dump signal",
        r"dump signal from another rank|dump signal due to .{0,60}?from\s+rank (?P<src>\d+)",
    ),
    _r(
        "nccl2_timeout",
        "Operation timed out after|NCCL operation timed out",
        r"(?:NCCL operation timed out|Operation timed out after).*",
    ),
    _r("thread_ended", "watchdog thread terminated", r"watchdog thread terminated with exception: (?P<why>.*)"),
    _r(
        "heartbeat",
        "watchdog got stuck|Heartbeat monitor timed out",
        r"watchdog got stuck for (?P<s>\d+)|Heartbeat monitor timed out",
    ),
    _r("stack_of_collective", "Stack trace of the failed collective", r"Stack trace of the failed collective: "),
    _r("elastic_root", "Root Cause", r"Root Cause \(first observed failure\)"),
    _r("elastic_row", "exitcode", r"(?<!\()exitcode\s*: (?P<x>-?\d+)(?: \(pid: (?P<pid>\d+)\)|\s*$)"),
    _r(
        "elastic_failed",
        "failed (exitcode",
        r"failed \(exitcode: (?P<x>-?\d+)\) local_rank: (?P<lr>\d+) \(pid: (?P<pid>\d+)\)",
    ),
    _r(  # Composer
        "rank_exit",
        "crashed with exit code|exited with code",
        r"\b[Rr]ank (?P<r>\d{1,6}) (?:crashed with exit code|\(PID \d+\) exited with code) (?P<x>-?\d+)",
    ),
    _r(  # Open MPI
        "rank_exit",
        "noticed that process rank",
        r"noticed that process rank (?P<r>\d{1,6}) with PID \S+ on node \S+ exited on signal (?P<signal>\d{1,2})",
        wraps=True,
    ),
    _r(  # Intel MPI
        "rank_exit",
        "RUNNING AT",
        r"\bRANK (?P<r>\d{1,6}) PID \d+ RUNNING AT \S+?\s*=\s*"
        r"(?:KILLED BY SIGNAL: (?P<signal>\d{1,2})|EXIT STATUS: (?P<x>\d+))",
        wraps=True,
    ),
    _r(  # Open MPI, whose names of processes end with the rank, and Horovod
        "rank_exit",
        "Process name:",
        r"Process name:\s*(?:\[(?:\[\d+,\d+\]|[\w.-]+@\d+),)?(?P<r>\d{1,6})\]?\s*Exit code:\s*(?P<x>\d+)",
        wraps=True,
    ),
    _r(  # Horovod under Determined, whose lines of one second come in the order of the alphabet
        "rank_exit", "Exit code:", r"Exit code: (?P<x>\d+)\s.{0,60}\|\| Process name: (?P<r>\d{1,6})", wraps=True
    ),
    _r(  # Lightning
        "rank_exit",
        "Child process with PID",
        r"\[rank: (?P<r>\d{1,6})\] Child process with PID \d+ terminated with code (?P<x>-?\d+)",
    ),
    _r(  # torchrun was told to end; what it does then, it does to all ranks
        "launcher_signal",
        "death signal|got signal",
        r"Received (?:Signals\.)?(?P<s>\w+) death signal|Process \d+ got signal: (?:Signals\.)?(?P<g>\w+)",
    ),
    _r("rank_signal", "Received SIGTERM|Received SIGUSR1|Received SIGHUP", r"Received (?P<s>SIG\w+)(?:: \d+)?\W*$"),
    _r(
        "rank_exit",
        "MPI_ABORT was invoked",
        r"MPI_ABORT was invoked on rank (?P<r>\d{1,6}) .*?errorcode (?P<x>-?\d+)",
        wraps=True,
    ),
    _r("deepspeed_exit", "exits with return code", r"exits with return code = (?P<x>-?\d+)"),
    _r(
        "submitit",
        "this job is preempted|this job is timed",
        r"Caught signal \S+ on \S+: this job is (?P<why>preempted|timed-out)",
    ),
    _r(
        "project_verdict",
        "|".join(f"{kind}: " for kind in (*ADVICE, *KINDS) if kind not in {"benign", "unknown"}),
        r"^(?:\S+ )?(?P<kind>" + "|".join((*ADVICE, *KINDS)) + r"): (?P<reason>.+)",
    ),
    _r("launcher_kill", "closing signal", r"Sending process (?P<pid>\d+) closing signal (?P<sig>SIG\w+)"),
    _r("lightning", "GLOBAL_RANK", r"GLOBAL_RANK: (?P<r>\d+), MEMBER: (?P<m>\d+)/(?P<w>\d+)"),
    _r(
        "world_size",
        "world_size|world size|World_size|World_Size|World size|World Size|WORLD_SIZE|nranks",
        r"(?:[Ww]orld[_ ][Ss]ize|WORLD_SIZE)['\"]?\s*[:=]?\s*(?:is )?(?P<w>\d{1,6})\b|rank (?P<r>\d+)"
        r" nranks (?P<n>\d+)",
    ),
    _r(
        "slurm_cancel",
        "CANCELLED AT",
        r"\*\*\* (?P<what>JOB|STEP) (?P<id>\S+) ON (?P<n>\S+) CANCELLED AT (?P<t>\S+)(?: DUE to| DUE"
        r" TO)?(?: (?P<why>[A-Za-z ,]+?))? ?\*\*\*",
    ),
    _r("slurm_task", "srun: error", r"srun: error: (?P<n>[\w.\-\[\],]+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.*)"),
    _r(
        "slurm_step",
        "Job step aborted|Force Terminated|Terminating",
        r"srun: (?:Job step aborted|Force Terminated|error: Node failure|Terminating).*",
    ),
    _r(  # sacct, scontrol, Slurm's mail
        "slurm_state",
        "OUT_OF_MEMORY|NODE_FAIL|PREEMPTED|TIMEOUT",
        r"(?:JobState=|State: +|Job_id=.*, )(?P<why>OUT_OF_MEMORY|NODE_FAIL|PREEMPTED|TIMEOUT)\b",
    ),
    _r("pbs", "PBS: job killed", r"PBS: job killed: (?P<why>.*)"),
    _r(
        "kubernetes",
        "Preempted by|Preempted to accommodate|DeadlineExceeded|active longer than specified deadline|low on resource",
        r"(?P<why>Preempted (?:by|to accommodate)|DeadlineExceeded|active longer than specified deadline"
        r"|low on resource: (?P<resource>[\w-]+)).*",
    ),
    _r("lsf", "TERM_", r"(?P<why>TERM_(?:RUNLIMIT|MEMLIMIT|PREEMPT)\b.*)"),
    _r(
        "timeout_set",
        "ddp_timeout|NCCL_TIMEOUT",
        r"(?P<name>ddp_timeout|(?:TORCH_)?NCCL_TIMEOUT\w*)['\"]?\s*[ =:]\s*['\"]?(?P<v>\d{2,12})\b",
    ),
    _r(
        "restart",
        "will restart worker group",
        r"(?:attempts left|new nodes from group_rank=\d+); will restart worker group",
    ),  # by torchrun, which starts all anew
    _r("group_world", "group_world_size", r"\bgroup_world_size=(?P<n>\d+)"),  # nodes, by torchrun's agent
    _r(  # a shell, Python, Open MPI, UCX, torch, glibc
        "death",
        "Killed|Aborted|Segmentation fault|Bus error|Fatal Python error|Segfault encountered|malloc()|realloc()"
        "|munmap_chunk()|free(): invalid|free(): double|double free or corruption|corrupted size vs"
        "|(SIGKILL)|(SIGSEGV)|(SIGBUS)|exit code|Exit Code|exited with code|exitCode|exit status|non-zero status",
        r"(?:line \d+:|^)\s*\d+ (?P<shell>Killed|Aborted|Segmentation fault|Bus error)\b|^\s*(?P<alone>Killed)\s*$"
        r"|(?P<core>Segmentation fault|Bus error|Aborted|Illegal instruction) +\(core dumped\)"
        r"|(?:Fatal Python error: |Signal: |Caught signal \d+ \()"
        r"(?P<handler>Segmentation fault|Bus error|Illegal instruction)|(?P<torch>Segfault) encountered"
        r"|(?:^|': )(?P<glibc>(?:free|malloc|realloc|munmap_chunk)\(\): \w.*|double free or corruption"
        r"|corrupted size vs\. prev_size)|\bexit(?:ed)? ?(?:with )?(?:a non-zero )?(?:[Cc]ode|status)(?: of)?[ \"':=]+"
        r"(?P<code>13[5-9])\b(?! (?:means|indicates|usually))"
        r"|traceback : Signal \d+ \((?P<row>SIG(?:KILL|SEGV|BUS))\) received"
        r"|\bExit Code: +(?P<pod>13[5-9])\b",
    ),
    _r(
        "spawned",
        "terminated with the following error|terminated with exit code",
        r"[Pp]rocess \d+ terminated with (?:the following error|exit code \d)",
    ),
    _r("nccl_ready", "Init COMPLETE", r"rank \d+ n[rR]anks (?P<ready>\d+) .*Init COMPLETE"),
    _r("stalled", "missing ranks", r"\[missing ranks:\s*(?P<named>\d[\d, ]*)\]"),  # Horovod
    _r(
        "start_awaited",
        "Waiting in store based barrier|client socket has failed to connect",
        r"Waiting in store based barrier .*?world_size=(?P<w>\d+), worker_count=(?P<n>\d+)"
        r"|client socket has failed to connect to \S+ \(errno: (?:110|111|113)",
    ),
    _r("traceback", "Traceback (most recent call last)", r"Traceback \(most recent call last\)"),
    _r(
        "left",
        "has NOT been destroyed before|was not called before program exit",
        r"process group has NOT been destroyed before|destroy_process_group\(\) was not called before program exit",
    ),
    _r(
        "heartbeat_of_rank",
        "heartbeat rank",
        r"heartbeat rank=(?P<r>\d{1,6}) host=(?P<host>\S+) phase=(?P<phase>\S+) epoch=\d+ step=(?P<step>\d{1,12})",
    ),
    _r(
        "finished",
        "Training done|training done|Training is|training is|Training finished|training finished|Finished training"
        "|finished training|Training complete|training complete|Training completed|training completed"
        "|finished successfully|completed successfully|successfully finished",
        r"(?i)\btraining (?:is )?(?:done|finished|complete[d]?)|\bfinished training|(?:job|run)"
        r" (?:completed|finished) successfully|worker group successfully finished",
    ),
)


@dataclass(frozen=True)
class Sign:
    """A failure that a line states by itself."""

    kind: str
    pattern: re.Pattern[str]
    words: tuple[str, ...]


CONSEQUENCE = "consequence"  # kind of a message that tells of the failure of somebody else
LOST = frozenset({CONSEQUENCE, "store_lost"})
VAGUE = "vague"  # kind of a message that tells that something failed, and nothing of what


def _s(kind: str, words: str, pattern: str = "") -> Sign:
    alternatives = tuple(words.split("|"))
    return Sign(kind, re.compile(pattern or "|".join(map(re.escape, alternatives))), alternatives)


HARDWARE_XID = r"(?:48|62|63|64|74|79|92|94|95|119|120|121|140|143|145|149|154)"
# The first that matches counts, so the special stands before the general.
SIGNS: tuple[Sign, ...] = (
    _s(CONSEQUENCE, "Tried to allocate more than 1EB"),
    _s(  # Ray's own error of that name is about the host's memory, torch's about the GPU's
        "host_oom_kill",
        "ray.exceptions.OutOfMemoryError|node running low on memory|due to memory pressure",
    ),
    _s(
        "cuda_oom",
        "OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory|Cuda failure"
        "|CUBLAS_STATUS_ALLOC_FAILED|Tried to allocate|Triton Error|cuda failed with error|CUDA_ERROR_OUT_OF_MEMORY"
        "|CUDA driver error|cudaMalloc|THCudaCheck FAIL|cuda runtime error",
        r"OutOfMemoryError|(?:CUDA|HIP) out of memory|CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'"
        r"|CUBLAS_STATUS_ALLOC_FAILED|out of memory\.? Tried to allocate|Triton Error \[\w+\]: out of memory"
        r"|(?:THCudaCheck FAIL .*|cuda runtime error \(2\) : |cuda failed with error 2 "
        r"|CUDA driver error: |cudaMalloc\w* failed: )out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY",
    ),
    _s(
        "hardware_fault",
        "uncorrectable|Unable to determine the device handle|fallen off the bus|unspecified launch failure on"
        "|hardware exception|GPU is lost|Invalid access of peer GPU memory",
        r"uncorrectable (?:ECC|NVLink) error(?!s?(?: count)?s?[ :=]+0\b)"
        r"|Unable to determine the device handle|fallen off the bus"
        r"|CUDA error: hardware exception|GPU is lost|CUDA error: Invalid access of peer GPU memory over nvlink",
    ),
    _s(
        "hardware_fault",
        "NVRM: Xid|SXid",
        rf"NVRM: Xid (?:\([^)]*\): {HARDWARE_XID}\b|.*caused by previous Xid {HARDWARE_XID}\b)"
        r"|SXid \([^)]*\): \d+, Fatal",
    ),
    _s(
        "shm_exhausted",
        "insufficient shared memory|out of shared memory|unable to allocate shared memory|extend"
        " /dev/shm/nccl|posix_fallocate failed|Error while creating shared memory segment|unable to mmap"
        "|unable to write to file </torch_",
    ),
    _s(
        "node_failure",
        "because its node has died|Owner's node has crashed|LocalRayletDiedError"
        "|has lost communication with a remote daemon",
    ),
    _s(
        "rank_killed",
        "ActorDiedError|RayActorError|actor died unexpectedly|A worker died or was killed while executing"
        "|worker process has died|Worker unexpectedly exits|WorkerCrashedError",
    ),
    _s("rank_killed", "terminated with signal", r"(?i)\bprocess \d+ terminated with signal SIG"),  # of mp.spawn
    _s("rank_killed", "died with", r"died with <Signals\.SIG(?:KILL|SEGV|BUS|ILL|FPE)"),  # of subprocess
    _s("rank_killed", "died unexpectedly", r"Worker proc \w+-(?P<named>\d+) died unexpectedly"),  # vLLM
    _s(
        "node_failure",
        "missed too many heartbeats|NodeDiedError|Task launch for",
        r"marked dead because the detector has missed too many heartbeats|NodeDiedError"
        r"|Task launch for \S+ failed on node",
    ),
    _s(  # a context of CUDA is one process's: the error is of the rank that reports it, be it by the watchdog's thread
        "rank_exception",
        "illegal memory access|device-side assert|unspecified launch failure|misaligned address|an illegal instruction",
        r"(?:(?:CUDA|HIP) error: |Cuda failure (?:\d+ )?')"
        r"(?:an illegal memory access|device-side assert|unspecified launch failure|misaligned address"
        r"|an illegal instruction)",
    ),
    _s("rank_exception", "Assertion", r"\.(?:cu|cuh|hip):\d+: .*Assertion `.+` failed"),
    _s(  # faults of a program's own kernel: 13, 31 and 43 in NVIDIA's catalogue of Xid, and AMD's runtime
        "rank_exception",
        "NVRM: Xid|Memory access fault by GPU",
        r"NVRM: Xid \([^)]*\): (?:13|31|43)\b|Memory access fault by GPU",
    ),
    _s("fd_exhausted", "Too many open files|items of ancdata", r"Too many open files|received \d+ items of ancdata"),
    _s("dataloader_stalled", "DataLoader timed out after"),
    _s(
        "host_oom_kill",
        "exceeded memory limit|Exceeded job memory limit|Exceeded step memory limit|oom-kill|oom_kill|oom-killer"
        "|Out of memory: Killed process|out of memory: Killed process|OOM Killed|OOMKilled|Out Of Memory|systemd-oomd",
        r"xceeded (?:job |step )?memory limit|oom[-_]kill(?!_score|_disable|[ :=]+0\b)"
        r"|[Oo]ut of memory: Killed process|OOM ?Killed"
        r"|task[s ]?[ \d,-]*: Out Of Memory|invoked oom-killer|systemd-oomd.* [Kk]illed",
    ),
    _s(
        "dataloader_worker_died",
        "DataLoader worker|Unexpected segmentation fault encountered in worker",
        r"DataLoader worker \(pid(?:\(s\))? [^)]*\) (?:is killed by signal|exited unexpectedly)"
        r"|Unexpected segmentation fault encountered in worker",
    ),
    _s(
        "device_mapping",
        "Duplicate GPU detected|invalid device ordinal|Invalid device id|machine only has",
        r"Duplicate GPU detected(?: : (?P<named>rank \d+ and rank \d+))?|invalid device ordinal|Invalid device id"
        r"|[Bb]ut your machine only has: \[",
    ),
    _s("port_in_use", "Address already in use|EADDRINUSE"),
    _s(CONSEQUENCE, "successfully reached monitoredBarrier"),
    _s(
        "missing_rank",
        "failed to pass monitoredBarrier",
        r"Ranks? (?P<named>[\d, ]+) failed to pass monitoredBarrier",
    ),
    _s(
        "mismatched_collectives",
        "Detected mismatch between collectives|doesn't match expected size|preamble.length|appears not to"
        " match sizes of the same param|inconsistent|disagreement between|Forward order differs across ranks"
        "|message truncated|Message truncated|Collectives differ in the following aspects",
        r"Collectives differ in the following aspects"
        r"|Detected mismatch between collectives|doesn't match expected size|appears not to match sizes"
        r"|has inconsistent (?!0 )\d+ params|op\.preamble\.length <= op\.nbytes"  # the latter: gloo, sizes
        r"|disagreement between rank0 and rank\d|Forward order differs across ranks"  # of ZeRO 3, of FSDP
        r"|NCCL WARN.*[Mm]essage truncated ?[:,] ?receiv",
    ),
    _s("missing_rank", "inconsistent 0 params", r"while rank (?P<named>\d+) has inconsistent 0 params"),
    _s("uneven_inputs", "exhausted inputs"),
    _s("divergent_control_flow", "Expected to have finished reduction in the prior iteration"),
    _s("divergent_control_flow", "did not receive grad for rank", r"did not receive grad for rank (?P<named>\d+)"),
    _s(
        "checkpoint_failed",
        "PytorchStreamReader failed|failed finding central directory|PytorchStreamWriter failed|unexpected pos "
        "|Error while deserializing header|Error while serializing|unexpected EOF, expected|storage has wrong size",
    ),
    _s(  # Megatron, DeepSpeed, autograd, clip_grad_norm_
        "nonfinite_loss",
        "found NaN in|Unexpected result nan|loss scale already at minimum|returned nan values|is non-finite",
        r"Rank (?P<named>\d+): found NaN in|Unexpected result nan on rank (?P<on>\d+)|loss scale already at minimum"
        r"|returned nan values in its|total norm .*is non-finite",
    ),
    _s(
        "nonfinite_loss",
        "oss is|FloatingPointError|nan or inf|NaN or inf|nan loss|NaN loss|nan gradient|NaN gradient"
        "|nan gradients|NaN gradients|non-finite|found nan|found NaN",
        r"(?i)loss (?:is|was|became) (?:nan|inf|not finite|non-finite)|FloatingPointError|(?:NaN"
        r"|non-finite|nan) (?:or inf )?(?:loss|gradient)|found (?:nan|NaN) in|Loss is NaN",
    ),
    _s(
        "launcher_misconfig",
        "expected, but not set|parameter missing|KeyError|has already checked in|Duplicate rank|duplicate rank"
        "|unrecognized arguments"
        "|process group has not been initialized|have assigned same rank"
        "|usage: torchrun|usage: accelerate|usage: deepspeed|PasswordAuthentication"
        "|arguments are required|expected one argument|invalid choice|[Errno 2]|command not found"
        "|Unable to create step|execve|not enough slots available|unable to reliably start|container start failed",
        r"environment variable \w+ expected, but not set|rank \d+ of \d+ ranks has already checked in"
        r"|KeyError: '(?:(?:LOCAL_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT))'|uplicate rank"
        r"|process group has not been initialized|unrecognized arguments|have assigned same rank"
        r"|^usage: (?:torchrun|accelerate|deepspeed) |Command 'ssh -o PasswordAuthentication=no"
        r"|^(?:usage: )?[\w./-]+\.py: error: |: can't open file '.*': \[Errno 2\]"
        r"|(?:torchrun|srun|mpirun|python\d?|accelerate|deepspeed): command not found"
        r"|There are not enough slots available|unable to reliably start one or more daemons"
        r"|pyxis: container start failed|rendezvous: (?:rank|world size|world_size|size) parameter missing"
        r"|srun: error: Unable to create step|slurmstepd: error: execve\(\)",
    ),
    _s(
        "network_misconfig",
        "no socket interface found|gai error|Name or service not known|Temporary failure in name"
        " resolution|ProcessGroupGloo|connectFullMesh|Invalid argument|No such device|is neither AF_INET|ibv_modify_qp"
        "|ibv_create_qp|ibv_create_cq|ibv_reg_mr|ibv_reg_dmabuf_mr|ibv_alloc_pd|ibv_query_port|ibv_query_gid|ibv_open_device"
        "|Connection refused"
        "|NET/OFI"
        "|Cannot assign requested address",
        r"no socket interface found|gai error|Name or service not known|Temporary failure in name"
        r" resolution|connectFullMesh failed|ibv_\w+ failed with (?:error )?22|interface .* not found"
        r"|is neither AF_INET"
        r"|WARN Call to ibv_\w+ failed(?! with (?:error )?(?:110|Connection timed out))"
        r"|connect \[127[\d.]+\]:\d+: Connection refused|Error: .*(?:listen|bind).*Cannot assign requested address"
        r"|WARN.*NET/OFI (?:Couldn't|Could not|Unable|No |(?!Request).*failed)",
    ),
    _s(
        "peer_to_peer",
        "peer access|P2P|peer mapping resources",
        r"peer access is not supported|P2P.{0,20}(?:failed|error)|Could not enable P2P|peer mapping"
        r" resources exhausted",
    ),
    # NCCL tells of a call to CUDA in its own process; those at the end of a process come of another failure
    _s("rank_exception", "Cuda failure", r"Cuda failure (?:\d+ )?'(?!driver shutting down|context is destroyed)"),
    # what a generated project says at the start
    _s("rendezvous_failed", "did not start within", r"^error: ranks \[[\d, ]+\] did not start within \d+"),
    _s(
        "launcher_misconfig",
        "was started for|two processes claim|settings differ between",
        r"^error: .*(?:was started for \d+ ranks|two processes claim rank \d+|settings differ between rank \d+)",
    ),
    _s(
        "rendezvous_failed",
        "client socket has timed out|RendezvousTimeoutError|clients joined|store->get|RendezvousConnectionError"
        "|connect() timed out|Timed out initializing process group",
        r"Timed out initializing process group in store|connect\(\) timed out"
        r"|client socket has timed out|RendezvousTimeoutError"
        r"|waiting for clients\. \d+/\d+ clients joined|RendezvousConnectionError"
        r"|store->get\('[^']*'\) got error(?!: (?:Connection|Broken|failed to recv|Failed to recv))",
    ),
    _s(
        "network_unreachable",
        "Call to connect|Connect to|ibv_modify_qp|Got completion|No route to host|exceeded retries|NET/OFI"
        "|Got async event|Call to recv|Call to send|Call to sendmsg|Call to recvmsg",
        r"socket(?:Start|Poll)Connect: exceeded retries|Call to connect (?:timeout|failed)|Connect to \S+ failed"
        r"|ibv_modify_qp failed with (?:error )?(?:110|Connection timed out)"
        r"|Got completion .*with (?:error|status) ?(?:\d+|=)"
        r"|No route to host|Call to (?:recv|send)\w* .*failed : Connection timed out"
        r"|NET/OFI .*completed with error|Got async event ?: ?port error",
    ),
    _s(
        VAGUE,
        "unhandled cuda error|invalid usage|internal error|error code is|HCCL error in",
        r"NCCL (?:[Ee]rror|failure).*(?:unhandled cuda error|invalid usage|internal error)"
        r"|OPS function error: Hccl\w+, error code is|HCCL error in: ",  # of Ascend's NPUs
    ),
    _s("store_lost", "recvValue|sendBytes failed|Failed to check the|Failed to recv, got 0 bytes|store unavailable"),
    _s(
        CONSEQUENCE,
        "communicator was aborted|closed by peer|reset by peer|Socket Timeout|Broken pipe|Timed out"
        " waiting|DistBackendError|remote process exited|ncclRemoteError|SignalException"
        "|ChildFailedError|KeyboardInterrupt|Watchdog caught|ncclSystemError|NCCL operations have failed"
        "|Connection refused|SIGTERM|store->get"
        "|RendezvousClosedError|RendezvousGracefulExitError|NCCL error in|unhandled system error"
        "|DistStoreError|DistNetworkError|Connection timed out|wait timeout after"
        "|pair closure|Engine core initialization failed|WorkerProc initialization failed|EngineDeadError"
        "|TrainingFailedError",
    ),
)
# tqdm's elapsed time, as in "[29:55<03:25, 2432.70 examples/s]"
BAR = re.compile(r"(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d\d)(?:<[\d:?]+)?, +\S+ ?[\w ]*(?:/s|s/\w+)")
PROJECT_VERDICT = next(each.pattern for each in RECOGNISERS if each.name == "project_verdict")
QUOTABLE = frozenset({"timeout", "death", "finished"})  # events that a sample of the data may quote
STATES_A_WAIT = frozenset({"timeout", "exception", "sign"})
EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:\(\w+\))?)(?:: (?P<message>.*)|$)")
EXCEPTION_LINE = re.compile(
    r"^\s{0,4}(?P<type>(?:[a-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Interrupt)|(?:[A-Z]\w*)?Exception)): "
)
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<at>\d+), in ?(?P<function>\S*)')
LAUNCHER = re.compile(
    r"torch/distributed/(?:run|launch|elastic|launcher)|torchrun|accelerate/commands|deepspeed/launcher"
)
LAUNCHERS_COMMAND = re.compile(r"--local[_-]rank|torch\.distributed|torchrun|accelerate|deepspeed")
WHY_OF_COMMAND = re.compile(r" died with |Command 'ssh ")  # that signal, or that a host cannot be reached
# What is put into quotes is quoted (a sample of the data, a setting), but where the words before say that it happened.
QUOTED = re.compile(r"(?<![\w'\"])(?P<quote>[\"'`])(?P<inner>.*?)(?<!\\)(?P=quote)(?!\w)")
TELLS = re.compile(
    r"(?i)(?:\(|\b(?:log|message|msg|err|error|exc|exception|reason|status|state|cause|details?|line|event|traceback"
    r"|stderr|stdout|output|textPayload|payload|body|with|by|failed|failure)[\"']?\s*[:=]?\s*)$"
)
SUPPOSED = re.compile(r"(?i)\b(?:if you (?:see|get|run into)|in case of|to (?:avoid|prevent)|what to do on)\b[^.;]*$")
CODE = re.compile(r"\braise [\w.]+\([^)]*$|\bexcept \(?[\w., ]*$")  # a line of a program, as rich tracebacks show them
DOWNLOAD = re.compile(r"HTTPS?ConnectionPool|urlopen error|Max retries exceeded")
LOGGED = re.compile(
    r"(?:\b(?:ERROR|CRITICAL|FATAL|ErrorMessage)\b|[Ff]ailed\b).{0,120}?"
    r"\b(?P<type>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): \S"
)
ERROR_FILE = re.compile(  # of torchelastic
    r'^\s*(?:\{.*?)?"message": "(?P<message>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .*?)(?:(?<!\\)"|$)'
)
FLAT_ROW = re.compile(
    r"time\s*: \S+\s+host\s*: \S+\s+rank\s*: \d+ \(local_rank: \d+\)\s+exitcode\s*: (?P<x>-?\d+)"
    r"(?: \(pid: (?P<pid>\d+)\))?"
)
STARTS = re.compile(
    r"\b(?:init_process_group|_env_rendezvous_handler|_create_c10d_store|_create_tcp_store|_call_store)\b"
)
BROKEN = frozenset({"EOFError", "UnpicklingError"})  # of what is read, a checkpoint or a connection
FULL = re.compile(r"Errno (?:28|122)\]|No space left on device|Disk quota exceeded")
SAVES = re.compile(r"save|write_record|checkpoint")
SHARES = re.compile(r"\b(?:SemLock|Lock|_share_\w+|_new_shared\w*|SharedMemory)\b")
# What Python prints above the traceback of an exception that ends nothing: in a destructor, in a handler of a log.
HARMLESS = re.compile(rb"Exception ignored in|--- Logging error ---")
SPAWNED = re.compile(r"(?i)\bprocess (?P<index>\d{1,4}) terminated with (?:signal SIG|exit code|the following error)")
HELPER = re.compile(r"multiprocessing/resource_tracker\.py$")  # a process that only tidies up behind the others
STREAM_OF_C = re.compile(r"^\s*(?:frame #|Exception raised from |terminate called|(?P<what>what\(\):\s*))")


def sign_of(text: str) -> tuple[Sign, re.Match[str]] | None:
    """Return the first sign that a text shows: of a download that failed none, the network between ranks is another."""
    if DOWNLOAD.search(text):
        return None
    for sign in SIGNS:
        if any(word in text for word in sign.words) and (found := sign.pattern.search(text)):
            return None if said_of_another(text, found.start(), found.end()) else (sign, found)
    return None


def said_of_another(text: str, begin: int, end: int) -> bool:
    """Tell whether a part of a line is only quoted, or only supposed: a sample of the data, a setting, a help text."""
    if SUPPOSED.search(text, 0, begin) or CODE.search(text, 0, begin):
        return True
    return any(
        quoted.start("inner") <= begin and end <= quoted.end("inner") and not TELLS.search(text, 0, quoted.start())
        for quoted in QUOTED.finditer(text)
    )


@lru_cache(maxsize=1)
def anchors() -> Markers:
    """Return what to search a log for: the words of all recognisers and signs, and what ends exceptions' names."""
    every = {word for words in [item.words for item in RECOGNISERS] + [item.words for item in SIGNS] for word in words}
    return markers([word.encode() for word in sorted(every)], rb"E(?:rror|xception):")


class Reader:
    """Turns the hits of one file into events. A traceback becomes one event, at its last line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.taken: set[int] = set()  # lines that belong to a traceback or a table's row
        self.tracebacks: Counter[bytes] = Counter()  # by their first bytes
        self.beats: dict[int, tuple[Event, ...]] = {}  # the last two heartbeats of each rank
        self.told = False  # a line has stated a timeout or a failure

    def last(self) -> Iterator[Event]:
        """Yield what only counts where a file ends: the last two heartbeats of each rank."""
        for beats in self.beats.values():
            yield from beats

    def events(self, hit: Hit) -> Iterator[Event]:
        """Yield what a line says; an error also keeps the time that a progress bar shows on its line or just above."""
        for event in self._events(hit):
            self.told |= event.name in STATES_A_WAIT
            elapsed = _elapsed(hit) if event.name in STATES_A_WAIT else None
            yield event if elapsed is None else replace(event, values={**event.values, "elapsed": str(elapsed)})

    def _events(self, hit: Hit) -> Iterator[Event]:
        if hit.number in self.taken:
            return
        line = parse(decode(hit.raw))
        stream = STREAM_OF_C.match(line.body)
        if not line.text.strip() or (stream and (self.told or not stream["what"])):
            return
        if stream:  # what a watchdog has thrown: its own line says the same, where somebody has kept that
            line = replace(line, text=line.body[stream.end() :], body=line.body[stream.end() :])
        if found := ERROR_FILE.match(line.text):
            sign = sign_of(found["message"])
            yield self._event("raised", hit.number, line, {"kind": sign[0].kind} if sign else {})
            return
        for recogniser in RECOGNISERS:
            if any(word in line.text for word in recogniser.words):
                found = recogniser.pattern.search(line.text) or (_joined(recogniser, hit) if recogniser.wraps else None)
                if not found or (recogniser.name in QUOTABLE and said_of_another(line.text, *found.span())):
                    continue
                if recogniser.name == "traceback":
                    yield from self._traceback(hit, line)
                    return
                if recogniser.name == "elastic_row":
                    yield from self._elastic_row(hit, line, found)
                    return
                values = {key: value for key, value in found.groupdict().items() if value is not None}
                if recogniser.name == "heartbeat" and line.origin.rank is None:
                    line = _begun_above(hit, line)
                event = self._event(recogniser.name, hit.number, line, values)
                if recogniser.name == "heartbeat_of_rank":
                    rank = int(values["r"])
                    self.beats[rank] = (*self.beats.get(rank, ())[-1:], event)
                    return
                yield event
                if recogniser.name == "stack_of_collective":
                    yield from self._stack(hit, line)
        if not any(HARMLESS.search(raw) for raw in hit.before(1)):
            yield from self._stated(hit.number, line)

    def _stated(self, number: int, line: Line) -> Iterator[Event]:
        """Yield the failure that a line states by itself."""
        if sign := sign_of(line.text):
            yield self._event("sign", number, line, {"kind": sign[0].kind, **_named(sign[1])})
        elif found := EXCEPTION_LINE.match(line.body):
            values = {"type": found["type"], **_of_full_disk(line.body, line.body)}
            values |= {"launcher": "1"} if _of_launcher(found["type"], line.body, ()) else {}
            yield self._event("raised", number, line, values)
        elif found := LOGGED.search(line.text):
            yield self._event("logged", number, line, found.groupdict())

    def _event(self, name: str, number: int, line: Line, values: Mapping[str, str]) -> Event:
        if line.origin == Origin() and (spawned := SPAWNED.search(line.text)):
            line = replace(line, origin=Origin(local_rank=int(spawned["index"])))
        text = (line.body if line.origin.rank is None else line.text).strip()[:LONGEST_TEXT]
        return Event(name, self.file, number, text, line.origin, line.clock, line.collected, values)

    def _stack(self, hit: Hit, line: Line) -> Iterator[Event]:
        for offset, raw in enumerate(hit.after(12), 1):
            text = parse(decode(raw)).body.strip()
            if not text.startswith("#"):
                return
            if found := re.match(r"#\d+ (?P<function>\S+) from (?P<path>\S+):(?P<at>\d+)", text):
                number = hit.number + offset
                yield Event("collective_frame", self.file, number, text, line.origin, values=found.groupdict())

    def _elastic_row(self, hit: Hit, line: Line, found: re.Match[str]) -> Iterator[Event]:
        """Yield a row of torchelastic's table, whose fields stand in six lines; the exit code's is the fourth."""
        if flat := list(FLAT_ROW.finditer(line.text)):  # a collector has joined the lines
            for row in flat:
                yield from self._row(hit.number, line, row[0], row["x"], row["pid"])
            return
        text = "\n".join(parse(decode(raw)).text for raw in (*hit.before(3), hit.raw, *hit.after(2)))
        self.taken.update(range(hit.number + 1, hit.number + 3))
        yield from self._row(hit.number, line, text, found["x"], found["pid"])

    def _row(self, number: int, line: Line, text: str, code: str, pid: str | None) -> Iterator[Event]:
        """Yield a row by its fields, and what a generated project says below it; nothing where a field is missing."""
        rank = re.search(r"rank\s*: (\d+) \(local_rank: (\d+)\)", text)
        time = re.search(r"time\s*: (\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)", text)
        if not rank or not time:
            return
        host = re.search(r"host\s*: (\S+)", text)
        values = {
            "x": code,
            "pid": pid or "",
            "r": rank[1],
            "lr": rank[2],
            "host": host[1] if host else "",
        }
        if error := re.search(r"(?m)traceback : (?P<t>.+)$", text):
            values["traceback"] = error["t"]
            if told := PROJECT_VERDICT.match(error["t"]):
                yield Event("project_verdict", self.file, number + 2, error["t"], line.origin, values=told.groupdict())
        row = f"rank {rank[1]} (local_rank: {rank[2]}) exitcode {code} (pid: {pid or '?'})"
        yield Event("elastic_row", self.file, number, row, line.origin, parse(time[1]).clock, None, values)

    def _traceback(self, hit: Hit, line: Line) -> Iterator[Event]:
        """Yield the exception at the end of a traceback. Lines of other ranks in between are not part of it."""
        before = line.text[: line.text.index("Traceback (most")]
        begin = hit.buffer[hit.start : hit.start + SAME]
        self.tracebacks[begin] += 1
        if self.tracebacks[begin] > MOST_SAME:
            return
        frames: list[re.Match[str]] = []
        flat = False
        for offset, raw in enumerate(hit.after(300), 1):
            text = decode(raw)
            part = parse(text)
            if part.origin != line.origin or not part.text.strip():
                continue
            body = text[len(before) :] if before.strip() and text.startswith(before) else part.body
            if frame := FRAME.match(body):
                frames.append(frame)
                flat = body.startswith("File")  # the indentation was lost when somebody pasted it
                continue
            if flat and not EXCEPTION_LINE.match(body):
                continue
            if body[:1] in {" ", "", "^", "~", "+", "|"} and not (frames and EXCEPTION_LINE.match(body)):
                self.taken.add(hit.number + offset)  # a line of the program: what it would say, it has not said
                continue
            if not (found := EXCEPTION.match(body.lstrip())):
                if frames:
                    return
                continue
            self.taken.update({hit.number, hit.number + offset})
            if any(HARMLESS.search(raw) for raw in hit.before(1)) or (frames and HELPER.search(frames[-1]["path"])):
                return
            more = hit.after(310)[offset : offset + 6]
            yield self._exception(hit.number + offset, part, found, frames, hit.before(2), more)
            return

    def _exception(
        self,
        number: int,
        line: Line,
        found: re.Match[str],
        frames: list[re.Match[str]],
        before: Sequence[bytes],
        more: Sequence[bytes],
    ) -> Event:
        for above in before:  # mp.spawn repeats the traceback of a process, below a line that names it
            if line.origin == Origin() and (spawned := SPAWNED.search(decode(above))):
                line = replace(line, origin=Origin(local_rank=int(spawned["index"])))
        follow = " ".join(parse(decode(raw)).body for raw in more if b"Traceback" not in raw)
        own = [frame for frame in frames if "site-packages" not in frame["path"] and "/lib/python" not in frame["path"]]
        values = {"type": found["type"]}
        if own or frames:
            last = (own or frames)[-1]
            values["at"] = f"{last['path']}:{last['at']}"
        values["functions"] = " ".join(frame["function"] for frame in frames[-12:])
        parent = any(b"terminated with the following error" in raw for raw in more)
        if parent or _of_launcher(found["type"], line.body, frames):
            values["launcher"] = "1"
        text = line.body.strip()
        if frames and found["type"].rpartition(".")[2] in BROKEN:
            place = frames[-1]["path"]
            if "torch/serialization.py" in place:
                values["kind"] = "checkpoint_failed"
            elif "multiprocessing/connection.py" in place:  # the process at the other end has gone
                values["kind"] = CONSEQUENCE
        sign = sign_of(text) or (sign_of(follow) if "NCCL" in text or "worker" in text else None)
        if sign:
            values.update({"kind": sign[0].kind, **_named(sign[1])})
        else:
            values |= _of_full_disk(text, values["functions"])
        if values.get("kind") in LOST and STARTS.search(values["functions"]):
            values["start"] = "1"
        return self._event("exception", number, line, values)


STEP = re.compile(
    rb"(?i)\b(?:global_step|steps?|iter(?:ation)?s?|batch(?:es)?)\b[ \t:=\[#]{1,3}(\d{1,9})(?: ?/ ?(\d{1,9}))?"
)
MOST_STEPS = 64  # lines with a step that are looked at: that many ranks may write to one file
TIME_OF_DAY = re.compile(rb"\d\d:\d\d:\d\d[.,]?\d*")
RANK_BYTES = re.compile(rb"\[(?:rank|default)?\d+\]")


def last_steps(file: str, tail: bytes, lines: int) -> Iterator[Event]:
    """Yield the last step that each rank has printed, by the end of a log that has so many lines."""
    seen: set[Origin] = set()
    begins: set[tuple[bytes, ...]] = set()  # what stands before a step, without the time: of a rank it is alike
    looked = 0
    for offset, raw in enumerate(reversed(tail.split(b"\n"))):
        found = STEP.search(raw)
        if not found:
            continue
        looked += 1
        if looked > MOST_STEPS:
            return
        begin = (TIME_OF_DAY.sub(b"", raw[: found.start()]), *RANK_BYTES.findall(raw, found.start()))
        if begin in begins and b"\r" not in raw:
            continue
        begins.add(begin)
        line = parse(decode(raw))
        if line.origin not in seen:
            seen.add(line.origin)
            values = {"step": found[1].decode(), **({"total": found[2].decode()} if found[2] else {})}
            text = line.text.strip()[:LONGEST_TEXT]
            yield Event("step", file, lines + 1 - offset, text, line.origin, line.clock, line.collected, values)


def _named(found: re.Match[str]) -> dict[str, str]:
    """Return the ranks that a sign itself names."""
    named = [value for key, value in found.groupdict().items() if key in {"named", "on"} and value]
    return {"named": named[0]} if named else {}


def _of_launcher(kind: str, text: str, frames: Sequence[re.Match[str]]) -> bool:
    """Tell whether an exception is the launcher's, about one of its processes that has ended with a code."""
    if kind.rpartition(".")[2] not in {"ChildFailedError", "CalledProcessError"} or WHY_OF_COMMAND.search(text):
        return False
    return any(LAUNCHER.search(f["path"]) for f in frames[-3:]) or bool(LAUNCHERS_COMMAND.search(text))


def _of_full_disk(text: str, where: str) -> dict[str, str]:
    """Return the kind of an exception that says that a disk is full: by the functions, or the file, that it names."""
    if not FULL.search(text):
        return {}
    return (
        {"kind": "shm_exhausted"}
        if SHARES.search(where)
        else {"kind": "checkpoint_failed"}
        if SAVES.search(where)
        else {}
    )


def _elapsed(hit: Hit) -> int | None:
    """Return the longest time, in seconds, that progress bars on a line and the three before it show."""
    found = [bar for raw in (hit.raw, *hit.before(3)) for bar in BAR.finditer(decode(raw))]
    times = [(int(bar["h"] or 0) * 60 + int(bar["m"])) * 60 + int(bar["s"]) for bar in found]
    return max(times, default=None)


def _begun_above(hit: Hit, line: Line) -> Line:
    """Return a line with the origin of the one before it, where that is the first half of a wrapped message."""
    for raw in hit.before(1):
        above = parse(decode(raw))
        if above.origin.rank is not None and "ProcessGroupNCCL" in above.text:
            return replace(line, origin=above.origin, clock=above.clock)
    return line


def _joined(recogniser: Recogniser, hit: Hit) -> re.Match[str] | None:
    """Search a line that was wrapped, joined with those that follow, with and without a space."""
    parts = [decode(hit.raw), *(decode(raw) for raw in hit.after(4))]
    for glue in ("", " "):
        if found := recogniser.pattern.search(glue.join(part.strip() if glue else part for part in parts)):
            return found
    return None
