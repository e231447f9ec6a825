"""Presets on a real cluster: their directives are accepted, and what they say about a site is what the ranks find."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_helpers import environment, with_standin

from ddp_scaffold.presets import load

flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky]

ROOT = Path(__file__).parents[2]
SLURM = [
    path.stem
    for path in sorted((ROOT / "templates" / "presets").glob("*.yml"))
    if load.load_preset(path).scheduler.value == "slurm"
]


# ------------------------------------------------------------------------------------------------- sbatch --test-only
def for_testbed(script: str) -> str:
    """Put what the testbed has in place of names and sizes of the site; no other option goes away.

    It has two nodes of 4 cores, 2 GPUs of no type and 6000 MB, the partition main with a limit of an hour, the feature
    `tests`, and no accounting, so any account will do and no QoS exists. CSCS has a plugin (`--uenv`).
    """
    replacements = [
        (r"--partition=\S+", "--partition=main"),
        (r"--qos=\S+", ""),
        (r"--(uenv|view)=\S+", ""),
        (r"(--constraint=|-C )\S+", r"\1tests"),
        (r"--time=\S+", "--time=00:10:00"),
        (r"--nodes=\d+", "--nodes=2"),
        (r"--ntasks-per-node=(?!1$)\d+", "--ntasks-per-node=2"),
        (r"--cpus-per-task=\d+", "--cpus-per-task=1"),
        (r"--gpus-per-node=(\w+:)?\d+", "--gpus-per-node=2"),
        (r"--gpus-per-task=(\w+:)?\d+", "--gpus-per-task=1"),
        (r"--gres=gpu:(\w+:)?\d+", "--gres=gpu:2"),
        (r"--gpus=(\w+:)?\d+", "--gpus=4"),
        (r"(--mem|--mem-per-gpu)=[1-9]\d*[MGT]?", r"\1=1G"),
        (r"--mem-per-cpu=[1-9]\d*[MGT]?", "--mem-per-cpu=100M"),
    ]
    for pattern, replacement in replacements:
        script = re.sub(rf"^#SBATCH {pattern}$", f"#SBATCH {replacement}".rstrip(), script, flags=re.MULTILINE)
    return script


Answer = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def test_only(slurm: dict[str, str], tmp_path: Path) -> Answer:
    """What `sbatch --test-only` says to a script."""
    update = ["scontrol", "update", "NodeName=tn[1-2]", "AvailableFeatures=tests", "ActiveFeatures=tests"]
    subprocess.run(update, env=slurm, check=True)

    def ask(script: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "train.sbatch"
        file.write_text(script)
        command = ["sbatch", "--test-only", str(file)]
        return subprocess.run(command, cwd=tmp_path, env=slurm, check=False, capture_output=True, text=True)

    return ask


@pytest.mark.parametrize("name", SLURM)
def test_sbatch_takes_the_directives(render: Callable[..., Path], test_only: Answer, name: str) -> None:
    script = (render({"preset": name}) / "launch/train.sbatch").read_text()
    done = test_only(for_testbed(script))
    assert done.returncode == 0, done.stderr
    assert re.search(r"Job \d+ to start at", done.stderr), done.stderr
    assert "error" not in done.stderr


@pytest.mark.parametrize(
    "directive", ["--no-such-option", "--partition=elsewhere", "--gres=gpu:3", "--constraint=other", "--time=soon"]
)
def test_sbatch_refuses_what_is_wrong(render: Callable[..., Path], test_only: Answer, directive: str) -> None:
    """Else the test above would say nothing."""
    script = for_testbed((render({"preset": "generic-slurm"}) / "launch/train.sbatch").read_text())
    script = script.replace("set -euo pipefail\n", f"#SBATCH {directive}\nset -euo pipefail\n", 1)
    assert test_only(script).returncode != 0


# ------------------------------------------------------------------------------------------------ a preset of one's own
OWN = """\
name: own-site
title: A site of two nodes
extends: generic-slurm
verified_on: 2026-11-28
status: documented
launcher: {value: LAUNCHER, source: the test, confidence: probed}
gpus_per_node: {value: 2, source: the test, confidence: probed}
cpus_per_task: {value: 2, source: the test, confidence: probed}
gpu_order: {value: [1, 0], source: the test, confidence: probed}
launch_flags: {value: ["-m cyclic", "--label"], source: the test, confidence: probed}
master_addr: {value: RULE, source: the test, confidence: probed}
scratch: {value: $SITE_SCRATCH/caches, source: the test, confidence: probed}
library_paths: {value: [$SITE_SCRATCH/lib], source: the test, confidence: probed}
internet: {value: none, source: the test, confidence: probed}
env_scripts:
  - {value: {path: $SITE_SCRATCH/two.sh, min_nodes: 2}, source: the test, confidence: probed}
  - {value: {path: $SITE_SCRATCH/three.sh, min_nodes: 3}, source: the test, confidence: probed}
env:
  - {name: SITE_ALWAYS, value: $SITE_SCRATCH/topo.xml, MORE}
  - {name: SITE_FROM_2, value: $(touch pwned), min_nodes: 2, MORE}
  - {name: SITE_FROM_3, value: "1", min_nodes: 3, MORE}
  - {name: SITE_TO_1, value: "1", max_nodes: 1, MORE}
  - {name: SITE_MAIN, value: "1", min_nodes: 2, partition: main, MORE}
  - {name: SITE_HIGH, value: "1", min_nodes: 2, partition: high, MORE}
  - {name: SITE_MINE, value: of the preset, MORE}
"""
MORE = "read_by: nobody, why: the test looks for it, source: the test, confidence: probed"


def own_preset(directory: Path, launcher: str, rule: str = "first-host") -> dict[str, Any]:
    """The preset, which `ddp-scaffold presets check` accepts."""
    text = OWN.replace("MORE", MORE).replace("LAUNCHER", launcher).replace("RULE", rule)
    if rule == "first-host-suffix":
        text += "master_suffix: {value: i, source: the test, confidence: probed}\n"
    file = directory / "own-site.yml"
    file.write_text(text)
    load.load_preset(file)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@pytest.fixture
def names_of_the_fast_network(slurm: dict[str, str]) -> Iterator[None]:
    """tn1i is tn1; the cluster removes lines with its mark as well."""
    hosts = Path("/etc/hosts")
    added = "10.78.0.11 tn1i # ddp-tests\n"
    with hosts.open("a") as file:
        file.write(added)
    yield
    hosts.write_text(hosts.read_text().replace(added, ""))


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The file system of the site, and the environment of who submits there."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "two.sh").write_text('[ -z "$SITE_NOT_SET" ] && false\nexport SITE_TWO="$FROM_NOWHERE-2"\n')
    (scratch / "three.sh").write_text("export SITE_THREE=1\n")
    return {
        "SITE_SCRATCH": str(scratch),
        "SITE_MINE": "of the user",
        "XDG_CACHE_HOME": "",
        "LD_LIBRARY_PATH": "/mine",
        "PREFLIGHT": "0",
    }


@pytest.mark.parametrize(
    ("launcher", "rule", "master"),
    [
        ("srun", "first-host-suffix", "tn1i"),
        ("torchrun", "first-host-ip", "10.78.0.11"),
        ("srun", "first-host-ip", "10.78.0.11"),
    ],
)
@pytest.mark.usefixtures("names_of_the_fast_network")
def test_ranks_find_what_the_preset_says(
    submit: Callable[..., Any],
    render: Callable[..., Path],
    site: dict[str, str],
    tmp_path: Path,
    launcher: str,
    rule: str,
    master: str,
) -> None:
    if launcher == "torchrun":
        pytest.importorskip("torch", reason="needs torch, for its torchrun")
    answers = {"preset": "own", "preset_file": own_preset(tmp_path, launcher, rule), "walltime": "00:10:00"}
    project = with_standin(render(answers), tmp_path / "my project")
    job = submit(project, ["--plan", "done"], **site)
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), result.output
    assert f"4 ranks on tn[1-2] by {launcher}" in result.output
    scratch = site["SITE_SCRATCH"]
    ranks = [rank["env"] for rank in job.ready(0)]
    # -m cyclic: it places the tasks of srun, which are ranks, or of torchrun one a node.
    nodes = ["tn1", "tn2", "tn1", "tn2"] if launcher == "srun" else ["tn1", "tn1", "tn2", "tn2"]
    assert [env["SLURMD_NODENAME"] for env in ranks] == nodes
    for env in ranks:
        assert env["CUDA_VISIBLE_DEVICES"] == "1,0"
        assert env["MASTER_ADDR"] == master
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["XDG_CACHE_HOME"] == f"{scratch}/caches/.cache"
        assert env["LD_LIBRARY_PATH"] == f"{scratch}/lib:/mine"
        assert env["HF_HUB_OFFLINE"] == "1"
        found = {name: value for name, value in env.items() if name.startswith("SITE_")}
        assert found == {
            "SITE_SCRATCH": scratch,
            "SITE_TWO": "-2",
            "SITE_ALWAYS": f"{scratch}/topo.xml",
            "SITE_FROM_2": "$(touch pwned)",
            "SITE_MAIN": "1",
            "SITE_MINE": "of the user",
        }
    assert re.search(r"^\d: \[launch\]", result.output, re.MULTILINE), result.output  # --label
    assert not (project / "pwned").exists()


def test_one_node_of_the_other_partition(
    submit: Callable[..., Any], render: Callable[..., Path], site: dict[str, str], tmp_path: Path
) -> None:
    answers = {"preset": "own", "preset_file": own_preset(tmp_path, "srun"), "walltime": "00:10:00"}
    project = with_standin(render(answers), tmp_path / "project")
    job = submit(project, ["--plan", "done"], partition="high", options=["--nodes=1"], **site)
    result = job.wait()
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    for rank in job.ready(0, 2):
        found = {name for name in rank["env"] if name.startswith("SITE_")}
        assert found == {"SITE_SCRATCH", "SITE_ALWAYS", "SITE_TO_1", "SITE_MINE"}


def test_launch_flags_are_for_the_launcher_that_the_preset_names(
    submit: Callable[..., Any], render: Callable[..., Path], site: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="needs torch, for its torchrun")
    answers = {"preset": "own", "preset_file": own_preset(tmp_path, "srun"), "walltime": "00:10:00"}
    project = with_standin(render(answers), tmp_path / "project")
    job = submit(project, ["--plan", "done"], LAUNCHER="torchrun", **site)
    result = job.wait()
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert "[launch] tn" in result.output
    assert not re.search(r"^\d: ", result.output, re.MULTILINE), result.output


def test_a_master_that_nobody_knows_is_named(
    submit: Callable[..., Any], render: Callable[..., Path], site: dict[str, str], tmp_path: Path
) -> None:
    """As where compute nodes cannot resolve each other's names; here getent knows nothing."""
    answers = {"preset": "own", "preset_file": own_preset(tmp_path, "srun", "first-host-ip"), "walltime": "00:10:00"}
    project = with_standin(render(answers), tmp_path / "project")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "getent").write_text("#!/bin/sh\nexit 2\n")
    (programs / "getent").chmod(0o755)
    job = submit(project, ["--plan", "done"], **site, PATH=f"{programs}:{environment()['PATH']}")
    result = job.wait()
    assert (result.state, result.exit_code) == ("FAILED", 78), result.output
    assert "error: tn1 has no IPv4 address" in result.output


# --------------------------------------------------------------------------------------------------------------- ibrun
# A stand-in for TACC's ibrun, which cannot be had elsewhere. Like it, it starts as many tasks on each node as
# --ntasks-per-node says, by an MPI launcher: tasks know their place by PMI_RANK and PMI_SIZE only, and whatever Slurm
# has set in the batch script (the first node's name, SLURM_NODEID=0) stays as it is on every node.
IBRUN = """\
#!/bin/bash
echo "stand-in ibrun: $*"
export FIRST=$SLURMD_NODENAME
exec srun --kill-on-bad-exit=0 --wait=60 bash -c '
  export PMI_RANK=$SLURM_PROCID PMI_SIZE=$SLURM_NTASKS SLURM_NODEID=0 SLURMD_NODENAME=$FIRST
  unset FIRST SLURM_PROCID SLURM_LOCALID SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST
  exec "$@"' ibrun "$@"
"""


@pytest.fixture
def ibrun_project(render: Callable[..., Path], tmp_path: Path) -> Path:
    """The stand-in training looks for the file `stop` as well, as real training does."""
    pytest.importorskip("torch", reason="needs torch, for its torchrun")
    preset = own_preset(tmp_path, "ibrun")
    del preset["launch_flags"]
    answers = {"preset": "own", "preset_file": preset, "walltime": "00:10:00", "max_restarts": 2}
    project = with_standin(render(answers), tmp_path / "my project")
    train = next(project.glob("src/*/train.py"))
    text = train.read_text()
    old = "while not stop.exists():"
    assert old in text
    text = text.replace(old, 'stop_file = run_dir / "stop"\nwhile not stop.exists() and not stop_file.exists():')
    text = text.replace(
        'end("stopped", ', 'if stop_file.exists():\n    end("stopped", stop_file.read_text())\nend("stopped", '
    )
    train.write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ibrun").write_text(IBRUN)
    (programs / "ibrun").chmod(0o755)
    return project


def test_ibrun_starts_one_torchrun_a_node(
    submit: Callable[..., Any], ibrun_project: Path, site: dict[str, str], tmp_path: Path
) -> None:
    hostile = ["a b", "$(touch pwned)", "*", ""]
    path = f"{tmp_path}/bin:{environment()['PATH']}"
    job = submit(ibrun_project, ["--plan", "done", *hostile], **site, PATH=path)
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), result.output
    assert "stand-in ibrun: bash launch/node.sh 2 300" in result.output
    ranks = job.ready(0)
    assert [rank["argv"] for rank in ranks] == [["--plan", "done", *hostile]] * 4
    envs = [rank["env"] for rank in ranks]
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "0", "1"]
    assert {env["WORLD_SIZE"] for env in envs} == {"4"}
    assert {env["SLURMD_NODENAME"] for env in envs} == {"tn1"}, "the stand-in hides it"
    for env in envs:
        assert env["OMP_NUM_THREADS"] == "2"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "PMI_RANK" not in env  # of the node's task, not of the rank
    logs = job.run_dir / "torchelastic/attempt0"
    assert sorted(path.name for path in logs.iterdir()) == ["agent0.log", "agent1.log", "tn1", "tn2"]


def test_a_signal_to_the_script_stops_ranks_of_ibrun_by_a_file(
    submit: Callable[..., Any], ibrun_project: Path, site: dict[str, str], slurm: dict[str, str], tmp_path: Path
) -> None:
    job = submit(ibrun_project, ["--plan", "wait,done"], **site, PATH=f"{tmp_path}/bin:{environment()['PATH']}")
    job.ready(0)
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.id], env=slurm, check=True)
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), result.output
    assert "got SIGUSR2: asking the ranks to stop" in result.output
    assert "attempt 0 ended, stopped: signal SIGUSR2 to the launch script on tn1; requeueing, 1 of 2" in result.output
    assert "attempt 1 ended, done: the plan says done" in result.output
    assert len(job.ready(1)) == 4
    assert not (job.run_dir / "stop").exists(), "the next attempt would stop at once"


def test_ibrun_is_the_only_launcher_of_its_script(
    submit: Callable[..., Any], ibrun_project: Path, site: dict[str, str], tmp_path: Path
) -> None:
    result = submit(ibrun_project, ["--plan", "done"], LAUNCHER="srun", **site).wait()
    assert (result.state, result.exit_code) == ("FAILED", 78), result.output
    assert "LAUNCHER=srun is no launcher of this script" in result.output


# --------------------------------------------------------------------------------------- two hosts without a scheduler
GLOO = """\
import os as _os
import torch as _torch
import torch.distributed as _dist
_dist.init_process_group("gloo")
_sum = _torch.ones(1)
_dist.all_reduce(_sum)
print(f"rank {_dist.get_rank()}: sum {_sum.item():g} by {_os.environ['GLOO_SOCKET_IFNAME']}", flush=True)
_dist.destroy_process_group()
"""


def test_torchrun_on_two_hosts_without_a_scheduler(
    slurm: dict[str, str], render: Callable[..., Path], tmp_path: Path
) -> None:
    """launch/torchrun.sh by hand on each; the hosts are network namespaces. Before the stand-in, gloo really meets."""
    pytest.importorskip("torch", reason="needs torch, for its torchrun")
    project = with_standin(render({"preset": "workstation"}), tmp_path / "my project")
    train = next(project.glob("src/*/train.py"))
    train.write_text(train.read_text().replace("import json\n", f"{GLOO}import json\n", 1))
    env = {name: value for name, value in slurm.items() if not name.startswith("SLURM")} | {
        "NNODES": "2", "NPROC": "2", "MASTER_ADDR": "tn1", "MASTER_PORT": "29517", "DDP_RUN__ID": "two",
        "PREFLIGHT": "0",
    }  # fmt: skip
    assert shutil.which("nsenter")
    running = []
    for rank, node in enumerate(("tn1", "tn2")):
        inside = f"hostname {node}; exec '{project}/launch/torchrun.sh' --plan done"
        command = ["nsenter", f"--net=/run/netns/ddp-{node}", "unshare", "--uts", "sh", "-c", inside]
        with (tmp_path / node).open("w") as out:
            running.append(
                subprocess.Popen(command, cwd="/", env={**env, "NODE_RANK": str(rank)}, stdout=out, stderr=out)
            )
    try:
        codes = [one.wait(timeout=100) for one in running]
    finally:
        for one in running:
            for _ in range(2):  # the script asks the ranks, then torchrun
                if one.poll() is None:
                    one.terminate()
                    try:
                        one.wait(timeout=40)
                    except subprocess.TimeoutExpired:
                        continue
    logs = [(tmp_path / node).read_text() for node in ("tn1", "tn2")]
    assert codes == [0, 0], "\n".join(logs)
    for log in logs:
        assert "attempt 0 of run two: 2 x 2 processes" in log
        assert "attempt 0 ended, done: the plan says done; exit code 0" in log
    for rank in range(4):
        assert f"rank {rank}: sum 4 by eth0" in logs[rank // 2]
    left = [path.name for path in (project / "runs/two").glob("ready-0-*.json")]
    assert len(left) == 4
