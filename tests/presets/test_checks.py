"""`ddp-scaffold presets check`: where a problem is reported, and the contradictions between fields."""

from __future__ import annotations

import datetime
import random
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from preset_helpers import fact, preset, run

from ddp_scaffold.presets import checks

ROOT = Path(__file__).parents[2]
ENV = {"name": "NCCL_NET", "value": "OFI", "read_by": "NCCL", "why": "x", "source": "a page", "confidence": "seen"}
PBS = {"scheduler": fact("pbs"), "launcher": fact("mpiexec"), "gpu_request": fact(None)}
LATER = datetime.date.today() + datetime.timedelta(days=3)

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "launcher of PBS": ({"launcher": fact("mpiexec")}, "launcher.value: with scheduler slurm it must be srun or"),
    "launcher of Slurm": ({**PBS, "launcher": fact("srun")}, "launcher.value: with scheduler pbs it must be mpiexec"),
    "launcher without scheduler": ({"scheduler": fact("none")}, "scheduler none it must be torchrun"),
    "GPU order, too short": (
        {"gpus_per_node": fact(4), "gpu_order": fact([1, 0])},
        "gpu_order.value: has 2 entries for 4",
    ),
    "GPU twice": ({"gpus_per_node": fact(2), "gpu_order": fact([1, 1])}, "gpu_order.value: names a GPU twice"),
    "masks without GPUs": ({"cpu_masks": fact(["0xf"])}, "cpu_masks.value: needs gpus_per_node"),
    "request of Slurm": (PBS | {"gpu_request": fact("gres")}, "gpu_request.value: gres is an option of the other"),
    "request of PBS": ({"gpu_request": fact("ngpus")}, "gpu_request.value: ngpus is an option of the other"),
    "chunk of PBS": ({"chunk": fact("system=a")}, "chunk: is not used"),
    "forbidden request": (
        {"forbidden_flags": fact(["--gpus-per-node"])},
        "gpu_request.value: asks with --gpus-per-node",
    ),
    "forbidden directive": (
        {"directives": fact(["--exclusive", "--mem=0"]), "forbidden_flags": fact(["--mem"])},
        "directives.value.1: --mem=0 is among the forbidden_flags",
    ),
    "forbidden under its other name": (
        {"directives": fact(["-C gpu"]), "forbidden_flags": fact(["--constraint"])},
        "directives.value.0: -C gpu is among the forbidden_flags",
    ),
    "forbidden launch flag": (
        {"launch_flags": fact(["--gres=gpu:1"]), "forbidden_flags": fact(["--gres"])},
        "launch_flags.value.0: --gres=gpu:1 is among",
    ),
    "directive of the script": ({"directives": fact(["-N 2"])}, "the batch script has a line for --nodes already"),
    "limit": ({"limits": [fact({"name": "a", "min_nodes": 3, "max_nodes": 2})]}, "limits.0.value.min_nodes: 3 is more"),
    "limit twice": ({"limits": [fact({"name": "a"}), fact({"name": "a"})]}, "limits.1.value: partition a stands there"),
    "partition": (
        {"partition": fact("b"), "limits": [fact({"name": "a"})]},
        "partition.value: b is not among the limits",
    ),
    "QoS": ({"qos": fact("b"), "limits": [fact({"name": "a", "by": "qos"})]}, "qos.value: b is not among the limits"),
    "account pattern": (
        {"account": fact({"required": True, "pattern": "[z-a]"})},
        "account.value.pattern: is not a regular",
    ),
    "account pattern that takes hours": (
        {"account": fact({"required": True, "pattern": "(a+)+$", "example": "a" * 60})},
        "account.value.pattern: must be of characters, classes",
    ),
    "account example": (
        {"account": fact({"required": True, "pattern": "p[0-9]+", "example": "x1"})},
        "account.value.example: x1 does not match",
    ),
    "suffix missing": ({"master_addr": fact("first-host-suffix")}, "master_suffix: is missing"),
    "suffix not used": ({"master_suffix": fact(".cluster")}, "master_suffix: is not used"),
    "line twice": ({"env": [ENV, ENV]}, "env.1.name: NCCL_NET is set by env.0 already"),
    "line twice for some nodes": (
        {"env": [ENV | {"max_nodes": 4}, ENV | {"min_nodes": 4, "partition": "a"}]},
        "env.1.name: NCCL_NET is set by env.0 already",
    ),
    "nodes of a line": ({"env": [ENV | {"min_nodes": 3, "max_nodes": 2}]}, "env.0.min_nodes: 3 is more than"),
    "plugin of a line": (
        {"env": [ENV | {"min_plugin": "1.16.3", "max_plugin": "1.9"}]},
        "env.0.min_plugin: 1.16.3 is more than max_plugin, 1.9",
    ),
    "plugin of a work-around": (
        {"recovery": [ENV | {"min_plugin": "1.6", "max_plugin": "1.5"}]},
        "recovery.0.min_plugin: 1.6 is more than max_plugin, 1.5",
    ),
    "line twice for a GPU": ({"env": [ENV | {"gpu": "H100"}, ENV | {"gpu": "h100"}]}, "env.1.name: NCCL_NET is set by"),
    "line twice, once for all GPUs": ({"env": [ENV, ENV | {"gpu": "H100"}]}, "env.1.name: NCCL_NET is set by env.0"),
    "line twice for 1.5.3": (
        {"env": [ENV | {"max_plugin": "1.5"}, ENV | {"min_plugin": "1.5.3"}]},
        "env.1.name: NCCL_NET is set by env.0 already",
    ),
    "line twice for 1.10": (
        {"env": [ENV | {"max_plugin": "1.10"}, ENV | {"min_plugin": "1.9"}]},
        "env.1.name: NCCL_NET is set by env.0 already",
    ),
    "line twice, once for all plugins": (
        {"env": [ENV | {"gpu": "H100"}, ENV | {"min_plugin": "1.9"}]},
        "env.1.name: NCCL_NET is set by env.0 already",
    ),
    "GPU, no model": ({"env": [ENV | {"gpu": "NVIDIA"}]}, "env.0.gpu: "),
    "GPU, a name": ({"env": [ENV | {"gpu": "A100 80GB"}]}, "env.0.gpu: "),
    "GPU, hostile": ({"env": [ENV | {"gpu": "A100]\n[gpu x"}]}, "env.0.gpu: "),
    "GPU, a command": ({"env": [ENV | {"gpu": "$(x)"}]}, "env.0.gpu: "),
    "plugin, a number": ({"env": [ENV | {"min_plugin": 1.5}]}, "env.0.min_plugin: "),
    "plugin, no number": ({"env": [ENV | {"max_plugin": "1.5.x"}]}, "env.0.max_plugin: "),
    "plugin, hostile": ({"env": [ENV | {"max_plugin": "1.5]\n"}]}, "env.0.max_plugin: "),
    "interface as a line": (
        {"env": [ENV | {"name": "NCCL_SOCKET_IFNAME"}]},
        "env.0.name: belongs into the field nccl_socket_ifname",
    ),
    "container without image": (
        {"container": fact({"command": ["apptainer"]})},
        "container.value: no word holds {image}",
    ),
    "future": ({"verified_on": LATER}, f"verified_on: {LATER} is in the future"),
    "future of a fact": ({"gpu": fact("A100", verified_on=LATER)}, "gpu.verified_on"),
    "future of a line": ({"env": [ENV | {"verified_on": LATER}]}, "env.0.verified_on"),
}

FINE: dict[str, dict[str, Any]] = {
    "PBS": PBS,
    "PBS with chunks": PBS | {"gpu_request": fact("ngpus"), "chunk": fact("system=a")},
    "ibrun": {"launcher": fact("ibrun")},
    "order and masks": {
        "gpus_per_node": fact(2),
        "gpu_order": fact([1, 0]),
        "cpu_masks": fact(["0xff", "0xff00"]),
    },
    "other flags": {"directives": fact(["--exclusive"]), "forbidden_flags": fact(["--gres"])},
    "a QoS beside limits of partitions": {"qos": fact("a"), "limits": [fact({"name": "b"})]},
    "one partition with several node counts": {
        "partition": fact("a"),
        "limits": [fact({"name": "a", "max_nodes": 1}), fact({"name": "a", "min_nodes": 2, "max_nodes": 2})],
    },
    "account": {"account": fact({"required": True, "pattern": "p[0-9]+", "example": "p1"})},
    "suffix": {"master_addr": fact("first-host-suffix"), "master_suffix": fact(".cluster")},
    "address of a suffix": {"master_addr": fact("first-host-ip"), "master_suffix": fact(".cluster")},
    "lines for other nodes": {"env": [ENV | {"max_nodes": 1}, ENV | {"min_nodes": 2}]},
    "lines for other partitions": {"env": [ENV | {"partition": "a"}, ENV | {"partition": "b"}]},
    "lines for other GPUs": {"env": [ENV | {"gpu": "B200"}, ENV | {"gpu": "GB200"}]},
    "lines for other plugins": {"env": [ENV | {"max_plugin": "1.9"}, ENV | {"min_plugin": "1.10"}]},
    "a line for one release": {"env": [ENV | {"min_plugin": "1.5.3", "max_plugin": "1.5"}]},
    "other GPUs of other plugins": {
        "env": [
            ENV | {"gpu": "A100", "max_plugin": "1.5"},
            ENV | {"gpu": "H100"},
            ENV | {"gpu": "A100", "min_plugin": "1.6"},
        ]
    },
    "alternatives for a hang": {"recovery": [ENV, ENV | {"value": "Socket"}]},
    "container": {"container": fact({"command": ["apptainer", "exec", "{image}"]})},
    "tomorrow, where it is tomorrow": {"verified_on": datetime.date.today() + datetime.timedelta(days=1)},
}


@pytest.mark.parametrize(("values", "problem"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    path = preset(tmp_path, "mine", **values)
    code, text = run("check", str(path))
    assert code == 1
    assert len(text.splitlines()) == 1, text
    assert text.startswith(f"{path}: ")
    assert problem in text


@pytest.mark.parametrize("values", FINE.values(), ids=FINE)
def test_what_only_looks_like_a_contradiction(tmp_path: Path, values: dict[str, Any]) -> None:
    path = preset(tmp_path, "mine", **values)
    assert run("check", str(path)) == (0, f"{path}: ok\n")


NOT_SIMPLE = [
    *("(a+)+$", "(a|aa)+$", "((a)+)+", "([a-z]+-?)*", "(a?){40}a{40}", "((a{1,9}){1,9}){1,9}", "(a|a)" * 20),
    *("a?" * 30 + "a" * 30, "a*a*a*a*b", "a?b?c?d?", "a|b*c*d*e*"),
    *("(?i)a", "(", "(a))", "[a", "[]", "a\\", "\\1", "\\b", "a**", "a+?", "a{2}{3}", "a{99999999999}"),
    *("*", "{3}", "a^b", "a$b"),
]
SIMPLE = [
    *("p[0-9]+", "[A-Za-z0-9_-]+@a100", "^project_[0-9]{9}$", "abc|abcd", "def-[a-z]+|rrg-[a-z]+_gpu", "[^-]+"),
    "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    *("\\d{4}-[\\w.]*", "[a-z]{3,8}[0-9]{2,}_?", "^a|b$", "a{,3}b*c?", "", "|", "|".join([".*.*.*x"] * 15)),
]


@pytest.mark.parametrize("pattern", NOT_SIMPLE)
def test_account_patterns_that_are_not_simple(tmp_path: Path, pattern: str) -> None:
    path = preset(tmp_path, "mine", account=fact({"required": True, "pattern": pattern}))
    started = time.process_time()
    code, text = run("check", str(path))
    assert (code, "account.value.pattern: " in text) == (1, True)
    assert time.process_time() - started < 2
    assert refusal(pattern, "9-9") == ""  # one that a project has recorded is left alone


@pytest.mark.parametrize("pattern", SIMPLE)
def test_simple_account_patterns_are_matched_at_once(pattern: str) -> None:
    assert checks.SIMPLE.fullmatch(pattern)
    started = time.process_time()
    for account in ("a" * 80, "a" * 79 + "@", "0" * 80, "9-9"):
        matches = re.fullmatch(pattern, account) is not None
        assert refusal(pattern, account) == ("" if matches else "is no account of Acme: they look like it (a page)")
    assert time.process_time() - started < 2


def test_the_template_takes_the_same_patterns_for_simple() -> None:
    chance = random.Random(0)
    parts = [*"a.-@*+?|^$()[]{}", "\\", "\\d", "[a-z]", "[^.]", "{3}", "{1,3}", "{2,}"]
    simple = 0
    for _ in range(3000):
        pattern = "".join(chance.choices(parts, k=chance.randint(1, 6)))
        matches = True
        if checks.SIMPLE.fullmatch(pattern):
            simple += 1
            try:
                matches = re.fullmatch(pattern, "9-9") is not None
            except re.error:  # {3,1}
                continue
        assert (refusal(pattern, "9-9") == "") == matches, pattern
    assert simple > 100


@cache
def account_validator() -> jinja2.Template:
    """Return what the template validates accounts by. Its filter is that of copier."""
    jinja = jinja2.Environment(trim_blocks=True, comment_start_string="{##", comment_end_string="##}")
    jinja.filters["regex_search"] = lambda text, regex: bool(re.search(regex, text))
    return jinja.from_string((ROOT / "templates/questions/account.jinja").read_text())


def refusal(pattern: str, account: str) -> str:
    """Return what the template says of an account."""
    known = {"account": {"pattern": pattern, "example": "it"}}
    preset_data = {"title": "Acme", "account": {"source": "a page"}}
    return account_validator().render(account=account, known=known, preset_data=preset_data).strip()


def test_several_contradictions_at_once(tmp_path: Path) -> None:
    path = preset(tmp_path, "mine", launcher=fact("mpiexec"), master_suffix=fact(".x"), qos=None, env=[ENV, ENV])
    code, text = run("check", str(path))
    assert (code, len(text.splitlines())) == (1, 3)


def test_nested_fields_are_named(tmp_path: Path) -> None:
    path = preset(
        tmp_path,
        "mine",
        limits=[fact({"name": "a"}), fact({"name": "b", "max_walltime": "soon", "by": "queue"})],
        env=["NCCL_NET=OFI", {**ENV, "why": 1}],
        modules=fact(["a", "b c"]),
        account=fact("p1"),
    )
    code, text = run("check", str(path))
    assert code == 1
    found = {line.split(": ")[1]: line.split(": ", 2)[2] for line in text.splitlines()}
    assert set(found) == {
        "limits.1.value.max_walltime",
        "limits.1.value.by",
        "env.0",
        "env.1.why",
        "modules.value.1",
        "account.value",
    }
    assert found["limits.1.value.by"] == "must be 'partition' or 'qos'"
    assert found["env.0"].startswith("must be a mapping of name, value, read_by")
    assert found["account.value"] == "must be a mapping of required, pattern and example"


def test_a_contradiction_of_two_files_is_one_of_the_file_that_extends(tmp_path: Path) -> None:
    path = preset(tmp_path, "mine", forbidden_flags=fact(["--gpus-per-node"]))
    text = run("check", str(path))[1]
    assert text.startswith(f"{path}: gpu_request.value: ")
    assert text.endswith(" (taken from generic-slurm)\n")


def test_a_problem_is_reported_for_the_file_that_holds_the_field(installed: Path, tmp_path: Path) -> None:
    base = preset(installed, "base", gpus_per_node=fact("4"), launcher=fact("srun"))
    path = preset(tmp_path, "mine", extends="base", cpus_per_task=fact(0))
    code, text = run("check", str(path))
    assert code == 1
    assert f"{base}: gpus_per_node.value: must be a valid integer" in text
    assert f"{path}: cpus_per_task.value: must be greater than or equal to 1" in text


def test_extends_leads_nowhere(installed: Path, tmp_path: Path) -> None:
    path = preset(tmp_path, "mine", extends="nowhere", gpu=fact(4))
    code, text = run("check", str(path))
    assert code == 1
    lines = text.splitlines()
    assert len(lines) == 2  # and not that scheduler and launcher are missing
    assert any("extends: there is no preset 'nowhere'; there are: generic-slurm, local" in line for line in lines)
    assert any("gpu.value" in line for line in lines)
    (installed / "nowhere.yml").write_text("a: [\n")
    code, text = run("check", str(path))
    assert "nowhere.yml:2: is not YAML" in text
    assert "gpu.value" in text


def test_extends_in_a_circle_or_too_deep(installed: Path) -> None:
    path = preset(installed, "a", extends="b")
    preset(installed, "b", extends="a")
    assert "extends: goes deeper than 2 presets, or in a circle" in run("check", str(path))[1]
    for name, base in (("b", "c"), ("c", "d"), ("d", "generic-slurm")):
        preset(installed, name, extends=base)
    assert "extends: goes deeper than 2 presets, or in a circle" in run("check", str(path))[1]
    preset(installed, "b", extends="generic-slurm")
    assert run("check", str(path)) == (0, f"{path}: ok\n")


def test_a_wrong_clock_does_not_disable_a_preset(installed: Path) -> None:
    preset(installed, "later", verified_on=LATER)
    assert run("show", "later")[0] == 0
    assert run("list")[0] == 0
