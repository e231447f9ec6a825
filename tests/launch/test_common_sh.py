"""The functions of launch/common.sh that settings of a cluster go through, by sourcing it in bash."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_helpers import environment


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Path:
    return render({"preset": "local"})


@pytest.fixture
def bash(rendered: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`bash(script, NAME="value")` runs it after common.sh; `tmp_path`/bin is first on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", "-c", f"source launch/common.sh; {script}"]
        values = environment(**env)
        values["PATH"] = f"{programs}:{values['PATH']}"
        return subprocess.run(command, cwd=rendered, env=values, check=False, capture_output=True, text=True)

    return run


Bash = Callable[..., subprocess.CompletedProcess[str]]


def fake(tmp_path: Path, name: str, script: str) -> None:
    """A program that stands in front of the real one."""
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


# ---------------------------------------------------------------------------------------------------------- load_env
@pytest.fixture
def load(bash: Bash, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`load(text, nodes, partition, NAME="value")`: what load_env adds to the environment or changes in it."""

    def run(text: str, nodes: int = 1, partition: str = "", **env: str) -> dict[str, str]:
        file = tmp_path / "x.env"
        file.write_bytes(text.encode())
        script = f"env -0 >'{tmp_path}/before'; load_env '{file}' {nodes} '{partition}'; env -0 >'{tmp_path}/after'"
        done = bash(script, **env)
        assert (done.returncode, done.stderr) == (0, "")
        before, after = (
            dict(pair.split("=", 1) for pair in (tmp_path / name).read_text().split("\0") if pair)
            for name in ("before", "after")
        )
        return {name: value for name, value in after.items() if before.get(name) != value and name != "_"}

    return run


Load = Callable[..., dict[str, str]]

SECTIONS = """\
ALWAYS=1
[nodes >= 2]
FROM_2=1
[nodes <= 1]
UP_TO_1=1
[partition gpu]
GPU=1
[nodes >= 2, partition gpu]
FROM_2_GPU=1
[nodes >= 2, nodes <= 4]
FROM_2_TO_4=1
[nodes >= 10, partition gpu]
FROM_10_GPU=1
"""


@pytest.mark.parametrize(
    ("nodes", "partition", "expected"),
    [
        (1, "", {"UP_TO_1"}),
        (1, "gpu", {"UP_TO_1", "GPU"}),
        (2, "", {"FROM_2", "FROM_2_TO_4"}),
        (2, "gpu-long", {"FROM_2", "FROM_2_TO_4"}),
        (4, "gpu", {"FROM_2", "FROM_2_TO_4", "GPU", "FROM_2_GPU"}),
        (9, "gpu", {"FROM_2", "GPU", "FROM_2_GPU"}),
        (10, "gpu", {"FROM_2", "GPU", "FROM_2_GPU", "FROM_10_GPU"}),
        (10, "cpu", {"FROM_2"}),
    ],
)
def test_lines_count_below_their_conditions_only(load: Load, nodes: int, partition: str, expected: set[str]) -> None:
    assert set(load(SECTIONS, nodes, partition)) == {"ALWAYS", *expected}


def test_the_same_variable_under_opposite_conditions(load: Load) -> None:
    text = "[nodes <= 1]\nNCCL_NET=Socket\n[nodes >= 2]\nNCCL_NET=OFI\n"
    assert [load(text, nodes)["NCCL_NET"] for nodes in (1, 2)] == ["Socket", "OFI"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("$ONE", "1"),
        ("a$ONE-b", "a1-b"),
        ("$ONE$TWO/$ONE", "1two words/1"),
        ("/scratch/$NOT_SET/x", "/scratch//x"),
        ("$ODD", "$(touch pwned) $ONE"),  # what a variable holds is not looked at again
        ("$(touch pwned)", "$(touch pwned)"),
        ("`touch pwned`", "`touch pwned`"),
        ("a; touch pwned", "a; touch pwned"),
        ("costs 5$", "costs 5$"),
        ("$", "$"),
        ("$1 ${ONE}", "$1 ${ONE}"),
        ("a=b=c", "a=b=c"),
        ("'a' \"b\" \\n *", "'a' \"b\" \\n *"),
        ("", ""),
    ],
)
def test_only_names_are_replaced(rendered: Path, load: Load, value: str, expected: str) -> None:
    env = {"ONE": "1", "TWO": "two words", "ODD": "$(touch pwned) $ONE"}
    assert load(f"NEW={value}\n", **env) == {"NEW": expected}
    assert not (rendered / "pwned").exists()


def test_a_lone_dollar_does_not_hide_the_names_behind_it(load: Load) -> None:
    assert load("NEW=5$ for $ONE\n", ONE="1") == {"NEW": "5$ for 1"}


def test_a_line_may_use_an_earlier_one(load: Load) -> None:
    assert load("BASE=/opt\nNEXT=$BASE/lib\n") == {"BASE": "/opt", "NEXT": "/opt/lib"}


def test_a_variable_that_is_set_already_wins(load: Load) -> None:
    assert load("ONE=file\nTWO=file\nTHREE=file\n", ONE="mine", TWO="") == {"THREE": "file"}
    assert load("ONE=first\nONE=second\n") == {"ONE": "first"}


def test_the_last_line_needs_no_newline(load: Load) -> None:
    assert load("# a comment\n\n  ONE=1\nTWO=2") == {"ONE": "1", "TWO": "2"}
    assert load("[nodes >= 2]\nTHREE=3", nodes=2) == {"THREE": "3"}


def test_lines_may_end_with_a_carriage_return(load: Load) -> None:
    text = "# a comment\r\n\r\nONE=1\r\n[nodes >= 2]\r\nTWO=2\r\n"
    assert load(text, nodes=2) == {"ONE": "1", "TWO": "2"}


@pytest.mark.parametrize("line", ["x[$(touch pwned)]=1", "x[`touch pwned`]=1", "x;touch pwned=1"])
def test_what_is_no_name_is_refused_and_never_run(rendered: Path, bash: Bash, tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.env"
    file.write_text(f"{line}\n")
    done = bash(f"load_env '{file}' 1 ''; echo went on")
    ran = rendered / "pwned"
    existed = ran.exists()
    ran.unlink(missing_ok=True)
    assert not existed
    assert done.returncode == 78
    assert line.split("=")[0] in done.stderr


@pytest.mark.parametrize(
    "condition",
    [
        "partiton gpu",
        "",
        "nodes >= 2x",
        "nodes >= 0",
        "nodes = 2",
        "nodes \\= 2",
        "nodes >= $(touch pwned)",
        "nodes >= a[$(touch pwned)]",
        "gpu",
        "gpu A100 80GB",
        "gpu 'A100'",
        'gpu "A100"',
        "gpu A*",
        "gpu $(touch pwned)",
        "gpu $(touch${IFS}pwned)",
        "gpu `touch pwned`",
        "gpu >= A100",
        "plugin",
        "plugin 1.5",
        "plugin = 1.5",
        "plugin > 1.5",
        "plugin >= 1.",
        "plugin >= .5",
        "plugin >= 1.17.x",
        "plugin >= -1",
        "plugin >= '1.5'",
        "plugin >= $(touch pwned)",
        "plugin >= a[$(touch pwned)]",
        "nodes >= 2, plugin x",  # where the first does not hold either
    ],
)
def test_a_condition_with_a_mistake_is_refused(rendered: Path, bash: Bash, tmp_path: Path, condition: str) -> None:
    fake(tmp_path, "nvidia-smi", "echo NVIDIA A100-SXM4-80GB")
    file = tmp_path / "x.env"
    file.write_text(f"[{condition}]\nONE=1\n")
    done = bash(f"load_env '{file}' 1 ''; echo went on", LD_LIBRARY_PATH=plugin(tmp_path / "lib", "1.5.0"))
    ran = rendered / "pwned"
    existed = ran.exists()
    ran.unlink(missing_ok=True)
    assert not existed
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert f"launch/env: [{condition}] is no condition" in done.stderr


# ------------------------------------------------------------------------------------------- GPUs and network plugins
NVIDIA = "[ \"$*\" = '--query-gpu=name --format=csv,noheader' ] && printf '%s\\n' 'NVIDIA {0}' 'NVIDIA T4'"
ROCM = "[ \"$*\" = --showproductname ] && printf 'GPU[%s]\\t\\t: Card {1}: \\t\\t%s\\n' 0 '{0}' 1 T4"
AMD = "[ \"$*\" = 'static --asic' ] && printf 'GPU: %s\\n  ASIC:\\n    MARKET_NAME: %s\\n' 0 '{0}' 1 T4"
INITIALIZING = "NET/OFI Initializing aws-ofi-nccl "
TOOLS = {"nvidia-smi": NVIDIA, "rocm-smi": ROCM, "amd-smi": AMD}


def plugin(directory: Path, version: str, name: str = "libnccl-net.so", text: str = INITIALIZING) -> str:
    """A library that holds what aws-ofi-nccl prints at its start, among what is no text."""
    directory.mkdir(exist_ok=True)
    words = (b"\x7fELF\0\xff", b"aws-ofi-nccl initialization failed", *[f"{text}{version}".encode(), b"\xfe\n"] * 2)
    (directory / name).write_bytes(b"\0".join(words))
    return str(directory)


Asked = Callable[..., tuple[set[str], str]]


@pytest.fixture
def asked(bash: Bash, tmp_path: Path) -> Asked:
    """`asked("gpu A100", ...)`: which of these conditions hold, and what was said. No tool finds anything by itself."""
    for name in (*TOOLS, "ldconfig"):
        if not (tmp_path / "bin" / name).exists():
            fake(tmp_path, name, "exit 9")

    def run(*conditions: str, container: str = "", nodes: int = 1, **env: str) -> tuple[set[str], str]:
        text = "".join(f"[{condition}]\nC{number}=1\n" for number, condition in enumerate(conditions))
        (tmp_path / "x.env").write_text(f"{text}[nodes >= 1]\nLAST=1\n")
        script = f"load_env '{tmp_path}/x.env' {nodes} '' {container}; env"
        done = bash(script, **{"LD_LIBRARY_PATH": "", **env})
        assert done.returncode == 0, done.stderr
        assert "LAST=1" in done.stdout.splitlines(), "a tool has read the rest of the file"
        lines = done.stdout.splitlines()
        return {each for number, each in enumerate(conditions) if f"C{number}=1" in lines}, done.stderr

    return run


@pytest.mark.parametrize(
    ("tool", "name", "series", "expected"),
    [
        ("nvidia-smi", "H100 80GB HBM3", "", {"gpu H100", "gpu h100", "gpu 80GB"}),
        ("nvidia-smi", "A100-SXM4-80GB", "", {"gpu A100", "gpu 80GB", "gpu SXM4, nodes <= 1"}),
        ("nvidia-smi", "GB200", "", {"gpu GB200"}),
        ("rocm-smi", "AMD INSTINCT MI250X", "series", {"gpu MI250X"}),
        ("rocm-smi", "AMD Instinct MI250X", "Series", {"gpu MI250X"}),
        ("amd-smi", "MI250X-O", "", {"gpu MI250X"}),
    ],
)
def test_a_word_of_the_first_gpu(
    asked: Asked, tmp_path: Path, tool: str, name: str, series: str, expected: set[str]
) -> None:
    fake(tmp_path, tool, f"{TOOLS[tool].format(name, series)}; cat >/dev/null; echo >>'{tmp_path}/asked'")
    words = ("H100", "h100", "H10", "A100", "80GB", "B200", "GB200", "MI250X", "MI250", "T4", "x")
    told = asked(*(f"gpu {word}" for word in words), "gpu SXM4, nodes <= 1", "nodes >= 2, gpu GB200")
    assert told == (expected, "")
    assert (tmp_path / "asked").read_text() == "\n", "more than once"


@pytest.mark.parametrize("output", ["", "NVIDIA-SMI has failed because it could not talk to the A100's driver"])
def test_no_gpu_is_said_once(asked: Asked, tmp_path: Path, output: str) -> None:
    fake(tmp_path, "nvidia-smi", f'echo "{output}"; exit 9')
    held, said = asked("gpu A100", "gpu H100", "nodes >= 1")
    assert held == {"nodes >= 1"}
    assert said.count("\n") == 1
    assert "is known to nvidia-smi, rocm-smi or amd-smi: lines below [gpu ...] in launch/env do not count" in said


def test_no_tool_at_all(asked: Asked, bash: Bash, tmp_path: Path) -> None:
    (tmp_path / "x.env").write_text("[gpu A100]\nONE=1\n[plugin >= 1]\nTWO=1\n")
    found = {name: shutil.which(name) for name in ("bash", "sed", "grep")}
    programs = tmp_path / "few"
    programs.mkdir()
    for name, path in found.items():
        assert path is not None
        (programs / name).symlink_to(path)
    done = bash(f"PATH={programs}; load_env '{tmp_path}/x.env' 1 ''; echo \"${{ONE-}}${{TWO-}}|\"", LD_LIBRARY_PATH="")
    assert (done.returncode, done.stdout) == (0, "|\n"), done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_nothing_is_looked_up_in_vain(asked: Asked, tmp_path: Path) -> None:
    for name in (*TOOLS, "ldconfig"):
        fake(tmp_path, name, f"echo {name} >>'{tmp_path}/asked'")
    assert asked("nodes >= 2, gpu A100, plugin >= 1", "partition x, plugin <= 1", "nodes >= 1") == ({"nodes >= 1"}, "")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.4.0aws", {"<= 1.5", "<= 1.9", "<= 1.16.3", "<= 01.9"}),
        ("1.5.0aws", {"<= 1.5", "<= 1.9", ">= 1.5", ">= 1.5.0", "<= 1.16.3", "<= 01.9"}),
        ("1.5.3", {"<= 1.5", "<= 1.9", ">= 1.5", ">= 1.5.0", "<= 1.16.3", "<= 01.9"}),
        ("1.9.2-aws", {"<= 1.9", ">= 1.5", ">= 1.5.0", ">= 1.9", "<= 1.16.3", "<= 01.9"}),
        ("1.16.3", {">= 1.5", ">= 1.5.0", ">= 1.9", ">= 1.16.3", "<= 1.16.3"}),
        ("1.17.0", {">= 1.5", ">= 1.5.0", ">= 1.9", ">= 1.16.3", ">= 1.17"}),
        ("2", {">= 1.5", ">= 1.5.0", ">= 1.9", ">= 1.16.3", ">= 1.17", ">= 2.0"}),
    ],
)
@pytest.mark.parametrize("text", ["Using aws-ofi-nccl ", INITIALIZING])
def test_versions_of_the_plugin(asked: Asked, tmp_path: Path, version: str, expected: set[str], text: str) -> None:
    numbers = ("1.5", "1.5.0", "1.9", "1.16.3", "1.17", "2.0")
    wanted = [f">= {each}" for each in numbers] + ["<= 1.5", "<= 1.9", "<= 1.16.3", "<= 01.9"]
    path = plugin(tmp_path / "lib", version, text=text)
    held, said = asked(*(f"plugin {each}" for each in wanted), LD_LIBRARY_PATH=f"/nowhere::{path}")
    assert (held, said) == ({f"plugin {each}" for each in expected}, "")


@pytest.mark.parametrize("name", ["libnccl-net.so.0", "libnccl-net-ofi.so", "librccl-net.so", "libnccl-net-aws-ofi.so"])
def test_where_the_plugin_is(asked: Asked, tmp_path: Path, name: str) -> None:
    """In LD_LIBRARY_PATH first, behind plugins of others; else where ldconfig says."""
    other = plugin(tmp_path / "an other", "9.9", "libnccl-net.so", "SHARP plugin ")
    (tmp_path / "an other" / "libnccl-net-x.so").mkdir()
    both = f"{other}:{plugin(tmp_path / 'one', '1.5', name)}"
    old = plugin(tmp_path / "cached one", "1.2", name)
    listed = f"\\t{name} (libc6,x86-64) => {old}/{name}\\n"
    fake(tmp_path, "ldconfig", f"[ \"$*\" = -p ] && printf '1 libs found\\n\\tlibm.so (x) => /lib/libm.so\\n{listed}'")
    assert asked("plugin <= 1.2", "plugin >= 1.5", LD_LIBRARY_PATH=both) == ({"plugin >= 1.5"}, "")
    assert asked("plugin <= 1.2", "plugin >= 1.5", LD_LIBRARY_PATH=other) == ({"plugin <= 1.2"}, "")


@pytest.mark.parametrize("version", ["", "git-0a1b2c3", "$(touch pwned)", "x1.5"])
def test_an_unknown_version_is_said_once(asked: Asked, tmp_path: Path, version: str) -> None:
    path = plugin(tmp_path / "lib", version) if version else ""
    held, said = asked("plugin >= 0", "plugin <= 99", "nodes >= 1", LD_LIBRARY_PATH=path)
    assert held == {"nodes >= 1"}
    assert said.count("\n") == 1
    assert "no network plugin aws-ofi-nccl with a known version was found" in said
    assert asked("nodes >= 1", LD_LIBRARY_PATH=path) == ({"nodes >= 1"}, "")  # nothing asks for it


def test_the_plugin_of_a_container_is_not_the_host_s(asked: Asked, tmp_path: Path) -> None:
    path = plugin(tmp_path / "lib", "1.5.0")
    fake(tmp_path, "nvidia-smi", NVIDIA.format("A100"))
    held, said = asked("plugin <= 1.5", "plugin >= 0", "gpu A100", container="container", LD_LIBRARY_PATH=path)
    assert held == {"gpu A100"}
    assert said.count("\n") == 1
    assert "in the container's image: lines below [plugin ...] in launch/env do not count; set by hand" in said


@pytest.mark.parametrize("container", ["", "container"])
def test_a_start_knows_whether_there_is_a_container(
    render: Callable[..., Path], bash: Bash, tmp_path: Path, container: str
) -> None:
    project = render({"preset": "aws-hyperpod"})
    fake(tmp_path, "nvidia-smi", NVIDIA.format("A100-SXM4-40GB"))
    path = plugin(tmp_path / "lib", "1.6.0")
    done = bash(f"cd '{project}'; prepare_environment 2 x {container}; env", LD_LIBRARY_PATH=path)
    assert done.returncode == 0, done.stderr
    assert ("\nFI_EFA_USE_DEVICE_RDMA=1\n" in done.stdout) == (not container)
    assert "FI_PROVIDER=" not in done.stdout
    assert ("in the container's image" in done.stderr) == bool(container)


# ------------------------------------------------------------------------------------------------------ master_address
KNOWN = 'shift; case $1 in {hosts}) echo "10.0.0.1 $1" ;; *) exit 2 ;; esac'


@pytest.mark.parametrize(
    ("known", "domain", "expected", "said"),
    [
        ("n1", "site.org", "n1", ""),
        ("n1.site.org", "site.org", "n1.site.org", "n1 cannot be resolved here, n1.site.org can"),
        ("other", "site.org", "n1", "warning: n1 cannot be resolved on"),
        ("n1.site.org", "", "n1", "warning: n1 cannot be resolved on"),
    ],
)
def test_master_address(bash: Bash, tmp_path: Path, known: str, domain: str, expected: str, said: str) -> None:
    fake(tmp_path, "getent", KNOWN.format(hosts=known))
    fake(tmp_path, "hostname", f"[ \"$*\" = -d ] && echo '{domain}'")
    done = bash("master_address n1")
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize(
    ("known", "expected", "said"),
    [
        ("n1-fast", "n1-fast", ""),
        ("n1", "n1", "n1-fast cannot be resolved here: taking n1"),
        ("n1.site.org", "n1.site.org", "n1 cannot be resolved here, n1.site.org can"),
        ("other", "n1", "warning: n1 cannot be resolved on"),
    ],
)
def test_the_plain_name_stands_in_for_that_of_a_fast_network(
    bash: Bash, tmp_path: Path, known: str, expected: str, said: str
) -> None:
    fake(tmp_path, "getent", KNOWN.format(hosts=known))
    fake(tmp_path, "hostname", '[ "$*" = -d ] && echo site.org')
    done = bash("master_address n1-fast n1")
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


def test_master_address_without_a_domain(bash: Bash, tmp_path: Path) -> None:
    fake(tmp_path, "getent", "exit 2")
    fake(tmp_path, "hostname", "echo hostname: no such option >&2; exit 1")
    done = bash("master_address n1")
    assert (done.returncode, done.stdout) == (0, "n1\n"), done.stderr


# ------------------------------------------------------------------------------------------------------- use_gpu_order
ALL = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,1,2,3", "3,2,1,0"),
        ("2,0,1,3", "3,2,1,0"),
        ("0,1", "0,1"),  # part of a node: not what the order is of
        ("0", "0"),
        ("0,1,2,3,4", "0,1,2,3,4"),
        ("GPU-1,GPU-2,GPU-3,GPU-4", "GPU-1,GPU-2,GPU-3,GPU-4"),
        ("", ""),
    ],
)
def test_gpu_order(bash: Bash, name: str, visible: str, expected: str) -> None:
    done = bash(f'use_gpu_order 3,2,1,0; echo "${name}"', **{name: visible})
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    others = bash("use_gpu_order 3,2,1,0; env", **{name: visible}).stdout
    assert {line.split("=")[0] for line in others.splitlines()} & set(ALL) == {name}


def test_gpu_order_of_more_than_nine(bash: Bash) -> None:
    order = ",".join(map(str, [*range(8, 16), *range(8)]))
    visible = ",".join(map(str, range(16)))
    done = bash(f'use_gpu_order {order}; echo "$CUDA_VISIBLE_DEVICES"', CUDA_VISIBLE_DEVICES=visible)
    assert done.stdout == f"{order}\n"


def test_gpu_order_is_applied_once(bash: Bash) -> None:
    """Where gres.conf names no kind of GPU, Slurm sets every variable; HIP takes CUDA_VISIBLE_DEVICES for its own."""
    both = {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    done = bash('use_gpu_order 3,2,1,0; echo "$ROCR_VISIBLE_DEVICES $CUDA_VISIBLE_DEVICES"', **both)
    rocr, cuda = ([int(number) for number in part.split(",")] for part in done.stdout.split())
    assert [rocr[number] for number in cuda] == [3, 2, 1, 0]


# --------------------------------------------------------------------------------------------------------- use_caches
def test_caches_go_to_a_directory_that_can_be_made(bash: Bash, tmp_path: Path) -> None:
    show = 'echo "${XDG_CACHE_HOME:-none}"'
    there = tmp_path / "scratch" / "user"
    assert bash(f"unset XDG_CACHE_HOME; use_caches '{there}'; {show}").stdout == f"{there}/.cache\n"
    assert (there / ".cache").is_dir()
    mine = bash(f"use_caches '{there}'; {show}", XDG_CACHE_HOME="/mine")
    assert mine.stdout == "/mine\n"


@pytest.mark.parametrize("kind", ["a file", "relative", "empty"])
def test_caches_stay_where_they_are_else(bash: Bash, rendered: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()  # below it, root cannot make a directory either
    directory = {"a file": str(tmp_path / "file"), "relative": "scratch/user", "empty": ""}[kind]
    done = bash(f"unset XDG_CACHE_HOME; use_caches '{directory}'; echo \"${{XDG_CACHE_HOME:-none}}\"")
    assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr
    assert f"no directory can be made in '{directory}'" in done.stderr
    assert not (rendered / "scratch").exists()
    assert not (rendered / ".cache").exists()


# --------------------------------------------------------------------------------------------------- stops by a file
def test_a_request_to_stop_and_forgetting_it(bash: Bash, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    done = bash(f"ask_to_stop '{tmp_path}' USR2")
    assert done.returncode == 0, done.stderr
    assert stop.read_text() == f"signal SIGUSR2 to the launch script on {os.uname().nodename}\n"
    assert bash(f"forget_request '{tmp_path}'").returncode == 0
    assert not stop.exists()
    assert bash(f"forget_request '{tmp_path}'").returncode == 0  # nothing to forget


@pytest.mark.parametrize("text", ["", "maintenance at noon\n", "please: signal it\n"])
def test_the_stop_file_of_a_user_is_not_forgotten(bash: Bash, tmp_path: Path, text: str) -> None:
    (tmp_path / "stop").write_text(text)
    assert bash(f"forget_request '{tmp_path}'").returncode == 0
    assert (tmp_path / "stop").read_text() == text


# ------------------------------------------------------------------------------------------------------------- node.sh
@pytest.mark.parametrize("host", ["n1", "n1.site.org"])
def test_a_node_that_came_is_not_missed_under_ibrun(
    render: Callable[..., Path], tmp_path: Path, bash: Bash, host: str
) -> None:
    """ibrun hides SLURMD_NODENAME, so a node is known by its host name, which is often the full one."""
    project = render({"preset": "generic-slurm", "launcher": "ibrun"})
    fake(tmp_path, "uname", f"echo {host}")
    fake(tmp_path, "scontrol", "echo n1")
    fake(tmp_path, "python", "exit 1")  # torchrun starts no rank
    run_dir = tmp_path / "run"
    script = f"cd '{project}'; bash launch/node.sh 1 5 '{run_dir}' true"
    slurm = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "LAUNCHED_WITH": "ibrun", "PMI_RANK": "0"}
    done = bash(script, **slurm, MASTER_ADDR="n1", MASTER_PORT="1", DDP_RUN__ID="r", DDP_ATTEMPT="0")
    assert done.returncode == 70, done.stderr
    assert "started no rank, and its own message above says why" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("stopping", "before", "expected"),
    [("1", 1, "early"), ("1", 0, ""), ("", 1, "")],
    ids=["asked to stop, and nothing noted", "asked to stop after they had met", "not asked to stop"],
)
def test_a_stop_is_early_if_the_ranks_have_noted_no_start(
    bash: Bash, tmp_path: Path, stopping: str, before: int, expected: str
) -> None:
    """With one line in the file, written before this start or by it."""
    (tmp_path / "attempts.jsonl").write_text('{"event": "start"}\n')
    done = bash(f"run_directory={tmp_path}; stopping={stopping}; stopped_early {before}")
    assert done.stdout.strip() == expected, done.stderr
