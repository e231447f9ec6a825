"""The commands to type after `new`: an environment for the jobs, and the start of a training."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..presets.facts import provided_by

# What starts a training, the scheduler's script before the one that runs on this machine.
STARTS = {"launch/train.sbatch": "sbatch", "launch/train.pbs": "qsub", "launch/torchrun.sh": "bash"}
KUBE = "launch/kube.py"  # submits to Kubernetes, whose pods have the image's Python
SKY = "launch/train.sky.yaml"
STARTED = (".sh", ".sbatch", ".pbs", KUBE, SKY)  # how the names of scripts end
VENV = "python3 -m venv .venv"


def next_steps(dest: str, scripts: Sequence[str], answers: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return the commands for a project in `dest`. The launch scripts take `.venv`, if it is there."""
    known = facts.get("known") or {}
    if KUBE in scripts:
        return [f"cd {shlex.quote(dest)}", *_with_pods(answers)]
    if SKY in scripts:
        return [f"cd {shlex.quote(dest)}", *_with_skypilot(answers)]
    if not answers.get("container_image"):
        steps = _in_venv(facts, answers)
    else:
        steps = _beside_image(answers, known) if known.get("container") else []
    return [f"cd {shlex.quote(dest)}", *steps, _start(scripts, answers)]


def _with_pods(answers: Mapping[str, Any]) -> list[str]:
    """The image, a Python for the script that submits, and whether the claim for runs is there."""
    image = shlex.quote(str(answers["container_image"]))
    build = f"docker build --file launch/Dockerfile --tag {image} . && docker push {image}"
    namespace, claim = answers["kubernetes_namespace"], answers["runs_claim"]
    steps = [VENV, "source .venv/bin/activate", "python -m pip install PyYAML", build]
    return [*steps, f"kubectl get --namespace {namespace} pvc {claim}", f"{KUBE} submit"]


def _with_skypilot(answers: Mapping[str, Any]) -> list[str]:
    """SkyPilot, in an environment of its own: its dependencies are nobody else's. The job makes that of training."""
    cloud = str(answers.get("sky_infra") or "").partition("/")[0]
    extra = {"": "all", "k8s": "kubernetes"}.get(cloud, cloud)
    steps = ["python3 -m venv ~/sky-venv", "source ~/sky-venv/bin/activate"]
    steps += [f"python -m pip install 'skypilot[{extra}]>=0.14,<0.15'", f"sky check {cloud}".strip()]
    secrets = [f"--secret {name}" for name in str(answers.get("sky_secrets") or "").split()]
    return [*steps, " ".join(["sky jobs launch", *secrets, SKY])]


def _in_venv(facts: Mapping[str, Any], answers: Mapping[str, Any]) -> list[str]:
    """An environment on top of the site's takes torch from there; else pip gets the index of the right build."""
    known = facts.get("known") or {}
    given = provided_by(facts, "torch") not in (None, "pip")
    steps = _modules(known, answers.get("modules") or "")
    steps += (known.get("commands") or []) if answers.get("modules") else []
    if uenv := known.get("uenv"):
        image, view = uenv["image"], uenv.get("view", "default")
        steps += [f"uenv image pull {image}", f"uenv start {image} --view={view}"]
    steps += [VENV.replace(" .venv", " --system-site-packages .venv") if given else VENV, "source .venv/bin/activate"]
    if known.get("torch_index") and not given:
        steps.append(f"python -m pip install torch --index-url {known['torch_index']}")
    return [*steps, "python -m pip install -e '.[dev]'"]


def _beside_image(answers: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """PyYAML for the batch script, which runs on the host, and in .venv-image what the image lacks of the packages.

    The batch scripts add that environment to what ranks see. What only srun can start is started in a job.
    """
    container = known["container"]
    loaded = answers.get("modules") or ""
    if loaded == " ".join(known.get("modules") or ()) and container.get("modules") is not None:
        loaded = " ".join(container["modules"])
    steps = [*_modules(known, loaded), VENV, ".venv/bin/python -m pip install PyYAML"]
    if container.get("packages"):
        return steps
    make = ["python -m venv --system-site-packages .venv-image", ".venv-image/bin/python -m pip install -e ."]
    image = str(answers["container_image"])
    if command := container.get("command"):
        start = " ".join(_word(word.replace("{image}", image)) for word in command)
        return [*steps, *(f"{start} {line}" for line in make)]
    options = [f"--{name}={answers[name]}" for name in ("account", "partition", "qos") if answers.get(name)]
    options += [flag.replace("{image}", image) for flag in container.get("srun_flags") or []]
    if any(option.startswith("--container-image") for option in options):
        options.append("--container-workdir=$PWD")
    start = " ".join(["srun", "--nodes=1", "--ntasks=1", *map(_word, options)])
    return [*steps, f"{start} bash -c '{' && '.join(make)}'"]


def _modules(known: Mapping[str, Any], loaded: str) -> list[str]:
    paths = [f"module use {path}" for path in known.get("module_paths") or ()]
    return [*paths, f"module load {loaded}"] if loaded else []


def _word(word: str) -> str:
    """Return a word of a command for a shell: $NAME stands for a variable."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def _start(scripts: Sequence[str], answers: Mapping[str, Any]) -> str:
    """Return the command that starts a training: with the launch script of the scheduler, if there is one."""
    for script, command in STARTS.items():
        if script in scripts:
            return f"{command} {script}"
    return f"python -m {answers['package']}.train"
