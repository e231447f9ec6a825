"""`ddp-scaffold presets probe`, with stand-ins on the PATH for the tools of a login node and of a compute node."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preset_helpers import Tool, fact, preset, run
from test_presets_init import ADDRESSES, CONFIG, LINKS, NVIDIA, PARTITIONS, SINFO

from ddp_scaffold.presets import probe

sys.path.insert(0, str(Path(__file__).with_name("dry")))
from sandbox import text_of

# `sinfo --version` prints "slurm" and the release (https://slurm.schedmd.com/sinfo.html#OPT_version).
VERSION = "slurm 24.05.3\n"
# Name|MaxWall, as sacctmgr --parsable2 separates fields (https://slurm.schedmd.com/sacctmgr.html#OPT_parsable2).
QOS = "normal|\ngpu_short|04:00:00\n"
QUERY = "NVIDIA A100-SXM4-40GB, 550.54.15\n" * 2
# github.com/NVIDIA/pyxis README.md
PYXIS = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n                              [pyxis] the image\n"
# `qstat -Q -f`, as MetaCentrum's documentation shows it for a queue of PBS Pro.
QUEUES = """Queue: default
    queue_type = Route
    total_jobs = 0
    state_count = Transit:0 Queued:0 Held:0 Waiting:0 Running:0 Exiting:0 Begun
\t:0
    resources_max.walltime = 720:00:00
    comment = Default queue (routing)
    route_destinations = q_2h,q_4h
    enabled = True
    started = True
"""


def limit(name: str, longest: str, **more: Any) -> dict[str, Any]:
    return fact({"name": name, "max_walltime": longest, **more})


@pytest.fixture
def acme(installed: Path) -> Callable[..., Path]:
    """`acme(field=value)` is a preset that agrees with the stand-ins but in these fields."""

    def make(**changes: Any) -> Path:
        values = {
            "partition": fact("gpu"),
            "gpus_per_node": fact(4),
            "cpus_per_node": fact(64),
            "limits": [limit("gpu", "2-00:00:00", max_nodes=8), limit("gpu_short", "04:00:00", by="qos")],
            "gpu": fact("A100 40 GB"),
            "accelerator": fact("cuda"),
            "nccl_socket_ifname": fact("hsn"),
            "gloo_socket_ifname": fact("hsn0"),
            "internet": fact("none"),
        }
        return preset(installed, "acme", **{**values, **changes})

    return make


@pytest.fixture
def slurm(tool: Tool) -> Tool:
    """A login node; `SLURM_JOB_ID` makes it a compute node."""
    tool("sinfo", SINFO, **{"--version": VERSION, "-h": SINFO})
    tool("scontrol", **{"show config": CONFIG, "show partition -o": PARTITIONS})
    tool("sacctmgr", QOS)
    tool("srun", "srun: usage\n")
    tool("ip", **{"-o link": LINKS, "-o -4 addr": ADDRESSES})
    tool("nvidia-smi", **{"-L": NVIDIA, "--query-gpu": QUERY})
    return tool


def held(*, name: str = "acme", code: int = 0) -> dict[str, tuple[str, str, str]]:
    """Return the findings by field: outcome, preset, machine."""
    ended, text = run("probe", name, "--json")
    assert ended == code, text
    return {row["field"]: (row["outcome"], row["preset"], row["machine"]) for row in json.loads(text)["findings"]}


@pytest.mark.usefixtures("slurm")
def test_a_login_node_that_agrees(acme: Callable[..., Path]) -> None:
    acme()
    found = held()
    assert found["scheduler"] == ("agrees", "slurm", "Slurm 24.05.3")
    assert found["partition"][0] == found["gpus_per_node"][0] == found["cpus_per_node"][0] == "agrees"
    assert found["limits.gpu.max_walltime"] == ("agrees", "2-00:00:00", "2-00:00:00")
    assert found["limits.gpu_short.max_walltime"][0] == "agrees"
    for field in ("gpu", "accelerator", "nccl_socket_ifname"):
        assert found[field][0] == "not looked at"
        assert "run this inside a job" in found[field][2]
    assert found["internet"][0] == "not looked at"
    assert found["limits"] == ("told", "", "also: cpu, visual")


@pytest.mark.usefixtures("slurm")
def test_inside_a_job(acme: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    acme()
    found = held()
    assert found["gpu"] == ("agrees", "A100 40 GB", "NVIDIA A100-SXM4-40GB")
    assert found["driver"] == ("told", "", "550.54.15")
    assert found["nccl_socket_ifname"] == ("agrees", "hsn", "eth0, hsn0, ib9")
    assert found["gloo_socket_ifname"][0] == "agrees"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("changes", "field", "machine"),
    [
        ({"partition": fact("gone"), "limits": [limit("gone", "01:00:00")]}, "partition", "gone"),
        ({"limits": [limit("gpu", "3-00:00:00")]}, "limits.gpu.max_walltime", "2-00:00:00"),
        ({"limits": [limit("gpu", "2-00:00:00", max_nodes=16)]}, "limits.gpu.max_nodes", "8"),
        ({"partition": None, "limits": [limit("visual", "08:00:00")]}, "limits.visual", "its state is DOWN"),
        ({"limits": [limit("gpu", "01:00:00"), limit("old", "01:00:00", by="qos")]}, "qos.old", "no such QOS"),
        ({"gpus_per_node": fact(8)}, "gpus_per_node", "4"),
        ({"gpu": fact("H100 80 GB")}, "gpu", "NVIDIA A100-SXM4-40GB"),
        ({"accelerator": fact("rocm")}, "accelerator", "cuda"),
        ({"gloo_socket_ifname": fact("hsn")}, "gloo_socket_ifname", "eth0, hsn0, ib9"),
        ({"nccl_socket_ifname": fact("=ib0")}, "nccl_socket_ifname", "eth0, hsn0, ib9"),
        ({"library_paths": fact(["/nowhere/lib"])}, "library_paths", "not there"),
        ({"container": fact({"command": ["apptainer", "exec", "{image}"]})}, "container", "none"),
        ({"container": fact({"srun_flags": ["--container-image={image}"]})}, "container", "srun has no such option"),
    ],
)
def test_what_differs(
    acme: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str, machine: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    acme(**changes)
    outcome, _, seen = held(code=1)[field]
    assert (outcome, seen) == ("differs", machine)


def test_pyxis_is_known_by_the_help_of_srun(acme: Callable[..., Path], slurm: Tool) -> None:
    slurm("srun", PYXIS)
    acme(container=fact({"srun_flags": ["--container-image={image}"]}))
    assert held()["container"] == ("agrees", "--container-image", "srun has it")


def test_a_forced_plugin_is_looked_for(
    acme: Callable[..., Path], slurm: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"name": "NCCL_NET", "value": "OFI", "read_by": "NCCL", "why": "w", "source": "s", "confidence": "seen"}
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    acme(env=[line])
    assert held()["env.NCCL_NET"][0] == "not looked at"  # a login node need not have it
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert held(code=1)["env.NCCL_NET"][0] == "differs"
    (tmp_path / "libnccl-net-ofi.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert held()["env.NCCL_NET"] == ("agrees", "OFI", "libnccl-net-ofi.so")


@pytest.mark.parametrize(("says", "code"), [("lmod-unknown.txt", 1), ("tcl-unknown.txt", 1), ("tcl-unknown.txt", 0)])
def test_a_module_that_is_gone(
    acme: Callable[..., Path], slurm: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int
) -> None:
    """Tcl modules of the 3.2 line print the error, and end with 0."""
    (tmp_path / "said.txt").write_text(text_of(says))
    function = f'[ "$2" = there ] && return 0; /bin/cat "{tmp_path}/said.txt" >&2; return {code}'
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("BASH_FUNC_module%%", f"() {{ {function}; }}")
    acme(modules=fact(["there", "gone"]))
    text = run("probe", "acme")[1]
    rows = dict(re.findall(r"^(agrees|differs) +modules +(\S+)", text, re.MULTILINE))
    assert rows == {"agrees": "there", "differs": "gone"}


@pytest.mark.parametrize(
    "text",
    ["", PARTITIONS[:150], "NomPartition=gpu ÉTAT=EN_PANNE\n", "\x00\xff\x1b[2J" * 50, "PartitionName=$(reboot)\n"],
    ids=["empty", "cut off", "another language", "binary", "hostile"],
)
def test_tools_that_print_what_cannot_be_read(acme: Callable[..., Path], slurm: Tool, text: str) -> None:
    """A cut one still tells of the partitions before the cut; none is made up, and nothing of the text is printed."""
    acme(gpus_per_node=fact(None), cpus_per_node=None)
    for name in ("scontrol", "sinfo", "sacctmgr", "nvidia-smi", "ip"):
        slurm(name, text)
    code, shown = run("probe", "acme")
    assert code in (1, 3), shown
    assert not {"ÉTAT", "reboot", "\x1b"} & set(re.findall(r"\S+", shown))
    found = {row.split()[0] for row in shown.splitlines()[2:-1] if row}
    assert "agrees" not in found
    assert re.search(r"not looked at +scheduler +slurm +sinfo: what it prints (cannot be read|is cut off)", shown)


def test_a_tool_that_hangs_and_one_that_fails(
    acme: Callable[..., Path], slurm: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 1)
    slurm("scontrol", script="exec /bin/sleep 600")
    slurm("sacctmgr", script="exit 1")
    acme()
    found = held()
    assert found["limits.gpu"] == ("not looked at", "", "scontrol show partition: no answer within 1 s")
    assert found["qos.gpu_short"] == ("not looked at", "", "sacctmgr show qos: failed here (exit code 1)")


def test_a_queue_of_pbs_that_is_gone(installed: Path, tool: Tool) -> None:
    tool("qstat", QUEUES)
    preset(
        installed, "pbs", scheduler=fact("pbs"), launcher=fact("mpiexec"), gpu_request=fact(None),
        limits=[limit("default", "720:00:00"), limit("gone", "01:00:00")],
    )  # fmt: skip
    found = held(name="pbs", code=1)
    assert found["limits.default.max_walltime"][0] == "agrees"
    assert found["limits.gone"] == ("differs", "a queue", "no such queue")


@pytest.mark.usefixtures("tool")
def test_another_machine_compares_nothing(acme: Callable[..., Path]) -> None:
    acme(library_paths=fact(["/nowhere"]))
    code, text = run("probe", "acme")
    assert code == 3
    assert "there is no scheduler on this machine" in text
    assert "nothing of this preset could be compared here" in text


@pytest.mark.usefixtures("slurm")
def test_nothing_names_the_user_or_the_host(
    acme: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "USER": "jdoe",
        "SCRATCH": f"{tmp_path}/jdoe",
        "HOSTNAME": "login7",
        "SLURM_JOB_ID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "jdoe").mkdir()
    acme(scratch=fact("$SCRATCH"), node_local=fact("/nowhere/$USER"))
    for words in (["probe", "acme"], ["probe", "acme", "--json"]):
        text = run(*words)[1]
        assert "$SCRATCH" in text
        for secret in ("jdoe", "login7", "GPU-1", str(tmp_path), "198.51.100.2"):
            assert secret not in text.replace(json.dumps(str(tmp_path)), "")
    assert held(code=1)["scratch"] == ("agrees", "$SCRATCH", "there")


def test_no_such_preset_and_a_broken_one(installed: Path) -> None:
    assert run("probe", "nowhere")[0] == 2
    (installed / "broken.yml").write_text("name: broken\n")
    code, text = run("probe", "broken")
    assert code == 1
    assert "presets check" in text
