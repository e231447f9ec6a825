"""Manifests as an API server would take them: Kubernetes' schema for Jobs and pods, the published ones for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())["schemas"]
RELEASES = ("1.31", "1.37")  # the first in which podFailurePolicy is stable, and the newest with a schema


def read(project: Path) -> list[dict[str, Any]]:
    """The objects of a project's manifest."""
    path = next((project / "launch").glob("*job*.yaml"), project / "launch/jobset.yaml")
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the Job that the pods belong to."""
    spec = objects[0]["spec"]
    spec = spec["template"]["spec"] if objects[0]["kind"] == "TrainingRuntime" else spec
    job: dict[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]
    return job


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = job_of(objects)["template"]["spec"]
    return pod


def problems(objects: list[dict[str, Any]]) -> list[str]:
    """What an API server would refuse, unknown fields included."""
    import kubernetes_validate
    from jsonschema import Draft202012Validator

    found = []
    for each in objects:
        schema = SCHEMAS[f"{each['apiVersion']}/{each['kind']}"]
        found += [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(each)]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job_of(objects)}
    for release in RELEASES:
        try:
            kubernetes_validate.validate(job, release, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{release}: {'.'.join(map(str, error.path))}: {error.message}")
    return found
