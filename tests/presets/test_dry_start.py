"""Every job that presets render is started in a sandbox that answers like its site, to the first line of training.

What a rank finds there is held against what its preset promises. The sandbox knows recorded texts of tools, options,
variables and the rules of containers; what it cannot know is on the cluster's page. No network, no root, no Slurm.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cross_section import every
from git_helpers import git

from ddp_scaffold.presets import load
from ddp_scaffold.presets.facts import needs
from ddp_scaffold.presets.schema import Preset

sys.path.insert(0, str(Path(__file__).with_name("dry")))
from promises import broken_promises, refused
from sandbox import Ended, Sandbox, build, directives, submit_pbs, submit_slurm
from sites import site_of

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "templates" / "presets").glob("*.yml"))
PRESETS = {path.stem: load.load_preset(path) for path in FILES}
Case = tuple[str, str, str]  # preset, launcher, bare or container
TYPICAL = {
    ("lumi-g", "srun", "container"),
    ("alcf-polaris", "mpiexec", "bare"),
    ("aws-hyperpod", "torchrun", "container"),
    ("tacc-vista", "ibrun", "bare"),
    ("cscs-clariden", "srun", "bare"),
}
IMAGE_NAMES = {"shifter": "docker:nvcr.io/nvidia/pytorch:24.10-py3"}
NO_PLUGIN = " is forced, and nothing puts a plugin on the library path"
# Modules that a user adds where `new` names a plugin as still needed, as the preset's `needs` says them.
TOLD = {"nersc-perlmutter": "pytorch nccl", "generic-slurm-slingshot": "aws-ofi-nccl"}


def cases() -> list[Any]:
    """Every preset with a scheduler, with each launcher that its script has, on the host and in its container."""
    found: list[Any] = []
    for name, preset in PRESETS.items():
        scheduler = preset.scheduler.value
        if scheduler in ("none", "kubernetes", "skypilot"):  # tests/kubernetes and tests/skypilot begin these
            continue
        own = preset.launcher.value
        launchers = ["srun", "torchrun"] if scheduler == "slurm" and own != "ibrun" else [own]
        ways = ["bare", *(["container"] if preset.container and preset.container.value else [])]
        ways += ["told"] if name in TOLD else []
        for case in ((name, launcher, way) for launcher in launchers for way in ways):
            marks = [] if case in TYPICAL else [pytest.mark.slow]
            found.append(pytest.param(case, marks=marks, id="-".join(case)))
    return found


@pytest.fixture(scope="session")
def base(render: Callable[..., Path]) -> Path:
    """A project whose package all sandboxes start."""
    return render({"preset": "generic-slurm"})


@pytest.fixture(scope="session")
def launch_template(template_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template without what is not the launch folder: to render all of it takes seconds."""
    repo = tmp_path_factory.mktemp("launch-template") / "ddp-scaffold"
    shutil.copytree(template_repo, repo, ignore=shutil.ignore_patterns(".git"))
    for path in (repo / "templates" / "project").iterdir():
        if "launch" in path.name or "answers_file" in path.name:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    git(repo, "init", "--quiet", "--initial-branch=main")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "The launch folder")
    return repo


@pytest.fixture(scope="session")
def rendered(launch_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """`rendered(case)` has the launch folder of a case, made once."""
    import copier

    made: dict[Case, Path] = {}

    def render(case: Case) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("rendered")
            data = answers(PRESETS[case[0]], *case[1:])
            copier.run_copy(
                str(launch_template), made[case], data=data, defaults=True, quiet=True, unsafe=False, vcs_ref="HEAD"
            )
        return made[case]

    return render


Start = Callable[..., tuple[Sandbox, Callable[..., Ended]]]


@pytest.fixture
def prepare(base: Path, rendered: Callable[[Case], Path], tmp_path: Path) -> Start:
    """`prepare(case)` returns the sandbox of a case, and a function that runs its job."""

    def make(case: Case, **site: Any) -> tuple[Sandbox, Callable[..., Ended]]:
        preset, launch = PRESETS[case[0]], rendered(case) / "launch"
        script = script_in(launch)
        own = replace(site_of(preset), **site)
        sandbox = build(tmp_path / "site", launch, base, preset, own, nodes_of(script), case[2] == "container")
        submit = submit_slurm if script.suffix == ".sbatch" else submit_pbs
        return sandbox, lambda **extra: submit(sandbox, sandbox.project / "launch" / script.name, **extra)

    return make


def script_in(launch: Path) -> Path:
    """Return the batch script of a launch folder."""
    return next(path for path in launch.iterdir() if path.suffix in (".sbatch", ".pbs"))


def answers(preset: Preset, launcher: str, way: str) -> dict[str, Any]:
    """Return what a user answers: the launcher, an image, an account where one is needed."""
    found: dict[str, Any] = {"project_name": "demo", "preset": preset.name, "container_image": ""}
    if preset.scheduler.value == "slurm":
        found["launcher"] = launcher
    if way == "container":
        container = preset.container.value if preset.container else None
        program = container.command[0] if container and container.command else ""
        found["container_image"] = IMAGE_NAMES.get(program, "pytorch.sif" if program else "/shared/pytorch.sqsh")
    if way == "told":
        found["modules"] = TOLD[preset.name]
    account = preset.account.value if preset.account else None
    if account and account.required:
        found["account"] = account.example or "demo"
    return found


def still_needed(preset: Preset, answered: Mapping[str, Any]) -> list[str]:
    """Return what `new` names as still needed with these answers."""
    data = preset.model_dump(mode="json")
    known = {name: fact["value"] for name, fact in data.items() if isinstance(fact, dict) and "value" in fact}
    known["limits"] = [fact["value"] for fact in data["limits"]]
    return needs({"preset_data": data, "known": known, **answered})


def nodes_of(script: Path) -> int:
    """Return the nodes that a script asks for."""
    if script.suffix == ".sbatch":
        return int(directives(script, "SBATCH")["--nodes"])
    return int(directives(script, "PBS")["-l select"].partition(":")[0])


def found_wrong(case: Case, answered: Mapping[str, Any], sandbox: Sandbox, ended: Ended) -> list[str]:
    """Return why a job would be refused or did not start, or what its ranks find that is not as promised."""
    script = script_in(sandbox.project / "launch")
    options = directives(script, "SBATCH") or directives(script, "PBS")
    walltime = options.get("--time", options.get("-l walltime", ""))
    problems = list(refused(sandbox.preset, options, len(sandbox.nodes), walltime))
    if "train" not in ended.ranks:
        lines = ended.output.splitlines()
        first = next((line for line in lines if "error" in line or "No such file" in line), "no error is told")
        return [*problems, f"ended with {ended.code}, before training: {first}"]
    launcher = case[1]
    numbered = {"mpiexec": sandbox.site.mpiexec, "ibrun": "torchrun"}.get(launcher, launcher)
    problems += broken_promises(
        sandbox, ended.ranks["train"], numbered, answered["gpus_per_node"], answered["cpus_per_task"],
        options.get("--partition", "batch" if "--nodes" in options else "workq"),
    )  # fmt: skip
    hosts = {env["SANDBOX_HOST"] for env in ended.ranks.get("preflight", [])}
    problems += [f"preflight ran on {sorted(hosts)}"] if hosts != set(sandbox.nodes) else []
    return problems + ([f"the job ended with {ended.code}"] if ended.code else [])


@pytest.mark.parametrize("case", cases())
def test_a_job_starts_as_its_preset_promises(case: Case, prepare: Start, rendered: Callable[[Case], Path]) -> None:
    sandbox, run = prepare(case)
    answered = yaml.safe_load((rendered(case) / ".copier-answers.yml").read_text())
    ended = run()
    wrong = found_wrong(case, answered, sandbox, ended)
    without_plugin = [text for text in wrong if text.endswith(NO_PLUGIN)]
    told = [text for text in still_needed(sandbox.preset, answered) if text.startswith("plugin: ")]
    assert wrong == without_plugin, ended.output
    assert bool(without_plugin) <= bool(told), "the job lacks its plugin, and `new` does not say so"
    if case[2] == "told" or any(line.name == "NCCL_NET" for line in sandbox.preset.env):
        assert bool(told) <= bool(without_plugin), "`new` asks for a plugin that the job has"
    assert case[2] != "told" or not told, "what `new` names does not bring the plugin"


# github.com/runpod/docs instant-clusters/configuration.mdx: what each Pod has, of the cluster and not of the job.
POD = {
    "MASTER_ADDR": "10.65.0.9", "PRIMARY_ADDR": "10.65.0.9", "MASTER_PORT": "29400", "PRIMARY_PORT": "29400",
    "NODE_ADDR": "10.65.0.9", "NODE_RANK": "7", "NUM_NODES": "8", "NUM_TRAINERS": "8", "WORLD_SIZE": "64",
    "HOST_NODE_ADDR": "10.65.0.9:29400",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_takes_nothing_of_the_cluster_that_pods_tell_of(
    launcher: str, prepare: Start, rendered: Callable[[Case], Path]
) -> None:
    case = ("runpod-slurm", launcher, "bare")
    sandbox, run = prepare(case)
    answered = yaml.safe_load((rendered(case) / ".copier-answers.yml").read_text())
    ended = run(**POD)
    assert found_wrong(case, answered, sandbox, ended) == [], ended.output
    assert {env["MASTER_PORT"] for env in ended.ranks["train"]} != {POD["MASTER_PORT"]}


LUMI: Case = ("lumi-g", "srun", "container")
POLARIS: Case = ("alcf-polaris", "mpiexec", "bare")
CLARIDEN: Case = ("cscs-clariden", "srun", "bare")
HANG = "exec sleep 600"
SOON = 'shift; exec /usr/bin/timeout 1 "$@"'  # in place of timeout: 1 s in place of 30


@pytest.mark.parametrize("says", every(2, ["lmod-unknown.txt", "tcl-unknown.txt"]))
def test_a_module_that_is_gone_ends_the_job_with_78(prepare: Start, says: str) -> None:
    _, run = prepare(LUMI, known_modules=frozenset(), module_says=says)
    ended = run()
    assert (ended.code, "train" in ended.ranks) == (78, False), ended.output
    assert "error: module load failed" in ended.output


def test_no_module_command_ends_the_job_with_78(prepare: Start) -> None:
    _, run = prepare(LUMI)
    ended = run(BASH_ENV="")
    assert (ended.code, "train" in ended.ranks) == (78, False), ended.output
    assert "error: module load failed" in ended.output


@pytest.mark.parametrize("script", every(3, ["exit 0", "echo 'scontrol: error: Invalid hostlist'; exit 1", HANG]))
def test_nodes_that_cannot_be_listed_end_the_job_with_78(prepare: Start, script: str) -> None:
    sandbox, run = prepare(LUMI)
    sandbox.tool("scontrol", script)
    sandbox.tool("timeout", SOON)
    ended = run()
    assert (ended.code, "train" in ended.ranks) == (78, False), ended.output
    assert "error: scontrol does not tell the first node of node[01-02]" in ended.output


CUT = 'head -c 300 "$0.txt"'
GERMAN = "printf 'Auftrag: 4242\\n    Auftragsname = demo\\n    Status = L\\n    run_count = eins\\n'"
GONE = "echo 'qstat: Unknown Job Id 4242.standin' >&2; exit 153"


@pytest.mark.parametrize(
    "script", every(3, ["exit 0", CUT, GERMAN, GONE, HANG], ["empty", "cut", "german", "gone", "hangs"])
)
def test_a_job_that_qstat_does_not_tell_of_starts_or_says_why(prepare: Start, script: str) -> None:
    """What qstat tells is for restarts and the end of the time: without it a job runs, and says what it lacks."""
    sandbox, _ = prepare(POLARIS)
    sandbox.tool("timeout", SOON)
    job = sandbox.project / "launch" / "train.pbs"
    ended = submit_pbs(sandbox, job, qstat=script)
    assert ended.code == 0, ended.output
    assert len(ended.ranks["train"]) == 8
    assert "warning: qstat" in ended.output


@pytest.mark.parametrize("script", every(3, ["exit 0", "echo 'mpiexec: Befehl unbekannt'; exit 1", HANG]))
def test_an_mpiexec_without_a_version_gets_no_option_that_only_one_has(prepare: Start, script: str) -> None:
    sandbox, run = prepare(POLARIS)
    sandbox.tool("timeout", SOON)
    real = (sandbox.root / "bin" / "mpiexec").read_text().splitlines()[-1]
    sandbox.tool("mpiexec", f'[ "$1" != --version ] || {{ {script}; }}\n{real}')
    ended = run()
    assert ended.code == 0, ended.output
    assert {env["SANDBOX_DEPTH"] for env in ended.ranks["train"]} == {""}


def test_a_missing_python_ends_the_job_with_78(prepare: Start) -> None:
    sandbox, run = prepare(POLARIS)
    shutil.rmtree(sandbox.project / ".venv")
    ended = run()
    assert (ended.code, ended.ranks) == (78, {}), ended.output
    assert "error: there is no python on the PATH" in ended.output


# A Python 3.6: it says so, and can read no file of ours.
OLD = f"""if [ "$1" = -c ]; then
  exec '{sys.executable}' -S -c 'import sys; sys.version_info = (3, 6, 15); exec(sys.argv[1])' "$2"
fi
echo 'SyntaxError: future feature annotations is not defined' >&2
exit 1"""


def test_a_python_that_is_too_old_ends_the_job_with_78(prepare: Start) -> None:
    sandbox, run = prepare(POLARIS)
    sandbox.tool("../home/project/.venv/bin/python", OLD)
    ended = run()
    assert (ended.code, ended.ranks) == (78, {}), ended.output
    assert "is older than Python 3.10" in ended.output
    assert "SyntaxError" not in ended.output


@pytest.mark.slow
def test_the_host_of_a_container_may_have_its_new_python_under_another_name(prepare: Start) -> None:
    """As on SUSE 15, whose python3 is 3.6."""
    sandbox, run = prepare(LUMI)
    venv = sandbox.project / ".venv" / "bin"
    new = (venv / "python").read_text().splitlines()[1:]
    for name in ("python", "python3"):
        sandbox.tool(f"../home/project/.venv/bin/{name}", OLD)
    sandbox.tool("python3.11", "\n".join(new))
    ended = run()
    assert ended.code == 0, ended.output
    assert {env["SANDBOX_PYTHON"] for env in ended.ranks["train"]} == {"image"}


@pytest.mark.slow  # the same path with another text, or a job of 16 ranks more
@pytest.mark.slow
def test_a_node_without_a_name_on_the_fast_network_is_found_by_its_own(prepare: Start) -> None:
    sandbox, run = prepare(("jsc-jupiter", "srun", "bare"))
    getent = sandbox.root / "bin" / "getent"
    getent.write_text(getent.read_text().replace("-interconnect-1", "-no-such-name"))
    ended = run()
    assert ended.code == 0, ended.output
    name = f"{sandbox.nodes[0]}-interconnect-1.jupiter.internal"
    assert f"{name} cannot be resolved here: taking {sandbox.nodes[0]}" in ended.output
    assert {env["MASTER_ADDR"] for env in ended.ranks["train"]} == {"10.0.0.1"}


@pytest.mark.slow
def test_an_image_without_more_packages_is_started_and_that_is_said(prepare: Start) -> None:
    sandbox, run = prepare(LUMI)
    shutil.rmtree(sandbox.project / ".venv-image")
    ended = run()
    assert ended.code == 0, ended.output
    assert "there is no .venv-image" in ended.output


@pytest.mark.slow
def test_a_job_whose_uenv_is_not_mounted_ends_with_78(prepare: Start) -> None:
    """What `sbatch` without CSCS's plugin of Slurm leaves: a .venv on top of an image that is not there."""
    sandbox, run = prepare(CLARIDEN)
    script = script_in(sandbox.project / "launch")
    script.write_text(
        "".join(line for line in script.read_text().splitlines(keepends=True) if "#SBATCH --uenv" not in line)
    )
    ended = run()
    assert (ended.code, ended.ranks) == (78, {}), ended.output
    assert "error: there is no python on the PATH" in ended.output


@pytest.mark.slow  # the same path with another text, or a job of 16 ranks more
def test_a_uenv_without_its_view_lacks_the_plugin_and_the_promise_says_so(
    prepare: Start, rendered: Callable[[Case], Path]
) -> None:
    sandbox, run = prepare(CLARIDEN)
    script = script_in(sandbox.project / "launch")
    script.write_text(
        "".join(line for line in script.read_text().splitlines(keepends=True) if "#SBATCH --view" not in line)
    )
    ended = run()
    answered = yaml.safe_load((rendered(CLARIDEN) / ".copier-answers.yml").read_text())
    assert any(text.endswith(NO_PLUGIN) for text in found_wrong(CLARIDEN, answered, sandbox, ended)), ended.output


GPU_TOOLS = {
    "empty": "exit 0",
    "cut": "printf 'NVIDIA H1'",
    "german": "echo 'NVIDIA-SMI ist fehlgeschlagen: keine Verbindung zum Treiber'; exit 9",
    "hangs": HANG,
}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(text, id=name, marks=[] if name == "cut" else [pytest.mark.slow])
        for name, text in GPU_TOOLS.items()
    ],
)  # slow: the same path with another text
def test_a_gpu_that_no_tool_tells_of_gets_no_line_of_another(prepare: Start, script: str) -> None:
    """NCCL_IB_HCA of OCI differs between H100 and H200: the wrong one is worse than none."""
    sandbox, run = prepare(("oci-h100", "srun", "bare"))
    sandbox.tool("nvidia-smi", script)
    sandbox.tool("timeout", SOON)
    ended = run()
    assert ended.code == 0, ended.output
    assert {"NCCL_IB_HCA" in env for env in ended.ranks["train"]} == {False}


IP = {"empty": "exit 0", "cut": "printf '4: hsn0    in'", "german": "echo 'Objekt \"-o\" unbekannt'; exit 1"}


@pytest.mark.parametrize(
    "script",
    [pytest.param(text, id=name, marks=[] if name == "german" else [pytest.mark.slow]) for name, text in IP.items()],
)  # slow: the same path with another text
def test_an_ip_that_tells_nothing_leaves_the_interface_to_gloo(prepare: Start, script: str) -> None:
    sandbox, run = prepare(LUMI)
    sandbox.tool("ip", script)
    ended = run()
    assert ended.code == 0, ended.output
    assert {env.get("GLOO_SOCKET_IFNAME", "") for env in ended.ranks["train"]} <= {"", "hsn0"}


@pytest.mark.slow  # the same path with another text, or a job of 16 ranks more
@pytest.mark.slow
def test_a_first_node_that_no_node_can_resolve_ends_the_job_with_78(prepare: Start) -> None:
    sandbox, run = prepare(LUMI)
    sandbox.tool("getent", "exit 2")
    ended = run()
    assert (ended.code, "train" in ended.ranks) == (78, False), ended.output
    assert "error: MASTER_ADDR=node01 cannot be resolved" in ended.output


@pytest.mark.slow  # the same path with another text, or a job of 16 ranks more
def test_a_partition_that_is_gone_when_the_job_is_requeued_is_said_with_what_to_type(prepare: Start) -> None:
    sandbox, run = prepare(LUMI)
    (sandbox.root / "ends").write_text("75")
    real = (sandbox.root / "bin" / "scontrol").read_text().partition("\n")[2]
    gone = "echo 'scontrol: error: Invalid partition name specified' >&2; exit 1"
    sandbox.tool("scontrol", f'case "$1" in requeue) {gone} ;; esac\n{real}')
    ended = run()
    assert ended.code == 75, ended.output
    assert "error: scontrol requeue failed" in ended.output
    assert "sbatch" in ended.output.splitlines()[-1]


@pytest.mark.slow
def test_a_queue_that_is_gone_when_the_job_submits_itself_again_is_said_with_what_to_type(prepare: Start) -> None:
    sandbox, run = prepare(POLARIS)
    (sandbox.root / "ends").write_text("75")
    sandbox.tool("qsub", "echo 'qsub: Unknown queue' >&2; exit 170")
    ended = run()
    assert ended.code == 75, ended.output
    assert "error: qsub failed here" in ended.output
    assert "qsub -q" in ended.output.splitlines()[-1]
