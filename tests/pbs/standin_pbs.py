#!/usr/bin/env python3
"""A stand-in for PBS Pro and for mpiexec of HPE's PALS: what launch/train.pbs needs of them, on one machine.

Not the real thing, which cannot be installed from Debian. It keeps what the script relies on, from the manuals: #PBS
lines lose against options; -v passes values, or names alone; a script gets no arguments, and begins in the home
directory; -W depend=afterany; qstat -f with its folded lines; SIGTERM at the time limit or by qdel to all processes of
the job, SIGKILL 10 s later; mpiexec ends the other ranks when one fails, unless PALS_ABORT_ON_FAILURE is 0. A routing
queue passes a job on: qstat and PBS_QUEUE have the queue where it runs, PBS_O_QUEUE the one of qsub, and a job that is
submitted to where it runs is refused.

Called by the name of a link: qsub, qstat, qdel, mpiexec. PBS_STANDIN is a directory for its jobs; PBS_STANDIN_HOSTS has
the names of its "nodes", which are all this machine; PBS_STANDIN_MPI says whose mpiexec it is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KILL_DELAY_S = 10
NCPUS = "8"  # of a node
ROUTED = {"prod": "small"}  # as on Polaris (argonne-lcf/user-guides docs/polaris/running-jobs/index.md, 2026-08-19)
# What `mpiexec --version` prints, as far as public recordings have it.
VERSIONS = {
    # E3SM-Project/mache mache/parallel/pbs.py: 'PALS reports e.g. "mpiexec version 1.8.0 revision ..."'
    "pals": "mpiexec version 1.8.0 revision",
    # the same file; MPICH 3.3 to 4.3 print this line, then indented ones
    "hydra": "HYDRA build details:\n    Version:                                 4.1.2",
    # Open MPI until 4.1 (recorded 1.4.3 to 4.1.6), and since 5.0 (recorded 5.0.7 to 5.0.10)
    "openmpi4": "mpiexec (OpenRTE) 4.1.5\n\nReport bugs to http://www.open-mpi.org/community/help/",
    "openmpi5": "mpiexec (Open MPI) 5.0.10\n\nReport bugs to https://www.open-mpi.org/community/help/",
}


def state_directory() -> Path:
    return Path(os.environ["PBS_STANDIN"])


def load(job: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((state_directory() / f"{job}.json").read_text())
    return content


def save(job: dict[str, Any]) -> None:
    aside = state_directory() / f".{job['id']}"
    aside.write_text(json.dumps(job))
    aside.replace(state_directory() / f"{job['id']}.json")


def parse(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Options as qsub takes them, and the rest."""
    options: dict[str, Any] = {"resources": {}}
    rest = []
    while words:
        word = words.pop(0)
        if not re.fullmatch(r"-[A-Za-z]", word):
            rest.append(word)
        elif word == "-l":
            for resource in words.pop(0).split(","):
                name, _, value = resource.partition("=")
                options["resources"][name] = value
        else:
            options[word[1:]] = words.pop(0)
    return options, rest


def qsub(arguments: list[str]) -> int:
    given, rest = parse(arguments)
    if len(rest) != 1:
        print("usage: qsub [options] script", file=sys.stderr)
        return 2
    text = Path(rest[0]).read_text()
    options: dict[str, Any] = {"resources": {}}
    for line in text.splitlines():
        if line.startswith("#PBS "):
            found, _ = parse(shlex.split(line[5:]))
            options = {**options, **found, "resources": {**options["resources"], **found["resources"]}}
        elif line and not line.startswith("#"):
            break  # PBS ignores directives after the first command
    options = {**options, **given, "resources": {**options["resources"], **given["resources"]}}
    if options.get("q") in ROUTED.values():
        print("qsub: Access to queue is denied", file=sys.stderr)
        return 1
    variables = {}
    for item in [part for part in options.get("v", "").split(",") if part]:
        name, equals, value = item.partition("=")
        variables[name] = value if equals else os.environ.get(name, "")
    number = len(list(state_directory().glob("*.json"))) + 1
    job = {
        "id": f"{number}.standin", "script": text, "variables": variables, "state": "Q", "options": options,
        "workdir": os.getcwd(), "code": None, "pid": None,
    }  # fmt: skip
    save(job)
    server = [sys.executable, __file__, "run", job["id"]]
    nowhere = subprocess.DEVNULL  # a pipe of the caller would stay open until the job's end
    subprocess.Popen(server, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    print(job["id"])
    return 0


def run(job_id: str) -> int:
    """What the server and the first node's daemon do with one job."""
    job = load(job_id)
    options = job["options"]
    waits_for = re.fullmatch(r"depend=afterany:(.+)", options.get("W", ""))
    while waits_for and load(waits_for[1])["state"] != "F":
        time.sleep(0.05)
    count = int(options["resources"].get("select", "1").split(":")[0])
    nodefile = state_directory() / f"{job_id}.nodes"
    nodefile.write_text("".join(f"{host}\n" for host in os.environ["PBS_STANDIN_HOSTS"].split(",")[:count]))
    script = state_directory() / f"{job_id}.SC"
    script.write_text(job["script"])
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "USER", "PBS_STANDIN", "PBS_STANDIN_HOSTS", "PBS_STANDIN_MPI")
        if name in os.environ
    }
    # Both are `ompthreads` of the chunk, else its CPUs: openpbs/openpbs src/resmom/start_exec.c, 2026-04-10 (cd7ab5e).
    asked = re.search(r"ompthreads=(\d+)", options["resources"].get("select", ""))
    threads = asked[1] if asked else NCPUS
    environment = {
        **kept, "NCPUS": threads, "OMP_NUM_THREADS": threads, **job["variables"],
        "PBS_JOBID": job_id, "PBS_O_WORKDIR": job["workdir"], "PBS_NODEFILE": str(nodefile),
        "PBS_O_QUEUE": options.get("q", "workq"), "PBS_QUEUE": queue(options), "PBS_ENVIRONMENT": "PBS_BATCH",
    }  # fmt: skip
    hours, minutes, seconds = (int(part) for part in options["resources"]["walltime"].split(":"))
    deadline = time.monotonic() + hours * 3600 + minutes * 60 + seconds
    output = Path(job["workdir"], f"{options.get('N', 'STDIN')}.o{job_id.split('.')[0]}")
    with output.open("ab") as stream:
        shell = subprocess.Popen(
            ["bash", script], cwd=os.environ["HOME"], env=environment, stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        save({**job, "state": "R", "pid": shell.pid})
        while shell.poll() is None:
            if time.monotonic() > deadline or (state_directory() / f"{job_id}.delete").exists():
                save({**load(job_id), "state": "E"})
                signal_session(shell.pid, signal.SIGTERM)
                try:
                    shell.wait(KILL_DELAY_S)
                except subprocess.TimeoutExpired:
                    signal_session(shell.pid, signal.SIGKILL)
            time.sleep(0.05)
    signal_session(shell.pid, signal.SIGKILL)  # what the job left behind
    save({**load(job_id), "state": "F", "code": shell.wait()})
    return 0


def queue(options: dict[str, Any]) -> str:
    """Where a job runs."""
    name = str(options.get("q", "workq"))
    return ROUTED.get(name, name)


def signal_session(session: int, number: int) -> None:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rsplit(")", 1)[1].split()[3]) == session:
                os.kill(int(entry.parent.name), number)
        except (OSError, ValueError):
            continue


def qstat(arguments: list[str]) -> int:
    if arguments[0] != "-f":
        return 2
    job = load(arguments[1])
    options = job["options"]
    fields = {
        "Job_Name": options.get("N", "STDIN"), "job_state": job["state"], "queue": queue(options),
        "Account_Name": options.get("A"), "run_count": 1,
        **{f"Resource_List.{name}": value for name, value in options["resources"].items()},
    }  # fmt: skip
    print(f"Job Id: {job['id']}")
    for name, value in fields.items():
        if value is not None:
            line = f"    {name} = {value}"
            print("\n\t".join(line[start : start + 79] for start in range(0, len(line), 79)))
    return 0


def qdel(arguments: list[str]) -> int:
    (state_directory() / f"{arguments[0]}.delete").touch()
    return 0


def mpiexec(arguments: list[str]) -> int:
    kind = os.environ.get("PBS_STANDIN_MPI", "pals")
    if arguments == ["--version"]:
        print(VERSIONS[kind])
        return 0
    settings: dict[str, str] = {}
    while arguments[0].startswith("-"):
        name, equals, value = arguments.pop(0).lstrip("-").partition("=")
        settings[name] = value if equals else arguments.pop(0)
    known = (
        {"n", "map-by", "x"} if kind.startswith("openmpi") else {"n", "ppn"} | ({"depth"} if kind == "pals" else set())
    )
    if unknown := set(settings) - known - {"cpu-bind"}:
        print(f"mpiexec: unrecognized argument {unknown.pop()}", file=sys.stderr)
        return 255
    (state_directory() / "mpiexec.log").write_text(json.dumps(settings))
    size, per_node = int(settings["n"]), int(settings.get("ppn") or settings["map-by"].split(":")[1])
    hosts = Path(os.environ["PBS_NODEFILE"]).read_text().split()
    assert size <= per_node * len(hosts)
    ranks = []
    for rank in range(size):
        place = {"PMI_RANK": rank, "PMI_SIZE": size, "PMI_LOCAL_RANK": rank % per_node, "PMI_LOCAL_SIZE": per_node}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        ranks.append(subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL))
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends its ranks when it is asked to end
        signal.signal(number, lambda *_: [each.terminate() for each in ranks])
    abort = os.environ.get("PALS_ABORT_ON_FAILURE", "1") not in ("0", "false")
    killed_at = float("inf")
    while any(each.poll() is None for each in ranks):
        if abort and killed_at == float("inf") and any(each.poll() for each in ranks):
            for each in ranks:
                each.terminate()
            killed_at = time.monotonic() + 5
        if time.monotonic() > killed_at:
            for each in ranks:
                each.kill()
        time.sleep(0.02)
    return next((each.returncode % 256 for each in ranks if each.returncode), 0)


if __name__ == "__main__":
    name = Path(sys.argv[0]).name
    if name == Path(__file__).name and sys.argv[1] == "run":
        sys.exit(run(sys.argv[2]))
    sys.exit({"qsub": qsub, "qstat": qstat, "qdel": qdel, "mpiexec": mpiexec}[name](sys.argv[1:]))
