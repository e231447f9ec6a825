"""What a job needs and nobody provides, and the open hangs that its answers run into."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from test_presets import ROOT

from ddp_scaffold.creating.steps import next_steps
from ddp_scaffold.presets import load
from ddp_scaffold.presets.facts import met_hangs, needs

FILES = sorted((ROOT / "templates" / "presets").glob("*.yml"))


def facts(name: str, **answers: Any) -> dict[str, Any]:
    """What a rendered project knows of a preset, without those that it extends."""
    data = yaml.safe_load((ROOT / f"templates/presets/{name}.yml").read_text())
    known = {key: fact["value"] for key, fact in data.items() if isinstance(fact, dict) and "value" in fact}
    known["limits"] = [fact["value"] for fact in data.get("limits", [])]
    given = {"nodes": 2, "gpus_per_node": known.get("gpus_per_node"), **answers}
    return {"preset_data": data, "known": known, **given}


@pytest.mark.parametrize(
    ("name", "answers", "needed"),
    [
        ("alcf-polaris", {"account": "p", "partition": "debug", "modules": "conda"}, []),
        ("alcf-polaris", {"account": "p", "partition": "debug", "modules": ""}, ["python", "torch"]),
        (
            "olcf-frontier",
            {"account": "p", "partition": "batch", "modules": "miniforge3/23 rccl-net-plugin"},
            [],
        ),
        ("lumi-g", {"account": "project_465000000", "partition": "standard-g", "container_image": "a.sif"}, []),
        ("lumi-g", {"account": "project_465000000", "partition": "standard-g"}, ["python", "torch", "plugin"]),
        ("lumi-g", {"account": "project_465000000", "partition": "standard-g", "nodes": 1}, ["python", "torch"]),
        (
            "ncsa-deltaai",
            {"account": "a", "partition": "ghx4", "modules": "python/miniforge3_pytorch/2.10.0"},
            ["plugin"],
        ),
        (
            "ncsa-deltaai",
            {
                "account": "a",
                "partition": "ghx4",
                "modules": "python/miniforge3_pytorch/2.10.0 nccl-ofi-plugin/1.18.0-cuda129",
            },
            [],
        ),
        ("ncsa-delta", {"account": "a", "partition": "gpuA100x4", "modules": "pytorch-conda/2.12"}, []),
        (
            "ncsa-delta",
            {"account": "a", "partition": "gpuA100x4", "modules": "python"},
            ["python", "torch", "plugin"],
        ),
        (
            "surf-snellius-a100",
            {"partition": "gpu_a100", "modules": "2025 Python/3.13.1-GCCcore-14.2.0"},
            [],
        ),
        ("ncar-derecho", {"account": "a", "partition": "main", "modules": "cuda conda"}, ["torch", "plugin"]),
        ("jsc-jupiter", {"account": "a", "partition": "booster", "modules": "Stages/2026 PyTorch/2.9.1"}, []),
        ("jsc-jupiter", {"account": "a", "partition": "booster", "modules": "Stages/2026 PyTorch/2.10.0"}, []),
        ("jsc-jupiter", {"account": "a", "partition": "booster", "modules": "Python/3.13.5"}, ["torch"]),
        ("isambard-ai", {"partition": "workq", "modules": "cray-python brics/nccl"}, ["torch"]),
        ("isambard-ai", {"partition": "workq", "modules": "cray-python"}, ["torch", "plugin"]),
        ("runpod-slurm", {}, []),
        ("nebius-soperator", {}, []),
        ("nebius-soperator", {"container_image": "a.sqsh"}, []),
        ("lambda-1cc", {}, []),
        ("gke-a3-mega", {"container_image": "r.example.org/x:1"}, ["interface"]),
        ("gke-a3-mega", {"container_image": "r.example.org/x:1", "nodes": 1}, []),
    ],
)
def test_what_nobody_provides_is_named_with_the_line_to_add(
    name: str, answers: dict[str, Any], needed: list[str]
) -> None:
    found = needs(facts(name, **answers))
    assert [line.partition(":")[0] for line in found] == needed
    assert all(line.partition(": ")[2] for line in found)


@pytest.mark.parametrize(("nodes", "image", "met"), [(1, "a.sif", 0), (4, "a.sif", 1), (8, "a.sif", 2), (8, "", 1)])
def test_open_hangs_are_told_where_the_answers_run_into_them(nodes: int, image: str, met: int) -> None:
    assert len(met_hangs(facts("lumi-g", nodes=nodes, container_image=image))) == met


def commands(name: str, **answers: Any) -> list[str]:
    """The commands that `new` prints, without the first and the last one."""
    known = facts(name)["known"]
    given = {"package": "demo", "modules": " ".join(known.get("modules") or ()), **answers}
    return next_steps("demo", ["launch/train.sbatch"], given, {**facts(name), **given})[1:-1]


def test_what_an_image_lacks_is_installed_in_the_image_and_what_the_batch_script_needs_on_the_host() -> None:
    assert commands("lumi-g", container_image="a.sif") == [
        "module use /appl/local/laifs/modules",
        "module load lumi-aif-singularity-bindings cray-python",
        "python3 -m venv .venv",
        ".venv/bin/python -m pip install PyYAML",
        "singularity run a.sif python -m venv --system-site-packages .venv-image",
        "singularity run a.sif .venv-image/bin/python -m pip install -e .",
    ]


def test_an_image_that_only_srun_starts_is_extended_in_a_job() -> None:
    host = ["python3 -m venv .venv", ".venv/bin/python -m pip install PyYAML"]
    make = "python -m venv --system-site-packages .venv-image && .venv-image/bin/python -m pip install -e ."
    assert commands("aws-hyperpod", container_image="/fsx/a.sqsh", partition="dev") == [
        *host,
        "srun --nodes=1 --ntasks=1 --partition=dev --container-image=/fsx/a.sqsh"
        f' "--container-mounts=$PWD:$PWD" "--container-workdir=$PWD" bash -c \'{make}\'',
    ]
    assert commands("cscs-clariden", container_image="my-edf", account="g1") == [
        *host,
        f"srun --nodes=1 --ntasks=1 --account=g1 --environment=my-edf bash -c '{make}'",
    ]


def test_where_no_node_can_extend_an_image_new_says_what_the_image_must_have() -> None:
    name, answers = "idris-jean-zay-h100", {"account": "X@h100", "partition": "gpu_p6", "container_image": "a.sif"}
    assert not any(".venv-image" in line for line in commands(name, **answers))
    told = needs(facts(name, **answers))
    assert [line.partition(":")[0] for line in told] == ["the project's packages in the image"]


@pytest.mark.parametrize(
    ("name", "venv", "torch"),
    [
        ("tacc-vista", "--system-site-packages ", None),  # of the module
        ("cscs-clariden", "--system-site-packages ", None),  # of the uenv
        ("olcf-frontier", "", "https://download.pytorch.org/whl/rocm7.1"),
        ("mila", "", None),  # pip's own
    ],
)
def test_torch_comes_from_the_site_from_an_index_or_from_pip(name: str, venv: str, torch: str | None) -> None:
    steps = commands(name)
    assert f"python3 -m venv {venv}.venv" in steps
    installed = [line.rpartition(" ")[2] for line in steps if line.startswith("python -m pip install torch ")]
    assert installed == ([torch] if torch else [])


def test_every_preset_says_who_provides_what_its_jobs_need() -> None:
    """Python and torch everywhere; with a scheduler interface and queue, too; a plugin where one is forced."""
    for path in FILES:
        preset = load.load_preset(path)
        wanted = {"python", "torch"}
        if preset.scheduler.value != "none":
            wanted |= {"interface", "queue"}
        wanted |= {"plugin"} if any(line.name == "NCCL_NET" for line in preset.env) else set()
        wanted |= {"account"} if preset.account and preset.account.value.required else set()
        assert wanted <= {fact.value.what for fact in preset.needs}, preset.name


def test_a_need_that_nobody_meets_names_a_way_out() -> None:
    for path in FILES:
        for fact in load.load_preset(path).needs:
            if fact.value.by == "user":
                assert fact.value.add, f"{path.stem}: {fact.value.what}"


def test_what_pods_need_is_named_before_they_are_started() -> None:
    example = {"container_image": "registry.example.com/x:1", "kubernetes_namespace": "team-a", "runs_claim": "shared"}
    (image,) = needs(facts("generic-kubernetes", **example))
    assert image.startswith("an image of yours (--set container_image=")
    assert needs(facts("generic-kubernetes", **{**example, "container_image": "r.example.org/x:1"})) == []
    steps = next_steps("demo", ["launch/kube.py"], example, facts("generic-kubernetes"))
    assert steps[-2:] == ["kubectl get --namespace team-a pvc shared", "launch/kube.py submit"]


def test_a_partition_of_other_nodes_names_the_answers_that_fit() -> None:
    given = {"partition": "gpu-h100", "nodes": 1, "modules": "python3/3.11"}
    assert needs(facts("tacc-lonestar6", gpus_per_node=3, **given)) == [
        "gpu-h100 has 2 GPUs a node, not 3: --set gpus_per_node=2 --set cpus_per_task=48"
    ]
    assert needs(facts("tacc-lonestar6", gpus_per_node=2, **given)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_another_version_of_a_module_provides_the_same(path: Any) -> None:
    """The versions are the default answer's, and what `add` says."""
    listed = [need["value"] for need in yaml.safe_load(path.read_text()).get("needs", ())]
    names = [need["name"] for need in listed if need["by"] == "module" and "name" in need]
    assert [name for name in names if name.rpartition("/")[2][:1].isdigit()] == []
