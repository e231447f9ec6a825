"""`ddp-scaffold presets init`, with stand-ins on the PATH for sinfo, scontrol, nvidia-smi, rocm-smi and ip."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest
import yaml
from preset_helpers import Tool, run

from ddp_scaffold.presets import load, probe

ROOT = Path(__file__).parents[2]
TODAY = datetime.date.today()

SINFO = """cpu|(null)|128|256000|100|7-00:00:00
gpu*|gpu:a100:4(S:0-1),lustre:1|64|512000|20|2-00:00:00
gpu*|gpu:a100:4(S:0-1)|64|1024000|2|2-00:00:00
visual|gpu:t4:1|32|128000|2|08:00:00
"""
CONFIG = """Configuration data as of 2026-11-28T10:00:00
ClusterName             = acme
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 24.05.3
"""
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=7-00:00:00 MinNodes=0 PriorityTier=1 \
PreemptMode=REQUEUE State=UP TRES=cpu=128,mem=1M
PartitionName=gpu AllowGroups=ALL Default=YES MaxNodes=8 MaxTime=2-00:00:00 MinNodes=2 PriorityTier=5 \
PreemptMode=REQUEUE State=UP
PartitionName=visual AllowGroups=ALL Default=NO MaxNodes=1 MaxTime=UNLIMITED MinNodes=1 PriorityTier=5 \
PreemptMode=OFF State=DOWN
"""
LINKS = """\
1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN mode DEFAULT\\    link/loopback 00:00
2: eth0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc mq state UP mode DEFAULT\\    link/ether 02:fc
3: hsn0@if3: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP mode DEFAULT\\    link/ether 02:fd
4: docker0: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc noqueue state DOWN\\    link/ether 02:fe
5: ib9: <BROADCAST,MULTICAST> mtu 2044 qdisc mq state DOWN\\    link/infiniband 00:00
"""
ADDRESSES = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: eth0    inet 192.0.2.2/24 brd 192.0.2.255 scope global eth0\\       valid_lft forever
3: hsn0    inet 198.51.100.2/24 scope global hsn0\\       valid_lft forever
4: docker0    inet 172.17.0.1/16 scope global docker0\\       valid_lft forever
5: ib9    inet 203.0.113.9/24 scope global ib9\\       valid_lft forever
"""
NVIDIA = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)
"""
ROCM = """============ ROCm System Management Interface ============
GPU[0]\t\t: Device Name: AMD Instinct MI250X
GPU[0]\t\t: GUID: 1
GPU[1]\t\t: Device Name: AMD Instinct MI250X
"""


@pytest.fixture
def cluster(tool: Tool) -> None:
    """Stand-ins for the login node of a Slurm cluster."""
    tool("sinfo", SINFO)
    tool("scontrol", **{"show config": CONFIG, "show partition -o": PARTITIONS})
    tool("ip", **{"-o link": LINKS, "-o -4 addr": ADDRESSES})
    tool("nvidia-smi", NVIDIA)


def made(name: str = "acme", *args: str) -> dict[str, Any]:
    """Make a preset without questions and return what its file holds; it must be valid."""
    code, text = run("init", name, "-y", *args)
    assert code == 0, text
    path = Path(f"{name}.yml")
    assert run("check", str(path)) == (0, f"{path}: ok\n")
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    return data


@pytest.mark.usefixtures("cluster")
def test_on_the_login_node_of_a_slurm_cluster() -> None:
    data = made()
    assert data["title"] == "The Slurm cluster acme"
    assert (data["extends"], data["verified_on"]) == ("generic-slurm", TODAY)
    assert data["gpus_per_node"] == {
        "value": 4,
        "source": "sinfo on the login node",
        "confidence": "probed",
        "verified_on": TODAY,
    }
    values = {name: fact["value"] for name, fact in data.items() if isinstance(fact, dict)}
    assert values == {
        "scheduler": "slurm",
        "gpu": "a100",
        "gpus_per_node": 4,
        "cpus_per_node": 64,
        "cpus_per_task": 16,
        "partition": "gpu",
        "nccl_socket_ifname": None,  # compute nodes may have others
    }
    assert data["cpus_per_task"]["confidence"] == "inferred"
    assert "ip addr on the login node shows eth0, hsn0; compute nodes" in data["nccl_socket_ifname"]["source"]
    assert [limit["value"] for limit in data["limits"]] == [
        {"name": "cpu", "max_walltime": "7-00:00:00", "preemptible": True},
        {"name": "gpu", "min_nodes": 2, "max_nodes": 8, "max_walltime": "2-00:00:00"},
        {"name": "visual", "max_nodes": 1, "note": "its state was DOWN"},
    ]
    assert {limit["confidence"] for limit in data["limits"]} == {"probed"}
    assert any("not made inside a job" in line for line in data["not_found"])
    assert "A100-SXM4" not in Path("acme.yml").read_text()  # a GPU of the login node
    preset = load.load_preset(Path("acme.yml"))
    assert preset.launcher.value == "srun"


@pytest.mark.usefixtures("cluster")
def test_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SCRATCH", "/anywhere")
    data = made()
    assert data["gpu"]["value"] == "NVIDIA A100-SXM4-40GB"
    assert data["accelerator"]["value"] == "cuda"
    assert data["gpus_per_node"]["value"] == 4  # the job may have a part of them
    assert data["nccl_socket_ifname"]["value"] == "hsn"
    assert data["nccl_socket_ifname"]["source"] == "ip addr on a compute node shows eth0, hsn0"
    assert data["scratch"]["value"] == "$SCRATCH"


@pytest.mark.parametrize(("name", "text", "accelerator"), [("nvidia-smi", NVIDIA, "cuda"), ("rocm-smi", ROCM, "rocm")])
def test_on_a_machine_without_a_scheduler(tool: Tool, name: str, text: str, accelerator: str) -> None:
    tool(name, text)
    data = made("desk")
    assert data["extends"] == "local"
    assert (data["accelerator"]["value"], data["gpus_per_node"]["value"]) == (accelerator, 2)
    assert data["gpus_per_node"]["source"].endswith(" on this machine")
    other = {"nvidia-smi": "rocm-smi", "rocm-smi": "nvidia-smi"}[name]
    absent = ["sinfo", "scontrol", other, "ip"]
    python = "python: there is no python3 on this machine, and projects need 3.10"
    index = ["torch_index: which index of pip has a build of torch for this machine's ROCm"] * (accelerator == "rocm")
    assert sorted(data["not_found"]) == sorted([*(f"{word}: not installed here" for word in absent), python, *index])


@pytest.mark.usefixtures("tool")
def test_nothing_is_found() -> None:
    data = made("desk", "--no-probe")
    assert data == {
        "name": "desk",
        "title": "desk",
        "extends": "local",
        "verified_on": TODAY,
        "status": "community",
    }


def test_pbs(tool: Tool) -> None:
    tool("pbsnodes")
    data = made()
    assert (data["scheduler"]["value"], data["launcher"]["value"]) == ("pbs", "mpiexec")


def test_slurm_that_does_not_answer(tool: Tool) -> None:
    tool("sinfo", script="exit 1")
    tool("scontrol", script="kill -TERM $$")
    data = made()
    assert data["extends"] == "generic-slurm"
    assert data["scheduler"]["source"] == "Slurm is installed on the login node, and does not answer"
    assert "sinfo: failed here (exit code 1)" in data["not_found"]
    assert "scontrol show config: failed here (signal 15)" in data["not_found"]


def test_different_nodes_are_not_averaged(tool: Tool) -> None:
    tool("sinfo", "a|gpu:a100:4|64|1|1|1:00\nb|gpu:h100:8|128|1|1|1:00\nc|gpu:2|64+|1|1|1:00\nd*|(null)|8|1|1|1:00\n")
    data = made()
    assert not {"gpus_per_node", "gpu", "cpus_per_node", "cpus_per_task", "partition"} & set(data)
    assert "gpus_per_node: sinfo on the login node shows 2, 4 and 8 GPUs a node" in data["not_found"]
    assert any("a100 and h100" in line for line in data["not_found"])


def test_a_cluster_without_gpus(tool: Tool) -> None:
    tool("sinfo", "cpu*|(null)|128|256000|100|1:00\n")
    assert "gpus_per_node: sinfo on the login node shows no GPUs" in made()["not_found"]


HOSTILE = [
    "{{ 7 * 7 }}|gpu:{{ 1 }}:4|64|1|1|1:00",
    "x: y|gpu:!!python/object:4|64|1|1|1:00",
    "*|gpu:4|64|1|1|1:00",
    "$(touch pwned)*|gpu:4|64|1|1|1:00",
    "'\"|gpu:4|64|1|1|1:00",
    "ok|gpu:a\x1b[2J:4|64|1|1|1:00",
    "ok|gpu:99999999999:99999999999|99999999999|1|1|1:00",
    "ok|gpu:0|0|0|0|0",
    "a|b",
    "|||||",
    "p" * 5000 + "|gpu:4|64|1|1|1:00",
    "zz|gpu:999,gpu:999|1|1|1|1:00",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_output_reaches_no_field(tool: Tool, line: str) -> None:
    name = line.partition("|")[0]
    tool("sinfo", line + "\n")
    tool(
        "scontrol",
        **{
            "show config": f"ClusterName = {name}: {{% raw %}}\nPreemptType = {line}\n",
            "show partition -o": f"PartitionName={name} MaxTime={line} MaxNodes={line} MinNodes={line}\n"
            f"PartitionName=gpu MaxTime={line} MaxNodes=99999999 MinNodes={line} State={line} PriorityTier={line}\n"
            "PartitionName=less MinNodes=3 MaxNodes=2\nPartitionName=gpu\n",
        },
    )
    tool("ip", **{"-o link": LINKS, "-o -4 addr": f"2: {name}  inet 1\n3: eth0}}}}'  inet 1\n{ADDRESSES}"})
    code, text = run("init", "acme", "-y")
    assert code == 0, text
    written = Path("acme.yml").read_text()
    assert run("check", "acme.yml")[0] == 0
    for mark in ("{{", "{%", "!!", "$(", "\x1b", "pwned", "ppp", "9999"):
        assert mark not in written
    data = yaml.safe_load(written)
    assert {limit["value"]["name"] for limit in data["limits"]} <= {"gpu", "ok", "a", "zz"}
    assert os.listdir() == ["acme.yml"]


@pytest.mark.parametrize("text", ["", "NomPartition=gpu ÉTAT=EN_PANNE\n", "slurm_load_partitions: Erreur\n"])
def test_what_cannot_be_read_is_named(tool: Tool, text: str) -> None:
    """Neither "no GPUs" nor "no limit" follows from it."""
    tool("sinfo", text)
    tool("scontrol", text)
    data = made()
    assert not {"gpus_per_node", "partition", "limits"} & set(data)
    lines = data["not_found"]
    assert "gpus_per_node: what sinfo on the login node prints cannot be read" in lines
    assert "limits: what scontrol show partition on the login node prints cannot be read" in lines
    assert "ÉTAT" not in Path("acme.yml").read_text()


@pytest.mark.parametrize("end", [-1, -3, -18])
def test_a_line_that_is_cut_off_tells_nothing(tool: Tool, end: int) -> None:
    """A time of 2-00:00:00 may end as 2-00:00, and 64 CPUs as 6."""
    tool("sinfo", SINFO[: SINFO.index("visual") + end])
    tool("scontrol", **{"show config": CONFIG, "show partition -o": PARTITIONS[: PARTITIONS.index(" MinNodes=2") - 2]})
    data = made()
    assert data["gpus_per_node"]["value"] == 4  # of the line before it
    assert [limit["value"]["name"] for limit in data["limits"]] == ["cpu"]
    for title in ("sinfo", "scontrol show partition"):
        assert f"{title}: what it prints is cut off here" in data["not_found"]


def test_output_that_is_no_text(tool: Tool) -> None:
    tool("sinfo", b"\xff\xfe\x00|gpu:4|1|1|1|1\ngpu*|gpu:4|64|1|1|1:00\n")
    tool("nvidia-smi", b"\x00\xff" * 1000)
    assert made()["gpus_per_node"]["value"] == 4


@pytest.mark.parametrize(
    ("printed", "walltime", "told"),
    [
        ("UNLIMITED", None, False),
        ("INFINITE", None, False),
        ("30", "00:30:00", False),  # minutes
        ("1440", "1-00:00:00", False),
        ("90:30", "01:30:30", False),  # minutes and seconds
        ("7:00:00", "07:00:00", False),
        ("100:00:00", "4-04:00:00", False),
        ("1-00", "1-00:00:00", False),  # days and hours
        ("2-03:04", "2-03:04:00", False),
        ("365-23:59:59", "365-23:59:59", False),
        ("1-30:00:00", "2-06:00:00", False),
        *(
            (odd, None, True)
            for odd in ("INVALID", "NONE", "3-", "-5", "1-2-3", "1:2:3:4", "00:00:00", "0", "1e9", "5m")
        ),
        *((odd, None, True) for odd in ("1000-00:00:00", "9" * 5000, "9" * 8, "1-:00", "\u0663\u0660", "30,UNLIMITED")),
    ],
)
def test_times_of_partitions(tool: Tool, printed: str, walltime: str | None, told: bool) -> None:
    tool("sinfo", SINFO)
    tool("scontrol", **{"show partition -o": f"PartitionName=gpu MaxTime={printed} MaxNodes=8\n"})
    data = made()
    assert data["limits"][0]["value"] == {"name": "gpu", "max_nodes": 8} | (
        {"max_walltime": walltime} if walltime else {}
    )
    assert any(line.startswith("limits: the MaxTime of gpu in scontrol") for line in data["not_found"]) == told


def alive(group: int) -> list[str]:
    """Return the processes of a group; not those that are dead, and that nobody has reaped yet."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            states.append(path.read_text().rpartition(")")[2].split())
    return [state for state, _, member, *_ in states if int(member) == group and state not in "ZX"]


def test_a_command_that_hangs_is_ended(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 1)
    pid = tmp_path / "pid"
    tool("sinfo", script=f"echo $$ > '{pid}'; /bin/sleep 600")
    tool("nvidia-smi", NVIDIA)
    started = time.monotonic()
    data = made()
    assert time.monotonic() - started < 20
    assert "sinfo: no answer within 1 s" in data["not_found"]
    deadline = time.monotonic() + 10
    while alive(int(pid.read_text())):  # its children with it
        assert time.monotonic() < deadline
        time.sleep(0.05)


HANGS = (
    "import sys; from ddp_scaffold import cli; from ddp_scaffold.presets import probe; probe.TIMEOUT_S = 3; cli.main()"
)


def test_a_terminal_shows_what_is_asked_and_what_gave_no_answer(tool: Tool) -> None:
    tool("sinfo", script="exec /bin/sleep 600")
    tool("ip", **{"-o link": LINKS, "-o -4 addr": ADDRESSES})
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scaffold"), "TERM": "xterm", "COLUMNS": "120"}
    child = pexpect.spawn(
        sys.executable,
        ["-c", HANGS, "presets", "init", "acme", "-y"],
        env=environment,
        dimensions=(50, 120),
        encoding="utf-8",
        timeout=30,
    )
    child.expect(r"Asking sinfo(, ip link)?(, ip addr)? \([0-3] s at most\)")
    child.expect_exact("note: no answer within 3 s: sinfo\r\n")
    child.expect_exact("sinfo: no answer within 3 s")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    assert "slurm" in Path("acme.yml").read_text()


def test_a_pipe_gets_no_word_of_what_is_asked(tool: Tool, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 1)
    tool("sinfo", script="exec /bin/sleep 600")
    said, silent = probe.ask({"sinfo": ("sinfo",)})
    assert (said, silent) == ({}, ["sinfo: no answer within 1 s"])
    assert capfd.readouterr() == ("", "")


def test_a_command_that_prints_without_end_is_ended(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST", 100_000)
    tool("sinfo", script="while :; do echo 'gpu*|gpu:4|64|1|1|1:00'; done")
    assert any(line.startswith("sinfo: failed here (") for line in made()["not_found"])


def test_a_command_that_cannot_be_run(tool: Tool, tmp_path: Path) -> None:
    tool("ip")
    path = tmp_path / "bin" / "rocm-smi"
    path.write_bytes(b"\x7fELF\x00")
    path.chmod(0o755)
    assert "rocm-smi --showid: cannot be run here" in made("desk")["not_found"]


@pytest.mark.usefixtures("cluster")
def test_json() -> None:
    code, text = run("init", "acme", "--json")
    assert code == 0
    result = json.loads(text)
    assert set(result) == {"version", "file", "extends", "found", "limits", "storage", "needs", "not_found", "next"}
    assert result["file"] == str(Path("acme.yml").absolute())
    assert result["found"]["gpus_per_node"]["verified_on"] == TODAY.isoformat()
    assert result["next"] == ["ddp-scaffold new DEST --preset ./acme.yml"]


@pytest.mark.usefixtures("cluster")
def test_what_is_printed() -> None:
    code, text = run("init", "acme", "-y")
    assert code == 0
    assert re.search("^gpus_per_node +4 +probed +sinfo on the login node$", text, re.MULTILINE)
    assert "gpu: from 2 nodes, up to 8 nodes, 2-00:00:00" in text
    assert "  rocm-smi" not in text
    assert "./acme.yml written; it extends generic-slurm. Next:" in text
    assert text.splitlines()[-1] == "  ddp-scaffold new DEST --preset ./acme.yml"


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_nothing_is_written_over(tool: Tool, kind: str) -> None:
    tool("sinfo", SINFO)
    path = Path("acme.yml")
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to("nowhere")
    code, text = run("init", "acme", "-y")
    assert code == 1
    assert "'acme.yml' exists" in text
    assert os.listdir() == ["acme.yml"]
    assert path.is_symlink() or path.read_text() == "mine"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Acme"], "NAME 'Acme' is no name of a preset"),
        (["../acme"], "is no name of a preset"),
        (["a\nb"], "is no name of a preset"),
        (["a" * 61], "is no name of a preset"),
        (["local"], "there is a preset 'local' already"),
        (["own"], "there is a preset 'own' already"),
        (["acme", "--output", "other.yml"], "--output 'other.yml' is not named like the preset"),
        (["acme", "--output", "nowhere/acme.yml"], "'nowhere' is not a directory"),
        (["acme", "--output", ""], "the path is empty"),
    ],
)
@pytest.mark.usefixtures("tool")
def test_wrong_usage(args: list[str], message: str) -> None:
    code, text = run("init", *args, "-y")
    assert code == 2, text
    assert message in text
    assert os.listdir() == []


@pytest.mark.usefixtures("tool")
def test_output_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a dir").mkdir()
    for number, output in enumerate((tmp_path / "a dir", tmp_path / "a dir" / "desk1.yml")):
        code, text = run("init", f"desk{number}", "-y", "--output", str(output))
        assert code == 0
        assert f"--preset '{tmp_path}/a dir/desk{number}.yml'" in text
        assert load.load_preset(tmp_path / "a dir" / f"desk{number}.yml").extends == "local"


@pytest.fixture
def dialog(tool: Tool) -> Any:
    """`dialog("acme")` starts the command on a terminal."""
    children = []

    def start(*args: str) -> Any:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "ddp_scaffold", "presets", "init", *args],
            env={**os.environ, "PYTHONPATH": str(ROOT / "scaffold"), "TERM": "xterm", "COLUMNS": "120"},
            dimensions=(50, 120),
            encoding="utf-8",
            timeout=30,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def converse(child: Any, answers: dict[str, str]) -> str:
    """Answer the questions, wait for the end, and return all that was printed."""
    shown = ""
    for question, answer in answers.items():
        child.expect_exact(question)
        shown += child.before
        child.expect(": ?$")
        shown += child.before
        child.sendline(answer)
    child.expect(pexpect.EOF)
    child.wait()
    return shown + str(child.before)


@pytest.mark.usefixtures("cluster")
def test_on_a_terminal_the_open_fields_are_asked(dialog: Any) -> None:
    shown = converse(
        dialog("acme"),
        {
            "What starts the ranks": "mpirun",
            "choose one of srun, torchrun, ibrun": "torchrun",
            "How a job asks for GPUs": "gres",
            "Interface for NCCL on compute nodes (ip addr on the login node shows eth0,": "$(reboot)",
            "should match pattern": "hsn",
            "Must a job name an account": "y",
            "Modules that a job loads (there is no python3 on the login node,": "$(reboot)",
            "should match pattern '^[A-Za-z0-9_+]": "GCC/13.3.0 Python/3.12.3",
            "Internet on compute nodes": "n",
            "choose one of open, nat, proxy, none": "",
            "Directory for caches": "/scratch/$USER",
        },
    )
    assert "GPUs on each node" not in shown  # sinfo has told
    assert "./acme.yml written" in shown
    data = yaml.safe_load(Path("acme.yml").read_text())
    values = {name: fact["value"] for name, fact in data.items() if isinstance(fact, dict)}
    assert (values["launcher"], values["gpu_request"], values["nccl_socket_ifname"]) == ("torchrun", "gres", "hsn")
    assert values["modules"] == ["GCC/13.3.0", "Python/3.12.3"]
    assert (values["account"], values["scratch"]) == ({"required": True}, "/scratch/$USER")
    assert data["launcher"]["source"] == "answered when this file was made"
    assert data["launcher"]["confidence"] == "seen"
    assert "internet: not known when this file was made" in data["not_found"]
    assert run("check", "acme.yml")[0] == 0


def test_on_a_terminal_without_a_scheduler_found(dialog: Any) -> None:
    converse(
        dialog("acme", "--no-probe"),
        {
            "Scheduler": "slurm",
            "Partition for GPU jobs": "",
            "GPUs on each node": "four",
            "that is not a whole number": "0",
            "should be greater than or equal to 1": "4",
            "CPUs for each GPU": "",
            "What starts the ranks": "",
            "How a job asks for GPUs": "none",
            "Interface for NCCL on compute nodes (NCCL chooses if it is left open)": "",
            "Must a job name an account": "no",
            "Modules that a job loads": "",
            "Internet on compute nodes": "proxy",
            "Directory for caches": "",
        },
    )
    data = yaml.safe_load(Path("acme.yml").read_text())
    values = {name: fact["value"] for name, fact in data.items() if isinstance(fact, dict)}
    assert values == {
        "scheduler": "slurm",
        "launcher": "srun",
        "gpus_per_node": 4,
        "gpu_request": None,
        "account": {"required": False},
        "internet": "proxy",
    }
    assert data["extends"] == "generic-slurm"


def test_pbs_is_answered(dialog: Any) -> None:
    converse(
        dialog("acme", "--no-probe"),
        {
            "Scheduler": "pbs",
            "Queue for GPU jobs": "workq",
            "Longest time of a job in workq": "24:00:00",
            "GPUs on each node": "4",
            "CPUs for each GPU": "8",
            "How a job asks for GPUs": "",
            "Interface for NCCL": "",
            "Must a job name an account": "",
            "Modules that a job loads": "",
            "Internet on compute nodes": "",
            "Directory for caches": "",
        },
    )
    preset = load.load_preset(Path("acme.yml"))
    assert (preset.launcher.value, preset.gpu_request and preset.gpu_request.value) == ("mpiexec", "ngpus")
    limits = [(limit.value.name, limit.value.max_walltime) for limit in preset.limits]
    assert (preset.partition and preset.partition.value, limits) == ("workq", [("workq", "24:00:00")])


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 130)])
def test_interrupted_at_a_question(dialog: Any, key: str, code: int) -> None:
    child = dialog("acme", "--no-probe")
    child.expect_exact("Scheduler")
    child.expect(": ?$")
    child.send(key)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == code
    assert "Traceback" not in child.before
    assert os.listdir() == []
