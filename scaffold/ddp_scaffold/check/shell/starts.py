"""The rules on how a script starts processes: nodes, tasks, GPUs, rendezvous, ports, CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..findings import Finding
from .launch import Job, Launch
from .rules import finding
from .words import expansions

STARTS_ELSEWHERE = {
    "srun",
    "mpirun",
    "mpiexec",
    "ibrun",
    "jsrun",
    "aprun",
    "pdsh",
    "ssh",
    "clush",
    "parallel",
    "pbsdsh",
}
LOCAL = re.compile(r"(localhost|127\.0\.0\.1)(:\d+)?$")
ITS_OWN_HOST = r"(?:\$\(\s*hostname(?:\s+-\w+)*\s*\)|`\s*hostname(?:\s+-\w+)*\s*`|\$\{?HOSTNAME\b\}?)"
OWN_ADDRESS = re.compile(rf"(MASTER_ADDR=|--master[-_]addr[= ]|--rdzv[-_]endpoint[= ])[\"']?({ITS_OWN_HOST})")
EPHEMERAL = range(32768, 61000)  # net.ipv4.ip_local_port_range of Linux, unless somebody changed it
FIRST_NODE = 'Use the first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1).'
OF_THE_GROUP = re.compile(
    r"--(?:dist|distributed|master|main_process|main|ddp|rdzv|multi|init|distributed_init)[-_]?(?:url|port|method|endpoint)"
)
PORT_OF_ADDRESS = re.compile(r"(?:(?:tcp://)?[^\s:/]+:)?(\d{4,5})")
OTHER_LAUNCHERS = re.compile(r"(?:^|/)(?:accelerate|deepspeed)$")
WORKERS = re.compile(r"--(?:num[-_]workers|workers|n[-_]workers|data[-_]workers|loader[-_]workers)(?:=(\d+))?$")


def starting_rules(job: Job) -> list[Finding]:
    """Return what is wrong with how a script starts its processes."""
    found: list[Finding] = []
    for launch in job.launches:
        for rule in (
            _ranks_of_the_batch_script,
            _own_address,
            _tasks,
            _gpus,
            _alone,
            _standalone,
            _node_rank,
            _cpus,
            _workers,
            _old,
        ):
            found += rule(job, launch)
    return [*found, *_other_nodes(job), *_local_address(job), *_ports(job)]


def as_typed(job: Job, launches: Sequence[Launch]) -> list[Finding]:
    """Return what is wrong with commands that a document tells a user to type, whatever their machine is."""
    found: list[Finding] = []
    for launch in launches:
        for rule in (_standalone, _node_rank, _gpus, _old):
            found += rule(job, launch)
    return [*(one for one in found if one.rule != "DDP459"), *_typed_address(job, launches), *_ports(job)]


def as_said(job: Job, launches: Sequence[tuple[Launch, int]]) -> Iterator[Finding]:
    """Yield commands that a document means for several nodes, and that start ranks of one: each node trains alone."""
    for launch, nodes in launches:
        given = [name for name in launch.options if name.startswith(("--nnode", "--rdzv"))]  # argparse takes beginnings
        if not launch.by_torchrun or launch.unsure or nodes < 2 or [name for name in given if name != "--nnodes"]:
            continue
        processes = _processes(job, launch)
        if launch.options.get("--nnodes", "1") != "1" or not processes or processes < 2 or launch.starter:
            continue
        how = "--standalone" if "--standalone" in launch.options else "without --nnodes"
        message = (
            f"The text means this for {nodes} nodes, and on each of them it starts a run of its own ({how}): {nodes}"
            f" runs with the same ranks 0 to {processes - 1}, and no gradient crosses a node."
        )
        fix = f"Use --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, with HOST of the first node."
        yield finding("DDP251", _where(job, launch), message, fix)


def _where(job: Job, launch: Launch) -> tuple[str, int, int]:
    return job.script.path, launch.command.line, launch.command.column


def _ranks_of_the_batch_script(job: Job, launch: Launch) -> Iterator[Finding]:
    """`srun torchrun --node_rank=$SLURM_NODEID`: the batch script puts in its own 0 before srun starts anything."""
    if not job.scheduled or launch.starter != "srun" or not job.several_nodes or _nodes_of_step(job, launch) == 1:
        return
    if launch.by_torchrun and launch.options.get("--rdzv-backend", "static") != "static":
        return  # it gives out ranks itself, and does not look at --node-rank
    early = {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"}
    copies = {
        one.name: name
        for one in job.script.assignments
        if not one.conditional and one.name in ("NODE_RANK", "RANK", "LOCAL_RANK", "MACHINE_RANK")
        for name in expansions(one.value.raw) & early
    }
    for word in launch.command.words:
        for name in sorted(expansions(word.raw)):
            if name in early or name in copies:
                of = f"${name}" + (f" (${copies[name]})" if name in copies else "")
                message = (
                    f"{of} is put in by the batch script, where it is 0, before srun starts anything: each of the "
                    f"{job.nodes} nodes takes itself for node 0, and they wait for each other."
                )
                fix = f"Let each task put it in: srun bash -c 'torchrun --node-rank \"${copies.get(name, name)}\" ...'."
                yield finding("DDP151", (job.script.path, word.line, word.column), message, fix)
                return


def _own_address(job: Job, launch: Launch) -> Iterator[Finding]:
    """`srun bash -c 'MASTER_ADDR=$(hostname) ...'`: each node waits for the others at its own address."""
    if (
        launch.starter != "srun"
        or launch.program != "shell"
        or not job.several_nodes
        or _nodes_of_step(job, launch) == 1
    ):
        return
    for word in launch.command.words:
        raw = word.raw
        inner = raw if raw.startswith("'") else raw.replace("\\$(", "\0(").replace("$(", "").replace("\0(", "$(")
        match = OWN_ADDRESS.search(inner)
        if match and not re.search(r"\b(?:if|case)\b|\]\s*(?:&&|\|\|)", inner[: match.start()]):
            message = (
                f"{match.group(2)} is evaluated on each node: each of the {job.nodes} nodes waits at its own address "
                "for the others."
            )
            yield finding(
                "DDP152", (job.script.path, word.line, word.column), message, f"Set it once, above. {FIRST_NODE}"
            )


def _nodes_of_step(job: Job, launch: Launch) -> int | None:
    """The nodes that a step of srun takes."""
    options = launch.starter_options
    raw = options.get("--nodes", options.get("-N"))
    if raw is not None:
        return job.number(raw)
    if "-w" in options or "--nodelist" in options or "--relative" in options or "-r" in options:
        return None
    total = options.get("--ntasks", options.get("-n"))
    if total is not None and job.number(total) == 1:
        return 1
    return job.nodes


def _tasks_of_step(job: Job, launch: Launch) -> int | None:
    """The tasks of a step on each node."""
    options = launch.starter_options
    raw = options.get("--ntasks-per-node")
    if raw is not None:
        return job.number(raw)
    total, nodes = options.get("--ntasks", options.get("-n")), _nodes_of_step(job, launch)
    if total is not None:
        count = job.number(total)
        return count // nodes if count and nodes and count % nodes == 0 else None
    return job.tasks_per_node


def _processes(job: Job, launch: Launch) -> int | None:
    """The processes that torchrun starts on a node."""
    raw = launch.options.get("--nproc-per-node", "1" if not launch.unsure else "")
    return job.gpus_per_node if raw.strip("\"'") in ("gpu", "auto") else job.number(raw)


def _tasks(job: Job, launch: Launch) -> Iterator[Finding]:
    """One torchrun a node starts the ranks of that node. With a torchrun in each task there are too many."""
    if launch.starter != "srun" or not launch.by_torchrun:
        return
    tasks, processes = _tasks_of_step(job, launch), _processes(job, launch)
    if tasks and processes and tasks > 1 and processes > 1:
        gpus = f" on its {job.gpus_per_node} GPUs" if job.gpus_per_node else ""
        message = (
            f"Each of the {tasks} tasks of a node starts a torchrun with {processes} processes: {tasks * processes} "
            f"processes{gpus}, and torchruns that wait for each other under one rank."
        )
        fix = (
            f"Use --ntasks-per-node=1 with --nproc-per-node={processes}, or one "
            "rank a task: srun python, without torchrun."
        )
        yield finding("DDP153", _where(job, launch), message, fix)


def _gpus(job: Job, launch: Launch) -> Iterator[Finding]:
    """`--nproc-per-node` against the GPUs that the job asks for, or CUDA_VISIBLE_DEVICES names."""
    if not launch.by_torchrun or launch.unsure:
        return
    processes = _processes(job, launch)
    gpus, by = job.gpus_per_node, "the job asks for"
    visible = [
        one
        for one in job.script.assignments
        if one.name == "CUDA_VISIBLE_DEVICES" and (one.scope != "command" or one.line == launch.command.line)
    ]
    if len(visible) == 1 and not visible[0].conditional and re.fullmatch(r"\d+(,\d+)*", visible[0].literal or ""):
        gpus, by = (visible[0].literal or "").count(",") + 1, "CUDA_VISIBLE_DEVICES names"
    elif visible:
        return
    if not processes or not gpus:
        return
    if processes > gpus:
        message = (
            f"torchrun starts {processes} processes a node, and {by} {gpus} GPU{'s' * (gpus > 1)}: ranks with a local "
            f"rank from {gpus} on die with `invalid device ordinal`, or share a GPU, and the others wait for them."
        )
        yield finding(
            "DDP154", _where(job, launch), message, f"Use --nproc-per-node={gpus}, or ask for {processes} GPUs."
        )
    elif processes < gpus and not visible and len(job.launches) == 1 and launch.command.after != "&":
        tasks = _tasks_of_step(job, launch)
        if tasks in (None, 1) and not re.search(r"vllm|sglang|server", job.script.text):
            message = f"torchrun starts {processes} of {gpus} processes a node: {gpus - processes} GPUs are idle."
            yield finding(
                "DDP459", _where(job, launch), message, f"Use --nproc-per-node={gpus}, or ask for fewer GPUs."
            )


def _environment_has(job: Job, *names: str) -> bool:
    return any(one.name in names for one in job.script.assignments)


def _alone(job: Job, launch: Launch) -> Iterator[Finding]:
    """srun starts a torchrun on each node, and none of them knows of the others."""
    if not launch.by_torchrun or launch.starter != "srun" or launch.unsure or not job.several_nodes:
        return
    nodes = _nodes_of_step(job, launch)
    if not nodes or nodes < 2 or _environment_has(job, "PET_NNODES"):
        return
    count = launch.options.get("--nnodes")
    if "--standalone" in launch.options and (job.number(count or "1") or 1) > 1:
        return  # DDP166 says more
    if "--standalone" in launch.options or count is None or count == "1":
        how = (
            "--standalone"
            if "--standalone" in launch.options
            else "without --nnodes"
            if count is None
            else "--nnodes=1"
        )
        message = (
            f"Each of the {nodes} nodes trains alone ({how}): {nodes} runs with the same ranks, no gradient "
            "crosses a node, and each writes the other's checkpoints over."
        )
        if launch.options.get("--rdzv-backend") == "c10d" and "--rdzv-endpoint" in launch.options:
            message = (
                f"One of the {nodes} nodes trains alone ({how}): the rendezvous at the shared endpoint is full, "
                "and torchrun on the others waits there and ends with an error."
            )
        fix = f"Use --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, with HOST of the first node."
        yield finding("DDP251", _where(job, launch), message, fix)


def _standalone(job: Job, launch: Launch) -> Iterator[Finding]:
    """--standalone makes the rendezvous of a node's own, at a free port of localhost; --nnodes stays as it is.

    Source: `run` in torch/distributed/run.py.
    """
    nodes = job.number(launch.options.get("--nnodes", ""))
    if launch.by_torchrun and not launch.unsure and "--standalone" in launch.options and nodes and nodes > 1:
        message = (
            f"--standalone makes a rendezvous at a free port of localhost, and --nnodes={nodes} waits there for"
            f" {nodes - 1} other nodes, which cannot find it: torchrun ends when the time for joining is over."
        )
        fix = f"Use --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, with HOST of the first node."
        yield finding("DDP166", _where(job, launch), message, fix)
        return
    said = re.compile(r"\w[\w.:-]*(?<!:0)")  # a value, which is not what --standalone gives itself
    given = [name for name, value in launch.options.items() if said.fullmatch(value)]
    pointless = [one for one in ("--master-port", "--master-addr", "--rdzv-endpoint") if one in given]
    if launch.by_torchrun and "--standalone" in launch.options and pointless:
        message = f"--standalone takes a free port of localhost: nothing reads {' and '.join(pointless)} beside it."
        yield finding("DDP556", _where(job, launch), message, "Take out one of the two; better the address or port.")


def _node_rank(job: Job, launch: Launch) -> Iterator[Finding]:
    """torchrun's own rendezvous is static, and without a node rank every node is node 0."""
    if not launch.by_torchrun or launch.unsure or "--standalone" in launch.options or "--node-rank" in launch.options:
        return
    raw = launch.options.get("--nnodes", "")
    nodes = job.nodes if expansions(raw) & {"SLURM_NNODES", "SLURM_JOB_NUM_NODES"} else job.number(raw)
    backend = launch.options.get("--rdzv-backend", "static")
    if backend != "static" or _environment_has(job, "PET_NODE_RANK", "PET_RDZV_BACKEND") or not nodes or nodes < 2:
        return
    if launch.starter == "" and job.scheduled:
        return  # DDP158 says more
    message = (
        f"No --node-rank, and the rendezvous is static: each of the {nodes} nodes takes itself for node 0, and waits "
        "for the others until the time for joining is over."
    )
    fix = "Add --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, or --node-rank with the number of each node."
    yield finding("DDP157", _where(job, launch), message, fix)


def _other_nodes(job: Job) -> Iterator[Finding]:
    """A batch script runs on the first node only: torchrun for several nodes needs srun before it."""
    if not job.scheduled or not job.several_nodes or not job.launches:
        return
    if re.search(rf"\b(?:{'|'.join(sorted(STARTS_ELSEWHERE))})\b", _code(job.script.text)):
        return
    for launch in job.launches:
        raw = launch.options.get("--nnodes", "")
        of_slurm = expansions(raw) & {"SLURM_NNODES", "SLURM_JOB_NUM_NODES"}
        nodes = job.nodes if of_slurm else job.number(raw)
        if launch.by_torchrun and nodes and nodes > 1:
            message = (
                f"Only the first node runs this script: torchrun waits there for {nodes - 1} of {nodes} nodes, on "
                "which nothing is started."
            )
            fix = "Start it on each node: srun --ntasks-per-node=1 torchrun ..."
            yield finding("DDP158", _where(job, launch), message, fix)


def _code(text: str) -> str:
    """The text without comments of whole lines."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _local_address(job: Job) -> Iterator[Finding]:
    """`localhost` is another host on each node."""
    started = [launch for launch in job.launches if launch.starter]
    if not job.several_nodes or not started or all("--standalone" in one.options for one in started):
        return
    if any(_nodes_of_step(job, launch) == 1 for launch in started):
        return
    message = (
        f"On each of the {job.nodes} nodes this is the node itself: ranks on other nodes wait at their own address."
    )
    fix = FIRST_NODE
    for one in job.script.assignments:
        if one.name == "MASTER_ADDR" and not one.conditional and LOCAL.fullmatch(one.literal or ""):
            yield finding("DDP155", (job.script.path, one.line, one.column), message, fix)
    for launch in started:
        for option in ("--master-addr", "--rdzv-endpoint"):
            if launch.options.get("--nnodes", "1") != "1" and LOCAL.fullmatch(
                launch.options.get(option, "").strip("\"'")
            ):
                yield finding("DDP155", _where(job, launch), message, fix)


def _typed_address(job: Job, launches: Sequence[Launch]) -> Iterator[Finding]:
    """`--nnodes=2 --master_addr=127.0.0.1`, which is typed on each of the nodes."""
    for launch in launches:
        nodes = job.number(launch.options.get("--nnodes", ""))
        given = [launch.options.get(option, "").strip("\"'") for option in ("--master-addr", "--rdzv-endpoint")]
        halves = any(  # of one node, each with some of its GPUs
            one.name == "CUDA_VISIBLE_DEVICES" and one.line == launch.command.line for one in job.script.assignments
        )
        if launch.by_torchrun and not halves and nodes and nodes > 1 and any(LOCAL.fullmatch(one) for one in given):
            message = (
                f"On each of the {nodes} nodes this is the node itself: ranks on other nodes wait at their own address."
            )
            yield finding("DDP155", _where(job, launch), message, "Write the address of the first node.")


def _cpus(job: Job, launch: Launch) -> Iterator[Finding]:
    """Since Slurm 22.05 srun does not take --cpus-per-task from sbatch: a task has one CPU."""
    options = launch.starter_options
    if launch.starter != "srun" or not job.cpus_per_task or job.cpus_per_task < 2 or launch.unsure:
        return
    trains = launch.program in ("torchrun", "launch", "python", "shell")
    if not (trains or (launch.program == "other" and OTHER_LAUNCHERS.search(launch.target))) or job.sources_unknown:
        return
    given = {"--cpus-per-task", "-c", "--cpus-per-gpu", "--threads-per-core", "--exact"} & set(options)
    bound = options.get("--cpu-bind", options.get("--cpu_bind", ""))
    unbound = re.search(r"\b(?:none|no|mask_cpu|map_cpu|mask_ldom|map_ldom)\b", bound)
    if given or unbound or _environment_has(job, "SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND"):
        return
    message = (
        "Since Slurm 22.05 srun does not take "
        f"--cpus-per-task={job.cpus_per_task} from sbatch: each task gets one CPU, "
        "for the program and all its loader workers."
    )
    fix = 'Write srun --cpus-per-task="$SLURM_CPUS_PER_TASK", or export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK".'
    yield finding("DDP457", _where(job, launch), message, fix)


def _workers(job: Job, launch: Launch) -> Iterator[Finding]:
    """Loader workers of all ranks of a task against its CPUs."""
    if not job.cpus_per_task or (not launch.starter and not job.scheduled):
        return
    ranks = _processes(job, launch) if launch.by_torchrun else 1
    for number, word in enumerate(launch.arguments):
        match = WORKERS.match(word)
        if not match or not ranks:
            continue
        follows = launch.arguments[number + 1] if number + 1 < len(launch.arguments) else ""
        workers = job.number(match.group(1) or follows)
        if workers and workers * ranks > job.cpus_per_task:
            of = f"{ranks} ranks with {workers} loader workers each" if ranks > 1 else f"{workers} loader workers"
            message = (
                f"{of} share the {job.cpus_per_task} CPUs of a task: the workers take turns, and every rank waits."
            )
            fix = f"Use at most {max(1, job.cpus_per_task // ranks - 1)} workers a rank, or a larger --cpus-per-task."
            yield finding("DDP458", _where(job, launch), message, fix)


def _old(job: Job, launch: Launch) -> Iterator[Finding]:
    if launch.program == "launch":
        message = "torch.distributed.launch is deprecated since torch 1.9; torchrun (since 1.10) takes its place."
        fix = "Use torchrun with the same options (without --use-env), and read LOCAL_RANK instead of --local-rank."
        yield finding("DDP653", _where(job, launch), message, fix)


def _ports(job: Job) -> Iterator[Finding]:
    """A port that is written down: two jobs on a node meet there; in the ephemeral range any connection may hold it."""
    places = [
        (one.literal, one.line, one.column)
        for one in job.script.assignments
        if one.name in ("MASTER_PORT", "MAIN_PROCESS_PORT") and one.literal
    ]
    for launch in job.launches:
        given = list(_given_ports(launch.arguments))
        if "--standalone" not in launch.options:
            endpoint = launch.options.get("--rdzv-endpoint", "").strip("\"'").rpartition(":")[2]
            given.append(launch.options.get("--master-port", "").strip("\"'") or endpoint)
            places += _behind_variable(job, given[-1])
        places += [(port, launch.command.line, launch.command.column) for port in given]
    for command in job.script.named("accelerate", "deepspeed"):
        given = list(_given_ports([word.raw for word in command.words]))
        places += [(port, command.line, command.column) for port in given]
    for text, line, column in places:
        if not re.fullmatch(r"[1-9]\d{1,4}", text or ""):
            continue
        where = (job.script.path, line, column)
        fix = (
            "Make it from the job: $((10000 + SLURM_JOB_ID % 20000))"
            if job.scheduled
            else "Use --standalone on one node"
        )
        if int(text or 0) in EPHEMERAL:
            message = f"Port {text} is one that Linux gives to any outgoing connection: rank 0 may find it taken."
            yield finding(
                "DDP652", where, message, f"{fix}, below 32768." if job.scheduled else f"{fix}, or a port below 32768."
            )
        elif not job.exclusive:
            message = (
                f"Port {text} is fixed: a second job on the node of rank 0 finds it taken, or joins the wrong job."
            )
            yield finding("DDP651", where, message, f"{fix}.")


def _behind_variable(job: Job, text: str) -> list[tuple[str, int, int]]:
    """Return the port of `--master_port=$port`, where it is written down: the script assigns it once, in any case."""
    name = re.fullmatch(r"\$\{?(\w+)\}?", text)
    if name is None or name[1] == "MASTER_PORT":
        return []
    assigned = [one for one in job.script.assignments if one.name == name[1]]
    written = assigned if len(assigned) == 1 and not assigned[0].conditional else []
    return [(one.literal, one.line, one.column) for one in written if one.literal]


def _given_ports(words: Sequence[str]) -> Iterator[str]:
    """Yield the ports that a program is given for its group: `--dist-url tcp://localhost:10001`."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if OF_THE_GROUP.fullmatch(name):
            value = value if equals else "".join(words[number + 1 : number + 2])
            match = PORT_OF_ADDRESS.fullmatch(value.strip("\"'"))
            if match:
                yield match[1]
