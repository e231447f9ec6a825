"""Every rule of `check`: its id, its name, how bad what it finds is, what it finds and why that matters.

The hundreds are severities: 1 hang, 2 wrong-result, 3 lost-work, 4 slow, 5 placebo, 6 hygiene. In each, the rules of
Python begin at 01 and those of scripts and variables at 50.
"""

from __future__ import annotations

from dataclasses import dataclass

from .findings import Rule, Severity

SEVERITIES: tuple[Severity, ...] = ("hang", "wrong-result", "lost-work", "slow", "placebo", "hygiene")
PAGE = "docs/check.md"


@dataclass(frozen=True)
class Described:
    """A rule, with what it finds and why that matters, in one line each."""

    rule: Rule
    what: str
    why: str


def described(number: int, name: str, what: str, why: str) -> Described:
    """Return a rule whose severity follows from its number."""
    return Described(Rule(f"DDP{number}", name, SEVERITIES[number // 100 - 1]), what, why)


PYTHON: tuple[Described, ...] = (
    described(
        101,
        "rank-only-collective",
        "a collective that only some ranks reach, also through helpers",
        "a collective ends only when every rank of its group has called it",
    ),
    described(
        102,
        "collective-after-exit",
        "a collective behind an exit that some ranks have taken",
        "the ranks that stay wait for those that have returned",
    ),
    described(
        103,
        "rank-only-forward",
        "a DDP model that only some ranks call",
        "DDP broadcasts buffers in forward and reduces gradients in backward: both are steps of all ranks",
    ),
    described(
        104,
        "rank-local-stop",
        "a loop with collectives that some ranks leave, by a test of the rank or a flag",
        "the ranks that go on wait in the next collective of the loop",
    ),
    described(
        105,
        "unreduced-decision",
        "a step that is skipped or ended by the loss or the batch of one rank",
        "ranks have different data, so they decide differently",
    ),
    described(
        106,
        "swallowed-exception",
        "an exception in a step of all ranks after which one rank goes on, or ends as if it were done",
        "the others are still inside of the step",
    ),
    described(
        107,
        "clock-decision",
        "a loop with collectives that each rank ends by its own clock",
        "no two ranks read the same time, so one does a step more",
    ),
    described(
        108,
        "file-decision",
        "a loop with collectives that each rank ends by looking for a file",
        "ranks look at different times, and shared file systems show a new file late",
    ),
    described(
        109,
        "work-in-signal-handler",
        "a signal handler that calls a collective or saves",
        "the signal comes in the middle of any step, at a different one on each rank",
    ),
    described(
        110,
        "long-rank-0-work",
        "sampling, or metrics of generated samples, on rank 0 while the others go on to a collective",
        "the others wait on the clock of that collective, 10 minutes with nccl",
    ),
    described(
        111,
        "rank-only-sharded-save",
        "a sharded save or load that only some ranks reach",
        "every rank holds a part, and the save ends when all have written theirs",
    ),
    described(
        112,
        "rank-only-group",
        "a process group that only some ranks make",
        "new_group is a call of all ranks of the job, members or not",
    ),
    described(
        113,
        "rank-only-metric",
        "a synchronised metric that only some ranks compute",
        "compute() gathers the states of all ranks",
    ),
    described(
        114, "collective-on-error-path", "a collective in except or finally", "a rank that has failed comes there alone"
    ),
    described(
        115,
        "early-stop-unreduced",
        "early stopping by a value that each rank measures on its own part of the data",
        "ranks run out of patience at different epochs, and those that go on wait for those that have left",
    ),
    described(
        116,
        "retried-collective",
        "a collective that is tried again after an exception",
        "the rank that tries again calls it twice, the others once",
    ),
    described(
        117,
        "spawn-under-launcher",
        "mp.spawn in a process that is a rank already",
        "torchrun starts each rank, each starts a set of processes, and several have the same rank",
    ),
    described(
        118,
        "own-rendezvous",
        "an address of the group that each rank draws for itself, at random",
        "every rank waits at another place, file or port, for ranks that never come there",
    ),
    described(
        120,
        "rank-0-name",
        "a variable that has a value on rank 0 only, and that all ranks use",
        "the other ranks end with a NameError, and rank 0 waits for them",
    ),
    described(
        201, "sampler-missing", "a training loader without a distributed sampler", "every rank reads all samples"
    ),
    described(
        202,
        "set-epoch-missing",
        "a distributed sampler that never hears of the epoch",
        "every epoch has the same order",
    ),
    described(
        204,
        "loss-past-ddp",
        "a loss that is computed past the DDP model",
        "DDP reduces the gradients only of what went through its own forward",
    ),
    described(
        205,
        "worker-seed-without-rank",
        "loader workers that have the same seed on all ranks",
        "all ranks draw the same augmentations",
    ),
    described(
        206,
        "shared-generator",
        "a generator with a fixed seed in a data set",
        "each worker of each rank has a copy, and repeats its draws",
    ),
    described(
        207,
        "unseeded-order",
        "a shuffle or split of the data that nothing seeds, or samples in the order of a set of texts",
        "ranks have different orders, so samples are read twice or never",
    ),
    described(
        208,
        "modules-from-set",
        "parameters or buffers in the order of a set",
        "the order of texts in a set differs between processes, and DDP pairs tensors by position",
    ),
    described(
        209,
        "load-without-map-location",
        "a checkpoint that all ranks load without map_location",
        "each rank puts a copy on the GPU from which it was saved",
    ),
    described(
        210,
        "first-gpu-everywhere",
        "GPU 0 on every rank, by its number or by `.cuda()` where nothing sets the device",
        "NCCL refuses two ranks on one GPU",
    ),
    described(211, "device-set-late", "a collective before the rank has its device", "it uses GPU 0 on every rank"),
    described(
        212,
        "validation-repeats",
        "a validation sampler that repeats samples, with metrics of all ranks together",
        "some samples count twice, and how many depends on the number of ranks",
    ),
    described(
        213,
        "no-sync-misuse",
        "no_sync() around a step of the optimizer",
        "each rank applies its own gradients, and the weights drift apart",
    ),
    described(
        214,
        "loss-reduced-before-backward",
        "a loss that is averaged over the ranks before backward",
        "DDP averages the gradients itself: this part's is too small by the number of ranks",
    ),
    described(
        215,
        "metric-of-one-part",
        "validation that is shared out over the ranks, and a metric that nothing takes together",
        "it was measured on one rank's part of the set",
    ),
    described(
        220,
        "validation-drops",
        "a validation loader that leaves the last batch of each rank out",
        "the metric is one of a part of the set, which depends on the number of ranks",
    ),
    described(
        222,
        "rank-only-step",
        "a step of an optimizer or a scheduler that only some ranks make",
        "weights or learning rates of the ranks drift apart",
    ),
    described(
        223,
        "metric-of-last-batch",
        "a metric of the last batch of one rank, which is returned or decides what is the best",
        "the other batches, and the other ranks' parts, do not count",
    ),
    described(
        224,
        "stream-shared-twice",
        "a stream of datasets of which each worker of a loader takes every n-th sample",
        "the stream has given each worker its own part already: most samples are read by nobody",
    ),
    described(
        301,
        "checkpoint-in-place",
        "a checkpoint that overwrites the only one in place",
        "a kill while it is written leaves none that can be loaded",
    ),
    described(302, "all-ranks-save", "a file that all ranks write", "each truncates what another has begun"),
    described(
        303,
        "resume-begins-again",
        "a failed load after which training begins anew",
        "one rank begins again while the others resume, and old work is overwritten",
    ),
    described(
        304,
        "resume-takes-newest",
        "a resume from the newest file, complete or not",
        "the newest file is the one whose writing a kill has cut off",
    ),
    described(
        305,
        "checkpoint-not-loadable",
        "objects in a checkpoint that torch.load refuses",
        "since PyTorch 2.6 weights_only is True, and the run cannot be resumed",
    ),
    described(
        306,
        "each-node-saves",
        "a file that the first rank of each node writes",
        "on a file system that the nodes share, they write the same file at the same time",
    ),
    described(
        307,
        "old-removed-first",
        "an old checkpoint that is removed before the new one is there",
        "a kill in between leaves neither",
    ),
    described(
        310,
        "optimizer-not-saved",
        "checkpoints from which training goes on, without the optimizer's state",
        "each resume begins with moments of zero",
    ),
    described(
        321,
        "optimizer-not-loaded",
        "an optimizer's state that is saved, and that no resume loads",
        "a run that goes on begins with empty moments, at the learning rate of the start",
    ),
    described(
        322,
        "best-begins-anew",
        "a best value that a run which goes on from a checkpoint begins with nothing",
        "the first validation after the resume overwrites the best checkpoint, whatever it is",
    ),
    described(
        323,
        "state-not-saved",
        "a second optimizer or a schedule that makes steps, and that no checkpoint has",
        "a run that goes on has the state of the others, and begins this one anew",
    ),
    described(
        324,
        "names-of-ddp",
        "what is saved of a model in DDP, and loaded into one that is not, or the reverse",
        "the names of the parameters differ by `module.`, and no run goes on",
    ),
    described(
        325,
        "saved-at-end",
        "weights that are saved once, after the last epoch, where nothing saves before",
        "a kill, a failed node or the time limit takes the whole run",
    ),
    described(
        401,
        "item-per-step",
        "item() of the loss at every step, or a test of it",
        "the CPU waits for the GPU, and cannot run ahead",
    ),
    described(402, "norm-per-parameter", "a wait for the GPU for each parameter", "hundreds of waits a step"),
    described(403, "norm-on-cpu", "each gradient copied to the CPU", "24 times slower a step on an H200"),
    described(404, "retain-graph", "retain_graph without a second backward", "it keeps the memory of the forward pass"),
    described(405, "anomaly-detection", "anomaly detection that is always on", "it checks every operation"),
    described(406, "barrier-per-step", "a barrier at every step", "backward already synchronises the ranks"),
    described(407, "broadcast-before-ddp", "a broadcast of all parameters before DDP", "DDP does it itself"),
    described(
        408,
        "rank-0-evaluation",
        "a validation set that rank 0 alone goes over in a loop of all ranks",
        "the GPUs of the other ranks do nothing meanwhile, until the timeout of the collective in which they wait",
    ),
    described(
        409,
        "no-sync-without-forward",
        "no_sync() around a backward pass whose forward pass stands before it",
        "DDP decides in forward, so the gradients are reduced all the same",
    ),
    described(
        410,
        "rank-0-preparation",
        "clustering, fitting or preparing data on rank 0, while the others wait in a collective",
        "the GPUs of the others do nothing meanwhile, until the timeout of the collective in which they wait",
    ),
    described(
        411, "workers-of-all-cpus", "as many loader workers on each rank as the node has CPUs", "they take turns"
    ),
    described(
        412,
        "collective-per-value",
        "a collective for each of several logged values, at every step",
        "each costs the ranks a round trip",
    ),
    described(
        413,
        "synchronize-per-step",
        "torch.cuda.synchronize() or empty_cache() at every step",
        "the CPU waits for the GPU, and cannot run ahead",
    ),
    described(
        414,
        "accumulation-without-no-sync",
        "a reduction at each backward pass, where the optimizer steps at every n-th only",
        "n - 1 of n reductions are for nothing",
    ),
    described(
        415,
        "group-per-call",
        "a process group that is made again and again",
        "each holds memory and connections until the end",
    ),
    described(
        420,
        "gloo-on-gpus",
        "a group of gloo for models on GPUs",
        "each gradient is copied to the CPU and sent over TCP, at every step",
    ),
    described(
        423,
        "validation-on-every-rank",
        "a validation set that every rank goes over from beginning to end",
        "n ranks take as long for it as one",
    ),
    described(
        424,
        "backward-twice-per-step",
        "two backward passes through one model before one step of its optimizer",
        "each of them reduces all gradients over the ranks, one for nothing",
    ),
    described(
        426,
        "whole-cache-per-rank",
        "a data set that each rank loads into its memory as a whole, of which its sampler gives it a part",
        "n ranks of a node read everything n times before the first step, and need n times the memory",
    ),
    described(
        425,
        "large-buffer",
        "a buffer of many megabytes in a model that DDP wraps",
        "DDP broadcasts all buffers from rank 0 at each forward pass, unless it is told not to",
    ),
    described(
        422,
        "gradient-by-gradient",
        "a collective for the gradient of each parameter, behind the backward pass",
        "hundreds of collectives a step, none of them beside the backward pass",
    ),
    described(
        501,
        "patched-timeout",
        "a default timeout that is patched where nothing looks",
        "torch.distributed has no such attribute",
    ),
    described(
        502, "variable-too-late", "a variable that is set after the group was made", "it is read when the group is made"
    ),
    described(
        503,
        "seed-before-spawn",
        "a seed in the process that starts the ranks by mp.spawn",
        "the ranks are new processes, which do not inherit it: two runs with one seed differ",
    ),
    described(601, "unread-file", "a file that could not be read as Python 3", "nothing in it was checked"),
    described(
        602,
        "device-after-init",
        "a process group that is made before the device is set",
        "NCCL has to guess a GPU for its first barrier",
    ),
    described(
        603,
        "main-guard-missing",
        "processes that are started where a file is imported",
        "each of them imports the file and starts them again",
    ),
    described(604, "destroy-on-error", "destroy_process_group after an exception", "it hides which rank failed"),
    described(
        605,
        "group-without-timeout",
        "a group that does not have the timeout of the default one",
        "new_group does not inherit it",
    ),
    described(
        606,
        "perhaps-rank-only",
        "a collective that only some ranks seem to reach, where something on the way is not known",
        "the message says what: if it is so, those that come wait until the timeout",
    ),
    described(
        607,
        "global-rank-as-device",
        "the rank among all nodes as the number of a GPU",
        "it works on one node only: the second has no such GPU",
    ),
    described(
        608,
        "equal-seeds",
        "one seed on all ranks, where the data set or the model draws",
        "worker k of every rank draws the same augmentations, and dropout the same masks",
    ),
    described(
        609,
        "all-ranks-download",
        "a data set that every rank downloads into one folder",
        "a rank may read what another one has not finished writing",
    ),
    described(
        610,
        "local-rank-option",
        "an option `--local_rank` without `--local-rank`",
        "torch.distributed.launch passes the second since PyTorch 2.0, and torchrun none",
    ),
    described(
        611,
        "each-rank-resumes",
        "each rank that looks for the checkpoint itself, on several nodes",
        "where it is not seen, ranks begin anew while the others go on",
    ),
    described(
        612,
        "folder-race",
        "a folder that every rank makes if it does not see it",
        "all but the first of those that look at the same time fail",
    ),
    described(
        613, "all-ranks-log", "a run of TensorBoard or W&B that every rank opens", "each step is in it once a rank"
    ),
    described(
        614,
        "all-ranks-prepare",
        "a file, as a cache, that every rank makes if it does not see it",
        "a rank may read what another one is writing",
    ),
    described(
        621,
        "collective-per-own-key",
        "a collective for each key of a dict that each rank fills by the data it has seen",
        "ranks that have seen other keys call it another number of times",
    ),
    described(
        622,
        "gather-keeps-own-gradient",
        "a gather whose backward pass keeps the gradient of the rank's own part alone",
        "what the other ranks' losses say about this part is dropped, and DDP divides the rest by the number of ranks",
    ),
    described(
        615,
        "rendezvous-file-left",
        "ranks that meet in a file which nothing removes",
        "the next run reads the addresses of one that died",
    ),
    described(
        616,
        "timeout-of-hours",
        "a group whose collectives may wait for three hours and more",
        "all GPUs of a hang are held until then, and nothing is told",
    ),
    described(
        631,
        "all-ranks-write",
        "a file of results or a log that every rank opens to write, under one name",
        "each truncates what another has written, or lines run into each other",
    ),
    described(
        632,
        "joined-in-order",
        "ranks that are started as processes and waited for one after the other",
        "nothing notices that one has died, and the others wait for it",
    ),
    described(
        633,
        "set-epoch-late",
        "set_epoch within the loop over the loader",
        "the order of the epoch is drawn before, so it counts from the next one on",
    ),
    described(
        634,
        "local-rank-as-rank",
        "the rank within a node as the rank among all",
        "it works on one node only: the second has the same ranks",
    ),
    described(
        641,
        "unequal-parts",
        "training data of which each rank takes every n-th, and nothing makes the parts equal",
        "a rank that has a batch more than the others waits for them in its backward pass",
    ),
    described(
        642,
        "unsorted-files",
        "a data set of the files of a folder, in the order in which the file system gives them",
        "it differs between the local disks of nodes, and the sampler shares out positions",
    ),
)

BY_ID: dict[str, Described] = {one.rule.id: one for one in PYTHON}


def page_of(rule: str) -> str:
    """Return where a rule is explained: a page of the documentation, and the heading in it."""
    return f"{PAGE}#{rule.lower()}"
