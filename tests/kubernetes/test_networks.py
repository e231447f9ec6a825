"""Pods whose network is another one: IPv6 alone, and a second interface. Preflight and real training, over gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cluster
from test_training import ANSWERS, arguments, losses

pytestmark = [pytest.mark.pods, pytest.mark.slow]  # real training, once each
STEPS = 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("network", "shown"), [("two", "10.79.0.12 eth0"), ("v6", "fd79::12 eth0")])
def test_ranks_meet_and_train(cluster: Cluster, render: Callable[..., Path], network: str, shown: str) -> None:
    (cluster.state / "network").write_text(network)
    cluster.pods_have(PREFLIGHT="1")
    project = render(ANSWERS)
    words = [*arguments(), "--train.steps", str(STEPS)]
    done = cluster.kube(project, "submit", "--name", f"in-{network}", "--image", "x:1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: everything is in order" in done.stdout
    assert shown in done.stdout  # the way to the master, of the second pod
    assert "gloo by eth0" in done.stdout
    assert max(losses(project / f"runs/in-{network}")) == STEPS
    assert json.loads((project / f"runs/in-{network}/outcome.json").read_text())["outcome"] == "done"
