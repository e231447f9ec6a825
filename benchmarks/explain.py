"""How long `ddp-scaffold explain` takes, and how much memory: one log of 200 MB, 4,096 rank logs of 2 GB in all, dumps.

    python benchmarks/explain.py [--scale 1.0] [--json FILE]

`--scale` makes all inputs smaller, so that one sees how the cost grows. Logs of three sorts: "alike" are lines of a
training loop that differ in their numbers; of "diverse" no two lines are alike (prompts, paths, hashes, JSON, words
that torch's messages have too); "warnings" repeats a traceback that says nothing of the failure. At the end of each log
but one stands a watchdog's timeout. The files are made in a temporary directory, and read once beforehand, so that a
slow disk does not count. CPU seconds are those of all processes together: on a machine that has other work to do, they
tell more than the seconds do. The flight-recorder dumps are copies of one that torch has written of gloo: 2,000
collectives, each with 13 frames, as many as the recorder keeps by default.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABSENT = 17


TEXT = (
    "the a of to and in that model sample device peer last found rank network data loader failed checkpoint memory"
    " error process complete store token prompt answer question because reward policy value world time evaluation"
    " about river mountain window signal record received connect patient cause catch image language distributed"
)
WORDS = TEXT.split()


def alike(rank: int, _: int) -> bytes:
    return "".join(
        f"[rank{rank}]: 2026-11-30 04:{step // 60 % 60:02d}:{step % 60:02d},{step % 1000:03d} INFO"
        f" train.py:88 step {step}/100000 | loss {2 + step % 97 / 97:.4f} | grad_norm {step % 89 / 89:.3f} | 9 it/s\n"
        for step in range(2000)
    ).encode()


@lru_cache(maxsize=64)
def of_seed(seed: int) -> bytes:
    """Return half a megabyte in which no two lines are alike."""
    source = random.Random(seed)
    lines = []
    for step in range(4000):
        text = " ".join(source.choices(WORDS, k=12))
        word = f"{source.getrandbits(64):016x}"
        lines.append(
            f"step {step} sample {word} {text}\n"
            if step % 2
            else f'{{"id": "{word}", "prompt": "{text}", "path": "/data/{word[:3]}/{word[3:9]}.json"}}\n'
        )
    return "".join(lines).encode()


def diverse(rank: int, block: int) -> bytes:
    """Return a block of its own for each of 64 ranks that follow each other, and each of 64 blocks of a file."""
    return of_seed((rank + block) % 64)


def warnings(rank: int, _: int) -> bytes:
    return (
        f"[rank{rank}]: Traceback (most recent call last):\n"
        + "".join(f'[rank{rank}]:   File "/home/user/x{line}.py", line {line}, in call\n' for line in range(20))
        + f"[rank{rank}]: logged and passed over\n"
    ).encode() * 200


RECORDER = """
import os, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=0, world_size=1)


def call(depth, step):
    if depth:
        call(depth - 1, step)
    elif step % 2:
        dist.all_reduce(torch.ones(step % 40 + 1))
    else:
        dist.broadcast(torch.ones(4), 0)


for step in range(2000):
    call(9, step)
with open(sys.argv[1], "wb") as file:
    file.write(c10d._dump_fr_trace())
os._exit(0)
"""
SORTS = {"alike": alike, "diverse": diverse, "warnings": warnings}


def log(path: Path, rank: int, size: int, sort: str) -> None:
    """Write a rank's log of about so many bytes, whose blocks differ where its lines are diverse."""
    prefix = f"[rank{rank}]:[E1130 05:00:00.209283984 ProcessGroupNCCL.cpp:689] [Rank {rank}]"
    group = (
        f"[rank{rank}]:[E1130 05:00:00.209283984 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    )
    number = 99 if rank == ABSENT else 100
    end = (
        f"{group}  failure detected by watchdog at work sequence id: 100"
        f" PG status: last enqueued work: {number}, last completed work: 99\n"
    )
    if rank != ABSENT:
        end = (
            f"{prefix} Watchdog caught collective operation timeout: WorkNCCL(SeqNum=100, OpType=ALLREDUCE,"
            f" NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n{end}"
        )
    with path.open("wb") as file:
        block, number = SORTS[sort](rank, 0), 0
        while size > len(block):
            size -= file.write(block)
            number += 1
            block = SORTS[sort](rank, number)
        file.write(block[: block.rfind(b"\n", 0, max(size, 1)) + 1])
        file.write(end.encode())


def dumps(folder: Path, ranks: int) -> None:
    """Write a flight-recorder dump for each rank."""
    first = folder / "rank_0"
    subprocess.run([sys.executable, "-c", RECORDER, str(first)], check=True, capture_output=True)
    (folder / "rank_0.store").unlink()
    for rank in range(1, ranks):
        (folder / f"rank_{rank}").write_bytes(first.read_bytes())


def measure(folder: Path, ranks: int, size: int, sort: str) -> dict[str, object]:
    """Return what one call costs. The memory is that of the largest process; there are as many as CPUs."""
    if sort == "dumps":
        dumps(folder, ranks)
    for rank in range(ranks if sort in SORTS else 0):
        log(folder / f"rank_{rank}.log", rank, size, sort)
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 20):  # in pieces: the largest size of this process counts as one of its children's
                pass
    used, start = sum(os.times()[2:4]), time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "ddp_scaffold", "explain", str(folder), "--json"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scaffold")},
    ) as command:
        assert command.stdout
        answer = command.stdout.read()
        _, status, usage = os.wait4(command.pid, 0)  # of this process, and of those that it has waited for
        command.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    verdict = json.loads(answer)["verdict"]
    memory = usage.ru_maxrss // 1024
    megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    return {
        "sort": sort,
        "files": ranks,
        "MB": round(megabytes),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(sum(os.times()[2:4]) - used, 2),
        "largest_process_MB": memory,
        "verdict": f"{verdict['kind']} {verdict['first_ranks']} {verdict['confidence']}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for ranks, size, sort in (
        *((1, 200_000_000, sort) for sort in SORTS),
        (512, 500_000, "alike"),
        *((4096, 500_000, sort) for sort in SORTS if sort != "warnings"),
        *((ranks, 0, "dumps") for ranks in (1, 512)),
    ):
        with tempfile.TemporaryDirectory(prefix="explain-") as name:
            result = measure(Path(name), ranks, int(size * options.scale), sort)
        results.append(result)
        print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
