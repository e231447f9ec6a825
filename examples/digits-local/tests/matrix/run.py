"""Put one fault after another into this project, and print what became of each: `make faults`.

    python tests/matrix/run.py [--only TEXT] [--rows 1,2] [--device cpu|cuda] [--jobs 2] [--runs DIR] [--json FILE]

Each row says what was injected, the exit code of every rank, the seconds from the deadline that applies to the last
exit, who was named, what is left running, and whether all of that is right. The exit code is 1 if any row is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matrix.cases import Case, cases
from matrix.once import run


def main() -> int:
    """Run the cases that the options select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the case of this name, or those whose name contains it")
    parser.add_argument("--rows", default="", help="rows, as 1,2,9")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--runs", type=Path, help="keep run directories and output here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = select(options.only, options.rows, options.device)
    if not chosen:
        parser.error("no case is selected")
    found = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        runs = (options.runs or Path(temporary)).resolve()
        for result in pool.map(lambda case: run(case, runs, options.device), chosen):
            found.append(result.row())
            if len(found) == 1:
                print(f"| {' | '.join(found[0])} |\n|{'---|' * len(found[0])}")
            print(f"| {' | '.join(str(value) for value in found[-1].values())} |", flush=True)
            if result.wrong:
                print(result.output, file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    bad = sum(row["right"] != "yes" for row in found)
    print(f"{len(found) - bad} of {len(found)} faults ended as they must", file=sys.stderr)
    return int(bad > 0)


def select(only: str = "", rows: str = "", device: str = "cpu") -> list[Case]:
    """The cases whose name is or else contains `only`, of these rows, that can be run on `device`."""
    wanted = {int(row) for row in rows.split(",") if row}
    named = [case for case in cases() if case.name == only] or [case for case in cases() if only in case.name]
    return [case for case in named if (not wanted or case.row in wanted) and (device == "cpu" or case.gpu)]


if __name__ == "__main__":
    sys.exit(main())
