"""launch/torchrun.sh with the real torchrun: exit codes, restarts, signals, and that nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cross_section import every
from launch_helpers import alive, environment, parent, ready, until, with_standin

pytest.importorskip("torch", reason="needs torch, for its torchrun")


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Path:
    return render({"max_restarts": 2})


@pytest.fixture
def project(rendered: Path, tmp_path: Path) -> Path:
    return with_standin(rendered, tmp_path / "my project")


class Launch:
    """One running torchrun.sh."""

    def __init__(self, project: Path, log: Path, plan: str, *args: str, **env: str) -> None:
        self.run_dir = project / "runs" / "r"
        self.log = log
        command = [str(project / "launch/torchrun.sh"), "--plan", plan, *args]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                cwd="/",
                env=environment(DDP_RUN__ID="r", **env),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def ready(self, attempt: int, ranks: int = 2) -> list[dict[str, Any]]:
        return ready(self.run_dir, attempt, ranks)

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was printed. No rank may be left."""
        code = self.process.wait(timeout=90)
        text = self.log.read_text()
        left = [pid for file in self.run_dir.glob("ready-*") if alive(pid := json.loads(file.read_text())["pid"])]
        assert not left, text
        return code, text


@pytest.fixture
def launch(project: Path, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(plan: str, *args: str, **env: str) -> Launch:
        started.append(Launch(project, tmp_path / f"log-{len(started)}", plan, *args, **{"NPROC": "2", **env}))
        return started[-1]

    yield start
    for one in started:
        for _ in range(2):  # only after a failure; the second one is for torchrun, which needs up to 30 s
            if one.process.poll() is None:
                one.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(timeout=40)


def run(launch: Callable[..., Launch], plan: str, *args: str, **env: str) -> tuple[int, str]:
    return launch(plan, *args, **env).ended()


def test_done_is_zero_and_arguments_arrive_intact(launch: Callable[..., Launch]) -> None:
    hostile = ["a b", "$(touch pwned)", "*", "", "--x=é'\""]
    one = launch("done", *hostile)
    code, text = one.ended()
    assert code == 0, text
    assert [rank["argv"] for rank in one.ready(0)] == [["--plan", "done", *hostile]] * 2
    assert "attempt 0 ended, done: the plan says done; exit code 0" in text


@pytest.mark.parametrize(("plan", "code"), [("fail", 1), ("config", 78)])
def test_failures_are_not_restarted(launch: Callable[..., Launch], plan: str, code: int) -> None:
    one = launch(plan)
    (one.run_dir / "checkpoints" / "step_00000005").mkdir(parents=True)
    got, text = one.ended()
    assert got == code, text
    assert "restarting" not in text
    assert "Root Cause" not in text, "torchrun's table is in a file"
    assert "Root Cause" in (one.run_dir / "torchelastic" / "agent0.log").read_text()
    assert "DDP_RUN__ID=r" in text.splitlines()[-1], "and the last line goes on with the run"


def test_without_an_outcome_the_code_of_the_launcher_decides(launch: Callable[..., Launch]) -> None:
    code, text = run(launch, "early")
    assert code == 1, text  # torchrun makes 1 of everything
    assert "no outcome.json" in text
    assert text.count("Root Cause") == 1, "no rank has said why, so torchrun's table is printed"
    assert text.splitlines()[-1].startswith("[launch] attempt 0 ended, failed")


def test_what_torchrun_itself_says_is_seen(launch: Callable[..., Launch], tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "torch" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    code, text = run(launch, "done", PYTHONPATH=str(broken.parents[1]))
    assert code == 1, text
    assert text.count("ImportError: libcudart.so.12: cannot open shared object file") == 1, text


def test_ranks_keep_the_terminal(project: Path) -> None:
    """A progress bar needs it: only torchrun's own words go elsewhere."""
    package = next((project / "src").iterdir())
    (package / "train.py").write_text("import sys\nsys.exit(0 if sys.stderr.isatty() and sys.stdout.isatty() else 3)\n")
    terminal, end = pty.openpty()
    env = environment(DDP_RUN__ID="r", NPROC="2")
    done = subprocess.run([project / "launch/torchrun.sh"], env=env, stdout=end, stderr=end, timeout=60, check=False)
    os.close(end)
    assert done.returncode == 0, os.read(terminal, 10000)
    os.close(terminal)


def test_restarts_continue_the_run_until_none_is_left(launch: Callable[..., Launch]) -> None:
    one = launch("stall,stall,stall,done")
    code, text = one.ended()
    assert code == 70, text
    assert "attempt 1 ended, stalled: the plan says stall; restarting, 2 of 2" in text
    assert "no restarts left of 2" in text
    assert [one.ready(attempt)[0]["env"]["DDP_ATTEMPT"] for attempt in range(3)] == ["0", "1", "2"]


@pytest.mark.slow
def test_max_restarts_of_the_environment_wins(launch: Callable[..., Launch]) -> None:
    assert run(launch, "stall,done", MAX_RESTARTS="0")[0] == 70


def test_a_signal_to_one_rank_stops_all_and_restarts(launch: Callable[..., Launch]) -> None:
    one = launch("wait,done")
    os.kill(one.ready(0)[1]["pid"], signal.SIGTERM)
    code, text = one.ended()
    assert code == 0, text
    assert "stopped: signal SIGTERM on rank 1; restarting, 1 of 2" in text


@pytest.mark.parametrize("number", every(3, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2]))
def test_a_signal_to_the_script_stops_without_restart(launch: Callable[..., Launch], number: signal.Signals) -> None:
    one = launch("wait,done")
    pids = [rank["pid"] for rank in one.ready(0)]
    one.process.send_signal(number)
    code, text = one.ended()
    assert code == 75, text
    assert f"got {number.name}: asking the ranks to stop" in text
    request = one.run_dir / "stop"  # from which the ranks know what it was: they get SIGTERM
    told = request.read_text() if request.exists() else "signal SIGTERM "
    assert told.startswith(f"signal {number.name} ")
    assert "no restart" in text
    assert not any(map(alive, pids))


def test_ctrl_c_reaches_the_ranks_once(launch: Callable[..., Launch]) -> None:
    one = launch("wait,done")
    one.ready(0)
    os.killpg(one.process.pid, signal.SIGINT)  # what a terminal does
    code, text = one.ended()
    assert code == 75, text
    assert "signal SIGTERM" in text


def test_workers_of_a_killed_torchrun_do_not_stay(launch: Callable[..., Launch]) -> None:
    one = launch("wait,done")
    pids = [rank["pid"] for rank in one.ready(0)]
    os.kill(parent(pids[0]), signal.SIGKILL)
    code, text = one.ended()
    assert not any(map(alive, pids)), text
    assert code == 0, text  # they stopped with a checkpoint, and the next attempt went on


@pytest.mark.slow
def test_a_helper_that_ends_a_moment_after_its_rank_is_no_orphan(launch: Callable[..., Launch]) -> None:
    code, text = run(launch, "helper")
    assert code == 0, text
    assert "left processes behind" not in text


def test_an_outcome_of_an_earlier_run_is_not_believed(launch: Callable[..., Launch]) -> None:
    assert run(launch, "stall", MAX_RESTARTS="0")[0] == 70
    code, text = run(launch, "early")
    assert code == 1, text
    assert "no outcome.json" in text


@pytest.mark.slow
def test_run_id_of_the_command_line_is_where_the_outcome_is_looked_for(
    project: Path, launch: Callable[..., Launch]
) -> None:
    one = launch("stall,done", "--run.id=other")
    one.run_dir = project / "runs" / "other"
    code, text = one.ended()
    assert code == 0, text
    assert len(one.ready(1)) == 2


def test_environment_of_the_ranks(launch: Callable[..., Launch]) -> None:
    one = launch("done", NCCL_DEBUG="INFO")
    code, text = one.ended()
    assert code == 0, text
    env = one.ready(0)[0]["env"]
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert env["NCCL_DEBUG"] == "INFO"  # what the user sets wins over nccl.env
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == str(one.run_dir / "flight_recorder" / "rank_")
    assert Path(env["TORCH_FR_DUMP_TEMP_FILE"]).parent.is_dir()
    assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize(("visible", "expected"), every(3, [(None, 3), ("", 2), ("1", 1), ("0,2", 2), ("-1", 2)]))
def test_auto_is_one_process_a_gpu(
    launch: Callable[..., Launch], tmp_path: Path, visible: str | None, expected: int
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nfor n in 0 1 2; do echo \"GPU $n: Some GPU (UUID: GPU-$n)\"; echo '  MIG 1g'; done\n")
    tool.chmod(0o755)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    one = launch("early", NPROC="auto", PATH=f"{tool.parent}:{environment()['PATH']}", **env)
    _, text = one.ended()
    assert f"1 x {expected} processes" in text
    assert len(one.ready(0, expected)) == expected


@pytest.mark.slow
def test_a_second_signal_ends_deaf_ranks(launch: Callable[..., Launch]) -> None:
    one = launch("deaf", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")  # read by torch since 2.12; 30 s before
    pids = [rank["pid"] for rank in one.ready(0)]
    one.process.send_signal(signal.SIGTERM)
    until(lambda: "asking the ranks to stop" in one.log.read_text(), "the first signal")
    assert all(map(alive, pids))
    one.process.send_signal(signal.SIGTERM)
    code, text = one.ended()
    assert code == 70, text
    assert "rank_killed" in (one.run_dir / "outcome.json").read_text(), "training had begun: they did not stop"
    assert "got SIGTERM: asking torchrun to stop" in text


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"NPROC": "two"}, "NPROC=two is not a number from 1"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 is not a number from 0"),
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"VENV": "/nowhere"}, "VENV=/nowhere is not a virtual environment"),
    ],
)
def test_wrong_variables_are_refused(launch: Callable[..., Launch], env: dict[str, str], said: str) -> None:
    code, text = run(launch, "done", **env)
    assert code == 78, text
    assert said in text


@pytest.mark.parametrize("began", every(2, [True, False]))
def test_a_refused_value_leaves_no_run_directory(rendered: Path, tmp_path: Path, began: bool) -> None:
    """Unless there is more in it than that refusal."""
    project, run_dir = tmp_path / "my project", tmp_path / "runs" / "r"
    shutil.copytree(rendered, project)
    if began:
        run_dir.mkdir(parents=True)
        (run_dir / "attempts.jsonl").write_text('{"event": "start", "attempt": 0, "world_size": 1, "time": 1.0}\n')
    command = [str(project / "launch/torchrun.sh"), "--train.steps", "-1", f"--run.dir={tmp_path / 'runs'}"]
    env = environment(NPROC="1", DDP_RUN__ID="r")
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 78, done.stderr
    assert "train.steps (from command line): Input should be greater than" in done.stderr
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert left == (["r"] if began else [])
    assert (run_dir / "outcome.json").exists() == began


BROKEN = {
    "no module": ("import torhc\n", "ModuleNotFoundError", "No module named 'torhc'", "or install torhc for "),
    "no name": ("from torch import nothing\n", "ImportError", "cannot import name 'nothing'", "correct that import"),
    "no Python": ("def f(:\n", "SyntaxError", "invalid syntax", "correct that line"),
    "anything": ("assert 1 + 1 == 3, 'no'\n", "AssertionError", "no", "correct that line"),
}


@pytest.mark.timeout(240)  # torch is imported three times, one after another
@pytest.mark.parametrize("what", every(4, BROKEN))
def test_ranks_that_die_while_importing_say_where_and_what_to_do(rendered: Path, tmp_path: Path, what: str) -> None:
    line, kind, said, remedy = BROKEN[what]
    project = tmp_path / "my project"
    shutil.copytree(rendered, project)
    model = project / "src" / "demo" / "model.py"
    model.write_text("import torch\n" + line + model.read_text().replace("from __future__ import annotations\n", ""))
    command = [str(project / "launch/torchrun.sh")]
    env = environment(NPROC="1", DDP_RUN__ID="r")
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stderr
    ended = next(text for text in done.stderr.splitlines() if " ended, " in text)
    assert f"ended, failed: {kind} in src/demo/model.py, line 2: {said}" in ended
    rows = dict(text.split(maxsplit=2)[1:] for text in done.stderr.splitlines() if text.startswith("[launch]   "))
    assert rows["kind"] == "rank_exception"
    assert remedy in rows["do"]
    assert json.loads((project / "runs" / "r" / "outcome.json").read_text())["exit_code"] == 1


def test_two_nodes(launch: Callable[..., Launch], free_port: int) -> None:
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    both = [launch("wait", NODE_RANK=str(rank), **shared) for rank in range(2)]
    pids = [rank["pid"] for rank in both[0].ready(0)]
    both[1].process.send_signal(signal.SIGTERM)
    for one in both:
        code, text = one.ended()
        assert code == 75, text
    until(lambda: not any(map(alive, pids)), "the ranks to be gone")


def with_ctrl_c(tmp_path: Path, **during: str) -> str:
    """A PATH where each of these commands, when its arguments have those words, meets a Ctrl-C of the terminal."""
    for name, words in during.items():
        real = shutil.which(name)
        shim = tmp_path / "shims" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f'#!/bin/sh\ncase "$*" in *"{words}"*) kill -INT 0 ;; esac\nexec {real} "$@"\n')
        shim.chmod(0o755)
    return f"{tmp_path / 'shims'}:{os.environ['PATH']}"


def test_ctrl_c_while_an_attempt_is_prepared_is_a_stop(launch: Callable[..., Launch], tmp_path: Path) -> None:
    code, text = run(launch, "done", PATH=with_ctrl_c(tmp_path, rm="outcome.json", wc="-l"))
    assert code == 75, text
    assert "ended, stopped: before training began" in text


def test_another_ctrl_c_at_the_end_does_not_cut_off_what_is_said(launch: Callable[..., Launch], tmp_path: Path) -> None:
    one = launch("wait", PATH=with_ctrl_c(tmp_path, python="outcome.py ended"))
    one.ready(0)
    os.killpg(one.process.pid, signal.SIGINT)
    code, text = one.ended()
    assert code == 75, text
    assert "this script was asked to stop, so no restart; exit code 75" in text
    assert text.rstrip().splitlines()[-1].startswith("cd "), "how to go on stands last"


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("number", every(2, [signal.SIGINT, signal.SIGTERM]))
def test_a_stop_before_training_began_is_a_stop(rendered: Path, tmp_path: Path, number: int) -> None:
    """Ranks that still import have no handler: the signal ends them, and torchrun calls that a failure."""
    project, up = tmp_path / "my project", tmp_path / "up"
    shutil.copytree(rendered, project)
    slow = f"import pathlib, time\npathlib.Path({str(up)!r}).touch()\ntime.sleep(60)\n"
    (project / "src" / "demo" / "train.py").write_text(slow)
    (project / "runs" / "r").mkdir(parents=True)  # which has been trained before, by another start
    (project / "runs" / "r" / "attempts.jsonl").write_text('{"event": "start", "attempt": 0}\n')
    command = [str(project / "launch/torchrun.sh")]
    with subprocess.Popen(
        command, cwd="/", env=environment(DDP_RUN__ID="r", NPROC="2"), stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as script:  # fmt: skip
        until(up.exists, "a rank")
        os.killpg(script.pid, number)  # as a terminal does, and some schedulers
        _, said = script.communicate(timeout=60)
    assert script.returncode == 75, said
    assert "ended, stopped: before training began; this script was asked to stop, so no restart; exit code 75" in said
