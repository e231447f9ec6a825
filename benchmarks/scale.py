"""What heartbeat and stall detection cost at rank 0, by the number of ranks.

    python benchmarks/scale.py PROJECT [--package digits] [--ranks 1024 4096 16384] [--seconds 60] [--json FILE]

Rank 0 is real: a process with the project's Monitor and the TCPStore server, as under srun. The other ranks are the
connections and requests of real ones, with default clocks: each has two store clients, beats at its pace, publishes
its state and waits for news. They run in a few processes on the same machine, so CPU time is told, not wall time; but
for the last column, an upper bound: the seconds until `diagnose` has heard from all ranks, which share these cores.

A server looks up the host name of each client that connects: a slow name server makes the start slow. Needs Linux,
and at rank 0 two open files a rank. Where fewer are allowed (ulimit -Hn), one connection waits for the news of several
ranks, and the table says how many wait.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

HEARTBEAT_S = 30  # the default of log.heartbeat_s
PROCESSES, THREADS = 4, 32  # that simulate the other ranks, and threads of each that beat
HEADINGS = {
    "ranks": "ranks",
    "waiting": "waiting for news",
    "interval_s": "s between beats",
    "monitor_pct": "monitor, % of a core",
    "server_pct": "store server, %",
    "total_pct": "both, %",
    "messages_s": "messages in/s",
    "in_kb_s": "kB in/s",
    "out_kb_s": "kB out/s",
    "memory_mb": "memory, MB",
    "diagnose_cpu_s": "diagnosis, CPU s",
    "diagnose_s": "diagnosis, s",
}


def main() -> None:
    """One row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--package", default="digits")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--seconds", type=float, default=60, help="to measure, or until ranks were compared once")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.project.resolve() / "src"))
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| " + " | ".join(HEADINGS.values()) + " |\n" + "|---" * len(HEADINGS) + "|", flush=True)
    rows = []
    start = multiprocessing.get_context("spawn")
    for ranks in options.ranks:
        here, there = start.Pipe()
        process = start.Process(target=rank0, args=(options.package, ranks, options.seconds, there))
        process.start()
        there.close()
        try:
            rows.append(here.recv())
        except EOFError:
            process.join()
            sys.exit(f"rank 0 ended with {process.exitcode} at {ranks} ranks: see its messages above")
        process.join()
        print("| " + " | ".join(str(value) for value in rows[-1].values()) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def part(package: str, name: str) -> Any:
    """A module of the project's plumbing."""
    return importlib.import_module(f"{package}.ddp.{name}")


def rank0(package: str, ranks: int, seconds: float, answer: Any) -> None:
    """Serve, watch, measure, diagnose; send the row."""
    raise_limit()
    parent = os.getppid()
    clocks, setup = part(package, "clocks").Clocks(), part(package, "start.groups")
    place = part(package, "start.launcher").Place(
        "slurm", 0, 0, ranks, 8, "n0", "127.0.0.1", free_port(), 0, agent_store=False
    )
    store = setup.connect_store(place, clocks, serve=True)
    job = setup.Job(place, clocks, store, tuple(f"n{rank // 8}" for rank in range(ranks)))
    with tempfile.TemporaryDirectory() as name:
        for folder in ("stacks", "heartbeats"):
            (Path(name) / folder).mkdir()
        monitor = part(package, "watch.monitor").Monitor(job, Path(name), heartbeat_s=HEARTBEAT_S)
        memory = resident()
        simulated = simulate(package, ranks, place.master_port)
        heartbeat = part(package, "trace.heartbeat")
        heartbeat.step_done(0, 0)
        monitor.start()
        time.sleep(2 * clocks.silent_s)  # rank 0 has seen every rank

        before, began = usage(), time.monotonic()
        while time.monotonic() - began < max(seconds, HEARTBEAT_S * (ranks // 1000)):  # as often as ranks are compared
            time.sleep(1)
            heartbeat.progress()
            if os.getppid() != parent:  # interrupted: the others end when the store goes
                os._exit(1)
        after, took = usage(), time.monotonic() - began
        spent = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in before}
        memory = resident() - memory

        before, began = usage(), time.monotonic()
        monitor.diagnose()
        diagnosis_s = time.monotonic() - began
        diagnosis_cpu = sum(numbers[0] for numbers in usage().values()) - sum(numbers[0] for numbers in before.values())
        monitor.stop()
        for process in simulated:
            process.join()
    watched, served = spent["monitor"][0] / took, spent["server"][0] / took
    interval = part(package, "start.board").beat_interval(ranks, clocks)
    numbers = [100 * watched, 100 * served, 100 * (watched + served)]
    traffic = [spent["server"][1] / took, spent["server"][2] / took / 1e3, spent["server"][3] / took / 1e3]
    measured = [*numbers, *traffic, memory / 1e6, diagnosis_cpu, diagnosis_s]
    waiting = sum(len(listeners(range(1 + index, ranks, PROCESSES), ranks)) for index in range(PROCESSES))
    answer.send(dict(zip(HEADINGS, [ranks, waiting, interval, *(round(value, 2) for value in measured)], strict=True)))


def usage() -> dict[str, list[float]]:
    """CPU seconds, reads, bytes read and bytes written so far, of the store server and of all other threads.

    The server thread is the one PyTorch calls pt_tcpstore_uv (torch 2.6 to 2.13). Only it uses read(2) and write(2) on
    sockets, so that its counters are the traffic of the store.
    """
    found = {"server": [0.0] * 4, "monitor": [0.0] * 4}
    for task in Path("/proc/self/task").iterdir():
        name = "server" if (task / "comm").read_text().startswith("pt_tcpstore") else "monitor"
        counts = dict(line.split(": ") for line in (task / "io").read_text().splitlines())
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        numbers = [seconds, *(float(counts[key]) for key in ("syscr", "rchar", "wchar"))]
        found[name] = [a + b for a, b in zip(found[name], numbers, strict=True)]
    return found


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def simulate(package: str, ranks: int, port: int) -> list[Any]:
    """Start the processes that stand for ranks 1 and on; returns when all of their clients are connected."""
    start = multiprocessing.get_context("spawn")
    ready = start.Semaphore(0)
    found = []
    for index in range(PROCESSES):
        mine = range(1 + index, ranks, PROCESSES)
        # An address for each process: from one to one, TCP has only 28,000 ports.
        found.append(start.Process(target=others, args=(package, mine, ranks, f"127.0.0.{index + 1}", port, ready)))
        found[-1].start()
    for _ in found:
        ready.acquire()
    return found


def others(package: str, mine: range, ranks: int, address: str, port: int, ready: Any) -> None:
    """The store traffic of some ranks, until rank 0 says goodbye."""
    raise_limit()
    dist = importlib.import_module("torch.distributed")
    board, heartbeat = part(package, "start.board"), part(package, "trace.heartbeat")
    clocks = part(package, "clocks").Clocks()
    interval = board.beat_interval(ranks, clocks)
    # What a run of a few days has: every phase, and a count of each.
    heartbeat.beat.seconds = dict.fromkeys(("data", "forward", "backward", "optim", "agree", "eval"), 12345.678)
    done, heard = threading.Event(), 0

    def connect() -> Any:
        store = dist.TCPStore(address, port, None, False, timedelta(seconds=300), wait_for_workers=False)
        return dist.PrefixStore("attempt0", store)

    def publish(store: Any, rank: int) -> None:
        state = replace(heartbeat.snapshot(rank, f"n{rank // 8}"), pid=os.getpid(), news=heard)
        store.set(f"state/{rank}", state.to_json())

    def listen(store: Any, ranks: range) -> None:
        nonlocal heard
        for number in itertools.count(1):
            store.wait([f"news/{number}"], timedelta(days=7))
            heard, news = number, store.get(f"news/{number}").decode()
            if news == "bye":
                done.set()
                return
            for rank in ranks:
                publish(store if len(ranks) == 1 else stores[rank], rank)

    def send(stores: dict[int, Any]) -> None:
        number, said = 0, time.monotonic()
        while not done.wait(interval - time.time() % interval):
            number += 1
            for rank, store in stores.items():
                board.send_beat(store, rank, number, interval, clocks)
            if time.monotonic() - said >= HEARTBEAT_S * max(1, ranks // 1000):
                said = time.monotonic()
                for rank, store in stores.items():
                    publish(store, rank)

    stores = {rank: connect() for rank in mine}
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=listen, args=(connect(), each)) for each in listeners(mine, ranks)]
    for index in range(THREADS):
        share = {rank: store for rank, store in stores.items() if rank // PROCESSES % THREADS == index}
        threads.append(threading.Thread(target=send, args=(share,)))
    for thread in threads:
        thread.start()
    ready.release()
    for thread in threads:
        thread.join()


def listeners(mine: range, ranks: int) -> list[range]:
    """`mine` in parts of one rank, or of several where rank 0 may not have two connections for each."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - ranks - 500
    if most < 1:
        sys.exit(f"{ranks} ranks need {ranks + 500} open files or more: raise ulimit -Hn")
    size = -(-ranks // most)
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def raise_limit() -> None:
    """As many open files as this process may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port() -> int:
    """A port that nobody listens on now."""
    socket = importlib.import_module("socket")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
