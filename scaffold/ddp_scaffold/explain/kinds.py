"""What to do about each kind of failure. `ddp/kinds.py` of a generated project says the same of the kinds it knows.

A test compares the two: the advice for people with a run directory and for those with a bare log must not drift apart.
"""

from __future__ import annotations

RANK_LOCAL = "look for an `if` on rank-local data around a collective or a forward"
ADVICE: dict[str, str] = {
    "rank_exception": "correct the exception of that rank; what the other ranks say is its consequence",
    "cuda_oom": "use a smaller batch or activation checkpointing",
    "host_oom_kill": "ask for more host memory, or use fewer loader workers and smaller batches",
    "rank_killed": "look at the kernel log of that host (dmesg: oom-kill), and at what the scheduler says of the job",
    "dataloader_worker_died": "look for oom-kill in dmesg; use fewer workers or smaller batches",
    "dataloader_stalled": "read that sample by itself; raise the loader's timeout if it is merely slow",
    "shm_exhausted": "make /dev/shm larger (docker --shm-size, or --ipc=host), or use fewer workers or smaller batches",
    "fd_exhausted": "raise the limit of open files (ulimit -Hn), use fewer workers, or close files in the data set",
    "rank0_work": "let the other ranks wait outside NCCL, on the store or a gloo group with a longer"
    " timeout, while rank 0 "
    "works alone",
    "missing_rank": "look at what that rank does instead: `py-spy dump` of its process, or its flight-recorder dump",
    "subset_collective": "make all ranks of the group issue the collective, or none of them",
    "mismatched_collectives": "make every rank issue the same collectives in the same order, with equal"
    " shapes and types",
    "uneven_inputs": "give all ranks equal numbers of batches (drop_last, a distributed sampler, or Join)",
    "divergent_control_flow": RANK_LOCAL,
    "straggler": "give the ranks equal work, or raise the timeout of that process group",
    "network_unreachable": "no rank has failed by itself: look at the network between the hosts, then at"
    " the logs of all ranks",
    "network_misconfig": "name the interface in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, the same"
    " network on all hosts",
    "peer_to_peer": "try NCCL_P2P_DISABLE=1 once to find out; if it helps, look at ACS, IOMMU and the"
    " container's settings",
    "rendezvous_failed": "see that all nodes have started, and that MASTER_ADDR:MASTER_PORT can be reached from each",
    "port_in_use": "choose another MASTER_PORT, or end the process that listens there",
    "launcher_misconfig": "start all ranks by one launcher (torchrun or srun) with the same size and"
    " address on each node",
    "device_mapping": "give each rank a GPU of its own: torch.cuda.set_device(LOCAL_RANK) before the process group",
    "hardware_fault": "look for Xid in dmesg of that host, and take the GPU out of service",
    "preempted": "start the job again from its last checkpoint; save one when SIGTERM or SIGUSR1 comes",
    "time_limit": "ask for more time, or save a checkpoint before the end and start the job again",
    "node_failure": "start the job again without that node, and report it",
    "store_lost": "look at rank 0's output, and whether that host, its network and the launcher are still up",
    "checkpoint_failed": "make room, then start again from the last good checkpoint",
    "nonfinite_loss": "from the first step on: look at the loss and its data; later: lower the learning rate, or look"
    " at that step's data",
    "watchdog_false_positive": "find what held the GIL or a CUDA call for so long (py-spy dump"
    " --native); if that work is "
    "wanted, raise TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "benign": "nothing has failed",
    "unknown": "",
}
# the kinds that only a generated project tells apart, and what they are among those of `explain`
KINDS = {
    "bad_settings": "launcher_misconfig",
    "divergent_weights": "divergent_control_flow",
    "ranks_differ": "divergent_control_flow",
}
