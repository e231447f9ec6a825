"""launch/outcome.py and the functions of launch/common.sh, one by one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launch_helpers import environment


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Path:
    return render({"preset": "local"})


@pytest.fixture(scope="module")
def outcome(rendered: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_outcome", rendered / "launch/outcome.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bash(project: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", f"source launch/common.sh; {script}"]
    return subprocess.run(command, cwd=project, env=environment(**env), check=False, capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------ the run directory
@pytest.mark.parametrize(
    ("arguments", "env", "file", "expected"),
    [
        ([], {}, {}, "runs/default"),
        ([], {}, {"id": "f", "dir": "out"}, "out/f"),
        ([], {}, {"id": "", "dir": "out"}, "out/default"),
        ([], {"DDP_RUN__ID": "e"}, {"id": "f"}, "runs/e"),
        (["--run.id", "c"], {"DDP_RUN__ID": "e"}, {"id": "f"}, "runs/c"),
        (["--run.id=c", "--run.dir=/scratch/x"], {"DDP_RUN__DIR": "d"}, {}, "/scratch/x/c"),
        ([], {"DDP_RUN__DIR": "d"}, {"dir": "out"}, "d/default"),
        (["--config", "other.yaml"], {}, {"id": "f"}, "runs/default"),
        (["--run.id"], {}, {}, "runs/default"),
        (["--fast-dev-run"], {}, {"id": "f"}, "runs/fast-dev-run/f"),
        (["--fast-dev-run=3"], {"DDP_RUN__DIR": "d/fast-dev-run"}, {}, "d/fast-dev-run/default"),
        ([], {"DDP_TRAIN__FAST_DEV_RUN": "3"}, {}, "runs/fast-dev-run/default"),
        (["--fast-dev-run", "0"], {"DDP_TRAIN__FAST_DEV_RUN": "3"}, {}, "runs/default"),
    ],
)
def test_directory(
    outcome: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    env: dict[str, str],
    file: dict[str, str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    Path("configs").mkdir()
    Path("configs/train.yaml").write_text(json.dumps({"run": file}))
    assert outcome.directory("default", arguments) == tmp_path / expected


@pytest.mark.parametrize("text", ["", "run: [1, 2]", "- run", "run: {id: [", "run: 3"])
def test_directory_leaves_complaints_about_the_file_to_training(
    outcome: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/train.yaml").write_text(text)
    assert outcome.directory("default", []) == tmp_path / "runs/default"


@pytest.mark.parametrize(
    ("arguments", "env", "file", "expected"),
    [
        ([], {}, {}, "300"),
        ([], {}, {"init_s": 40}, "40"),
        ([], {"DDP_CLOCKS__INIT_S": "50"}, {"init_s": 40}, "50"),
        (["--clocks.init_s=60.5"], {"DDP_CLOCKS__INIT_S": "50"}, {}, "60.5"),
    ],
)
def test_setting(
    outcome: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    env: dict[str, str],
    file: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    Path("configs").mkdir()
    Path("configs/train.yaml").write_text(json.dumps({"clocks": file}))
    assert outcome.setting("clocks.init_s", "300", arguments) == expected


def test_ranks_that_could_all_run_no_python_code_are_told_by_their_stacks(outcome: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/rank0.txt").write_text("=== attempt 1, pid 7\nTimeout (0:00:15)!\nThread 0x1\n")
    (tmp_path / "stacks/rank1.txt").write_text("=== attempt 0, pid 6\nTimeout (0:00:15)!\n=== attempt 1, pid 8\n")
    code, decision, why = outcome.ended(tmp_path, 1, 1)
    assert (code, decision) == (70, "restart")
    assert "ranks 0 could run no Python code" in why
    assert outcome.ended(tmp_path, 2, 1)[:2] == (1, "end"), "those are words of an earlier attempt"


# ----------------------------------------------------------------------------------------------------- the exit code
def test_an_end_that_follows_a_line_cut_short_can_be_read(outcome: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"event": "start", "attempt": 0}\n{"event": "st')
    for attempt in (0, 1):
        outcome._leave(tmp_path, attempt, 78, "launcher_misconfig", "no launcher")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[:1] + lines[2:]] == ["start", "end", "end"]


def test_the_last_rows_name_who_where_and_what_to_do(outcome: ModuleType, tmp_path: Path) -> None:
    reason = "rank 3 (n2) raised ConfigError: x is unknown\n  -> write y"
    content = {
        "exit_code": 1,
        "attempt": 0,
        "restart": False,
        "kind": "rank_killed",
        "reason": reason,
        "first_ranks": [3],
    }
    (tmp_path / "outcome.json").write_text(json.dumps(content | {"phase": "data", "step": 7, "advice": "an older one"}))
    (tmp_path / "environment.txt").write_text("rank 0 host n1\nrank 3 host n2\n")
    (tmp_path / "report.md").touch()
    assert outcome.ended(tmp_path, 0, 1)[2] == "failed: rank 3 (n2) raised ConfigError: x is unknown"
    assert [row.split(maxsplit=2)[1:] for row in outcome.rows(tmp_path, 0)] == [
        ["kind", "rank_killed"],
        ["rank", "3 (n2)"],
        ["where", "phase data, step 7"],
        ["do", "write y"],
        ["report", str(tmp_path / "report.md")],
    ]
    assert outcome.rows(tmp_path, 1) == [], "an earlier attempt says nothing about this one"


@pytest.mark.parametrize(
    ("content", "launcher", "expected"),
    [
        (
            {"attempt": 2, "exit_code": 75, "restart": True, "reason": "signal\nSIGTERM"},
            1,
            (75, "restart", "stopped: signal SIGTERM"),
        ),
        ({"attempt": 2, "exit_code": 75, "restart": False, "reason": "stop"}, 1, (75, "end", "stopped: stop")),
        ({"attempt": 2, "exit_code": 0, "restart": False, "reason": ""}, 0, (0, "end", "done: no reason given")),
        ({"attempt": 1, "exit_code": 75, "reason": "x"}, 1, (1, "end", "failed: outcome.json is of attempt 1")),
        ({"attempt": 2, "exit_code": 9}, 1, (1, "end", "failed: outcome.json is of attempt 2")),
        ({"exit_code": 75}, 78, (78, "end", "config: outcome.json cannot be used (KeyError('attempt'))")),
        ([], 1, (1, "end", "failed: outcome.json cannot be used")),
        ("{", 70, (70, "restart", "stalled: outcome.json cannot be used")),
        (None, 0, (0, "end", "done: no outcome.json, and the launcher ended with 0")),
        (None, 137, (1, "end", "failed: no outcome.json, and the launcher ended with 137")),
    ],
)
def test_ended(outcome: ModuleType, tmp_path: Path, content: Any, launcher: int, expected: Any) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "outcome.json").write_text(text)
    code, decision, what = outcome.ended(tmp_path, 2, launcher)
    assert (code, decision) == expected[:2]
    assert what.startswith(expected[2])
    assert "\n" not in what


# --------------------------------------------------------------------------------------------------------- common.sh
@pytest.mark.parametrize(
    ("version", "old_names"),
    [("2.6.0", True), ("2.10.0+cu126", True), ("2.11.0", False), ("2.14.1+cu130", False), ("3.0.0", False)],
)
def test_flight_recorder_by_torch_release(rendered: Path, tmp_path: Path, version: str, old_names: bool) -> None:
    metadata = tmp_path / "site" / f"torch-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    run_dir = tmp_path / "my run"
    done = bash(rendered, f"use_flight_recorder '{run_dir}'; env", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    prefix = f"{run_dir}/flight_recorder/rank_"
    assert f"TORCH_FR_DUMP_TEMP_FILE={prefix}\n" in done.stdout
    assert (f"TORCH_NCCL_DEBUG_INFO_TEMP_FILE={prefix}\n" in done.stdout) == old_names
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE=2000\n" in done.stdout) == old_names
    assert (run_dir / "flight_recorder").is_dir()


def test_no_torch_is_a_wrong_configuration(rendered: Path, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/bin/false")
    done = bash(rendered, f"PATH={tmp_path}:$PATH; use_flight_recorder x")
    assert done.returncode == 78
    assert "has no torch" in done.stderr


def test_env_files_give_way_to_the_environment(rendered: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.env"
    file.write_text("# a comment\n\nONE=1\nTWO=a b=c\nTHREE=3")
    done = bash(rendered, f"load_env '{file}'; echo \"$ONE|$TWO|$THREE\"", ONE="mine")
    assert done.stdout == "mine|a b=c|3\n", done.stderr


def test_recovery_settings_in_use_are_announced_and_win(render: Callable[..., Path]) -> None:
    project = render({"preset": "local"})
    assert "recovery.env" not in bash(project, "prepare_environment").stderr
    with (project / "launch/env/recovery.env").open("a") as file:
        file.write("NCCL_DEBUG=INFO\n")
    done = bash(project, "prepare_environment; env")
    assert "launch/env/recovery.env is in use: NCCL_DEBUG=INFO" in done.stderr
    assert "NCCL_DEBUG=INFO\n" in done.stdout
    assert "NCCL_DEBUG=WARN" not in done.stdout


def test_a_conda_environment_is_used(rendered: Path, tmp_path: Path) -> None:
    """It has a python and no bin/activate."""
    (tmp_path / "conda" / "bin").mkdir(parents=True)
    (tmp_path / "conda" / "bin" / "python").symlink_to(sys.executable)
    done = bash(rendered, "prepare_environment; command -v python", VENV=str(tmp_path / "conda"))
    assert done.stdout == f"{tmp_path}/conda/bin/python\n", done.stderr


def test_venv_is_used(rendered: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    done = bash(rendered, "prepare_environment; command -v python", VENV=str(tmp_path / "v"))
    assert done.stdout == f"{tmp_path}/v/bin/python\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs ip and getent")
def test_gloo_interface(rendered: Path) -> None:
    show = 'echo "${GLOO_SOCKET_IFNAME:-none}"'
    assert bash(rendered, f"use_gloo_interface 127.0.0.1 1; {show}").stdout == "lo\n"
    mine = bash(rendered, f"use_gloo_interface 127.0.0.1 1; {show}", GLOO_SOCKET_IFNAME="ib0")
    assert mine.stdout == "ib0\n"
    several = bash(rendered, f"use_gloo_interface 127.0.1.1 2; {show}")
    assert several.stdout == "none\n"  # no other node reaches lo
    assert "is the loopback address 127.0.1.1" in several.stderr
    unknown = bash(rendered, "use_gloo_interface no-such-host.invalid 2")
    assert unknown.returncode == 78
    assert "no-such-host.invalid cannot be resolved" in unknown.stderr
