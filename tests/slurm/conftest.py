"""A real two-node Slurm cluster for the tests below, and submitting to it. See `cluster` for what it is made of."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment, ready, until

CLUSTER = Path(__file__).with_name("cluster")
NEEDED = ("sbatch", "slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of slow tests under both launchers, make test-all takes srun and torchrun in turn, make test-long the other."""
    turns: dict[str, str] = {}
    for item in items:
        name, _, parameters = item.name.partition("[")
        launcher = "srun" if "srun" in parameters else "torchrun" if "torchrun" in parameters else ""
        if not launcher or item.path.name not in ("test_real_faults.py", "test_real_training.py"):
            continue
        kept = turns.setdefault(name, ("srun", "torchrun")[len(turns) % 2])
        if launcher != kept and name != "test_trains_to_the_end_over_two_nodes":
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start the cluster, yield the environment of its commands, and remove it without a trace."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        give_up = pytest.fail if os.environ.get("REQUIRE_SLURM") else pytest.skip  # CI must not be quietly greener
        give_up(f"needs {', '.join(missing)} (Debian packages slurm-wlm, munge, iproute2, util-linux)")
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if subprocess.run(["unshare", "--net", "--uts", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system does not allow new network namespaces")
    state = tmp_path_factory.mktemp("slurm")
    with open("/tmp/ddp-tests-slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another test run has the cluster's network
        try:
            up = subprocess.run([CLUSTER, "up", state], check=False, capture_output=True, text=True, timeout=60)
            assert up.returncode == 0, up.stdout + up.stderr
            yield environment(SLURM_CONF=str(state / "slurm.conf"))
        finally:
            subprocess.run([CLUSTER, "down", state], check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `exit_code` is that of the batch script, or None if a signal ended it."""

    state: str
    exit_code: int | None
    restarts: int
    output: str
    run_dir: Path


class Job:
    """A submitted job."""

    def __init__(self, project: Path, job_id: str, env: dict[str, str]) -> None:
        self.project, self.id, self._env = project, job_id, env
        self.run_dir = project / "runs" / f"slurm-{job_id}"

    def output(self) -> str:
        """What the batch script and the ranks have printed so far, in all attempts."""
        file = self.project / f"slurm-{self.id}.out"
        return file.read_text() if file.exists() else ""

    def fields(self) -> dict[str, str]:
        """What `scontrol show job` says."""
        shown = subprocess.run(
            ["scontrol", "show", "job", "-o", self.id], env=self._env, check=True, capture_output=True, text=True
        ).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A failed assertion in the body also shows what Slurm and the job say."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.fields()}\n{self.output()}") from error

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """Wait for a true value and return it."""
        with self.explained():
            return until(condition, f"{what}, of job {self.id}", seconds)

    def ready(self, attempt: int, ranks: int = 4) -> list[dict[str, Any]]:
        """Wait until all ranks of an attempt run, and return the arguments and environment of each (stand-in only)."""
        with self.explained():
            return ready(self.run_dir, attempt, ranks)

    def cancel(self) -> None:
        """scancel, as a user does it."""
        subprocess.run(["scancel", self.id], env=self._env, check=True)

    def release(self) -> None:
        """Let a job that was submitted with --hold begin."""
        subprocess.run(["scontrol", "release", self.id], env=self._env, check=True)

    def wait(self, seconds: float = 100) -> JobResult:
        """Wait for the end of the job, restarts included."""
        self.until(lambda: self.fields()["JobState"] in ENDED, "the end", seconds)
        fields = self.fields()
        code, _, number = fields["ExitCode"].partition(":")
        exit_code = int(code) if number == "0" else None
        return JobResult(fields["JobState"], exit_code, int(fields["Restarts"]), self.output(), self.run_dir)


class HandMade(Job):
    """An allocation without a batch script. The test starts its step from outside the nodes, so it sees all ends."""

    step: subprocess.Popen[bytes] | None = None

    def start(self, script: str, arguments: Sequence[str], **env: str) -> None:
        """Start one task a node, which run `script` in bash; it has the arguments of training in "$@"."""
        given = {
            "MASTER_ADDR": "tn1",
            "MASTER_PORT": str(10000 + int(self.id) % 20000),
            "DDP_RUN__ID": self.run_dir.name,
            "DDP_RUN__DIR": str(self.run_dir.parent),
            "DDP_ATTEMPT": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self.project / "src"),
        }
        command = ["srun", f"--jobid={self.id}", "--kill-on-bad-exit=0", "--wait=60"]
        with (self.project / f"slurm-{self.id}.out").open("wb") as out:
            self.step = subprocess.Popen(
                [*command, "bash", "-c", script, "bash", *arguments],
                cwd=self.project,
                env={**self._env, **given, **env},
                stdout=out,
                stderr=out,
            )

    def end(self) -> None:
        """Give the nodes back, and kill what still runs there."""
        self.cancel()
        if self.step is not None:
            self.step.wait(timeout=60)


@pytest.fixture
def submit(slurm: dict[str, str]) -> Iterator[Callable[..., Job]]:
    """`submit(project, args, partition="main", options=[...], MAX_RESTARTS="1").wait()` gives a JobResult.

    `args` go to training. Whatever a test leaves in the queue is cancelled, and no process of it may stay.
    """
    jobs: list[Job] = []

    def run(
        project: Path,
        args: Sequence[str] = (),
        partition: str = "main",
        options: Sequence[str] = (),
        script: Sequence[str] = ("launch/train.sbatch",),
        **env: str,
    ) -> Job:
        command = ["sbatch", "--parsable", f"--partition={partition}", *options, *script, *args]
        done = subprocess.run(command, cwd=project, env={**slurm, **env}, check=True, capture_output=True, text=True)
        jobs.append(Job(project, done.stdout.strip(), slurm))
        return jobs[-1]

    yield run
    for job in jobs:
        if job.fields()["JobState"] not in ENDED:
            job.cancel()

    def queue() -> str:
        shown = subprocess.run(["squeue", "--noheader"], env=slurm, check=True, capture_output=True, text=True)
        return shown.stdout

    until(lambda: not queue(), "an empty queue")


@pytest.fixture
def allocate(slurm: dict[str, str], submit: Callable[..., Job]) -> Iterator[Callable[..., HandMade]]:
    """`allocate(project)` gets both nodes, for ranks that the test starts itself."""
    made: list[HandMade] = []

    def run(project: Path) -> HandMade:
        command = ["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=10"]
        done = subprocess.run(command, cwd=project, env=slurm, check=True, capture_output=True, text=True)
        made.append(HandMade(project, done.stderr.split("Granted job allocation ")[1].split()[0], slurm))
        return made[-1]

    yield run
    for one in made:
        one.end()


@pytest.fixture
def link(slurm: dict[str, str]) -> Iterator[Callable[..., None]]:
    """`link("cut", "tn2")`, `link("slow", "tn2", "200")`, `link("heal", "tn2")`; healed in any case in the end."""

    def change(*words: str) -> None:
        subprocess.run([CLUSTER, *words], env=slurm, check=True, timeout=10)

    yield change
    for node in ("tn1", "tn2"):
        change("heal", node)


@pytest.fixture
def listen(slurm: dict[str, str]) -> Iterator[Callable[[str, int], None]]:
    """`listen("tn1", 29500)` takes a port of a node until the test ends."""
    listeners: list[subprocess.Popen[str]] = []

    def start(node: str, port: int) -> None:
        code = f"import socket, sys; s = socket.create_server(('', {port})); print('listening', flush=True)"
        code += "; sys.stdin.read()"
        command = ["nsenter", f"--net=/run/netns/ddp-{node}", sys.executable, "-c", code]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        listeners.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "listening\n"

    yield start
    for one in listeners:
        one.communicate(timeout=10)  # the end of its standard input is what it waits for


@pytest.fixture(scope="session")
def real_project(render: Callable[..., Path]) -> Path:
    """A project whose training is the real one."""
    from training_helpers import ANSWERS

    return render(ANSWERS)


@pytest.fixture
def train(submit: Callable[..., Job], real_project: Path) -> Callable[..., Job]:
    """`train(["--section.key", "value"], init=12, DDP_FAULTS="...")` submits real training: two ranks, one a node."""
    from training_helpers import STEPS, arguments

    def run(
        args: Sequence[str] = (), steps: int = STEPS, options: Sequence[str] = (), init: float = 60, **env: str
    ) -> Job:
        return submit(real_project, [*arguments(steps, init=init), *args], options=options, **env)

    return run


@pytest.fixture(scope="session")
def _results() -> dict[str, JobResult]:
    return {}


@pytest.fixture
def uninterrupted(train: Callable[..., Job], _results: dict[str, JobResult]) -> JobResult:
    """A run that nothing disturbed, trained once for all tests."""
    if "uninterrupted" not in _results:
        _results["uninterrupted"] = train().wait()
    return _results["uninterrupted"]


@pytest.fixture(scope="session")
def timed() -> Iterator[Callable[[str, str, float], None]]:
    """`timed(fault, launcher, seconds)` adds a row to a table that `pytest -s` shows at the end."""
    rows: list[tuple[str, str, float]] = []
    yield lambda *row: rows.append(row)
    print("\n\nseconds from the deadline (of a cut link, clocks.silent_s after it) to the last exit of a rank")
    for fault, launcher, seconds in rows:
        print(f"{fault:<44} {launcher:<9} {seconds:6.1f}")


@pytest.fixture(params=["srun", "torchrun"])
def launcher(request: pytest.FixtureRequest) -> str:
    """The value of LAUNCHER."""
    if request.param == "torchrun":
        pytest.importorskip("torch", reason="needs torch, for its torchrun")
    return str(request.param)
