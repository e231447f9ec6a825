"""What SkyPilot itself makes of task files: python by_skypilot.py PROJECT..., with a Python that has it.

Prints one JSON object for each project: the task as SkyPilot reads it, its script for a node, and which exit codes of
nodes its controller recovers from. Nothing is rented, no cloud is asked, and no server is started.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import sky
from sky.backends.task_codegen import TaskCodeGen
from sky.jobs.recovery_strategy import StrategyExecutor
from sky.skylet import log_lib

NODES = ([1], [78], [70], [75], [170], [175], [137, 1], [137, 75], [70, 137])  # exit codes of a job's nodes


def told(project: str) -> dict[str, Any]:
    os.chdir(project)
    task = sky.Task.from_yaml("launch/train.sky.yaml")
    (resources,) = task.resources
    recovery = resources.job_recovery
    recovered = []
    for codes in NODES:
        executor = SimpleNamespace(
            restart_cnt_on_failure=0, **{key: recovery[key] for key in recovery if key[:2] in ("ma", "re")}
        )
        if StrategyExecutor.should_restart_on_failure(executor, exit_codes=codes):
            recovered.append(codes)
    script = log_lib.make_task_bash_script(TaskCodeGen.build_task_bash_script(task.run), env_vars=dict(task.envs))
    return {
        "version": sky.__version__,
        "nodes": task.num_nodes,
        "cloud": str(resources.cloud),
        "accelerators": resources.accelerators,
        "spot": resources.use_spot,
        "buckets": {path: storage.source for path, storage in task.storage_mounts.items()},
        "volumes": task.volumes,
        "hooks": resources.hooks,
        "strategy": recovery["strategy"],
        "recovered": recovered,
        "script": script,
    }


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(json.dumps(told(path)))
