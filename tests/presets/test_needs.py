"""What a job needs and nobody provides, and the open hangs that its answers run into."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from test_presets import ROOT

from ddp_scaffold.presets.facts import met_hangs, needs


def facts(name: str, **answers: Any) -> dict[str, Any]:
    """What a rendered project knows of a preset, without those that it extends."""
    data = yaml.safe_load((ROOT / f"templates/presets/{name}.yml").read_text())
    known = {key: fact["value"] for key, fact in data.items() if isinstance(fact, dict) and "value" in fact}
    known["limits"] = [fact["value"] for fact in data.get("limits", [])]
    return {"preset_data": data, "known": known, "nodes": 2, "gpus_per_node": known["gpus_per_node"], **answers}


@pytest.mark.parametrize(
    ("name", "answers", "needed"),
    [
        ("alcf-polaris", {"account": "p", "partition": "debug", "modules": "conda"}, []),
        ("alcf-polaris", {"account": "p", "partition": "debug", "modules": ""}, ["python", "torch"]),
        (
            "olcf-frontier",
            {"account": "p", "partition": "batch", "modules": "miniforge3/23 rccl-net-plugin"},
            ["torch"],
        ),
        ("lumi-g", {"account": "project_465000000", "partition": "standard-g", "container_image": "a.sif"}, []),
        ("lumi-g", {"account": "project_465000000", "partition": "standard-g"}, ["python", "torch", "plugin"]),
        ("lumi-g", {"account": "project_465000000", "partition": "standard-g", "nodes": 1}, ["python", "torch"]),
        (
            "ncsa-deltaai",
            {"account": "a", "partition": "ghx4", "modules": "python/miniforge3_pytorch/2.10.0"},
            ["plugin"],
        ),
        ("ncar-derecho", {"account": "a", "partition": "main", "modules": "cuda conda"}, ["torch", "plugin"]),
        ("jsc-jupiter", {"account": "a", "partition": "booster", "modules": "Stages/2026 PyTorch/2.9.1"}, []),
        ("isambard-ai", {"partition": "workq", "modules": "cray-python brics/nccl"}, ["torch"]),
        ("isambard-ai", {"partition": "workq", "modules": "cray-python"}, ["torch", "plugin"]),
        ("runpod-slurm", {}, []),
        ("nebius-soperator", {}, ["python", "torch"]),
        ("nebius-soperator", {"container_image": "a.sqsh"}, []),
        ("lambda-1cc", {}, []),
    ],
)
def test_what_nobody_provides_is_named_with_the_line_to_add(
    name: str, answers: dict[str, Any], needed: list[str]
) -> None:
    found = needs(facts(name, **answers))
    assert [line.partition(":")[0] for line in found] == needed
    assert all(line.partition(": ")[2] for line in found)


@pytest.mark.parametrize(
    ("nodes", "image", "met"), [(1, "a.sif", 0), (2, "a.sif", 1), (8, "a.sif", 2), (16, "a.sif", 3), (16, "", 1)]
)
def test_open_hangs_are_told_where_the_answers_run_into_them(nodes: int, image: str, met: int) -> None:
    assert len(met_hangs(facts("lumi-g", nodes=nodes, container_image=image))) == met
