"""Stop signals to every process of a job: a fork server and workers outlive them, at whatever moment they come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("signals_script.py")


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"}, name="digits")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("start_method", "processes"),
    [
        ("forkserver", 6),
        pytest.param("spawn", 5, marks=pytest.mark.slow),
        pytest.param("fork", 5, marks=pytest.mark.slow),
    ],
)
def test_workers_outlive_signals_to_all(project: Path, tmp_path: Path, start_method: str, processes: int) -> None:
    """The training process, two times two workers, and with forkserver their server, all in reach of the signals."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    own = {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1", "MARK": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), start_method],
        env=clean | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
        start_new_session=True,
    )
    assert ended.returncode == 0, ended.stdout
    found = re.search(r"read everything; (\d+) processes, signal SIG", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= processes, ended.stdout


SCRIPT_SAYS = """
import os, signal, sys
from pathlib import Path
from digits.ddp.start.stop import PreemptSettings, StopFlags, kind_of_stop
flags = StopFlags(PreemptSettings())
flags.install()
flags.stop_file = Path(sys.argv[1])
os.kill(os.getpid(), signal.SIGTERM)
print(flags.reason(), kind_of_stop(flags.reason()), sep=": ")
"""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "signal SIGTERM: preempted"),
        ("signal SIGINT to the launch script on n1\n", "signal SIGINT to the launch script on n1: preempted"),
        ("", "signal SIGTERM: preempted"),
    ],
)
def test_ranks_tell_the_signal_that_the_launch_script_got(
    project: Path, tmp_path: Path, written: str | None, told: str
) -> None:
    """Ctrl-C reaches the script, and SIGTERM the ranks."""
    file = tmp_path / "stop"
    if written is not None:
        file.write_text(written)
    command = [sys.executable, "-c", SCRIPT_SAYS, str(file)]
    env = os.environ | {"PYTHONPATH": str(project / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == f"{told}\n", done.stderr
