# ruff: noqa: E501 (lines of logs are as long as they are)
"""Logs written from the formats that torch, NCCL, gloo, torchelastic, Slurm and the kernel print, each with its answer."""

from __future__ import annotations

from dataclasses import dataclass

SKIPPED = "nonfinite_loss: 4 steps had a NaN or infinite gradient, more than train.max_nonfinite allows (2)"
STEP = " (phase train, step 10)\n"


@dataclass(frozen=True)
class Case:
    """A log; `kind` and `ranks` are right, `also` are other kinds that the log supports as well."""

    name: str
    kind: str
    ranks: tuple[int, ...] | None
    log: str
    also: tuple[str, ...] = ()


def watchdog(
    rank: int,
    seq: int,
    operation: str = "ALLREDUCE",
    size: int | str = 4096,
    *,
    torch: str = "2.7",
    out: int | None = None,
) -> str:
    """Return what a rank's watchdog prints at a timeout of 600 s, in the words of a release."""
    sizes = f", NumelIn={size}, NumelOut={out or size}"
    if torch == "1.9":
        work, prefix, number = "", "[E ProcessGroupNCCL.cpp:566]", ""
        sizes = ""
    elif torch == "2.1":
        work, prefix, number = "", "[E ProcessGroupNCCL.cpp:474]", f"SeqNum={seq}, "
    elif torch == "2.4":
        prefix, number = (
            f"[rank{rank}]:[E1206 18:44:12.71529{rank % 10}746 ProcessGroupNCCL.cpp:607]",
            f"SeqNum={seq}, ",
        )
        work = (
            f"{prefix} [PG 0 (default_pg) Rank {rank}] Exception (either an error or timeout) detected by watchdog at work:"
            f" {seq}, last enqueued NCCL work: {seq}, last completed NCCL work: {seq - 1}.\n"
        )
    else:
        prefix, number = (
            f"[rank{rank}]:[E1127 21:59:32.20928{rank % 10}984 ProcessGroupNCCL.cpp:689]",
            f"SeqNum={seq}, ",
        )
        work = (
            f"{prefix} [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: {seq}"
            f" PG status: last enqueued work: {seq}, last completed work: {seq - 1}\n"
        )
    return (
        f"{prefix} [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL({number}OpType={operation}{sizes},"
        f" Timeout(ms)=600000) ran for 60007{rank % 10} milliseconds before timing out.\n{work}"
    )


def behind(rank: int, enqueued: int, source: int) -> str:
    """Return what a rank prints that another one asked for a dump."""
    return (
        f"[rank{rank}]:[E1127 21:59:38.315478114 ProcessGroupNCCL.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received"
        f" a dump signal due to a collective timeout from  rank {source} and we will try our best to dump the debug info. Last"
        f" enqueued NCCL work: {enqueued}, last completed NCCL work: {enqueued}.This is most likely caused by incorrect usages\n"
    )


def raised(rank: int | None, error: str, frame: str = "train.py", prefix: str | None = None) -> str:
    """Return the traceback of a rank; without a rank, one without prefix."""
    p = prefix if prefix is not None else "" if rank is None else f"[rank{rank}]: "
    return (
        f'{p}Traceback (most recent call last):\n{p}  File "/home/user/proj/{frame}", line 41, in main\n{p}    step(batch)\n'
        f"{p}{error}\n"
    )


def table(*rows: tuple[int, int, str], host: str = "n1") -> str:
    """Return torchelastic's table; the last row is the one that it calls the root cause. A row: rank, exit code, time."""
    text = "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60 + "\nFailures:\n"
    for number, (rank, code, time) in enumerate(rows):
        if number == len(rows) - 1:
            text += (
                ("  <NO_OTHER_FAILURES>\n" if len(rows) == 1 else "")
                + "-" * 60
                + "\nRoot Cause (first observed failure):\n"
            )
        text += (
            f"[{number}]:\n  time      : 2026-11-27_{time}\n  host      : {host}\n  rank      : {rank} (local_rank: {rank % 8})\n"
            f"  exitcode  : {code} (pid: {1000 + rank})\n  error_file: <N/A>\n"
            f"  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
        )
    return text + "=" * 60 + "\n"


def lost(rank: int) -> str:
    """Return the traceback of a rank whose gloo peer has gone."""
    return raised(
        rank,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3",
    )


def steps(rank: int, last: int, total: int | None = None) -> str:
    """Return what a loop prints at its last two steps."""
    of = f"/{total}" if total else ""
    return "".join(f"[rank{rank}]: INFO step {step}{of} loss 2.1\n" for step in (last - 1, last))


def beat(rank: int, second: int) -> str:
    """Return a heartbeat of a generated project, as a rank's log has it."""
    return (
        f"2026-11-30 10:52:{second:02d},634 rank{rank} INFO heartbeat rank={rank} host=n{rank} phase=forward epoch=1"
        f" step={second} collectives=71 idle_s=0.0\n"
    )


def watchdog_ended(rank: int, why: str) -> str:
    """Return what a watchdog prints whose own process has an error of CUDA."""
    return (
        f"[rank{rank}]:[E1127 21:59:32.20928{rank % 10}984 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
        f" Process group watchdog thread terminated with exception: CUDA error: {why}\nCompile with `TORCH_USE_CUDA_DSA`\n"
    )


LEFT = "[rank2]:[W1127 21:40:05.371645547 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.\n"
T, L = "21:08:34", "21:08:40"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
BUS = "RuntimeError: DataLoader worker (pid 414) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
SLURM = "slurmstepd: error: *** JOB 5123 ON n1 CANCELLED AT 2026-11-27T22:00:00"
XID = "[12345.678] NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python"
ABORTED = "[rank0]: RuntimeError: NCCL communicator was aborted on rank 0."
UNIQUE = "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout"
WARN = "n1:4321:4400 [0] misc/socket.cc:484 NCCL WARN "
CLOSING = "W1127 21:59:32.389000 4326 torch/distributed/elastic/multiprocessing/api.py:900] Sending process {} closing signal {}\n"
ECC = "CUDA error: uncorrectable ECC error encountered"
AGENT = "INFO:torch.distributed.elastic.agent.server.api:[default] "
RESTART = f"{AGENT}Worker group FAILED. 1/3 attempts left; will restart worker group\n"
GROUP_DONE = f"{AGENT}worker group successfully finished. Waiting 300 seconds for other agents to finish.\n"
FLAT = (
    "2026-08-23T22:22:58.879Z [{}]: time : 2026-08-23_22:22:58 host : algo-2 rank : {} (local_rank: {}) exitcode : {} (pid: 189)"
    " error_file: <N/A> traceback : <N/A>\n"
)
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 42260 got signal: {}\n"
BARRIER = "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)\n"
READY = "n1:71:72 [0] NCCL INFO comm 0x55fb6f3ce680 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 41000 commId 0x7955 - Init COMPLETE\n"
FULL = "OSError: [Errno 28] No space left on device"
DOWNLOAD = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x.org', port=443): Max retries exceeded with url: /x ([Errno -3] Temporary failure in name resolution)"
CASES: tuple[Case, ...] = (
    Case("raise", "rank_exception", (1,), raised(1, "ValueError: bad label") + table((0, -15, T), (1, 1, T))),
    Case(
        "raise-then-timeouts", "rank_exception", (2,), raised(2, "KeyError: 'image'") + watchdog(0, 9) + watchdog(1, 9)
    ),
    Case(
        "raise-victims-first", "rank_exception", (3,), lost(2) + lost(0) + raised(3, "IndexError: list index") + lost(1)
    ),
    Case(
        "raise-srun",
        "rank_exception",
        (5,),
        raised(5, "ZeroDivisionError: division by zero", prefix="5: ")
        + "srun: error: n1: task 5: Exited with exit code 1\n",
    ),
    Case(
        "raise-default",
        "rank_exception",
        (1,),
        raised(1, "RuntimeError: boom", prefix="[default1]:") + table((0, -15, T), (1, 1, T)),
    ),
    Case(
        "raise-ansi",
        "rank_exception",
        (1,),
        "\x1b[31m" + raised(1, "RuntimeError: boom") + "\x1b[0m" + table((0, -15, T), (1, 1, T)),
    ),
    Case("raise-custom", "rank_exception", (0,), raised(0, "mypkg.errors.BadShard: shard 7") + lost(1)),
    Case("oom", "cuda_oom", (3,), raised(3, OOM) + watchdog(0, 100) + watchdog(1, 100) + watchdog(2, 100)),
    Case(
        "oom-old",
        "cuda_oom",
        (1,),
        raised(1, "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB", prefix="1: ")
        + "srun: error: n1: task 1: Exited with exit code 1\n",
    ),
    Case("oom-cloudwatch", "cuda_oom", (2,), raised(2, OOM, prefix="2026-02-18T10:48:25.681Z [rank2]: ") + lost(0)),
    Case(
        "host-oom",
        "host_oom_kill",
        None,
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.\n",
    ),
    Case(
        "host-oom-task",
        "host_oom_kill",
        (3,),
        "srun: error: n1: task 3: Out Of Memory\nslurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been OOM Killed.\n",
    ),
    Case(
        "host-oom-row",
        "host_oom_kill",
        (1,),
        "[9912.1] Out of memory: Killed process 1001 (python) total-vm:99999kB\n" + table((0, -15, T), (1, -9, T)),
    ),
    Case("killed", "rank_killed", (1,), table((0, -15, T), (1, -9, T))),
    Case("segfault", "rank_killed", (2,), lost(0) + lost(1) + table((0, 1, T), (1, 1, T), (2, -11, T))),
    Case("killed-agent-kill-later", "rank_killed", (2,), table((0, -9, "21:09:10"), (1, -15, T), (2, -11, T))),
    Case("killed-two-nodes", "rank_killed", (9,), table((9, -9, T), host="n2") + table((0, 1, L), host="n1")),
    Case(
        "worker-killed",
        "dataloader_worker_died",
        (1,),
        raised(1, "RuntimeError: DataLoader worker (pid 414) is killed by signal: Killed. "),
    ),
    Case(
        "worker-exited",
        "dataloader_worker_died",
        (0,),
        raised(0, "RuntimeError: DataLoader worker (pid(s) 414, 415) exited unexpectedly") + lost(1),
    ),
    Case(
        "loader-timeout",
        "dataloader_stalled",
        (1,),
        raised(1, "RuntimeError: DataLoader timed out after 60 seconds") + watchdog(0, 8),
    ),
    Case(
        "loader-timeout-0",
        "dataloader_stalled",
        (0,),
        raised(0, "RuntimeError: DataLoader timed out after 120 seconds") + lost(1),
    ),
    Case("shm", "shm_exhausted", (0,), raised(0, BUS)),
    Case(
        "shm-nccl",
        "shm_exhausted",
        None,
        WARN.replace("socket.cc:484", "shmutils.cc:72")
        + "Error: failed to extend /dev/shm/nccl-abc to 9637892 bytes, error: No space left on device (28)\n",
    ),
    Case("fds", "fd_exhausted", (1,), raised(1, "OSError: [Errno 24] Too many open files: '/data/7.npy'")),
    Case("ancdata", "fd_exhausted", (0,), raised(0, "RuntimeError: received 0 items of ancdata") + lost(1)),
    Case(
        "rank0-barrier", "rank0_work", (0,), watchdog(1, 77, size=1) + watchdog(2, 77, size=1) + watchdog(3, 77, size=1)
    ),
    Case(
        "rank0-barrier-behind", "rank0_work", (0,), watchdog(1, 77, size=1) + watchdog(2, 77, size=1) + behind(0, 76, 1)
    ),
    Case(
        "rank0-barrier-2.4",
        "rank0_work",
        (0,),
        "".join(watchdog(r, 12, size=1, torch="2.4") for r in (1, 2, 3, 4, 5, 6, 7)),
    ),
    Case("missing", "missing_rank", (2,), watchdog(0, 55) + watchdog(1, 55) + behind(2, 54, 0) + watchdog(3, 55)),
    Case(
        "missing-gather",
        "missing_rank",
        (3,),
        "".join(watchdog(r, 55, "_ALLGATHER_BASE", 100, out=400) for r in (0, 1, 2)),
    ),
    Case(
        "missing-monitored",
        "missing_rank",
        (4, 5),
        "[E ProcessGroupGloo.cpp:136] [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 2000000 ms\n",
    ),
    Case("missing-old", "missing_rank", (1,), "".join(watchdog(r, 9, torch="2.1") for r in (0, 2, 3))),
    Case("missing-left-0", "missing_rank", (1,), lost(2) + lost(0) + table((0, 1, T), (2, 1, T))),
    Case(
        "missing-wrapped",
        "missing_rank",
        (1,),
        (watchdog(0, 55) + watchdog(2, 55)).replace("before timing", "before\ntiming") + behind(1, 54, 0),
    ),
    Case("subset", "subset_collective", (0,), watchdog(0, 41) + behind(1, 60, 0) + behind(2, 60, 0) + behind(3, 60, 0)),
    Case(
        "subset-3", "subset_collective", (3,), watchdog(3, 41) + behind(0, 44, 3) + behind(1, 44, 3) + behind(2, 44, 3)
    ),
    Case("mismatch-op", "mismatched_collectives", None, watchdog(0, 6) + watchdog(1, 6, "BROADCAST")),
    Case(
        "mismatch-detail",
        "mismatched_collectives",
        None,
        raised(
            1,
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=21, OpType=BROADCAST, TensorShape=[1]), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE).",
        ),
    ),
    Case(
        "mismatch-odd",
        "mismatched_collectives",
        (2,),
        watchdog(0, 6) + watchdog(1, 6) + watchdog(2, 6, size=64) + watchdog(3, 6),
    ),
    Case(
        "uneven",
        "uneven_inputs",
        None,
        raised(0, "RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all ranks."),
    ),
    Case(
        "uneven-1",
        "uneven_inputs",
        None,
        raised(1, "RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        + raised(0, "RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all ranks."),
    ),
    Case(
        "divergent",
        "divergent_control_flow",
        (1,),
        raised(1, "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.")
        + lost(0),
    ),
    Case("divergent-numbers", "divergent_control_flow", None, watchdog(0, 30) + watchdog(1, 33, "BROADCAST", 7)),
    Case(
        "straggler",
        "straggler",
        (2,),
        watchdog(0, 30) + watchdog(1, 30) + watchdog(2, 30).replace("600072", "200000").replace("600000", "200000"),
    ),
    Case(
        "straggler-late",
        "straggler",
        (1,),
        watchdog(0, 30) + watchdog(1, 30).replace("21:59:32", "22:08:32") + watchdog(2, 30),
    ),
    Case(
        "net-connect",
        "network_unreachable",
        None,
        WARN + "Connect to 10.0.0.2<43210> failed : No route to host\n" + ABORTED + "\n",
    ),
    Case(
        "net-ib",
        "network_unreachable",
        None,
        WARN
        + "NET/IB : Got completion from peer 10.1.0.2<4791> with error 12, opcode 1, len 0, vendor err 129\n"
        + watchdog(0, 9)
        + watchdog(1, 9),
    ),
    Case("net-config", "network_misconfig", None, WARN + "Bootstrap : no socket interface found\n"),
    Case(
        "net-gai",
        "network_misconfig",
        None,
        "[W socket.cpp:464] [c10d] The server socket cannot be retrieved (gai error: -2 - Name or service not known)\n",
        also=("rendezvous_failed",),
    ),
    Case("p2p", "peer_to_peer", None, WARN + "Cuda failure 'peer access is not supported between these two devices'\n"),
    Case("p2p-first", "peer_to_peer", None, "World size: 2\n" + watchdog(0, 1) + watchdog(1, 1)),
    Case(
        "rdzv",
        "rendezvous_failed",
        None,
        raised(
            None,
            "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.",
        ),
    ),
    Case(
        "rdzv-client",
        "rendezvous_failed",
        None,
        raised(
            1, "TimeoutError: The client socket has timed out after 300s while trying to connect to (10.0.0.1, 29500)."
        ),
    ),
    Case("rdzv-id", "rendezvous_failed", None, raised(1, UNIQUE), also=("missing_rank",)),
    Case(
        "port",
        "port_in_use",
        None,
        raised(
            None,
            "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        ),
    ),
    Case(
        "port-eaddr",
        "port_in_use",
        (0,),
        raised(
            0,
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: true, code: -98, name: EADDRINUSE, message: address already in use",
        ),
    ),
    Case(
        "launcher",
        "launcher_misconfig",
        None,
        raised(
            None,
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
        ),
    ),
    Case(
        "launcher-init",
        "launcher_misconfig",
        (0,),
        raised(
            0,
            "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        ),
    ),
    Case(
        "device",
        "device_mapping",
        (0, 1),
        WARN + "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000\n",
    ),
    Case(
        "device-ordinal",
        "device_mapping",
        (3,),
        raised(3, "RuntimeError: CUDA error: invalid device ordinal") + table((0, -15, T), (3, 1, T)),
    ),
    Case(
        "ecc",
        "hardware_fault",
        (2,),
        raised(2, "RuntimeError: CUDA error: uncorrectable ECC error encountered") + watchdog(0, 9),
    ),
    Case("xid", "hardware_fault", None, XID.format(79) + "\n" + watchdog(0, 9) + watchdog(1, 9)),
    Case(
        "preempted",
        "preempted",
        None,
        "step 100\n"
        + SLURM
        + " DUE TO PREEMPTION ***\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n",
    ),
    Case("preempted-victims", "preempted", None, SLURM + " DUE TO PREEMPTION ***\n" + lost(0)),
    Case("time-limit", "time_limit", None, "step 100\n" + SLURM + " DUE TO TIME LIMIT ***\n"),
    Case(
        "time-limit-hang",
        "missing_rank",
        (2,),
        watchdog(0, 55) + watchdog(1, 55) + behind(2, 54, 0) + SLURM + " DUE TO TIME LIMIT ***\n",
    ),
    Case(
        "time-limit-2",
        "time_limit",
        None,
        SLURM
        + " DUE TO TIME LIMIT ***\n"
        + raised(1, "RuntimeError: [../gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:3"),
    ),
    Case("node", "node_failure", None, SLURM + " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"),
    Case(
        "node-victims",
        "node_failure",
        None,
        watchdog(0, 9) + watchdog(1, 9) + SLURM.replace("JOB", "STEP") + " DUE TO NODE FAILURE ***\n",
    ),
    Case(
        "store",
        "store_lost",
        None,
        "[rank1]:[W1127 21:21:05.371645547 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=52, addr=[n2]:32932, remote=[n1]:44741): Failed to recv, got 0 bytes.\n",
        also=("missing_rank",),
    ),
    Case(
        "store-2",
        "store_lost",
        None,
        "".join(
            f'[rank{r}]:[W1127 21:21:05.371645547 ProcessGroupNCCL.cpp:1826] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early)\n'
            for r in (0, 1)
        ),
    ),
    Case(
        "checkpoint",
        "checkpoint_failed",
        (0,),
        raised(0, "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ),
    Case(
        "checkpoint-full",
        "checkpoint_failed",
        (0,),
        raised(0, "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 4352 vs 4246"),
    ),
    Case("nan", "nonfinite_loss", (1,), raised(1, "FloatingPointError: Loss became infinite or NaN at iteration=12")),
    Case("nan-2", "nonfinite_loss", (0,), raised(0, "ValueError: loss is nan, stopping training")),
    Case(
        "heartbeat",
        "watchdog_false_positive",
        (1,),
        "[rank1]:[F1127 21:59:32.209283984 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n",
    ),
    Case(
        "heartbeat-old",
        "watchdog_false_positive",
        (0,),
        "[rank0]:[E ProcessGroupNCCL.cpp:1182] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=103\n",
    ),
    Case(
        "heartbeat-consequence",
        "missing_rank",
        (2,),
        watchdog(0, 55)
        + watchdog(1, 55)
        + behind(2, 54, 0)
        + "[rank2]:[F1127 22:07:32.209283984 ProcessGroupNCCL.cpp:1554] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress\n",
    ),
    Case(
        "benign",
        "benign",
        None,
        "step 100 loss 0.1\nTraining finished\n[rank0]:[W1127 21:09:26.593044720 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called before program exit\n",
    ),
    Case(
        "benign-2",
        "benign",
        None,
        "using GPU 0 to perform barrier as devices used by this process are currently unknown.\nTraining is done.\n",
    ),
    Case("unknown-victim", "unknown", None, watchdog(3, 55)),
    Case("unknown-victim-old", "unknown", None, watchdog(3, 55, torch="1.9")),
    Case("unknown-all", "unknown", None, "World size: 2\n" + watchdog(0, 55) + watchdog(1, 55)),
    Case("unknown-nothing", "unknown", None, "step 1\nstep 2\n"),
    Case(
        "rank0-bar",
        "rank0_work",
        (0,),
        "Running tokenizer on dataset:  47%|####  | 3169/6811 [10:02<11:27, 1578.58 examples/s]"
        + raised(None, UNIQUE).replace("Socket Timeout", "Socket Timeout\n"),
    ),
    Case(
        "rank0-first",
        "rank0_work",
        (0,),
        raised(None, UNIQUE).replace("in main\n", "in main_process_first\n"),
    ),
    Case("pbs-walltime", "time_limit", None, "step 9\n=>> PBS: job killed: walltime 86415 exceeded limit 86400\n"),
    Case("pbs-mem", "host_oom_kill", None, "=>> PBS: job killed: mem 33560316kb exceeded limit 33554432kb\n"),
    Case(
        "pbs-node",
        "node_failure",
        None,
        "=>> PBS: job killed: node 1 (n2) requested job terminate, 'EOF' (code 1099) - received SISTER_EOF attempting to communicate with sister MOM's\n",
    ),
    Case(
        "host-oom-tasks",
        "host_oom_kill",
        (1, 2, 3, 6),
        "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been OOM Killed.\nsrun: error: n1: tasks 1-3,6: Out Of Memory\n",
    ),
    Case(
        "rdzv-connect",
        "rendezvous_failed",
        None,
        raised(None, "RuntimeError: connect() timed out. Original timeout was 60000 ms."),
    ),
    Case(
        "gloo-mesh",
        "network_misconfig",
        None,
        raised(None, "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error"),
    ),
    Case(
        "ecc-old",
        "hardware_fault",
        (1,),
        "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n",
    ),
    Case(
        "heartbeat-wrapped",
        "watchdog_false_positive",
        (6,),
        "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] ProcessGroupNCCL'\ns watchdog got stuck for 480 seconds without making progress\n",
    ),
    Case(
        "uneven-finished",
        "uneven_inputs",
        (1,),
        "[rank1]: Training finished after 99 steps\n" + watchdog(0, 55) + watchdog(2, 55),
    ),
    Case(
        "sub-groups",
        "unknown",
        None,
        (watchdog(4, 57) + watchdog(6, 216))
        .replace("[PG ID 0 PG GUID 0(default_pg) Rank 4]", "[PG ID 11 PG GUID 112 Rank 0]")
        .replace("[PG ID 0 PG GUID 0(default_pg) Rank 6]", "[PG ID 11 PG GUID 119 Rank 1]")
        .replace("[Rank 4]", "[Rank 0]")
        .replace("[Rank 6]", "[Rank 1]"),
    ),
    Case(
        "heartbeat-several",
        "unknown",
        None,
        "".join(
            f"[rank{rank}]:[E419 10:53:25.421620797 ProcessGroupNCCL.cpp:1484] [PG ID 2 PG GUID 9 Rank {rank}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress\n"
            for rank in (2, 4)
        ),
    ),
    Case(
        "rank0-flat",
        "rank0_work",
        (0,),
        "Running tokenizer on dataset: 47%|### | 3169/6811 [30:11<38:27, 1578.58 examples/s]Traceback (most recent call last):\n"
        'File "/home/user/proj/train.py", line 94, in\nmain()\nFile "/home/user/proj/data.py", line 5, in main\nbarrier()\n'
        + UNIQUE
        + "\n",
    ),
    Case(
        "uneven-totals",
        "uneven_inputs",
        (1,),
        steps(0, 100, 120) + steps(1, 100, 100) + steps(2, 100, 120) + watchdog(0, 55) + watchdog(2, 55),
    ),
    Case("uneven-totals-gloo", "uneven_inputs", (0,), steps(0, 99, 100) + steps(1, 99, 104) + lost(1)),
    Case("uneven-left", "uneven_inputs", (2,), steps(2, 99) + LEFT + watchdog(0, 55) + watchdog(1, 55)),
    Case("left-all", "benign", None, "Training finished\n" + LEFT + LEFT.replace("rank2", "rank0")),
    Case(
        "totals-all-fail",
        "rank_exception",
        (1,),
        steps(0, 9, 100) + steps(1, 9, 104) + raised(1, "KeyError: 'x'") + lost(0),
    ),
    Case("totals-nobody-waits", "unknown", None, steps(0, 100, 100) + steps(1, 120, 120)),
    Case(
        "totals-not-through",
        "missing_rank",
        (1,),
        steps(0, 9, 104) + steps(1, 8, 100) + steps(2, 9, 104) + watchdog(0, 55) + watchdog(2, 55),
    ),
    Case(
        "heartbeat-stops",
        "rank_killed",
        (1,),
        "".join(beat(r, t) for t in range(0, 20, 2) for r in (0, 1, 2) if r != 1 or t < 6),
    ),
    Case(
        "heartbeat-goes-on",
        "unknown",
        None,
        "".join(beat(r, t) for t in range(0, 20, 2) for r in (0, 1, 2) if r != 1 or t < 16),
    ),
    Case(
        "heartbeat-ray",
        "node_failure",
        None,
        "(raylet) The node with node id: 8a3f and address: 10.0.0.7 and node name: 10.0.0.7 has been marked dead because the detector has missed too many heartbeats from it. This can happen when a raylet crashes unexpectedly\n",
    ),
    Case(
        "ray-actor",
        "rank_killed",
        None,
        raised(None, "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.")
        + "The actor is dead because its worker process has died. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.\n",
    ),
    Case(
        "ray-task-error",
        "rank_exception",
        None,
        raised(None, "ray.exceptions.RayTaskError(ValueError): ray::main_task() (pid=1042684, ip=10.0.0.1)"),
    ),
    Case(
        "deepspeed-killed",
        "rank_killed",
        None,
        "[2026-11-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', '--local_rank=7'] exits with return code = -9\n",
    ),
    Case(
        "deepspeed-1",
        "unknown",
        None,
        "[2026-11-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', '--local_rank=7'] exits with return code = 1\n",
    ),
    Case(
        "submitit-preempted",
        "preempted",
        None,
        "submitit WARNING (2026-11-12 04:18:45,881) - Caught signal SIGHUP on n1: this job is preempted.\nsubmitit INFO (2026-11-12 04:18:45,912) - Requeued job 606 (3 remaining timeouts)\n",
    ),
    Case(
        "submitit-time",
        "time_limit",
        None,
        "submitit WARNING (2026-11-12 04:18:45,881) - Caught signal SIGUSR2 on n1: this job is timed-out.\n",
    ),
    Case("requeued", "preempted", None, SLURM + " DUE TO JOB REQUEUE ***\n"),
    Case(
        "checked-in",
        "launcher_misconfig",
        None,
        "n1:18569:18835 [0] bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in\n",
    ),
    Case("no-rank", "launcher_misconfig", None, raised(None, "KeyError: 'LOCAL_RANK'")),
    Case("key-error", "rank_exception", (0,), raised(0, "KeyError: 'rank'") + lost(1)),
    Case(
        "store-hung-up",
        "unknown",
        None,
        "World size: 4\n" + raised(1, UNIQUE.replace("Socket Timeout", "Connection reset by peer")),
    ),
    Case(
        "project",
        "missing_rank",
        (1,),
        "missing_rank: rank 1 (n2) has not come to collective 19, in which the others wait; phase forward, step 5, idle for 7 s. Victims, which wait for it: rank 0 in backward at train.py:191\n"
        + table((0, 70, T), (1, 70, T)),
    ),
    Case(
        "project-table",
        "rank0_work",
        (0,),
        table((0, 70, T)).replace(
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
            "rank0_work: rank 0 (n1) made no progress in rank-0 work while the others waited; phase guard:sample, step 20",
        ),
    ),
    Case(
        "project-several",
        "straggler",
        (2, 11),
        "straggler: rank 2 (n1), rank 11 (n3.cluster) are slower than the others; phase forward, step 5\n",
    ),
    Case(
        "project-uneven",
        "uneven_inputs",
        None,
        "uneven_inputs: rank 0 (n1) raised ConfigError: the number of training samples differs between ranks (rank 0 (n1): 100, rank 1 (n1): 101) (phase init, step 0)\n",
    ),
    Case(
        "project-restarted",
        "cuda_oom",
        (3,),
        "rank_killed: rank 1 (n2) is gone: its process ended by SIGKILL; last heard of in phase forward, step 5\nstep 7 loss 2\ncuda_oom: rank 3 (n2) ran out of memory (phase forward, step 7)\n",
    ),
    Case(
        "project-nan-some",
        "nonfinite_loss",
        (1, 6),
        f"{SKIPPED}; so was the loss itself, on ranks 1, 6 of 8 only{STEP}",
    ),
    Case("project-nan-all", "nonfinite_loss", None, f"{SKIPPED}; so was the loss itself, on all ranks{STEP}"),
    Case("project-nan-gradient", "nonfinite_loss", None, f"{SKIPPED}; the loss itself was finite{STEP}"),
    Case("project-words", "benign", None, "the kinds are uneven_inputs: rank 0 has more\nTraining finished\n"),
    Case(
        "project-never-starts",
        "rendezvous_failed",
        None,
        "error: ranks [1] did not start within 8 s (1 of 2 came): look at the output of their nodes, or raise clocks.init_s\n",
    ),
    Case(
        "project-two-claim",
        "launcher_misconfig",
        None,
        "error: two processes claim rank 1: give each its own RANK\n",
    ),
    Case("killed-noticed-late", "rank_killed", (1,), lost(0) + table((0, 1, T), (2, -15, T), (1, -9, L))),
    Case("left-others-killed", "missing_rank", (1,), lost(0) + table((2, -15, T), (3, -15, T), (0, 1, T))),
    Case(
        "cuda-access-watchdog",
        "rank_exception",
        (2,),
        watchdog_ended(2, "an illegal memory access was encountered") + watchdog(0, 55) + watchdog(1, 55),
    ),
    Case(
        "cuda-assert-watchdog",
        "rank_exception",
        (1,),
        watchdog_ended(1, "device-side assert triggered") + table((0, -15, T), (1, -6, T)),
    ),
    Case(
        "cuda-access-after-timeout",
        "missing_rank",
        (2,),
        watchdog(0, 55)
        + watchdog(1, 55)
        + behind(2, 54, 0)
        + watchdog_ended(0, "an illegal memory access was encountered"),
    ),
    Case(
        "ray-worker-died",
        "rank_killed",
        None,
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, check the logs for the dead worker.\n"
        "(Worker pid=92, ip=10.0.0.7) [rank1]:[E1224 13:23:05.483840160 ProcessGroupNCCL.cpp:542] [Rank 1] raised the following async exception: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5\n",
    ),
    Case(
        "one-complains",
        "unknown",
        None,
        "[rank1]:[E1224 13:23:05.483840160 ProcessGroupNCCL.cpp:542] [Rank 1] raised the following async exception: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5\n",
    ),
    Case(
        "net-retries",
        "network_unreachable",
        None,
        raised(
            3,
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited, NCCL version 2.22.3",
        )
        + "[rank3]: Last error:\n[rank3]: socketPollConnect: exceeded retries (20000)\n",
    ),
    Case(
        "rdzv-closed", "unknown", None, raised(None, "torch.distributed.elastic.rendezvous.api.RendezvousClosedError")
    ),
    Case(
        "ignored-in-destructor",
        "rank_killed",
        (1,),
        "Exception ignored in: <function Loader.__del__ at 0x7f>\n"
        + raised(None, "AttributeError: 'NoneType' object has no attribute 'close'")
        + table((0, -15, T), (1, -9, T)),
    ),
    Case(
        "logging-error",
        "benign",
        None,
        "--- Logging error ---\n" + raised(None, "OSError: [Errno 116] Stale file handle") + "Training finished\n",
    ),
    Case(
        "resource-tracker",
        "unknown",
        None,
        raised(0, "KeyError: '/loky-77-abc'").replace(
            "/home/user/proj/train.py", "/usr/lib/python3.10/multiprocessing/resource_tracker.py"
        )
        + "[rank0]: step 9\n",
    ),
    Case("composer", "rank_killed", (3,), "ERROR:composer.cli.launcher:Rank 3 crashed with exit code -7.\n"),
    Case(
        "open-mpi",
        "rank_killed",
        (5,),
        "--------------------------------------------------------------------------\n"
        "mpirun noticed that process rank 5 with PID 4711 on node n3 exited on signal 9 (Killed).\n",
    ),
    Case(
        "intel-mpi",
        "rank_killed",
        (2,),
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 2 PID 4711 RUNNING AT n3\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n",
    ),
    Case("mpirun-tags", "rank_exception", (6,), raised(6, "ValueError: bad label", prefix="[1,6]<stderr>:") + lost(1)),
    Case("mpirun-tags-oom", "cuda_oom", (4,), raised(4, OOM, prefix="[1,4]<stderr>:")),
    Case("one-complains-other-spoke", "missing_rank", (0,), steps(0, 99) + steps(1, 99) + lost(1)),
    Case(
        "spawn-raised",
        "rank_exception",
        (1,),
        raised(None, "torch.multiprocessing.spawn.ProcessRaisedException: ", "launch.py")
        + "\n-- Process 1 terminated with the following error:\n"
        + raised(None, "ValueError: bad label"),
    ),
    Case(
        "spawn-raised-old",
        "cuda_oom",
        (2,),
        raised(None, "Exception: ", "launch.py")
        + "\n-- Process 2 terminated with the following error:\n"
        + raised(None, "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB"),
    ),
    Case(
        "spawn-killed",
        "rank_killed",
        (3,),
        raised(None, "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGKILL"),
    ),
    Case("spawn-killed-old", "rank_killed", (0,), raised(None, "Exception: process 0 terminated with signal SIGSEGV")),
    Case(
        "xid-lines",
        "hardware_fault",
        None,
        "[ 184.3] NVRM: The NVIDIA GPU 0000:b3:00.0\n         NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "         NVRM: fallen off the bus and is not responding to commands.\n",
    ),
    Case(
        "nccl-cuda-init",
        "rank_exception",
        (5,),
        raised(
            5,
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1197, unhandled cuda error, NCCL version 2.18.3",
        )
        + "[rank5]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank5]: Last error:\n[rank5]: Cuda failure 'initialization error'\n",
    ),
    Case("nccl-driver-gone", "unknown", None, WARN + "Cuda failure 'driver shutting down'\n"),
    Case(
        "launcher-sigterm",
        "preempted",
        None,
        "step 7\nW1127 21:59:32.388000 4326 torch/distributed/elastic/agent/server/api.py:723] Received 15 death signal, shutting down workers\n"
        + CLOSING.format(71, "SIGTERM"),
    ),
    Case(
        "launcher-sighup",
        "preempted",
        None,
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGHUP death signal, shutting down workers\n"
        + CLOSING.format(71, "SIGHUP")
        + raised(None, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 70 got signal: 1"),
    ),
    Case("launcher-signal-alone", "preempted", None, SIGNALLED.format(1)),
    Case("launcher-sigint", "unknown", None, "^C" + SIGNALLED.format(2)),
    Case("launcher-signal-later", "rank_exception", (1,), raised(1, "ValueError: bad label") + SIGNALLED.format(15)),
    Case(
        "launcher-signal-after-timeouts",
        "missing_rank",
        (2,),
        watchdog(0, 55) + watchdog(1, 55) + behind(2, 54, 0) + SIGNALLED.format(15),
    ),
    Case(
        "ranks-sigterm",
        "preempted",
        None,
        "[rank: 0] Received SIGTERM: 15\n[rank: 1] Received SIGTERM: 15\n[rank: 1] Bypassing SIGTERM: 15\n",
    ),
    Case(
        "ranks-sigterm-of-launcher",
        "rank_killed",
        (1,),
        "[rank: 0] Received SIGTERM: 15\n" + table((0, -15, T), (1, -9, T)),
    ),
    Case(
        "open-mpi-exit",
        "rank_exception",
        (5,),
        "mpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. The first process to do so was:\n\n  Process name: [[4711,1],5]\n  Exit code:    1\n",
    ),
    Case(
        "open-mpi-5-exit",
        "rank_killed",
        (12,),
        "prterun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. The first process to do so was:\n\n   Process name: [prterun-n1-4711@1,12]\n   Exit code:    139\n",
    ),
    Case(
        "horovod-exit",
        "rank_exception",
        (3,),
        "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. The first process to do so was:\nProcess name: 3\nExit code: 1\n",
    ),
    Case(
        "horovod-exit-told",
        "cuda_oom",
        (2,),
        raised(2, OOM, prefix="[1,2]<stderr>:") + "  Process name: [[4711,1],2]\n  Exit code:    1\n",
    ),
    Case(
        "horovod-stalled",
        "missing_rank",
        (2, 3),
        "[1,0]<stderr>:Stalled ops:\n[1,0]<stderr>:allreduce.layer1.weight [missing ranks: 2, 3]\n",
    ),
    Case(
        "horovod-stalled-then-fails",
        "rank_exception",
        (1,),
        "[1,0]<stderr>:allreduce.layer1.weight [missing ranks: 2, 3]\n"
        + raised(1, "ValueError: bad label", prefix="[1,1]<stderr>:"),
    ),
    Case(
        "lightning-child",
        "rank_exception",
        (1,),
        "[rank: 1] Child process with PID 2414 terminated with code 1. Forcefully terminating all other processes to avoid zombies\n",
    ),
    Case(
        "lightning-child-killed",
        "rank_killed",
        (3,),
        "[rank: 3] Child process with PID 2414 terminated with code -9. Forcefully terminating all other processes to avoid zombies\n",
    ),
    Case(
        "srun-exit",
        "rank_exception",
        (3,),
        "srun: error: n1: task 3: Exited with exit code 1\nsrun: Terminating StepId=12.0\nsrun: error: n1: tasks 0-2: Terminated\n",
    ),
    Case("srun-segfault", "rank_killed", (2,), lost(0) + "srun: error: n1: task 2: Segmentation fault (core dumped)\n"),
    Case(
        "srun-exit-of-torchrun",
        "rank_killed",
        (9,),
        table((9, -9, T), host="n2") + "srun: error: n2: task 1: Exited with exit code 1\n",
    ),
    Case("slurm-memory", "host_oom_kill", None, "slurmstepd: error: Exceeded job memory limit at some point.\n"),
    Case(
        "ray-memory",
        "host_oom_kill",
        None,
        raised(None, "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    ),
    Case(
        "ray-gpu-memory",
        "cuda_oom",
        None,
        raised(None, "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Actor.step() (pid=7, ip=10.0.0.1)"),
    ),
    Case("ray-node-died", "node_failure", None, raised(None, "ray.exceptions.NodeDiedError: The task's node died.")),
    Case(
        "pod-preempted",
        "preempted",
        None,
        "  Warning  Preempted  2m  default-scheduler  Preempted by default/other on node n1\n",
    ),
    Case(
        "pod-evicted",
        "host_oom_kill",
        None,
        "Message: The node was low on resource: memory. Container train was using 100Gi, which exceeds its request of 10Gi.\n",
    ),
    Case(
        "pod-evicted-disk",
        "preempted",
        None,
        "Message: The node was low on resource: ephemeral-storage. Container train was using 100Gi.\n",
    ),
    Case(
        "pod-deadline", "time_limit", None, "  Warning  DeadlineExceeded  2m  job-controller  Job was active longer\n"
    ),
    Case(
        "pod-deadline-later",
        "rank_exception",
        (0,),
        raised(0, "ValueError: bad label") + "  Warning  DeadlineExceeded  2m  job-controller  Job was active longer\n",
    ),
    Case(
        "shell-segfault",
        "rank_killed",
        None,
        "run.sh: line 12: 4711 Segmentation fault      (core dumped) python t.py\n",
    ),
    Case("shell-killed", "rank_killed", None, "step 5 loss 2\nKilled\n"),
    Case("python-segfault", "rank_killed", (1,), "[rank1]: Fatal Python error: Segmentation fault\n"),
    Case(
        "mpi-segfault",
        "rank_killed",
        None,
        "[n1:4711] *** Process received signal ***\n[n1:4711] Signal: Segmentation fault (11)\n[n1:4711] Signal code: Address not mapped (1)\n",
    ),
    Case("glibc-abort", "rank_killed", None, "free(): double free detected in tcache 2\nAborted (core dumped)\n"),
    Case(
        "shell-abort",
        "rank_killed",
        None,
        "step 5 loss 2\nrun.sh: line 12: 4711 Aborted     (core dumped) python t.py\n",
    ),
    Case(
        "segfault-after-exception",
        "rank_exception",
        None,
        raised(None, "ValueError: bad label") + "Segmentation fault (core dumped)\n",
    ),
    Case(
        "killed-after-timeouts",
        "missing_rank",
        (2,),
        watchdog(0, 55) + watchdog(1, 55) + behind(2, 54, 0) + "Killed\n",
    ),
    Case(
        "aborted-by-watchdog",
        "unknown",
        None,
        "World size: 2\n"
        + watchdog(0, 55)
        + watchdog(1, 55)
        + "run.sh: line 12: 4711 Aborted     (core dumped) python t.py\n",
    ),
    Case(
        "launch-py-killed",
        "rank_killed",
        None,
        raised(
            None,
            "subprocess.CalledProcessError: Command '['/usr/bin/python', '-u', 't.py', '--local_rank=7']' died with <Signals.SIGKILL: 9>.",
        ),
    ),
    Case(
        "launch-py-exit",
        "unknown",
        None,
        raised(
            None,
            "subprocess.CalledProcessError: Command '['/usr/bin/python', '-u', 't.py', '--local_rank=7']' returned non-zero exit status 1.",
        ),
    ),
    Case(
        "extension-not-built",
        "rank_exception",
        (0,),
        raised(0, "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.")
        + lost(1),
    ),
    Case(
        "vllm-rank",
        "rank_exception",
        (1,),
        raised(
            None,
            "KeyError: 'layers.0.mlp'",
            prefix="(VllmWorker rank=1 pid=2107) ERROR 05-05 10:10:10 [multiproc_executor.py:522] ",
        )
        + "ERROR 05-05 10:10:12 [core.py:396] RuntimeError: Engine core initialization failed. See root cause above.\n",
    ),
    Case(
        "vllm-engine",
        "unknown",
        None,
        raised(None, "RuntimeError: Engine core initialization failed. See root cause above."),
    ),
    Case(
        "vllm-died",
        "rank_killed",
        (1,),
        "ERROR 05-05 10:10:10 [x.py:1] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n",
    ),
    Case(
        "store-barrier",
        "rendezvous_failed",
        None,
        raised(
            0,
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)",
        ),
    ),
    Case("store-barrier-waits", "rendezvous_failed", None, BARRIER * 3),
    Case("store-barrier-passed", "unknown", None, BARRIER + "step 1 loss 2\nstep 2 loss 2\n"),
    Case(
        "store-wait",
        "unknown",
        None,
        raised(1, "torch.distributed.DistStoreError: wait timeout after 1800000ms, keys: /x"),
    ),
    Case(
        "disk-full-save",
        "checkpoint_failed",
        None,
        raised(None, FULL, frame="checkpoint.py").replace("in main", "in save"),
    ),
    Case(
        "disk-quota",
        "checkpoint_failed",
        (2,),
        raised(2, "OSError: [Errno 122] Disk quota exceeded").replace("in main", "in save_model"),
    ),
    Case("disk-full-elsewhere", "rank_exception", (2,), raised(2, FULL) + lost(0)),
    Case("disk-full-semaphore", "shm_exhausted", None, raised(None, FULL).replace("in main", "in Lock")),
    Case(
        "safetensors-cut",
        "checkpoint_failed",
        None,
        raised(None, "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    ),
    Case("download-names", "rank_exception", (0,), raised(0, DOWNLOAD) + lost(1)),
    Case("download-logged", "benign", None, f"WARNING retrying: {DOWNLOAD}\nTraining finished\n"),
    Case("oom-nccl", "cuda_oom", None, WARN + "Cuda failure 2 'out of memory'\n"),
    Case(
        "oom-npu",
        "cuda_oom",
        (1,),
        raised(1, "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 1; 60.97 GiB total capacity)"),
    ),
    Case(
        "nan-megatron",
        "nonfinite_loss",
        (11,),
        raised(
            None,
            "AssertionError: Rank 11: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 3",
        ),
    ),
    Case(
        "nan-rerun",
        "nonfinite_loss",
        (3,),
        "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 3 at iteration #3 invocation #2\n",
    ),
    Case(
        "loss-scale",
        "nonfinite_loss",
        None,
        raised(None, "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."),
    ),
    Case(
        "zero3-disagree",
        "mismatched_collectives",
        None,
        raised(1, "RuntimeError: disagreement between rank0 and rank1: rank0: [1, 2], rank1: [3, 4]"),
    ),
    Case(
        "gloo-sizes",
        "mismatched_collectives",
        None,
        raised(
            1,
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:510] op.preamble.length <= op.nbytes. 8 vs 4",
        ),
    ),
    Case(
        "net-family",
        "network_misconfig",
        None,
        "ncclInternalError: Internal check failed.\nLast error:\nncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)\n",
    ),
    Case(
        "net-memlock", "network_misconfig", None, WARN + "Call to ibv_reg_mr failed with error Cannot allocate memory\n"
    ),
    Case(
        "net-ofi",
        "network_unreachable",
        None,
        WARN + "NET/OFI Request 0x7f completed with error. RC: 107. Error: unreachable remote\n",
    ),
    Case("xid-caused", "hardware_fault", None, XID.format("45") + ", Ch 00000001 caused by previous Xid 149\n"),
    Case("xid-cleanup", "unknown", None, XID.format("45") + ", Ch 00000001\n"),
    Case(
        "nvswitch",
        "hardware_fault",
        None,
        "[  12.3] nvidia-nvswitch3: SXid (PCI:0000:c3:00.0): 20034, Fatal, Link 27 LTSSM Fault Up\n",
    ),
    Case(
        "nccl-says-nothing",
        "unknown",
        None,
        raised(
            None,
            "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, invalid usage, NCCL version 2.7.8",
        ),
    ),
    Case(
        "nccl-failed-there",
        "rank_exception",
        (1,),
        raised(1, "RuntimeError: NCCL error in: x.cpp:784, unhandled cuda error, NCCL version 2.7.8")
        + lost(0)
        + lost(2),
    ),
    Case(
        "cuda-assert-kernel",
        "rank_exception",
        (3,),
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss: block: [0,0,0], thread: [4,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
        + raised(3, "RuntimeError: CUDA error: device-side assert triggered"),
    ),
    Case(
        "watchdog-throws",
        "rank_exception",
        (2,),
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n",
    ),
    Case(
        "worker-segfault",
        "dataloader_worker_died",
        None,
        "ERROR: Unexpected segmentation fault encountered in worker.\n",
    ),
    Case(
        "pdsh",
        "rank_exception",
        None,
        "".join(
            f"gpu0{host}: {line}\n"
            for pair in zip(raised(None, "KeyError: 'x'").splitlines(), lost(None).splitlines(), strict=True)
            for host, line in enumerate(pair, 1)
        ),
    ),
    Case("pdsh-address", "cuda_oom", None, raised(None, OOM, prefix="10.0.0.7: ")),
    Case(
        "determined",
        "rank_exception",
        (3,),
        raised(None, "KeyError: 'x'", prefix="[2023-05-06T03:36:10Z] c5a9683c [rank=3] || "),
    ),
    Case(
        "quoted",
        "missing_rank",
        (2,),
        "".join(f"> {line}\n" for line in (watchdog(0, 55) + watchdog(1, 55) + behind(2, 54, 0)).splitlines()),
    ),
    Case(
        "error-file",
        "rank_exception",
        None,
        '{"message": {"message": "ValueError: bad label", "extraInfo": {"py_callstack": "Traceback (most recent call last):\\n  File"}}}\n',
    ),
    Case(
        "error-file-oom",
        "cuda_oom",
        None,
        '{"message": {"message": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "extraInfo": {}}}\n',
    ),
    Case(
        "logged",
        "rank_exception",
        None,
        "2024-05-05 10:10:10 | ERROR | train.py:31 | Training failed: ValueError: bad label\n",
    ),
    Case(
        "logged-then-done",
        "benign",
        None,
        "2024-05-05 10:10:10 | ERROR | upload failed: ValueError: bad label\nTraining finished\n",
    ),
    Case(
        "source-in-traceback",
        "rank_exception",
        None,
        raised(None, "KeyError: 'x'").replace("step(batch)", 'raise RuntimeError("CUDA out of memory")'),
    ),
    Case(
        "store-hung-up-sending",
        "store_lost",
        None,
        '[rank1]:[W901 21:19:08.277343715 ProcessGroupNCCL.cpp:1783] [PG ID 0 PG GUID 0(default_pg) Rank 1] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe\n[rank3]:[W901 21:19:09.254317555 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=51, addr=[n1]:40714, remote=[n1]:29500): Broken pipe\n',
    ),
    Case(
        "ray-worker-exits",
        "rank_killed",
        None,
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\n",
    ),
    Case(
        "ray-worker-crashed",
        "rank_killed",
        None,
        raised(None, "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task."),
    ),
    Case("ray-actor-node", "node_failure", None, "The actor is dead because its node has died. Node Id: 8a3f\n"),
    Case(
        "composer-new",
        "rank_killed",
        (0,),
        "ERROR:composer.cli.launcher:Global rank 0 (PID 208865) exited with code -11\n",
    ),
    Case(
        "composer-new-1",
        "rank_exception",
        (3,),
        "ERROR:composer.cli.launcher:Global rank 3 (PID 208865) exited with code 1\n",
    ),
    Case("spawn-exit", "rank_exception", (2,), "Exception: process 2 terminated with exit code 1\n"),
    Case("spawn-exit-told", "cuda_oom", (2,), "Exception: process 2 terminated with exit code 1\n" + raised(2, OOM)),
    Case(
        "spawn-cut",
        "rank_exception",
        (1,),
        raised(None, "Exception: ", "launch.py")
        + "\n-- Process 1 terminated with the following error:\n"
        + raised(None, "").rstrip(),
    ),
    Case(
        "determined-cli",
        "cuda_oom",
        (2,),
        "[] [rank=2] RuntimeError: CUDA out of memory. Tried to allocate 824.00 MiB (GPU 0)\n",
    ),
    Case(
        "logger-then-rank",
        "rank_exception",
        (3,),
        raised(3, "KeyError: 'x'", prefix="[2026-11-27 21:59:32 ERROR] [rank: 3] ") + lost(1),
    ),
    Case(
        "oom-library",
        "cuda_oom",
        None,
        "RuntimeError: TensorStorage tensor.h 168\ncuda failed with error 2 out of memory. use CUDA_LAUNCH_BLOCKING=1\n",
    ),
    Case("oom-driver", "cuda_oom", (1,), raised(1, "RuntimeError: CUDA driver error: out of memory")),
    Case(
        "unused-parameters",
        "divergent_control_flow",
        (3,),
        "Parameters which did not receive grad for rank 3: head.bias, head.weight\n",
    ),
    Case(
        "unused-parameters-told",
        "divergent_control_flow",
        (2,),
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.\nParameter indices which did not receive grad for rank 2: 362 363\n",
    ),
    Case(
        "gloo-gave-up",
        "unknown",
        None,
        raised(
            1,
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Application timeout caused pair closure",
        ),
    ),
    Case("docker-137", "rank_killed", None, "trainer-1 exited with code 137\n"),
    Case(
        "pod-139",
        "rank_killed",
        None,
        "    State:          Terminated\n      Reason:       Error\n      Exit Code:    139\n",
    ),
    Case(
        "pod-143",
        "unknown",
        None,
        "    State:          Terminated\n      Reason:       Error\n      Exit Code:    143\n",
    ),
    Case(
        "pod-137-oom",
        "host_oom_kill",
        None,
        "    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
    ),
    Case("pod-137-later", "rank_exception", (0,), raised(0, "KeyError: 'x'") + "trainer-1 exited with code 137\n"),
    Case(
        "sacct-memory", "host_oom_kill", None, "Slurm Job_id=512 Name=train Failed, Run time 00:12:33, OUT_OF_MEMORY\n"
    ),
    Case("scontrol-node", "node_failure", None, "   JobState=NODE_FAIL Reason=NodeDown Dependency=(null)\n"),
    Case("scontrol-time", "time_limit", None, "   JobState=TIMEOUT Reason=TimeLimit Dependency=(null)\n"),
    Case("scontrol-runs", "unknown", None, "   JobState=RUNNING Reason=None Dependency=(null)\n   TIMEOUT_ACTION=x\n"),
    Case(
        "sagemaker",
        "rank_exception",
        None,
        'AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage "ValueError: bad label"\n',
    ),
    Case(
        "launch-py-line",
        "unknown",
        None,
        "subprocess.CalledProcessError: Command '['/usr/bin/python', '-u', 't.py', '--local_rank=3']' returned non-zero exit status 1.\n",
    ),
    Case(
        "record",
        "rank_exception",
        (1,),
        table((0, -15, T), (1, 1, T)).replace(
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
            'Traceback (most recent call last):\n    File "t.py", line 3, in main\n      step()\n  EOFError: Ran out of input',
        ),
    ),
    Case(
        "record-cut",
        "rank_exception",
        None,
        "      return _unpickler(io.BytesIO(buf)).load()\n  EOFError: Ran out of input\n",
    ),
    Case(
        "checkpoint-empty",
        "checkpoint_failed",
        None,
        raised(None, "EOFError: Ran out of input").replace(
            "/home/user/proj/train.py", "/x/site-packages/torch/serialization.py"
        ),
    ),
    Case(
        "checkpoint-short",
        "checkpoint_failed",
        None,
        raised(None, "RuntimeError: unexpected EOF, expected 4859355 more bytes. The file might be corrupted."),
    ),
    Case("pickle-empty", "rank_exception", (0,), raised(0, "EOFError: Ran out of input") + lost(1)),
    Case(
        "ofi-provider",
        "network_misconfig",
        None,
        "10.0.0.7: WARN: Function: find_ofi_provider Line: 543: NET/OFI Couldn't find any optimal provider\n",
    ),
    Case("ofi-info", "unknown", None, "n1:71:16 [7] NCCL INFO NET/OFI No NIC info for dev 0\n"),
    Case("store-barrier-many", "rendezvous_failed", None, BARRIER.replace("worker_count=3", "worker_count=8") * 2),
    Case(
        "store-lost-at-start",
        "rendezvous_failed",
        None,
        raised(None, "RuntimeError: Connection reset by peer").replace("in main", "in init_process_group"),
    ),
    Case(
        "store-lost-at-start-told",
        "rank_exception",
        (0,),
        raised(1, "RuntimeError: Connection reset by peer").replace("in main", "in init_process_group")
        + raised(0, "KeyError: 'x'"),
    ),
    Case(
        "lightning-devices",
        "device_mapping",
        None,
        "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1]\n But your machine only has: [0]\n",
    ),
    Case(
        "glibc-old",
        "rank_killed",
        None,
        "*** Error in `python': free(): invalid pointer: 0x00007fcbb6ab6d80 ***\n======= Backtrace: =========\n",
    ),
    Case(
        "same-rank",
        "launcher_misconfig",
        None,
        raised(None, "RuntimeError: more than one node have assigned same rank at General.cpp:17"),
    ),
    Case(
        "no-script",
        "launcher_misconfig",
        None,
        "/usr/bin/python3: can't open file '/home/user/t.py': [Errno 2] No such file or directory\n",
    ),
    Case("usage", "launcher_misconfig", None, "train.py: error: the following arguments are required: --data\n"),
    Case(
        "xid-program",
        "rank_exception",
        None,
        XID.format(31) + ", Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7fd7_90743000\n",
    ),
    Case(
        "gpu-fault-amd",
        "rank_exception",
        None,
        "Memory access fault by GPU node-1 (Agent handle: 0x5581) on address 0x7f00. Reason: Page not present or supervisor privilege.\n",
    ),
    Case("first-collective-cut", "unknown", None, READY + watchdog(0, 1) + watchdog(1, 1) + watchdog(2, 1)),
    Case("later-collective", "missing_rank", (3,), READY + watchdog(0, 9) + watchdog(1, 9) + watchdog(2, 9)),
    Case(
        "error-file-lines",
        "rank_exception",
        None,
        'ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{\n  "message": {\n    "message": "TypeError: bad arguments",\n    "extraInfo": {\n',
    ),
    Case("net-qp", "network_misconfig", None, WARN + "Call to ibv_create_qp failed\n"),
    Case(
        "net-device",
        "network_misconfig",
        None,
        WARN + "Call to ibv_modify_qp failed with error No such device errno 19\n",
    ),
    Case(
        "net-qp-timeout",
        "network_unreachable",
        None,
        WARN + "Call to ibv_modify_qp failed with error Connection timed out errno 110\n",
    ),
    Case(
        "net-ece",
        "unknown",
        None,
        "n1:71:16 [0] NCCL INFO Call to ibv_set_ece failed with error Operation not supported errno 95\n",
    ),
    Case(
        "net-loopback",
        "network_misconfig",
        None,
        raised(None, "RuntimeError: [../gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:12345: Connection refused"),
    ),
    Case(
        "net-recv-timeout",
        "network_unreachable",
        None,
        WARN + "Call to recv from 10.0.0.2<43210> failed : Connection timed out\n",
    ),
    Case(
        "net-recv-reset",
        "unknown",
        None,
        WARN + "Call to recv from 10.0.0.2<43210> failed : Connection reset by peer\n",
    ),
    Case("rdzv-connect-old", "rendezvous_failed", None, raised(None, "RuntimeError: connect() timed out.")),
    Case(
        "nccl-of-data-parallel",
        "unknown",
        None,
        raised(None, "RuntimeError: NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ),
    Case(
        "nccl-old-lost",
        "missing_rank",
        (2,),
        "World size: 3\n"
        + "".join(
            raised(rank, "RuntimeError: NCCL error in: x.cpp:784, unhandled system error, NCCL version 2.7.8")
            for rank in (0, 1)
        ),
    ),
    Case(
        "oom-old-check",
        "cuda_oom",
        None,
        "THCudaCheck FAIL file=/pytorch/aten/src/THC/THCGeneral.cpp line=50 error=2 : out of memory\n",
    ),
    Case(
        "device-old-check",
        "device_mapping",
        None,
        "THCudaCheck FAIL file=/pytorch/torch/csrc/cuda/Module.cpp line=59 error=101 : invalid device ordinal\n",
    ),
    Case(
        "mpi-abort",
        "rank_exception",
        (2,),
        "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n",
    ),
    Case(
        "mpi-slots",
        "launcher_misconfig",
        None,
        "There are not enough slots available in the system to satisfy the 16\nslots that were requested by the application:\n",
    ),
    Case(
        "mpi-node",
        "node_failure",
        None,
        "ORTE has lost communication with a remote daemon.\n\n  HNP daemon   : [[4711,0],0] on node n1\n  Remote daemon: [[4711,0],1] on node n2\n",
    ),
    Case("srun-exit-137", "rank_killed", (3,), "srun: error: n1: task 3: Exited with exit code 137\n"),
    Case(
        "cgroup-oom",
        "host_oom_kill",
        None,
        "[9912.1] Memory cgroup out of memory: Killed process 1001 (python) total-vm:99999kB\n",
    ),
    Case(
        "oomd",
        "host_oom_kill",
        None,
        "systemd-oomd[812]: Killed /user.slice/train.scope due to memory pressure for /user.slice being 81.60% > 50.00%\n",
    ),
    Case(
        "nccl-truncated",
        "mismatched_collectives",
        None,
        "n1:71:16 [0] transport/net_socket.cc:473 NCCL WARN NET/Socket : peer 10.0.0.2<43210> message truncated, receiving 1048576 bytes instead of 65536.\n",
    ),
    Case(
        "connection-of-workers",
        "rank_killed",
        (1,),
        raised(None, "EOFError").replace(
            "/home/user/proj/train.py", "/usr/lib/python3.10/multiprocessing/connection.py"
        )
        + table((0, -15, T), (1, -9, T)),
    ),
    Case(
        "ray-node-below",
        "node_failure",
        None,
        raised(None, "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.")
        + "\tclass_name: RayTrainWorker\n\tpid: 6420\nThe actor is dead because its node has died. Node Id: 677df2a9\n",
    ),
    Case(
        "ray-actor-alone",
        "rank_killed",
        None,
        raised(None, "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task."),
    ),
    Case("ray-owner-node", "node_failure", None, "Worker exit detail: Owner's node has crashed.\n"),
    Case(
        "nvlink-access",
        "hardware_fault",
        (5,),
        raised(5, "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
    ),
    Case(
        "hccl-vague",
        "unknown",
        None,
        raised(1, "RuntimeError: InnerRunOpApi:x.cpp:281 OPS function error: HcclAllreduce, error code is 6"),
    ),
    Case(
        "one-node-killed",
        "rank_killed",
        (1,),
        "E torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: -9) local_rank: 1 (pid: 28773) of binary:"
        " /usr/bin/python\n  group_world_size=1\n",
    ),
    Case(
        "of-two-nodes-killed",
        "rank_killed",
        None,
        "E torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: -9) local_rank: 1 (pid: 28773) of binary:"
        " /usr/bin/python\n  group_world_size=2\n",
    ),
    Case("two-of-an-unknown-number", "unknown", None, watchdog(2, 9) + watchdog(3, 9)),
    Case(
        "usage-of-launcher", "launcher_misconfig", None, "usage: accelerate <command> [<args>] launch [-h] [--quiet]\n"
    ),
    Case("usage-of-a-tool", "unknown", None, "usage: rsync [-a] SRC DEST\n"),
    Case(
        "deepspeed-ssh",
        "launcher_misconfig",
        None,
        raised(
            None,
            "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no n1 hostname' returned non-zero"
            " exit status 255.",
            "deepspeed/launcher/runner.py",
        ),
    ),
    Case(
        "ddp-nothing-arrived",
        "missing_rank",
        (1,),
        raised(
            0,
            "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 0 params.",
        ),
    ),
    Case(
        "collectives-differ",
        "mismatched_collectives",
        None,
        "[rank1]: RuntimeError: Collectives differ in the following aspects:\n[rank1]: \tTensor Tensor shapes: [9] vs [512]\n",
    ),
    Case(
        "rank-parameter",
        "launcher_misconfig",
        None,
        raised(
            None, "ValueError: Error initializing torch.distributed using env:// rendezvous: rank parameter missing"
        ),
    ),
    Case("parameter-of-a-program", "rank_exception", None, raised(None, "ValueError: rank parameter missing")),
    Case("row-of-a-table-alone", "rank_killed", None, "> traceback : Signal 9 (SIGKILL) received by PID 492347\n"),
    Case("row-without-pid", "rank_exception", (1,), table((1, 1, T)).replace(" (pid: 1001)", "")),
    Case(
        "quoted-in-the-data",
        "rank_exception",
        (1,),
        f'INFO sample[3]: {{"question": "[rank7]: {OOM}"}}\n' + raised(1, "ValueError: bad label 7") + ABORTED + "\n",
    ),
    Case(
        "quoted-in-settings",
        "unknown",
        None,
        "settings:\n  on_error: 'CUDA out of memory'\n  retry: \"Address already in use\"\n" + steps(0, 10),
    ),
    Case("quoted-by-a-collector", "cuda_oom", (5,), f'{{"log":"[rank5]: {OOM}\\n","stream":"stderr"}}\n'),
    Case("quoted-by-a-message", "hardware_fault", None, f'level=error msg="{ECC}" attempt=1\n'),
    Case(
        "quoted-as-a-value",
        "cuda_oom",
        None,
        'failed: OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")\n',
    ),
    Case(
        "quoted-by-an-assertion",
        "rank_exception",
        (1,),
        raised(1, "AssertionError: expected no 'Address already in use' in the log"),
    ),
    Case(
        "supposed",
        "unknown",
        None,
        "UserWarning: raise the limit if you see Too many open files.\nTip: exit code 137 means that a process was killed\n",
    ),
    Case(
        "counters-at-zero",
        "unknown",
        None,
        "memory.events: max 0 oom 0 oom_kill 0\noom_kill_disable 0\nVolatile uncorrectable ECC error count: 0\n",
    ),
    Case(
        "survived",
        "benign",
        None,
        f"WARNING batch 64 failed\n{raised(None, OOM)}WARNING Address already in use, trying 29501\n"
        + "".join(f"step {step}/9 loss 2.1\n" for step in range(1, 10))
        + "Training finished\n",
    ),
    Case(  # rank 0 says that it is done, rank 3 never does
        "survived-by-another",
        "cuda_oom",
        (3,),
        raised(3, OOM) + steps(0, 100) + "[rank0]: Training finished\n",
    ),
    Case(
        "survived-by-none",
        "cuda_oom",
        (3,),
        raised(None, OOM) + "step 10 loss 2.1\nTraining finished\n" + table((0, -15, L), (3, 1, T)),
    ),
    Case(
        "ignored-at-exit",
        "benign",
        None,
        "Training finished\nException ignored in: <stdout>\nBrokenPipeError: [Errno 32] Broken pipe\n",
    ),
    Case(
        "restarted-and-done",
        "benign",
        None,
        raised(3, OOM) + table((0, -15, L), (3, 1, T)) + RESTART + steps(0, 100) + GROUP_DONE,
    ),
    Case(
        "restarted-and-failed-otherwise",
        "rank_exception",
        (1,),
        raised(3, OOM) + ABORTED + "\n" + RESTART + raised(1, "ValueError: bad label") + table((0, -15, L), (1, 1, T)),
    ),
    Case("restarted-and-cut", "cuda_oom", (3,), raised(3, OOM) + RESTART + steps(0, 5)),
    Case(
        "rows-joined-by-a-collector",
        "rank_killed",
        (3,),
        FLAT.format(1, 1, 1, -15)
        + FLAT.format(2, 2, 2, -15)
        + "Root Cause (first observed failure): "
        + FLAT.format(0, 3, 3, -9),
    ),
    Case(
        "programs-lines",
        "rank_exception",
        (1,),
        '  ❱ 41     raise RuntimeError("CUDA out of memory")  # [rank7]\n'
        + "train.py:41:    except torch.cuda.OutOfMemoryError:  # on [rank7]\n"
        + "| cuda_oom | `CUDA out of memory` | [rank7] |\n"
        + raised(1, "ValueError: bad label 7")
        + ABORTED
        + "\n",
    ),
    Case(
        "preempted-and-done-later", "benign", None, f"{SLURM} DUE TO PREEMPTION ***\n{steps(0, 100)}Training finished\n"
    ),
    Case(
        "quoted-timeouts",
        "unknown",
        None,
        "".join(
            f'{{"q": "{watchdog(rank, 7, operation).splitlines()[0]}"}}\n'
            for rank, operation in ((0, "ALLREDUCE"), (1, "BROADCAST"))
        ),
    ),
    Case(
        "restart-only-announced",
        "cuda_oom",
        (3,),
        raised(3, OOM)
        + "INFO agent: max_restarts=3, will restart worker group on failure\n"
        + ABORTED
        + "\n"
        + table((0, -15, L), (3, 1, T)),
    ),
    Case("all-aborted", "unknown", None, table(*((rank, -6, T) for rank in range(4)))),
)
