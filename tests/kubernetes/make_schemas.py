#!/usr/bin/env python3
"""Makes schemas.json: the published schemas of JobSet and of Kubeflow Trainer, without texts and without pods.

    python tests/kubernetes/make_schemas.py JOBSET_REPOSITORY TRAINER_REPOSITORY

The arguments are clones of github.com/kubernetes-sigs/jobset and github.com/kubeflow/trainer; what is taken is their
HEAD. Both are under the Apache License 2.0. Jobs and pods, most of these files, are held against Kubernetes' own schema
by kubernetes-validate instead. An unknown field is an error here, as for `kubectl apply --validate=strict`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("schemas.json")
JOBSET = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
TRAINER = "manifests/base/crds/trainer.kubeflow.org_"
# What stands for itself elsewhere, by the keys that lead there.
JOB = ("replicatedJobs", "items", "template", "spec")
ANYTHING = {JOB, ("volumeClaimPolicies",), ("runtimePatches",), ("podGroupPolicy",)}
KEPT = {"type", "enum", "required", "minimum", "maximum", "minLength", "maxLength", "pattern", "maxItems"}


def git(repository: str, *words: str) -> str:
    return subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True, text=True).stdout


def trimmed(schema: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    if any(path[-len(end) :] == end for end in ANYTHING):
        return {}
    found = {key: value for key, value in schema.items() if key in KEPT}
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if "properties" in schema:
        found["properties"] = {name: trimmed(each, (*path, name)) for name, each in schema["properties"].items()}
        found["additionalProperties"] = False
    if "items" in schema:
        found["items"] = trimmed(schema["items"], (*path, "items"))
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = trimmed(schema["additionalProperties"], path)
    return found


def schema_of(repository: str, path: str) -> tuple[str, dict[str, Any]]:
    definition = yaml.safe_load(git(repository, "show", f"HEAD:{path}"))
    version = next(each for each in definition["spec"]["versions"] if each["storage"])
    schema = trimmed(version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {"type": "object"}
    return f"{definition['spec']['group']}/{version['name']}/{definition['spec']['names']['kind']}", schema


def main(jobset: str, trainer: str) -> None:
    paths = [(jobset, JOBSET), *((trainer, f"{TRAINER}{name}.yaml") for name in ("trainjobs", "trainingruntimes"))]
    content = {
        "source": {
            "github.com/kubernetes-sigs/jobset": git(jobset, "rev-parse", "HEAD").strip(),
            "github.com/kubeflow/trainer": git(trainer, "rev-parse", "HEAD").strip(),
        },
        "licence": "Apache-2.0",
        "made_by": "tests/kubernetes/make_schemas.py",
        "schemas": dict(schema_of(*each) for each in paths),
    }
    FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
