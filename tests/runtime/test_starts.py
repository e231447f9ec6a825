"""Starts of a rendered project: who owns a run directory, what ranks say of themselves, what torchrun's table shows."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)
Part = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def part(render: Callable[..., Path]) -> Iterator[Part]:
    """Imports a module of a project's plumbing."""
    project = render({"package": "begins"}, name="begins")
    sys.path.insert(0, str(project / "src"))
    yield lambda name: importlib.import_module(f"begins.ddp.{name}")
    sys.path.remove(str(project / "src"))


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LAUNCH_CLAIM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other() -> Iterator[int]:
    """A process that lives until the end of the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def test_a_run_directory_has_one_owner_at_a_time(part: Part, tmp_path: Path, other: int) -> None:
    owner = part("start.owner")
    owner.claim(tmp_path / "run", other, 0)
    assert owner.held_by_another(tmp_path / "run")
    with pytest.raises(part("errors").RunTaken, match=f"process {other} on .*attempt 0"):
        owner.claim(tmp_path / "run", os.getpid(), 0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["owner.json"]


def test_its_own_ranks_may_use_it(part: Part, tmp_path: Path, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = part("start.owner")
    script = owner.claim(tmp_path, other, 0)
    monkeypatch.setenv("LAUNCH_CLAIM", script.token)
    assert owner.claim(tmp_path, os.getpid(), 0) == script
    assert not owner.held_by_another(tmp_path)
    owner.release(tmp_path)  # not its own: the script goes on
    assert (tmp_path / "owner.json").exists()


def test_what_a_kill_leaves_is_no_hindrance(part: Part, tmp_path: Path) -> None:
    owner = part("start.owner")
    process = subprocess.Popen(["sleep", "60"])
    owner.claim(tmp_path, process.pid, 0)
    process.kill()  # and not waited for: a zombie does not own anything
    while part("processes").began(process.pid):
        time.sleep(0.01)
    assert not owner.held_by_another(tmp_path)
    assert owner.claim(tmp_path, os.getpid(), 0).pid == os.getpid()
    process.wait()
    owner.release(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_process_of_the_same_number_is_not_the_owner(part: Part, tmp_path: Path, other: int) -> None:
    owner = part("start.owner")
    owner.claim(tmp_path, other, 0)
    content = json.loads((tmp_path / "owner.json").read_text())
    (tmp_path / "owner.json").write_text(json.dumps({**content, "began": "1"}))
    assert owner.claim(tmp_path, os.getpid(), 0).pid == os.getpid()


def elsewhere(owner: ModuleType, run_dir: Path, **changed: Any) -> None:
    """An owner on another host."""
    owner.claim(run_dir, os.getpid(), 0)
    content = json.loads((run_dir / "owner.json").read_text())
    (run_dir / "owner.json").write_text(json.dumps({**content, "host": "n7", "pid": 4711, "token": "n7", **changed}))
    (run_dir / "heartbeats").mkdir()
    (run_dir / "heartbeats" / "rank0.json").write_text("{}")


def test_an_owner_elsewhere_that_is_silent_is_gone(part: Part, tmp_path: Path) -> None:
    owner = part("start.owner")
    elsewhere(owner, tmp_path, quiet_s=2.0)
    began = time.monotonic()
    assert owner.claim(tmp_path, os.getpid(), 0).pid == os.getpid()
    assert 1 < time.monotonic() - began < 30


def test_an_owner_elsewhere_that_writes_heartbeats_lives(part: Part, tmp_path: Path) -> None:
    owner = part("start.owner")
    elsewhere(owner, tmp_path, quiet_s=30.0)
    beat = tmp_path / "heartbeats" / "rank0.json"
    script = f"import pathlib, time; time.sleep(1.5); pathlib.Path({str(beat)!r}).write_text('1')"
    with subprocess.Popen([sys.executable, "-c", script]), pytest.raises(part("errors").RunTaken, match="4711 on n7"):
        owner.claim(tmp_path, os.getpid(), 0)


def test_a_requeued_job_takes_over_at_once(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = part("start.owner")
    elsewhere(owner, tmp_path, job="17", quiet_s=1000.0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    began = time.monotonic()
    assert owner.claim(tmp_path, os.getpid(), 1).attempt == 1
    assert time.monotonic() - began < 5


def test_of_many_that_come_at_once_one_gets_it(part: Part, tmp_path: Path) -> None:
    """Also where all of them find a dead owner."""
    owner = part("start.owner")
    process = subprocess.Popen(["true"])
    owner.claim(tmp_path, process.pid, 0)
    process.wait()
    lines = ["import os, sys", "from pathlib import Path", "from begins.ddp.start import owner", "sys.stdin.readline()"]
    lines += ["try: owner.claim(Path(sys.argv[1]), os.getpid(), 0); print('has it', flush=True)"]
    lines += ["except owner.RunTaken: print('refused', flush=True)", "sys.stdin.readline()"]
    environment = {**os.environ, "PYTHONPATH": str(Path(owner.__file__).parents[3])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    starts = [subprocess.Popen([sys.executable, "-c", "\n".join(lines), str(tmp_path)], **pipes) for _ in range(6)]
    for start in starts:
        start.stdin.write("\n")
        start.stdin.flush()
    answers = [start.stdout.readline().strip() for start in starts]
    for start in starts:
        start.communicate("\n")
    assert sorted(answers) == ["has it", *["refused"] * 5]


def test_names_that_are_made_are_unique(part: Part, tmp_path: Path) -> None:
    names = [part("start.owner").new_directory(tmp_path / "runs", "20261129-010000") for _ in range(3)]
    assert names == ["20261129-010000", "20261129-010000-2", "20261129-010000-3"]


def arrivals(part: Part, *changes: dict[str, Any]) -> list[Any]:
    module = part("start.arrival")
    plain = {"host": "n1", "machine": "m1", "gloo": "10.0.0.1", "gpu": "", "cores": tuple(range(8)), "of_cores": 8}
    return [module.Arrival(**{**plain, "rank": rank, **change}) for rank, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}, {}], ""),
        ([{"gpu": "H200, a"}, {"gpu": "H200, b"}, {"gpu": "H200, a"}], "ranks 0, 2 on n1 have the same GPU (H200, a)"),
        ([{"gpu": "H200, a"}, {"gpu": "H200, a", "host": "n2", "machine": "m2"}], ""),
        ([{"gloo": "127.0.1.1"}, {"gloo": "127.0.1.1"}], ""),  # one host: loopback will do
        ([{}, {"host": "n2", "machine": "m2", "gloo": "127.0.1.1"}], "gloo offers the other hosts 127.0.1.1"),
        ([{}, {"machine": "m2", "gloo": "::1"}], "gloo offers the other hosts ::1"),  # hosts of one name
        ([{}, {"host": "n2", "machine": "m2", "gloo": ""}], "gloo offers the other hosts a loopback address"),
        ([{"cores": (3,)}, {"cores": (3,)}], "ranks 0-1 on n1 have only core 3 of 8"),
        ([{"cores": (0, 1)}, {"cores": (0,)}, {"cores": (1,)}], "ranks 0-2 on n1 have only cores 0-1 of 8"),
        ([{"cores": (0,)}, {"cores": (1,)}], ""),
        ([{"cores": (0,), "of_cores": 1}, {"cores": (0,), "of_cores": 1}], ""),  # it has no more
    ],
    ids=str,
)
def test_what_ranks_say_of_themselves(part: Part, changes: list[dict[str, Any]], said: str) -> None:
    found = part("start.arrival").judge(arrivals(part, *changes))
    assert [said in finding.what for finding in found] == ([True] if said else [])


def test_an_arrival_survives_the_store(part: Part) -> None:
    one = arrivals(part, {"findings": (part("start.findings").Finding("what", "remedy", ranks=(0,)),)})[0]
    assert type(one).from_json(json.loads(json.dumps(one.as_json()))).cores == one.cores


def test_the_root_cause_of_torchruns_table(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own code makes the table of what three ranks have left: rank 1 was killed, later than they say so."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    files = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    verdict = part("kinds").Verdict(70, "rank_killed", "rank 1 (n1) sends no heartbeat", [1], advice="look at dmesg")
    for file in files:
        file.parent.mkdir()
    for rank in (0, 2):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[rank]))
        place = part("start.launcher").Place("torchrun", rank, rank, 3, 3, "n1", "127.0.0.1", 29500, 0, True)
        part("start.elastic").tell_torchrun(verdict, place, "a stack")
    failures = {rank: ProcessFailure(rank, 100 + rank, -9 if rank == 1 else 70, str(files[rank])) for rank in range(3)}
    error = ChildFailedError("train", failures)
    assert error.get_first_failure()[0] == 1
    root = str(error).partition("Root Cause")[2]
    assert "rank_killed: rank 1 (n1) sends no heartbeat" in root
    assert "look at dmesg" in root
    files[1].unlink()  # torchrun was faster than its siblings
    failures = {1: ProcessFailure(1, 101, -9, str(files[1])), **{rank: failures[rank] for rank in (0, 2)}}
    assert ChildFailedError("train", failures).get_first_failure()[0] == 1
