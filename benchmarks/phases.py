"""What keeping the changes of phase costs, for the picture of a failure: seconds of CPU a change, with and without.

    PYTHONPATH=PROJECT/src python benchmarks/phases.py [--package digits]

Blocks of both alternate. CPU time and not wall time, so that other work on the machine counts for less.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time

CHANGES = 20_000  # of a block


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="digits", help="the generated package to measure")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each")
    options = parser.parse_args()
    heartbeat = importlib.import_module(f"{options.package}.ddp.trace.heartbeat")
    kept, unkept = importlib.import_module(f"{options.package}.ddp.trace.phases").Phases(), heartbeat.phases
    kept.begin()
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(options.rounds):
        for name, phases in (("without", unkept), ("with", kept)):
            heartbeat.phases = phases
            times[name].append(block(heartbeat))
    medians = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    print("| a change of phase | microseconds of CPU |\n| --- | --- |")
    for name, value in medians.items():
        print(f"| {name} the changes kept | {value:.2f} |")
    print(f"| difference | {medians['with'] - medians['without']:.2f} |")


def block(heartbeat: object) -> float:
    """Seconds of CPU a change."""
    phase = heartbeat.phase  # type: ignore[attr-defined]
    began = time.process_time()
    for _ in range(CHANGES // 2):  # into it, and back
        with phase("forward"):
            pass
    return (time.process_time() - began) / CHANGES


if __name__ == "__main__":
    main()
