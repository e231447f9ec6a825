"""The rules on variables and on the scripts that start a job, and how a finding of one of them is made."""

from __future__ import annotations

from ..findings import Finding
from ..rules import Described, described, page_of

# Number, name, what it finds, why that matters.
_ROWS: tuple[tuple[int, str, str, str], ...] = (
    (150, "gloo-takes-no-pattern", "`^` or `=` in GLOO_SOCKET_IFNAME", "gloo takes exact names; the syntax is NCCL's"),
    (
        151,
        "node-rank-of-the-batch-script",
        ("$SLURM_NODEID or $SLURM_PROCID in the words of srun"),
        ("the batch script puts in its own 0, so every node is node 0"),
    ),
    (
        152,
        "master-address-of-each-node",
        ("$(hostname) as master address, evaluated on each node"),
        "each node waits at its own address for the others",
    ),
    (
        153,
        "launcher-in-every-task",
        ("a torchrun for several processes in each of several tasks of a node"),
        "there are more processes than GPUs, under ranks that are taken",
    ),
    (
        154,
        "more-processes-than-gpus",
        "--nproc-per-node above the GPUs of the job",
        ("the ranks without a GPU die, and the others wait for them"),
    ),
    (
        155,
        "localhost-on-several-nodes",
        "localhost as master address of several nodes",
        "on each node that is the node itself",
    ),
    (
        156,
        "loopback-on-several-nodes",
        "NCCL_SOCKET_IFNAME=lo with several nodes",
        "no other node can be reached through it",
    ),
    (
        157,
        "no-node-rank",
        ("torchrun for several nodes, without --node-rank and with the static rendezvous"),
        "every node takes itself for node 0",
    ),
    (
        158,
        "other-nodes-not-started",
        ("torchrun for several nodes in a batch script, without srun"),
        "a batch script runs on the first node alone",
    ),
    (
        161,
        "infinite-timeout",
        "NCCL_IB_TIMEOUT=0, or 32 and more",
        ("the adapter waits for ever for a peer that is gone"),
    ),
    (164, "value-ends-the-process", "a value that torch cannot read", "each process ends as it makes its group"),
    (
        165,
        "quotes-in-the-value",
        "quotes within the quotes of a value",
        ("they are a part of the value, which nothing knows"),
    ),
    (
        166,
        "standalone-on-several-nodes",
        "torchrun --standalone with --nnodes above 1",
        "the rendezvous is on localhost, where no other node can join",
    ),
    (
        250,
        "forced-protocol",
        "NCCL_PROTO with LL128",
        ("NVIDIA warns of corrupted data on platforms that do not support it"),
    ),
    (
        251,
        "each-node-trains-alone",
        ("srun of a torchrun for one node, on several nodes"),
        ("there are as many runs as nodes, each with the same ranks"),
    ),
    (
        350,
        "signal-without-trap",
        "--signal=B: in a script without a trap for it",
        "bash dies of the signal, and nothing is saved",
    ),
    (
        351,
        "trap-behind-foreground",
        "a trap, and training in the foreground",
        ("bash runs a trap only when the command in the foreground has ended"),
    ),
    (
        352,
        "signal-ends-torchrun",
        "--signal=USR1 to a step of torchrun",
        ("torchrun has no handler for it, and leaves its ranks behind as orphans"),
    ),
    (
        353,
        "unbounded-requeue",
        ("a job that requeues or submits itself, and counts nothing"),
        "a job that fails at once does so for ever",
    ),
    (354, "unbounded-retry", "`while true` around training, without a way out", "a wrong setting burns the allocation"),
    (
        355,
        "restart-on-a-used-store",
        ("--max-restarts without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ("the next attempt reads the addresses of the last one (10 of 12 restarts failed)"),
    ),
    (
        360,
        "torchrun-takes-the-signal",
        "SIGUSR1 in TORCHELASTIC_SIGNALS_TO_HANDLE",
        ("torchrun forwards it, and ends all ranks after 30 s"),
    ),
    (450, "no-peer-to-peer", "NCCL_P2P_DISABLE=1", "1.10 to 1.6 times the step time on NVLink"),
    (451, "no-shared-memory", "NCCL_SHM_DISABLE=1", "about 9 times the step time, together with NCCL_P2P_DISABLE=1"),
    (452, "no-infiniband", "NCCL_IB_DISABLE=1", "TCP between nodes, whatever adapters there are"),
    (453, "blocking-launches", "CUDA_LAUNCH_BLOCKING=1", "1.97 times the step time"),
    (
        454,
        "collectives-compared",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ("1.01 to 1.6 times the step time; DDP on gloo crashes with it in torch 2.13"),
    ),
    (455, "line-per-collective", "NCCL_DEBUG_SUBSYS=ALL or COLL at NCCL_DEBUG=INFO", "gigabytes of log a day"),
    (456, "no-nvlink-sharp", "NCCL_NVLS_ENABLE=0", "370 in place of 480 GB/s on 8 H100"),
    (
        457,
        "cpus-not-passed-to-srun",
        "srun without --cpus-per-task, which sbatch has",
        ("since Slurm 22.05 srun does not take it over, and a task gets one CPU"),
    ),
    (
        458,
        "more-workers-than-cpus",
        "more loader workers than the CPUs of a task",
        "the workers take turns, and all ranks wait",
    ),
    (459, "idle-gpus", "--nproc-per-node below the GPUs of the job", "the others do nothing"),
    (
        550,
        "directives-are-comments",
        "`# SBATCH` throughout a script",
        ("with a space it is a comment, and the job gets defaults"),
    ),
    (551, "directive-after-command", "#SBATCH or #PBS below the first command", "the scheduler has stopped reading"),
    (552, "variable-in-directive", "$NAME in an #SBATCH line", "sbatch puts in no variables"),
    (
        553,
        "unread-variable",
        ("a variable that nothing has ever read, as NCCL_TIMEOUT"),
        "it changes nothing, and seems to",
    ),
    (554, "no-longer-read", "a variable that nothing reads any more", "it changes nothing, and once did"),
    (
        555,
        "not-yet-read",
        ("a variable that the project's torch does not read yet"),
        "it changes nothing before the next update",
    ),
    (
        556,
        "overruled-variable",
        ("a pair of variables or options of which one makes the other pointless"),
        "only one of them counts",
    ),
    (557, "mistyped-variable", "a name that is one letter away from one that is read", "nothing reads it"),
    (558, "variable-of-rpc", "TP_SOCKET_IFNAME without torch.distributed.rpc", "only TensorPipe reads it"),
    (559, "space-around-equals", "`export NAME = value`", "for the shell these are three words"),
    (560, "set-too-late", "os.environ behind init_process_group", "torch has read the variable by then"),
    (650, "directive-is-a-comment", "a single `# SBATCH` among others", "it may be off on purpose, or not"),
    (651, "fixed-port", "a port that is written down", "a second job on the node finds it taken"),
    (652, "ephemeral-port", "a port from 32768 to 60999", "Linux gives these to any connection"),
    (653, "old-launcher", "torch.distributed.launch", "deprecated since torch 1.9"),
    (654, "abort-can-hang", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "ncclCommAbort can hang itself; 3 does without it"),
    (
        655,
        "renamed-variable",
        ("an old name, where every release that is allowed knows the new one"),
        "each rank warns, and the new one wins",
    ),
    (656, "debugging-left-on", "timing, desync or NaN checks of each collective", "they cost time in each step"),
    (657, "pinned-tuning", "NCCL_ALGO or NCCL_NTHREADS", "NCCL chooses better by size and topology"),
    (
        658,
        "no-flight-record",
        "the flight recorder or its dump switched off",
        ("after a hang nothing tells which rank did not come"),
    ),
    (659, "value-out-of-range", "NCCL_IB_RETRY_CNT above 7", "the field has three bits"),
    (
        660,
        "blocking-wait",
        "TORCH_NCCL_BLOCKING_WAIT=1",
        ("NCCL's watchdog is not started, and nothing limits a hang of DDP"),
    ),
    (661, "errors-only-logged", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 or 2", "a timeout is logged, and no process ends"),
    (662, "no-heartbeat-monitor", "TORCH_NCCL_ENABLE_MONITORING=0", "nothing ends a process whose watchdog is stuck"),
)

SCRIPTS: tuple[Described, ...] = tuple(described(*row) for row in _ROWS)
BY_ID = {one.rule.id: one.rule for one in SCRIPTS}


def finding(rule: str, where: tuple[str, int, int], message: str, fix: str) -> Finding:
    """Return a finding of `rule` at file, line and column."""
    file, line, column = where
    return Finding(file, line, column, rule, BY_ID[rule].severity, message, fix, page_of(rule))
