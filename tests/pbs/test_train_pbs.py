"""launch/train.pbs with a stand-in for PBS and mpiexec (standin_pbs.py): stops, restarts, and what ranks find."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment, ready, until, with_standin

HERE = Path(__file__).parent
OWN: dict[str, Any] = {
    "name": "tiny-pbs",
    "title": "A PBS of two nodes",
    "extends": "generic-slurm",
    "verified_on": "2026-11-28",
    "status": "documented",
    "scheduler": {"value": "pbs", "source": "the test", "confidence": "inferred"},
    "launcher": {"value": "mpiexec", "source": "the test", "confidence": "inferred"},
    "gpu_request": {"value": None, "source": "the test", "confidence": "inferred"},
    "chunk": {"value": "system=tiny", "source": "the test", "confidence": "inferred"},
    "directives": {"value": ["-l filesystems=home:eagle"], "source": "the test", "confidence": "inferred"},
    "launch_flags": {"value": ["--cpu-bind=depth"], "source": "the test", "confidence": "inferred"},
}
ANSWERS = {"preset": "own", "preset_file": OWN, "nodes": 2, "gpus_per_node": 2, "cpus_per_task": 2, "max_restarts": 2}


class Pbs:
    """The stand-in, with its jobs in one directory."""

    def __init__(self, directory: Path) -> None:
        self.jobs, programs = directory / "jobs", directory / "bin"
        home = directory / "home"
        for each in (self.jobs, programs, home):
            each.mkdir()
        for name in ("qsub", "qstat", "qdel", "mpiexec"):
            (programs / name).symlink_to(HERE / "standin_pbs.py")
        self.environment = environment(PBS_STANDIN=str(self.jobs), PBS_STANDIN_HOSTS=f"localhost,{os.uname().nodename}")
        self.environment |= {"PATH": f"{programs}:{self.environment['PATH']}", "HOME": str(home)}

    def __call__(self, project: Path, *command: str, **variables: str) -> str:
        env = {**self.environment, **variables}
        done = subprocess.run(command, cwd=project, env=env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def end(self, job: str) -> dict[str, Any]:
        """Wait for a job's end, and return what is known of it."""
        until(lambda: ended(self, job), f"end of job {job}")
        content: dict[str, Any] = json.loads((self.jobs / f"{job}.json").read_text())
        return content


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[Pbs]:
    cluster = Pbs(tmp_path)
    yield cluster
    for file in cluster.jobs.glob("*.standin.json"):
        cluster(tmp_path, "qdel", file.stem)
        cluster.end(file.stem)


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Path:
    return render(ANSWERS)


@pytest.fixture
def project(rendered: Path, tmp_path: Path) -> Path:
    """The training stand-in takes its plan from the command line, which qsub does not give: from a variable, here."""
    copy = with_standin(rendered, tmp_path / "my project")
    train = next(copy.glob("src/*/train.py"))
    plan = 'import os as _os, sys as _sys\n_sys.argv[1:] = ["--plan", _os.environ["DDP_PLAN"]]\n'
    train.write_text(train.read_text().replace("import json\n", plan + "import json\n", 1))
    return copy


def submit(pbs: Pbs, project: Path, plan: str, *options: str) -> str:
    words = ["-v", "DDP_PLAN,PREFLIGHT=0", *options]
    return pbs(project, "qsub", *words, "launch/train.pbs", DDP_PLAN=plan)


def ended(pbs: Pbs, job: str) -> bool:
    file = pbs.jobs / f"{job}.json"
    return file.exists() and json.loads(file.read_text())["state"] == "F"


def output(project: Path, job: str) -> str:
    file = project / f"demo.o{job.split('.')[0]}"
    return file.read_text() if file.exists() else ""


def test_what_the_ranks_find(pbs: Pbs, project: Path) -> None:
    job = submit(pbs, project, "done")
    assert pbs.end(job)["code"] == 0, output(project, job)
    ranks = [rank["env"] for rank in ready(project / "runs/pbs-1", 0, 4)]
    assert [env["PMI_RANK"] for env in ranks] == ["0", "1", "2", "3"]
    assert [env["PMI_LOCAL_RANK"] for env in ranks] == ["0", "1", "0", "1"]
    for env in ranks:
        assert env["MASTER_ADDR"] == "localhost"
        assert 10000 <= int(env["MASTER_PORT"]) < 30000
        assert env["OMP_NUM_THREADS"] == "2"
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
        assert int(env["DDP_WALLTIME_END"]) > 0
    assert "attempt 0 ended, done: the plan says done; exit code 0" in output(project, job)


def test_threads_that_the_chunk_asks_for_are_kept(pbs: Pbs, project: Path) -> None:
    job = submit(pbs, project, "done", "-l", "select=2:ompthreads=3")
    assert pbs.end(job)["code"] == 0, output(project, job)
    assert {rank["env"]["OMP_NUM_THREADS"] for rank in ready(project / "runs/pbs-1", 0, 4)} == {"3"}


def test_a_stopped_job_submits_itself_again_and_finishes(pbs: Pbs, project: Path) -> None:
    job = submit(pbs, project, "stall,done", "-l", "walltime=00:07:00")
    assert pbs.end(job)["code"] == 70, output(project, job)
    second = pbs.end("2.standin")
    assert second["code"] == 0, output(project, "2")
    assert "submitting again, 1 of 2" in output(project, job)
    assert second["options"]["resources"] == {
        "select": "2:system=tiny",
        "walltime": "00:07:00",
        "filesystems": "home:eagle",
    }
    assert second["options"]["W"] == f"depend=afterany:{job}"
    assert [rank["env"]["DDP_ATTEMPT"] for rank in ready(project / "runs/pbs-1", 1, 4)] == ["1"] * 4


def test_a_restart_goes_to_the_queue_of_the_first_submission(pbs: Pbs, project: Path) -> None:
    job = submit(pbs, project, "stall,done", "-q", "prod")
    assert pbs.end(job)["code"] == 70, output(project, job)
    assert "error: qsub failed" not in output(project, job)
    assert pbs.end("2.standin")["code"] == 0, output(project, "2")


@pytest.mark.parametrize(
    ("mpi", "settings"),
    [
        ("pals", {"n": "4", "ppn": "2", "depth": "2"}),
        ("hydra", {"n": "4", "ppn": "2"}),
        ("openmpi4", {"n": "4", "map-by": "ppr:2:node"}),
        ("openmpi5", {"n": "4", "map-by": "ppr:2:node"}),
    ],
)
def test_each_mpiexec_gets_the_options_that_it_knows(
    pbs: Pbs, project: Path, mpi: str, settings: dict[str, str]
) -> None:
    pbs.environment["PBS_STANDIN_MPI"] = mpi
    job = submit(pbs, project, "done")
    assert pbs.end(job)["code"] == 0, output(project, job)
    given = json.loads((pbs.jobs / "mpiexec.log").read_text())
    assert {name: given[name] for name in given if name not in ("x", "cpu-bind")} == settings
    assert ("x" in given) == mpi.startswith("openmpi")


def test_restarts_are_bounded(pbs: Pbs, project: Path) -> None:
    submit(pbs, project, "stall,stall", "-v", "DDP_PLAN,PREFLIGHT=0,MAX_RESTARTS=1")
    assert pbs.end("2.standin")["code"] == 70
    told = output(project, "2").rstrip().splitlines()
    assert "no restarts left of 1; exit code 70" in told[-3]
    assert told[-1].startswith(f"cd '{project}' && ")
    assert "DDP_RUN__ID=pbs-1 " in told[-1]
    assert " qsub -q " in told[-1]
    names = told[-1].split(" -v ")[1].split()[0].split(",")
    assert {"DDP_RUN__ID", "MAX_RESTARTS", "PREFLIGHT"} <= set(names)
    assert not {"DDP_ATTEMPT", "DDP_WALLTIME_END"} & set(names)
    assert told[-1].endswith(" launch/train.pbs")
    assert not (pbs.jobs / "3.standin.json").exists()


@pytest.mark.parametrize(("plan", "code"), [("config", 78), ("fail", 1)])
def test_what_would_fail_again_is_not_submitted_again(pbs: Pbs, project: Path, plan: str, code: int) -> None:
    job = submit(pbs, project, plan)
    assert pbs.end(job)["code"] == code, output(project, job)
    assert not (pbs.jobs / "2.standin.json").exists()


def test_a_deleted_job_stops_and_stays_deleted(pbs: Pbs, project: Path) -> None:
    job = submit(pbs, project, "wait,done")
    ready(project / "runs/pbs-1", 0, 4)
    pbs(project, "qdel", job)
    assert pbs.end(job)["code"] == 75, output(project, job)
    assert "asked to end" in output(project, job)
    assert not (pbs.jobs / "2.standin.json").exists()


def test_elsewhere_than_in_the_project(pbs: Pbs, project: Path, tmp_path: Path) -> None:
    job = pbs(tmp_path, "qsub", str(project / "launch/train.pbs"))
    assert pbs.end(job)["code"] == 78
    assert "is not the project's directory" in output(tmp_path, job)


@pytest.mark.slow
def test_training_stops_by_the_clock_and_goes_on_in_the_next_job(pbs: Pbs, rendered: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    project = with_standin(rendered, tmp_path / "real")
    train = next(project.glob("src/*/train.py"))
    train.write_text(next(rendered.glob("src/*/train.py")).read_text())
    settings = {
        "DDP_RUN__DEVICE": "cpu",
        "DDP_TRAIN__STEPS": "20000",
        "DDP_LOG__TRACKER": "none",
        "DDP_PREEMPT__BEFORE_END_S": "260",  # of the 300 that the job has
        "OMP_NUM_THREADS": "1",
    }
    # One node: preflight would find out that the stand-in's two are one.
    variables = ",".join(f"{key}={value}" for key, value in settings.items())
    job = pbs(project, "qsub", "-l", "select=1,walltime=00:05:00", "-v", variables, "launch/train.pbs")
    until(lambda: ended(pbs, job), "end of the first job", 120)
    assert pbs.end(job)["code"] == 75, output(project, job)
    assert "preflight: everything is in order" in output(project, job)
    assert "stopped: stopped on request: end of the allocation" in output(project, job)
    until(lambda: "resumed" in output(project, "2.standin"), "the second job goes on from the checkpoint", 120)
