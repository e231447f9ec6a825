"""Answers that a cluster would refuse hours later: its limits, and what the names of its accounts look like."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cross_section import every


def fact(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "docs.acme.org/limits", "confidence": "documented"}


ACME: dict[str, Any] = {
    "name": "acme",
    "title": "The Acme cluster",
    "extends": "generic-slurm",
    "verified_on": "2026-11-28",
    "status": "documented",
    "account": fact({"required": True, "pattern": "[a-z]{3}[0-9]{4}", "example": "abc1234"}),
    "limits": [
        fact({"name": "batch", "max_nodes": 91, "max_walltime": "02:00:00", "unnamed": True}),
        fact({"name": "batch", "min_nodes": 92, "max_nodes": 183, "max_walltime": "1-06:00:00", "unnamed": True}),
        fact({"name": "debug", "max_nodes": 2, "max_walltime": "00:30:00"}),
        fact({"name": "large", "min_nodes": 100}),
        fact({"name": "slow", "by": "partition", "max_walltime": "48:00:00"}),
        fact({"name": "prio", "by": "qos", "max_nodes": 8, "max_walltime": "00:20:00"}),
        fact({"name": "four", "min_nodes": 4, "max_nodes": 4}),
        fact({"name": "twice", "max_walltime": "01:00:00"}),
        fact({"name": "twice", "max_walltime": "03:00:00"}),
    ],
}
Answers = dict[str, Any]


def answers(**given: Any) -> Answers:
    return {"preset": "own", "preset_file": ACME, "nodes": 2, "walltime": "00:20:00", "account": "abc1234", **given}


@pytest.mark.parametrize(
    "given",
    [
        {"partition": "batch", "nodes": 183, "walltime": "30:00:00"},
        {"partition": "debug,batch", "walltime": "02:00:00"},  # one of several is enough
        pytest.param({"partition": "batch", "qos": "prio", "walltime": "00:20:00"}, marks=pytest.mark.slow),
        pytest.param({"partition": "", "walltime": "02:00:00"}, marks=pytest.mark.slow),  # where nothing is named
        pytest.param({"partition": "slow", "nodes": 5000, "walltime": "2-00:00:00"}, marks=pytest.mark.slow),
        pytest.param({"partition": "large", "nodes": 100, "walltime": "99-00:00:00"}, marks=pytest.mark.slow),
        pytest.param({"partition": "elsewhere", "nodes": 5000, "walltime": "99-00:00:00"}, marks=pytest.mark.slow),
        pytest.param({"partition": "twice", "walltime": "03:00:00"}, marks=pytest.mark.slow),
        pytest.param({"partition": "prio", "walltime": "99-00:00:00"}, marks=pytest.mark.slow),  # prio is no partition
        pytest.param({"partition": "batch", "qos": "debug", "walltime": "02:00:00"}, marks=pytest.mark.slow),
        pytest.param({"partition": "four", "nodes": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_the_cluster_takes_is_taken(render: Callable[..., Path], given: Answers) -> None:
    text = (render(answers(**given)) / "launch/train.sbatch").read_text()
    for option, name in (("partition", "partition"), ("qos", "qos"), ("time", "walltime"), ("nodes", "nodes")):
        assert (f"#SBATCH --{option}={given.get(name)}" in text) == bool(given.get(name))
    assert "#SBATCH --account=abc1234" in text


@pytest.mark.parametrize(
    ("given", "message"),
    every(
        2,
        [
            (
                {"partition": "batch", "walltime": "02:00:01"},
                "is longer than batch allows for 2 nodes, 02:00:00 (as of 2026-11-28; sbatch --time wins over it)",
            ),
            ({"partition": "batch", "nodes": 1, "walltime": "03:00:00"}, "batch allows for 1 node, 02:00:00"),
            ({"partition": "batch", "nodes": 91, "walltime": "03:00:00"}, "batch allows for 91 nodes, 02:00:00"),
            ({"partition": "batch", "nodes": 92, "walltime": "1-06:00:01"}, "batch allows for 92 nodes, 30:00:00"),
            ({"partition": "batch", "nodes": 184}, "takes 1 to 91, or 92 to 183 nodes, not 184 (as of 2026-11-28)"),
            ({"partition": "large", "nodes": 99}, "takes 100 or more nodes, not 99"),
            ({"partition": "four", "nodes": 5}, "takes 4 nodes, not 5"),
            ({"partition": "debug,batch", "walltime": "02:00:01"}, "for 2 nodes, 02:00:00"),
            ({"partition": "batch,debug", "nodes": 3}, "debug takes 1 to 2 nodes, not 3"),
            ({"partition": "slow", "walltime": "2-00:00:01"}, "is longer than slow allows for 2 nodes, 48:00:00"),
            ({"partition": "twice", "walltime": "04:00:00"}, "is longer than twice allows for 2 nodes, 03:00:00"),
            ({"qos": "prio", "walltime": "00:20:01"}, "is longer than prio allows for 2 nodes, 00:20:00"),
            ({"qos": "prio", "nodes": 9}, "takes 1 to 8 nodes, not 9"),
            # The limit of a QoS takes the place of the partition's.
            ({"partition": "slow", "qos": "prio", "walltime": "01:00:00"}, "is longer than prio allows"),
            ({"partition": "", "walltime": "02:00:01"}, "allows for 2 nodes, 02:00:00"),
            ({"partition": "", "nodes": 184}, "takes 1 to 91, or 92 to 183 nodes, not 184"),
            ({"walltime": "00:04:59"}, "must be 00:05:00 or longer"),
            ({"walltime": "0-00:01:00"}, "must be 00:05:00 or longer"),
            ({"walltime": "UNLIMITED"}, "must look like 04:00:00 or 1-12:00:00"),
        ],
    ),
    ids=str,
)
def test_what_the_cluster_would_refuse_is_refused(render: Callable[..., Path], given: Answers, message: str) -> None:
    with pytest.raises(ValueError, match=r"'(walltime|nodes|partition|qos)'") as caught:
        render(answers(**given))
    assert message in " ".join(str(caught.value).split())


def test_a_preset_without_limits_takes_all(render: Callable[..., Path]) -> None:
    given = {"preset": "generic-slurm", "partition": "batch", "qos": "prio", "nodes": 9999, "walltime": "99-00:00:00"}
    text = (render(given) / "launch/train.sbatch").read_text()
    assert "#SBATCH --nodes=9999" in text
    assert "#SBATCH --time=99-00:00:00" in text


def test_a_limit_of_a_shipped_preset(render: Callable[..., Path]) -> None:
    given = {"preset": "alcf-polaris", "partition": "debug", "nodes": 11, "walltime": "00:30:00"}
    with pytest.raises(ValueError, match="takes 1 to 2 nodes, not 11"):
        render(given)


def test_the_message_for_pbs_names_its_own_option(render: Callable[..., Path]) -> None:
    given = {"preset": "alcf-polaris", "partition": "debug", "nodes": 1, "walltime": "99:00:00"}
    with pytest.raises(ValueError, match="is longer than debug allows for 1 node, ") as caught:
        render(given)
    assert "sbatch" not in str(caught.value)
    assert "qsub -l walltime" in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- accounts
@pytest.mark.parametrize("account", ["abc123", "ABC1234", "abc12345", "xabc1234", "project"])
def test_an_account_of_another_shape_is_refused(render: Callable[..., Path], account: str) -> None:
    with pytest.raises(ValueError, match="'account'") as caught:
        render(answers(account=account))
    said = "is no account of The Acme cluster: they look like abc1234 (docs.acme.org/limits)"
    assert said in " ".join(str(caught.value).split())


def test_without_an_example_the_pattern_is_told(render: Callable[..., Path]) -> None:
    own = {**ACME, "account": fact({"required": True, "pattern": "abc|abcd"})}
    with pytest.raises(ValueError, match=re.escape("they look like abc|abcd")):
        render(answers(preset_file=own, account="abcde"))
    text = (render(answers(preset_file=own, account="abcd")) / "launch/train.sbatch").read_text()
    assert "#SBATCH --account=abcd" in text


def test_a_recorded_pattern_that_could_take_hours_is_not_matched(render: Callable[..., Path]) -> None:
    own = {**ACME, "account": fact({"required": True, "pattern": "(a+)+$"})}
    text = (render(answers(preset_file=own, account="a" * 60 + "-")) / "launch/train.sbatch").read_text()
    assert f"#SBATCH --account={'a' * 60}-" in text


def test_an_account_that_is_left_out_is_asked_for_in_the_script(render: Callable[..., Path]) -> None:
    text = (render(answers(account="")) / "launch/train.sbatch").read_text()
    assert "#SBATCH --account" not in text
    assert "# An account must be named here: sbatch --account=abc1234, or SBATCH_ACCOUNT" in text
