"""Hostile answers and preset files: what is rendered from them never reaches a shell as code.

The rendered batch scripts run, from the first line to the last, with stand-ins for the programs of the cluster: site.sh
is sourced, prepare_site and load_env are called, the arrays are built, task.sh starts. What would run the payload makes
a file `pwned`. `ddp-scaffold presets check` refuses most of these files; the template must not rely on that.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cross_section import every
from launch_helpers import environment

# One for every place that it may come to: unquoted, in a comment, in '', in "".
PAYLOAD = "x$(touch pwned)`touch pwned`'; touch pwned; '\"; touch pwned; \"\ntouch pwned\n#"
QUOTES = "x`touch pwned`'; touch pwned; '\"; touch pwned; \"\ntouch pwned\n#"  # the same without a $
SUBSCRIPT = "a[$(touch pwned)]"  # what ${!name} and arithmetic of bash run
LINE = f"x\n{SUBSCRIPT}=1\n"
SOURCE = "the test"


def fact(value: Any, source: str = SOURCE) -> dict[str, Any]:
    return {"value": value, "source": source, "confidence": "documented"}


def line(**given: Any) -> dict[str, Any]:
    entry = {"name": "NCCL_X", "value": "1", "read_by": "NCCL", "why": "it helps", "source": SOURCE}
    return {**entry, "confidence": "seen", **given}


CONTAINER = {"srun_flags": ["--container-image={image}"], "command": ["apptainer", "{image}"]}

# Whatever a preset file may hold. Each is harmless: the script runs to its end, and nothing happens.
HARMLESS: dict[str, dict[str, Any]] = {
    "directives": {"directives": fact([PAYLOAD, f"--x={PAYLOAD}"])},
    "launch flags": {"launch_flags": fact([PAYLOAD, f"--x={PAYLOAD}", "--y=$(touch pwned)"], PAYLOAD)},
    "forbidden flags": {"forbidden_flags": fact([PAYLOAD])},
    "cpu masks": {"cpu_masks": fact([PAYLOAD, "0x1"])},
    "gpu order, source": {"gpu_order": fact([1, 0], PAYLOAD)},
    "address of the master, source": {"master_addr": fact("first-host-ip", PAYLOAD)},
    "module paths": {"module_paths": fact([f"/opt/{PAYLOAD}", "$HOME/$(touch pwned)"])},
    "library paths": {"library_paths": fact([f"/opt/{QUOTES}", "$HOME/`touch pwned`"], PAYLOAD)},
    "scratch": {"scratch": fact(f"$SCRATCH/{QUOTES}", PAYLOAD)},
    "internet, source": {"internet": fact("none", PAYLOAD)},
    "interface, source": {"nccl_socket_ifname": fact("eth0", PAYLOAD), "gloo_socket_ifname": fact("lo", PAYLOAD)},
    "env, value": {"env": [line(value=PAYLOAD), line(name="NCCL_Y", value="$(touch pwned)$HOME")]},
    "env, words": {"env": [line(read_by=PAYLOAD, since=PAYLOAD, why=PAYLOAD, source=PAYLOAD, instead=PAYLOAD)]},
    "recovery, value": {"recovery": [line(value=PAYLOAD)]},
    "recovery, words": {"recovery": [line(read_by=PAYLOAD, since=PAYLOAD, why=PAYLOAD, source=PAYLOAD)]},
    "container": {
        "container": fact({"srun_flags": [QUOTES, "`touch pwned`{image}"], "command": [QUOTES, "`touch pwned`"]})
    },
    "site script, source": {"env_scripts": [fact({"path": "/dev/null"}, PAYLOAD)]},
    "limits, words": {"limits": [fact({"name": "x", "max_walltime": "01:00:00", "note": PAYLOAD}, PAYLOAD)]},
    "what is only shown": {
        "keywords": [PAYLOAD], "storage": [fact(PAYLOAD)], "notes": [fact(PAYLOAD)], "hangs": [fact(PAYLOAD)],
        "not_found": [PAYLOAD], "gpu": fact(PAYLOAD), "status": PAYLOAD, "accelerator": fact(PAYLOAD),
        "sees": fact(PAYLOAD), "requeue": fact(PAYLOAD), "preemption": fact({"note": PAYLOAD}),
    },
    "kind of request": {"gpu_request": fact(PAYLOAD)},
}  # fmt: skip
PBS_HARMLESS = {"chunk": {"chunk": fact(PAYLOAD)}}

# These may be refused, when the project is rendered or when the job starts.
MAY_BE_REFUSED: dict[str, dict[str, Any]] = {
    "title": {"title": PAYLOAD},
    "name": {"name": PAYLOAD},
    "day": {"verified_on": PAYLOAD},
    "limits": {"limits": [fact({"name": PAYLOAD, "max_walltime": "01:00:00"})]},
    "limits, time": {"limits": [fact({"name": "x", "max_walltime": PAYLOAD})]},
    "GPU type": {"gpu_type": fact(PAYLOAD), "gpu_request": fact("gres")},
    "gpu order": {"gpu_order": fact([PAYLOAD, 0])},
    "cpu masks, source": {"cpu_masks": fact(["0x1", "0x2"], PAYLOAD)},
    "suffix": {"master_addr": fact("first-host-suffix"), "master_suffix": fact(PAYLOAD)},
    "lead of the signal": {"stop_signal_lead_s": fact(PAYLOAD)},
    "account": {"account": fact({"required": True, "example": PAYLOAD})},
    "container, source": {"container": fact(CONTAINER, PAYLOAD)},
    "container, modules": {"container": fact({**CONTAINER, "modules": [PAYLOAD]})},
    "container, expansions": {
        "env": [line(name="ONE", value="$(touch pwned)"), line(name="TWO", value=SUBSCRIPT)],
        "container": fact({"srun_flags": ["${ONE@P}", "${PATH:TWO}"], "command": ["${ONE@P}", "${PATH:TWO}"]}),
    },
    "library paths, a lone $": {"library_paths": fact(["/opt/$(touch pwned)"])},
    "container, a lone $": {"container": fact({**CONTAINER, "srun_flags": [PAYLOAD], "command": ["$(touch pwned)"]})},
    "scratch, a lone $": {"scratch": fact("/scratch/$(touch pwned)")},
    "site script": {"env_scripts": [fact({"path": f"/nowhere{PAYLOAD}", "min_nodes": 1})]},
    "site script, nodes": {"env_scripts": [fact({"path": "/dev/null", "min_nodes": PAYLOAD})]},
    "interface": {"nccl_socket_ifname": fact(LINE)},
    "interface of gloo": {"gloo_socket_ifname": fact(LINE)},
    "env, name": {"env": [line(name=SUBSCRIPT)]},
    "env, name of two lines": {"env": [line(name=LINE)]},
    "env, partition": {"env": [line(partition=f"main]\n{SUBSCRIPT}=1\n[partition main")]},
    "env, GPU": {"env": [line(gpu=f"x]\n{SUBSCRIPT}=1\n[gpu x")]},
    "env, words of a GPU": {"env": [line(gpu=PAYLOAD)]},
    "env, plugin": {"env": [line(min_plugin=f"1]\n{SUBSCRIPT}=1\n[plugin >= 1"), line(name="B", max_plugin=SUBSCRIPT)]},
    "env, nodes": {"env": [line(min_nodes=f"1]\n{SUBSCRIPT}=1\n[nodes >= 1")]},
    "recovery, name": {"recovery": [line(name=f"X\n{SUBSCRIPT}")]},
    "modules": {"modules": fact([PAYLOAD])},
    "partition": {"partition": fact(PAYLOAD)},
    "qos": {"qos": fact(PAYLOAD)},
    "GPUs": {"gpus_per_node": fact(PAYLOAD)},
    "CPUs": {"cpus_per_task": fact(PAYLOAD)},
    "launcher": {"launcher": fact(PAYLOAD)},
    "extends": {"extends": PAYLOAD},
    "extends another directory": {"extends": "../project/launch/common"},
}

# Each is put in a comment, a directive or a word by another script, too.
FOR_ALL_SCRIPTS = {
    "name", "day", "limits", "limits, time", "title", "GPU type", "lead of the signal", "account", "container, source",
    "gpu order", "suffix", "container, modules", "library paths, a lone $", "scratch, a lone $", "container, a lone $",
    "interface", "env, name",
}  # fmt: skip
QUICK = {"env, name", "container, modules", "extends another directory"}

LAUNCHERS = ("srun", "torchrun", "ibrun", "pbs")


def preset_file(launcher: str, given: dict[str, Any]) -> dict[str, Any]:
    own = {
        "name": "hostile", "title": "A hostile cluster", "extends": "generic-slurm", "verified_on": "2026-11-28",
        "status": "documented", "scheduler": fact("pbs" if launcher == "pbs" else "slurm"),
        "launcher": fact("mpiexec" if launcher == "pbs" else launcher),
    }  # fmt: skip
    return {**own, **copy.deepcopy(given)}


def answers(launcher: str, given: dict[str, Any]) -> dict[str, Any]:
    more = {"container_image": "img.sqsh"} if "container" in given else {}
    more |= {} if launcher == "pbs" or "launcher" in given else {"launcher": launcher}
    small = {"preset": "own", "nodes": 2, "gpus_per_node": 2, "cpus_per_task": 1}
    small = {name: value for name, value in small.items() if name not in given}
    return {**small, "preset_file": preset_file(launcher, given), **more}


STARTS = """\
printf '%s\\0' "$0" "$@" >>started
SLURM_LOCALID=0 bash launch/task.sh true
"""
PROGRAMS = {
    "srun": STARTS,
    "ibrun": STARTS,
    "mpiexec": f"if [ \"$*\" = --version ]; then echo mpiexec version 1.8.0 revision; exit; fi\n{STARTS}",
    "scontrol": "case $2 in hostnames) printf 'localhost\\nn2\\n' ;; *) echo 'J EndTime=2030-01-01T00:00:00 x' ;; esac",
    "squeue": "echo RUNNING",
    "scancel": "true",
    "module": "true",
    "qstat": "printf 'Job Id: 7\\n    job_state = R\\n    Resource_List.walltime = 00:10:00\\n    queue = q\\n'",
    "qsub": "true",
}  # fmt: skip


def run(project: Path, directory: Path, launcher: str) -> tuple[list[str], str]:
    """Run the batch script of a copy; return what started the ranks, word by word, and what was printed."""
    here = directory / "project"
    shutil.copytree(project, here)
    programs = directory / "bin"
    programs.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    (directory / "nodes").write_text("localhost\nn2\n")
    env = environment(
        HOME=str(directory), USER="me", SCRATCH=str(directory / "scratch"), PREFLIGHT="0", MAX_RESTARTS="0",
        SLURM_SUBMIT_DIR=str(here), SLURM_JOB_NUM_NODES="2", SLURM_JOB_PARTITION="main", SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="localhost,n2", SLURM_NTASKS="4", SLURM_CPUS_PER_TASK="1", SLURM_NTASKS_PER_NODE="2",
        PBS_O_WORKDIR=str(here), PBS_NODEFILE=str(directory / "nodes"), PBS_JOBID="7.server",
        PBS_QUEUE="main", CUDA_VISIBLE_DEVICES="0,1",
    )  # fmt: skip
    env["PATH"] = f"{programs}:{env['PATH']}"
    scripts = [path for path in (here / "launch").iterdir() if path.suffix in (".sh", ".sbatch", ".pbs")]
    wrong = [subprocess.run(["bash", "-n", path], check=False, capture_output=True, text=True) for path in scripts]
    script = "launch/train.pbs" if launcher == "pbs" else "launch/train.sbatch"
    done = subprocess.run(["bash", script], cwd=here, env=env, check=False, capture_output=True, text=True)
    # And what is sourced and read alone: a script that ended early would not have come to it.
    parts = ["source launch/site.sh; prepare_site 2"]
    parts += [f"load_env launch/env/{name}.env 2 main" for name in ("nccl", "recovery")]
    for part in parts:
        command = ["bash", "-c", f"source launch/common.sh; {part}"]
        subprocess.run(command, cwd=here, env=env, check=False, capture_output=True)
    found = sorted(str(path) for path in directory.rglob("pwned*"))
    assert not found, f"{found}\n{done.stdout}{done.stderr}"
    assert not [each.stderr for each in wrong if each.returncode]
    started = here / "started"
    return started.read_text().split("\0") if started.exists() else [], done.stdout + done.stderr


def started_by(launcher: str, words: list[str]) -> bool:
    return bool(words) and Path(words[0]).name == {"pbs": "mpiexec", "ibrun": "ibrun"}.get(launcher, "srun")


@pytest.mark.parametrize("place", ["# {}", "x={}", "x='{}'", 'x="{}"', "x=('{}' 1)"])
def test_the_payload_would_run(tmp_path: Path, place: str) -> None:
    """Else the tests below would say nothing."""
    subprocess.run(["bash", "-c", place.format(PAYLOAD)], cwd=tmp_path, check=False, capture_output=True)
    assert (tmp_path / "pwned").exists()


def test_the_name_would_run(tmp_path: Path) -> None:
    script = f"key='{SUBSCRIPT}'; [ -n \"${{!key+set}}\" ]"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False, capture_output=True)
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("launcher", every(3, LAUNCHERS))
def test_all_harmless_facts_at_once(render: Callable[..., Path], tmp_path: Path, launcher: str) -> None:
    merged: dict[str, Any] = {}
    for given in [*HARMLESS.values(), *(PBS_HARMLESS.values() if launcher == "pbs" else [])]:
        for name, value in given.items():
            if name in ("env", "recovery") and name in merged:
                numbered = [{**entry, "name": f"{entry['name']}_{len(merged[name])}"} for entry in value]
                merged[name] = merged[name] + numbered
            else:
                merged[name] = value
    words, printed = run(render(answers(launcher, merged)), tmp_path, launcher)
    assert started_by(launcher, words), printed
    # The payload came as far as a word of the command: it was not just lost. A ' is taken out, blanks part words.
    assert "--y=$(touch" in words, words
    if launcher in ("srun", "torchrun"):
        assert "touchpwnedimg.sqsh" in "".join(words), words


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "pbs"])
@pytest.mark.parametrize("name", [*HARMLESS, *PBS_HARMLESS])
def test_harmless(render: Callable[..., Path], tmp_path: Path, name: str, launcher: str) -> None:
    words, printed = run(render(answers(launcher, {**HARMLESS, **PBS_HARMLESS}[name])), tmp_path, launcher)
    assert started_by(launcher, words), printed


def cases() -> list[Any]:
    found = []
    for name in MAY_BE_REFUSED:
        for launcher in ("srun", "ibrun", "pbs") if name in FOR_ALL_SCRIPTS else ("srun",):
            slow = [] if launcher == "srun" and name in QUICK else [pytest.mark.slow]
            slow += [] if launcher == "srun" else [pytest.mark.long]
            found.append(pytest.param(name, launcher, marks=slow, id=f"{name}-{launcher}"))
    return found


@pytest.mark.parametrize(("name", "launcher"), cases())
def test_refused_or_harmless(render: Callable[..., Path], tmp_path: Path, name: str, launcher: str) -> None:
    try:
        project = render(answers(launcher, MAY_BE_REFUSED[name]))
    except OSError:
        raise
    except Exception:  # of any kind: nothing is there to be run
        return
    words, printed = run(project, tmp_path, launcher)
    # It went on to the ranks, or said why not.
    assert started_by(launcher, words) or "error: " in printed, printed


# ------------------------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize(
    ("name", "value"),
    every(
        2,
        [
            ("account", "x; rm -rf ~"),
            ("account", "x\n#SBATCH --uid=0"),
            ("partition", "a'b\""),
            ("partition", "a\ntouch pwned"),
            ("partition", "a,"),
            ("qos", "$(touch pwned)"),
            ("qos", "a\n#SBATCH --wrap=touch"),
            ("container_image", "$(touch pwned)"),
            ("container_image", "img.sqsh'; touch pwned; '"),
            ("container_image", "a b"),
            ("container_image", "--help"),
            ("modules", "cuda $(touch pwned)"),
            ("modules", "cuda'; touch pwned; '"),
            ("modules", "cuda\ntouch pwned"),
            ("walltime", "01:00:00\ntouch pwned"),
        ],
    ),
)
def test_hostile_answers_are_refused(render: Callable[..., Path], name: str, value: str) -> None:
    given = {**answers("srun", {"container": fact(CONTAINER)}), name: value}
    with pytest.raises(ValueError, match=f"'{name}'"):
        render(given)


@pytest.mark.parametrize("launcher", ["mpirun", "srun; touch pwned", ""])
def test_another_launcher_is_refused(render: Callable[..., Path], launcher: str) -> None:
    with pytest.raises(ValueError, match="launcher"):
        render({"preset": "generic-slurm", "launcher": launcher})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("- a", "must be a preset"),
        ({}, "must be a preset"),
        ({"name": "x"}, "must be a preset"),
        ({"name": "x", "extends": "../../etc/passwd"}, "extends must be the name of a preset"),
        ({"name": "x", "extends": "{{ 7 * 7 }}"}, "extends must be the name of a preset"),
    ],
)
def test_what_is_no_preset_is_refused(render: Callable[..., Path], own: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render({"preset": "own", "preset_file": own})


def test_jinja_in_a_preset_file_stays_text(render: Callable[..., Path]) -> None:
    given = {"env": [line(value="{{ 7 * 7 }}", why="{% raw %}")]}
    text = (render(answers("srun", given)) / "launch/env/nccl.env").read_text()
    assert "NCCL_X={{ 7 * 7 }}" in text
    assert "Why: {% raw %}." in text
