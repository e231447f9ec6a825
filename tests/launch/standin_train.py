"""Stands in for training in the tests of the launch scripts: no torch, but signals, outcome.json and exit codes.

--plan lists what each attempt does: done; config and early (exit 78, the latter without an outcome.json); stall; fail;
wait (until any rank gets a signal, then stop); vanish (rank 1 is killed, rank 0 finds out); deaf (ignores all signals);
helper (done, and a process of rank 0 notices a little after torchrun has ended, as one of a loader's workers may).
Each rank leaves a file ready-<attempt>-<rank>.json in the run directory, with its arguments and environment.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CODES = {"done": 0, "failed": 1, "stalled": 70, "stopped": 75, "config": 78}
ENDS = {"done": "done", "fail": "failed", "stall": "stalled", "config": "config"}

rank, world_size = (
    int(next((os.environ[name] for name in names if name in os.environ), default))
    for names, default in (
        (("RANK", "SLURM_PROCID", "PMI_RANK"), "0"),
        (("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"), "1"),
    )
)
attempt = int(os.environ["DDP_ATTEMPT"])
run_dir = Path("runs", os.environ["DDP_RUN__ID"])
run_dir.mkdir(parents=True, exist_ok=True)
stop = run_dir / f"stop-{attempt}"


def write(path: Path, content: object) -> None:
    # A second signal may come while the first is still handled: each writes a file of its own.
    aside = path.with_name(f".{path.name}.{rank}.{time.monotonic_ns()}")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def end(outcome: str, reason: str) -> None:
    if rank == 0:
        exit_code = CODES[outcome]
        content = {"version": 1, "outcome": outcome, "exit_code": exit_code, "attempt": attempt, "reason": reason}
        content["restart"] = exit_code in (70, 75)
        write(run_dir / "outcome.json", content)
    else:  # nobody leaves before the outcome is known, as in training
        while not (run_dir / "outcome.json").exists():
            time.sleep(0.05)
    sys.stdout.flush()
    os._exit(CODES[outcome])


def ask_to_stop(number: int, _frame: object) -> None:
    write(stop, f"{signal.Signals(number).name} on rank {rank}")


plan = sys.argv[sys.argv.index("--plan") + 1].split(",")[attempt]
for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
    signal.signal(each, signal.SIG_IGN if plan == "deaf" else ask_to_stop)
write(run_dir / f"ready-{attempt}-{rank}.json", {"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid()})
while len(list(run_dir.glob(f"ready-{attempt}-*.json"))) < world_size:
    time.sleep(0.05)

if plan == "early":
    sys.exit(78)
if rank == 0:  # as ddp/report/outcome.py notes that the ranks have met
    with (run_dir / "attempts.jsonl").open("a") as events:
        start = {"event": "start", "attempt": attempt, "world_size": world_size, "time": round(time.time(), 1)}
        events.write(json.dumps(start) + "\n")
if plan == "helper":
    if rank == 0:
        code = f"while kill -0 {os.getppid()} 2>/dev/null; do sleep 0.05; done; sleep 0.3"
        subprocess.Popen(["sh", "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
    end("done", "the plan says helper")
if plan in ENDS:
    end(ENDS[plan], f"the plan says {plan}")
if plan == "vanish":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)  # peers need a while to notice a silent rank
    end("stalled", "rank 1 sends no heartbeat any more")
while not stop.exists():
    time.sleep(0.05)
end("stopped", f"signal {json.loads(stop.read_text())}")
