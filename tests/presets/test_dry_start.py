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
from git_helpers import git

from ddp_scaffold.presets import load
from ddp_scaffold.presets.schema import Preset

sys.path.insert(0, str(Path(__file__).with_name("dry")))
from promises import broken_promises  # noqa: E402
from sandbox import Ended, Sandbox, build, directives, submit_pbs, submit_slurm  # noqa: E402
from sites import site_of  # noqa: E402

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "templates" / "presets").glob("*.yml"))
PRESETS = {path.stem: load.load_preset(path) for path in FILES}
Case = tuple[str, str, str]  # preset, launcher, bare or container
TYPICAL = {
    ("lumi-g", "srun", "container"),
    ("alcf-polaris", "mpiexec", "bare"),
    ("aws-hyperpod", "torchrun", "container"),
    ("tacc-vista", "ibrun", "bare"),
}
IMAGE_NAMES = {"shifter": "docker:nvcr.io/nvidia/pytorch:24.10-py3"}
NO_PLUGIN = "NCCL_NET=AWS Libfabric is forced, and nothing puts a plugin on the library path"
# Jobs that would not start, or not as promised, with the reason. A case that is put right fails here until it is removed.
KNOWN: dict[Case, list[str]] = {}


def cases() -> list[Any]:
    """Every preset with a scheduler, with each launcher that its script has, on the host and in its container."""
    found: list[Any] = []
    for name, preset in PRESETS.items():
        scheduler = preset.scheduler.value
        if scheduler == "none":
            continue
        own = preset.launcher.value
        launchers = ["srun", "torchrun"] if scheduler == "slurm" and own != "ibrun" else [own]
        ways = ["bare", "container"] if preset.container and preset.container.value else ["bare"]
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


Start = Callable[..., tuple[Sandbox, Callable[..., Ended]]]


@pytest.fixture
def prepare(base: Path, launch_template: Path, tmp_path: Path) -> Start:
    """`prepare(case)` returns the sandbox of a case, and a function that runs its job."""
    import copier

    def make(case: Case, **site: Any) -> tuple[Sandbox, Callable[..., Ended]]:
        name, launcher, way = case
        preset = PRESETS[name]
        rendered = tmp_path / "rendered"
        copier.run_copy(
            str(launch_template), rendered, data=answers(preset, launcher, way), defaults=True, quiet=True,
            unsafe=False, vcs_ref="HEAD",
        )  # fmt: skip
        script = next(path for path in (rendered / "launch").iterdir() if path.suffix in (".sbatch", ".pbs"))
        nodes = nodes_of(script)
        root = tmp_path / "site"
        sandbox = build(
            root, rendered / "launch", base, preset, replace(site_of(preset), **site), nodes, way == "container"
        )
        submit = submit_slurm if script.suffix == ".sbatch" else submit_pbs
        return sandbox, lambda **extra: submit(sandbox, sandbox.project / "launch" / script.name, **extra)

    return make


def answers(preset: Preset, launcher: str, way: str) -> dict[str, Any]:
    """Return what a user answers: the launcher, an image, an account where one is needed."""
    found: dict[str, Any] = {"project_name": "demo", "preset": preset.name}
    if preset.scheduler.value == "slurm":
        found["launcher"] = launcher
    if way == "container":
        container = preset.container.value if preset.container else None
        program = container.command[0] if container and container.command else ""
        found["container_image"] = IMAGE_NAMES.get(program, "pytorch.sif" if program else "/shared/pytorch.sqsh")
    account = preset.account.value if preset.account else None
    if account and account.required:
        found["account"] = account.example or "demo"
    return found


def nodes_of(script: Path) -> int:
    """Return the nodes that a script asks for."""
    if script.suffix == ".sbatch":
        return int(directives(script, "SBATCH")["--nodes"])
    return int(directives(script, "PBS")["-l select"].partition(":")[0])


def found_wrong(case: Case, sandbox: Sandbox, ended: Ended) -> list[str]:
    """Return why a job did not start, or what its ranks find that is not as promised."""
    name, launcher, _ = case
    preset = PRESETS[name]
    if "train" not in ended.ranks:
        lines = [line for line in ended.output.splitlines() if "warning" not in line]
        first = next((line for line in lines if "error" in line or "No such file" in line), "no error is told")
        return [f"ended with {ended.code}, before training: {first}"]
    numbered = {"mpiexec": sandbox.site.mpiexec, "ibrun": "torchrun"}.get(launcher, launcher)
    script = next(path for path in (sandbox.project / "launch").iterdir() if path.suffix in (".sbatch", ".pbs"))
    options = directives(script, "SBATCH")
    partition = options.get("--partition", "batch") if options else "workq"
    per_node = preset.gpus_per_node.value or PER_NODE
    cpus = preset.cpus_per_task.value or CPUS
    ranks = ended.ranks["train"]
    problems = broken_promises(sandbox, ranks, numbered, per_node, cpus, partition)
    hosts = {env["SANDBOX_HOST"] for env in ended.ranks.get("preflight", [])}
    problems += [f"preflight ran on {sorted(hosts)}"] if hosts != set(sandbox.nodes) else []
    return problems + ([f"the job ended with {ended.code}"] if ended.code else [])


PER_NODE, CPUS = 1, 4  # what copier.yml takes where a preset leaves it open


@pytest.mark.parametrize("case", cases())
def test_a_job_starts_as_its_preset_promises(case: Case, prepare: Start) -> None:
    sandbox, run = prepare(case)
    ended = run()
    assert found_wrong(case, sandbox, ended) == KNOWN.get(case, []), ended.output
