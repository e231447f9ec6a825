"""What a preset says about a cluster, as pydantic models: every field with its type, and what the templates do with it.

A field that a preset leaves out is unknown; a field with `value: null` is known to be left open, and says why. New
fields are added here and in the templates that read them; a preset never holds what nothing reads.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

OWN = "own"  # no preset: the answer that stands for a file of the user's own
T = TypeVar("T")
# One line, without characters that hide or reorder what stands there.
_PLAIN = r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]*$"
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=600, pattern=_PLAIN)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,79}$")]
Interfaces = Annotated[str, StringConstraints(pattern=r"^[\^=]?[A-Za-z0-9_.,-]{1,80}$")]
# One option and its value, as on a #SBATCH or #PBS line or after srun, without quotes: of the characters that a shell
# acts on only those that constraints need (& | * [ ]); the templates quote them.
Option = Annotated[
    str,
    StringConstraints(pattern=r"^-{1,2}[A-Za-z][A-Za-z0-9_-]*([= ][A-Za-z0-9_.,:=/%+@&|*\[\]-]+)?$", max_length=300),
]
Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+][A-Za-z0-9_./+-]*$", max_length=120)]
# An absolute path, perhaps with environment variables, or one below a variable: /scratch/$USER, $SCRATCH.
_NAME = r"\$[A-Z_][A-Z0-9_]*"
Directory = Annotated[str, StringConstraints(pattern=rf"^(/|{_NAME})([A-Za-z0-9_./-]|{_NAME})*$", max_length=200)]
Word = Annotated[str, StringConstraints(pattern=rf"^([A-Za-z0-9_.,:=/%+@-]|\{{image\}}|{_NAME})+$", max_length=300)]
# One command and its arguments, as words without quotes: none of the characters that a shell acts on, but $NAME.
Command = Annotated[
    str,
    StringConstraints(pattern=rf"^[A-Za-z_][A-Za-z0-9_./-]*( ([A-Za-z0-9_.,:=/%+@-]|{_NAME})+)*$", max_length=300),
]
Url = Annotated[str, StringConstraints(pattern=r"^https://[A-Za-z0-9._/-]+$", max_length=200)]
# An image of uenv as its options take it: pytorch/v2.8.0:v1.
Uenv = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:@-]*$", max_length=120)]
Walltime = Annotated[str, StringConstraints(pattern=r"^([0-9]{1,3}-)?[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]$")]
# What tells models of GPUs apart, as a word of their names: A100, GB200, MI250X.
Model = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]{1,10}[0-9]{1,6}[A-Za-z]{0,4}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){0,3}$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=80)]
Count = Annotated[int, Field(ge=1, le=100_000)]
# Of Kubernetes: keys of labels, annotations and resources; values of labels; whole amounts; taints as in kubectl taint.
_KEY = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
Key = Annotated[str, StringConstraints(pattern=rf"^{_KEY}$", max_length=317)]
Label = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}$", max_length=63)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)?$")]
Toleration = Annotated[
    str,
    StringConstraints(pattern=rf"^{_KEY}(={_LABEL})?(:(NoSchedule|PreferNoSchedule|NoExecute))?$", max_length=400),
]
# Of SkyPilot: where it may rent, and what it calls a GPU.
Infra = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}(/[A-Za-z0-9*][A-Za-z0-9_.@:*-]{0,99}){0,2}$", max_length=250),
]
Accelerator = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,39}$")]
Confidence = Literal["documented", "seen", "inferred", "probed"]


class Strict(BaseModel):
    """No unknown keys, no conversion of types, no change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Fact(Strict, Generic[T]):
    """A value and how it is known.

    documented: by the site or vendor; seen: in somebody's public scripts; inferred: it follows from other facts;
    probed: found on the machine by `presets init`. `verified_on` is the file's where it is left out.
    """

    value: T
    source: Text
    confidence: Confidence
    verified_on: datetime.date | None = None


class Limit(Strict):
    """What one partition, queue or QoS allows. Several with one name have different node counts."""

    name: Name
    by: Literal["partition", "qos"] = "partition"  # the option that chooses it; a queue of PBS is a partition here
    min_nodes: Count = 1
    max_nodes: Count | None = None
    max_walltime: Walltime | None = None
    preemptible: bool = False
    unnamed: bool = False  # it counts as well when a job names neither partition nor QoS
    chains: bool = True  # False: no job may follow another by itself there, so none restarts itself
    # Of its nodes, where they have fewer than the preset says: `new` names the answers that fit.
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    cpus_per_task: Annotated[int, Field(ge=1, le=1024)] | None = None
    note: Text | None = None


class Account(Strict):
    """Whether a job must name an account (project, allocation), and what its name looks like."""

    required: bool
    pattern: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@\[\]{}()?*+|^$\\,-]+$", max_length=120)] | None
    ) = None
    example: Name | None = None


class Container(Strict):
    """How ranks run inside a container; {image} in a word is replaced by the answer `container_image`."""

    srun_flags: list[Word] = []  # pyxis or CSCS: options of srun
    command: list[Word] = []  # singularity, apptainer, shifter: words before `python`
    image: Text | None = None  # what an image looks like there, as a hint
    modules: list[Module] | None = None  # in place of the preset's modules, when ranks run in a container
    default_image: Word | None = None  # the default answer to `container_image`, where ranks are to run in one
    # What starts the container, if variables of the job must be told to it to win over the image's own.
    variables: Literal["pyxis", "apptainer", "singularity", "shifter", "podman-hpc"] | None = None
    library_paths: list[Directory] = []  # inside, in front of the image's LD_LIBRARY_PATH; with srun_flags only
    # How a project's packages come into an image there, where no node both starts containers and reaches the internet.
    packages: Text | None = None


class Need(Strict):
    """One thing that a job needs there, and who provides it. Several entries of one `what` are alternatives.

    module: the module `name`, if it is among the answer `modules`, or any of them, if none is named; container: an
    image, if one is answered; uenv: the preset's, without a container; pip: .venv, by the commands that `new` prints,
    without a container; site: what is there without being asked for; user: nobody else, `add` says how.
    """

    what: Literal["python", "torch", "plugin", "interface", "queue", "account"]
    by: Literal["module", "container", "uenv", "pip", "site", "user"]
    name: Text | None = None  # the module or image that has it
    add: Text | None = None  # the line to type or to write, where nothing else provides it


class UserEnvironment(Strict):
    """An environment of CSCS's uenv, mounted in jobs whose ranks run in no container."""

    image: Uenv
    view: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:,-]+$", max_length=120)] = "default"


class Sidecar(Strict):
    """A container beside that of the ranks, which starts before it and ends after it (Kubernetes 1.29 and later)."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    image: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][A-Za-z0-9_.:/@-]{0,254}$")]
    command: list[Text]
    env: dict[Variable, Text] = {}
    capabilities: list[Annotated[str, StringConstraints(pattern=r"^[A-Z_]{1,40}$")]] = []
    host_paths: dict[Directory, Directory] = {}


class Script(Strict):
    """A file of the site that sets its environment; it is sourced in the batch script, before the lines of `env`."""

    path: Directory
    min_nodes: Count = 1


class EnvLine(Strict):
    """One line of nccl.env or recovery.env: what reads it, since when, why it is there, and the source.

    $NAME in the value is replaced when a job starts. A variable that is set already keeps its value.
    """

    name: Variable
    value: Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=_PLAIN)]
    read_by: Text
    since: Text | None = None  # a release; None: not known, and then nothing is claimed
    why: Text
    source: Text
    confidence: Confidence
    verified_on: datetime.date | None = None
    min_nodes: Count | None = None
    max_nodes: Count | None = None
    partition: Name | None = None
    gpu: Model | None = None  # of the first node
    # Of the network plugin aws-ofi-nccl, as many numbers as are given: 1.5.3 is not above 1.5.
    min_plugin: Version | None = None
    max_plugin: Version | None = None
    instead: Text | None = None  # another value, and when, where no condition can tell: "16384 at CSCS"


class Hang(Fact[Text]):
    """A known hang, and what helps. With `open`, `new` tells it when the answers run into what is named here."""

    open: bool = False  # not known to be mended
    min_ranks: Count | None = None
    min_nodes: Count | None = None
    container: bool | None = None  # with an image, or without


class Preemption(Strict):
    """What happens to a job that another one pushes out."""

    grace_s: Annotated[int, Field(ge=0, le=86_400)] | None = None  # from the signal to SIGKILL
    requeued: bool | None = None
    note: Text | None = None


class Preset(Strict):
    """Where a project trains. Absent fields are unknown; None inside a fact is a value left open on purpose."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=60)]
    title: Text
    extends: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=60)] | None = None
    keywords: list[Text] = []  # other words that people search for
    verified_on: datetime.date
    # documented: rests on the site's or vendor's own pages; community: on public scripts of its users.
    status: Literal["documented", "community"]

    # Without a scheduler: torchrun. With slurm: srun (one task a GPU), torchrun (srun starts one on each node), or
    # ibrun (the same by TACC's ibrun); LAUNCHER replaces it at run time. With pbs: mpiexec (one rank a GPU). With
    # kubernetes: torchrun, one a pod; with skypilot: one a node.
    scheduler: Fact[Literal["none", "slurm", "pbs", "kubernetes", "skypilot"]]
    launcher: Fact[Literal["torchrun", "srun", "ibrun", "mpiexec"]]

    accelerator: Fact[Literal["cuda", "rocm", "cpu"] | None] | None = None
    gpu: Fact[Text] | None = None  # for people: "A100 40 GB"
    gpus_per_node: Fact[Annotated[int, Field(ge=1, le=64)] | None]  # devices: a GCD of an MI250X counts
    cpus_per_node: Fact[Annotated[int, Field(ge=1, le=2048)]] | None = None
    cpus_per_task: Fact[Annotated[int, Field(ge=1, le=1024)] | None]  # for each GPU, as the scheduler counts CPUs
    # Slurm's options; `ngpus` in a chunk of PBS; None: a job does not ask for GPUs, nodes come with them.
    gpu_request: Fact[Literal["gpus-per-node", "gres", "gpus-per-task", "gpus", "ngpus"] | None] | None = None
    chunk: Fact[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:=-]{1,120}$")]] | None = None  # PBS
    gpu_type: Fact[Name | None] | None = None  # --gpus-per-node=h100:4
    gpu_order: Fact[list[Annotated[int, Field(ge=0, le=63)]]] | None = None  # the GPU of local rank 0, 1, ...
    sees: Fact[Literal["all", "one"]] | None = None  # the GPUs that a task sees
    cpu_masks: Fact[list[Annotated[str, StringConstraints(pattern=r"^0x[0-9a-f]+$")]]] | None = None  # of whole nodes

    directives: Fact[list[Option]] | None = None  # #SBATCH or #PBS lines beside the usual ones
    launch_flags: Fact[list[Option]] | None = None  # of srun, mpiexec or ibrun
    forbidden_flags: Fact[list[Annotated[str, StringConstraints(pattern=r"^-{1,2}[A-Za-z][A-Za-z0-9_-]*$")]]] | None = (
        None
    )
    account: Fact[Account] | None = None
    partition: Fact[Name | None] | None = None  # the default answer
    qos: Fact[Name | None] | None = None
    limits: list[Fact[Limit]] = []

    # What the pods of a job carry on Kubernetes, beside what answers give. Of `tolerations`, the default answer.
    gpu_resource: Fact[Key] | None = None
    pod_resources: Fact[dict[Key, Quantity]] | None = None  # others, of a pod that has a whole node
    pod_annotations: Fact[dict[Key, Text]] | None = None
    node_selector: Fact[dict[Key, Label]] | None = None
    tolerations: Fact[list[Toleration]] | None = None
    capabilities: Fact[list[Annotated[str, StringConstraints(pattern=r"^[A-Z_]{1,40}$")]]] | None = None
    # Where they are mounted: what they are on the node. Read-only, but for those below /dev.
    host_paths: Fact[dict[Directory, Directory]] | None = None
    sidecar: Fact[Sidecar] | None = None

    # What SkyPilot rents: the default answers. False: there is none of it, and the answer must say so, too.
    sky_infra: Fact[Infra | None] | None = None
    sky_accelerator: Fact[Accelerator] | None = None
    sky_spot: Fact[bool] | None = None
    sky_multi_node: Fact[bool] | None = None
    sky_network_tier: Fact[Literal["best"] | None] | None = None
    sky_store: Fact[Literal["s3", "gs", "nebius", "volume"]] | None = None  # volume: buckets cannot be mounted

    # host: the name of the first node; ip: its address; suffix: the name with `master_suffix`, else without it. With
    # `master_suffix`, ip is the address of that name, where it can be resolved.
    master_addr: Fact[Literal["first-host", "first-host-ip", "first-host-suffix"]] | None = None
    master_suffix: Fact[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]{1,60}$")]] | None = None
    # NCCL takes prefixes, ^ and =; gloo takes concrete names only. `route`: the interface that leads to the master.
    nccl_socket_ifname: Fact[Interfaces | None] | None = None
    gloo_socket_ifname: Fact[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,-]{1,80}$")] | None] | None = None

    env: list[EnvLine] = []
    recovery: list[EnvLine] = []  # known work-arounds for hangs: rendered, but off
    modules: Fact[list[Module] | None] | None = None
    module_paths: Fact[list[Directory]] | None = None  # module use
    commands: Fact[list[Command]] | None = None  # after the modules: conda activate
    env_scripts: list[Fact[Script]] = []
    library_paths: Fact[list[Directory]] | None = None  # in front of LD_LIBRARY_PATH, after the modules
    container: Fact[Container | None] | None = None
    uenv: Fact[UserEnvironment] | None = None
    torch_index: Fact[Url] | None = None  # of pip, with the build of torch that runs there
    needs: list[Fact[Need]] = []  # what a job needs, and who provides it
    internet: Fact[Literal["open", "nat", "proxy", "none"] | None] | None = None  # of the compute nodes
    scratch: Fact[Directory | None] | None = None  # caches go there
    node_local: Fact[Directory | None] | None = None
    storage: list[Fact[Text]] = []

    requeue: Fact[bool | None] | None = None
    preemption: Fact[Preemption | None] | None = None
    # How long before the time limit the scheduler sends the signal to stop.
    stop_signal_lead_s: Fact[Annotated[int, Field(ge=30, le=3600)]] | None = None

    notes: list[Fact[Text]] = []  # quirks that no other field holds
    hangs: list[Hang] = []  # known, and what helps
    not_found: list[Text] = []  # what was looked for in vain
