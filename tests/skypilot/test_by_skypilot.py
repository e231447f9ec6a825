"""SkyPilot's own code reads every preset's task, says what it recovers from, and makes the script that a node runs.

SKYPILOT_PYTHON names a Python that has skypilot 0.14; `make test-skypilot` makes one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment, with_standin
from standin_sky import Sky

from ddp_scaffold.presets import load

PYTHON = os.environ.get("SKYPILOT_PYTHON", "")
pytestmark = [
    pytest.mark.slow,  # SkyPilot is 400 MB of other people's packages
    pytest.mark.skipif(not PYTHON, reason="SKYPILOT_PYTHON names no Python with skypilot: make test-skypilot"),
]
PRESETS = [path.stem for path in load.files() if load.load_preset(path).scheduler.value == "skypilot"]
STORES = {"sky-runpod": "a-volume", "sky-gcp": "gs://a-bucket/runs", "sky-nebius": "nebius://a-bucket"}


def by_skypilot(*projects: Path, home: Path) -> list[dict[str, Any]]:
    home.mkdir(exist_ok=True)
    env = {**environment(), "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [PYTHON, Path(__file__).with_name("by_skypilot.py"), *projects]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("preset", PRESETS)
def test_skypilot_takes_every_preset(render: Callable[..., Path], tmp_path: Path, preset: str) -> None:
    store = STORES.get(preset, "s3://a-bucket/team/runs")
    project = render({"preset": preset, "runs_store": store})
    (told,) = by_skypilot(project, home=tmp_path / "home")
    known = load.load_preset(Path(load.__file__).parents[3] / f"templates/presets/{preset}.yml")
    assert told["version"].startswith("0.14.")
    infra = known.sky_infra.value if known.sky_infra else None
    assert told["cloud"].lower() == (infra or "none")
    accelerator = known.sky_accelerator.value if known.sky_accelerator else "H100"
    assert told["accelerators"] == {accelerator: known.gpus_per_node.value or 4}
    assert told["spot"] is bool(known.sky_spot and known.sky_spot.value)
    assert told["buckets"] == ({"/ddp-bucket": store} if "://" in store else {})
    assert (told["volumes"] or {}) == ({} if "://" in store else {"/ddp-runs": store})
    assert [hook["events"] for hook in told["hooks"]] == [["down", "preemption"]]
    # 1 and 78 never, whatever a node that was ended with the others is noted as; 170 and 175 neither.
    assert told["recovered"] == [[70], [75], [137, 75], [70, 137]]


def test_a_name_that_skypilot_does_not_know_would_be_refused(render: Callable[..., Path], tmp_path: Path) -> None:
    project = render({"preset": "sky-aws", "runs_store": "s3://a-bucket"})
    file = project / "launch/train.sky.yaml"
    file.write_text(file.read_text().replace("recover_on_exit_codes", "recover_on_exit_code"))
    with pytest.raises(AssertionError, match=r"recover_on_exit_code\b"):
        by_skypilot(project, home=tmp_path / "home")


@pytest.mark.parametrize(("plan", "code"), [("done", 0), ("fail", 1), ("stall", 70)])
def test_the_script_that_skypilot_makes_ends_with_our_code(
    sky: Sky, render: Callable[..., Path], tmp_path: Path, plan: str, code: int
) -> None:
    """Its own lines around ours: those that leave its environment, and those that wait for a cache of uploads."""
    answers = {"preset": "sky-aws", "nodes": 1, "gpus_per_node": 1, "runs_store": "s3://a-bucket"}
    project = with_standin(render(answers), tmp_path / "demo")
    script = project / "launch/sky.sh"
    script.write_text(script.read_text().replace('refuse_unknown_settings "$@"\n', ""))
    (told,) = by_skypilot(project, home=tmp_path / "home-of-client")
    run = tmp_path / "run.sh"
    run.write_text(told["script"].replace("export LAUNCH_BUCKET=", "# ").replace("export TRAINING=", "# "))
    task = project / "launch/train.sky.yaml"
    # SkyPilot's lines put its own user environment first, if there is one; here the Python of the tests is to stay.
    task.write_text(
        task.read_text().replace(
            "bash launch/sky.sh train", f"export PATH={Path(sys.executable).parent}:$PATH; . {run}"
        )
    )
    cluster = sky.start(
        project, "job-1", TRAINING=f"--plan {plan}", DDP_RUN__DIR=str(sky.folder / "home/sky_workdir/runs")
    )
    assert cluster.codes() == [code], cluster.output()
