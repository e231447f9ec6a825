"""What launch/bucket.py does with a bucket: only what one can do, and never half a checkpoint that counts."""

from __future__ import annotations

import builtins
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launch_helpers import until

LAUNCH = Path(__file__).parents[2] / "templates/project/{{ launch }}"


def load(name: str) -> ModuleType:
    """A file of the template as a module: its name there says when it is rendered, and does not end with .py."""
    path = LAUNCH / f"{{% if known.scheduler == 'skypilot' %}}{name}.py{{% endif %}}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for its dataclasses
    loader.exec_module(module)
    return module


bucket = load("bucket")
SCRIPT = str(bucket.__file__)


def checkpoint(run_dir: Path, step: int, content: bytes = b"weights") -> Path:
    """A checkpoint as ddp/saving/directory.py leaves it."""
    path = run_dir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "state.pt").write_bytes(content)
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"counters": {"step": step}, "files": {"state.pt": sums}}))
    return path


def names(root: Path) -> list[str]:
    return [str(name) for name in bucket.whole_checkpoints(root)]


@pytest.fixture
def dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run directory on a node, and its folder in the bucket, where only what a bucket can do is allowed."""
    folder = tmp_path / "bucket" / "run"
    monkeypatch.setenv("SKYPILOT_TASK_ID", "job-1")
    opened, below = builtins.open, str(tmp_path / "bucket")

    def written_once(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        assert not str(file).startswith(below) or not set(mode) & set("a+"), f"{file} is opened with {mode}"
        return opened(file, mode, *more, **options)

    def forbidden(*paths: Any, **_options: Any) -> None:
        assert not any(str(path).startswith(below) for path in paths), f"{paths}: no bucket has that"
        replace(*paths)

    replace = os.replace
    monkeypatch.setattr(builtins, "open", written_once)
    for name in ("replace", "rename", "link", "symlink"):
        monkeypatch.setattr(os, name, forbidden)
    return tmp_path / "node" / "run", folder


def test_a_run_moves_to_another_node(
    dirs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, folder = dirs
    assert bucket.begin(run_dir, folder) == 0
    assert capsys.readouterr().out == "0 0 -\n"
    checkpoint(run_dir, 10)
    checkpoint(run_dir, 20, b"more")
    (run_dir / "metrics.jsonl").write_text('{"step": 20}\n')
    (run_dir / "logs").mkdir()
    (run_dir / "logs/rank0.log").write_text("hello")
    (run_dir / "owner.json").write_text("of this node")
    bucket.publish(run_dir, folder, set())
    bucket.mirror(run_dir, folder, {})
    bucket.count(folder)

    elsewhere = tmp_path / "other" / "run"
    assert bucket.begin(elsewhere, folder) == 0
    assert capsys.readouterr().out == "1 1 step_00000020\n"  # the attempt, restarts so far, where to go on
    assert names(elsewhere) == ["step_00000010", "step_00000020"]
    assert (elsewhere / "metrics.jsonl").read_text() == '{"step": 20}\n'
    assert (elsewhere / "logs/rank0.log").read_text() == "hello"
    assert not (elsewhere / "owner.json").exists()


def test_what_is_no_longer_kept_goes_once_a_newer_one_is_there(dirs: tuple[Path, Path]) -> None:
    run_dir, folder = dirs
    published: set[str] = set()
    old = checkpoint(run_dir, 10)
    bucket.publish(run_dir, folder, published)
    shutil.rmtree(old)
    bucket.publish(run_dir, folder, published)
    assert names(folder) == ["step_00000010"]  # the only one there
    checkpoint(run_dir, 20)
    bucket.publish(run_dir, folder, published)
    assert names(folder) == ["step_00000020"]
    assert not (folder / "checkpoints/step_00000010").exists()
    checkpoint(folder, 40)  # of an attempt that has come further, on other nodes
    checkpoint(run_dir, 30)
    bucket.publish(run_dir, folder, published)
    assert names(folder)[-1] == "step_00000040"


def test_a_checkpoint_counts_with_its_manifest_only(dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, folder = dirs
    checkpoint(run_dir, 10)
    copy, order = bucket.copy, list[str]()

    def interrupted(source: Path, target: Path) -> str:
        order.append(target.name)
        if target.name == "manifest.json":
            raise OSError("the node is gone")
        return str(copy(source, target))

    monkeypatch.setattr(bucket, "copy", interrupted)
    with pytest.raises(OSError, match="the node is gone"):
        bucket.publish(run_dir, folder, set())
    assert order == ["state.pt", "manifest.json"]
    assert names(folder) == []
    monkeypatch.setattr(bucket, "copy", copy)
    bucket.publish(run_dir, folder, set())
    assert names(folder) == ["step_00000010"]


def test_a_damaged_checkpoint_is_left_in_the_bucket(
    dirs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, folder = dirs
    checkpoint(run_dir, 10)
    checkpoint(run_dir, 20)
    checkpoint(run_dir, 30)
    bucket.publish(run_dir, folder, set())
    (folder / "checkpoints/step_00000030/state.pt").write_bytes(b"weighty")  # as long, and another one
    (folder / "checkpoints/step_00000020/state.pt").write_bytes(b"w")
    elsewhere = tmp_path / "other" / "run"
    assert bucket.begin(elsewhere, folder) == 0
    told = capsys.readouterr()
    assert told.out.split()[-1] == "step_00000010"
    assert "step_00000030 in the bucket is damaged" in told.err
    assert names(elsewhere) == ["step_00000010"]


def test_two_jobs_do_not_have_one_run(
    dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, folder = dirs
    assert bucket.begin(run_dir, folder) == 0
    bucket.count(folder)
    monkeypatch.setenv("SKYPILOT_TASK_ID", "job-2")
    assert bucket.begin(run_dir, folder) == 78
    assert "is going on already: job-1 was seen" in capsys.readouterr().err
    silent = bucket.Entry("job-1", 4, 3, time.time() - bucket.QUIET_S - 1)
    silent.write(folder)
    assert bucket.begin(run_dir, folder) == 0
    assert capsys.readouterr().out == "5 0 -\n"  # another job begins to count its restarts


def test_a_bucket_that_cannot_be_written_to_is_said(
    dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, folder = dirs
    folder.parent.mkdir()
    folder.touch()
    assert bucket.begin(run_dir, folder) == 78
    assert "cannot be written to" in capsys.readouterr().err


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Any]:
    """`bucket.py keep`, as launch/sky.sh starts it, below a shell that says which signals it gets."""
    started = []

    def start(run_dir: Path, folder: Path, state: Path) -> subprocess.Popen[str]:
        script = 'trap "echo parent got SIGTERM" TERM; "$@" & while ! wait $!; do kill -0 $! 2>/dev/null || break; done'
        command = ["bash", "-c", script, "bash", sys.executable, SCRIPT, "keep", run_dir, folder, state]
        env = {**os.environ, "SKYPILOT_TASK_ID": "job-1", "DDP_ATTEMPT": "0", "LAUNCH_SYNC_S": "0.2"}
        started.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_what_comes_is_kept_until_the_end_through_sigterm(keeper: Any, tmp_path: Path) -> None:
    run_dir, folder, state = (tmp_path / name for name in ("run", "folder", "state"))
    state.mkdir()
    bucket.Entry("job-1", 0, 0, time.time()).write(folder)
    checkpoint(run_dir, 10)
    process = keeper(run_dir, folder, state)
    until(lambda: names(folder) == ["step_00000010"], "the first checkpoint")
    os.killpg(process.pid, signal.SIGTERM)  # as SkyPilot does, 30 s before SIGKILL
    checkpoint(run_dir, 20)
    (run_dir / "outcome.json").write_text("{}")
    (state / "finish").touch()
    process.communicate(timeout=60)
    assert names(folder)[-1] == "step_00000020"
    assert (folder / "outcome.json").exists()


def test_a_newer_attempt_takes_the_run_over(keeper: Any, tmp_path: Path) -> None:
    run_dir, folder, state = (tmp_path / name for name in ("run", "folder", "state"))
    state.mkdir()
    run_dir.mkdir()
    bucket.Entry("job-1", 0, 0, time.time()).write(folder)
    process = keeper(run_dir, folder, state)

    def taken_over() -> bool:  # again and again: the first one may be about to write its sign of life
        bucket.Entry("job-1", 1, 0, time.time()).write(folder)
        return process.poll() is not None

    until(taken_over, "the end of the older attempt")
    out, _ = process.communicate(timeout=60)
    assert "parent got SIGTERM" in out  # the launch script, which stops its ranks
    checkpoint(run_dir, 10)
    assert names(folder) == []
    assert json.loads((folder / "launch.json").read_text())["attempt"] == 1
