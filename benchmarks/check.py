"""How long `ddp-scaffold check` takes for 1,000 files and 200,000 lines, beside ruff on the same tree, and for 5,000
small files.

    python benchmarks/check.py [--rounds 3] [--json FILE]

The tree is made of the training code, scripts and tests of examples/, each file once as it is and then with other names
for what it defines, until both numbers are reached. The small files are of eleven lines and import each other in
chains of a hundred. Wall times and CPU times of whole processes with their children, the best of the rounds: where
other work uses the CPUs, wall times say little.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES, LINES, SMALL = 1000, 200_000, 5000


def make_tree(folder: Path) -> tuple[int, int]:
    """Write the tree, and return its files and lines: 9 of 10 files are Python, the others scripts."""
    examples = ROOT / "examples"
    sources = {
        kind: sorted(path for path in examples.rglob(f"*.{kind}") if path.is_file()) for kind in ("py", "sh", "sbatch")
    }
    texts = {kind: [path.read_text("utf-8") for path in paths] for kind, paths in sources.items()}
    scripts = [("sh", text) for text in texts["sh"]] + [("sbatch", text) for text in texts["sbatch"]]
    python = texts["py"]
    lines = 0
    for number in range(FILES):
        suffix, text = scripts[number % len(scripts)] if number % 10 == 9 else ("py", python[number % len(python)])
        if suffix == "py":
            text = re.sub(r"^(\s*)(def|class) (\w+)", rf"\1\2 \3_{number}", text, flags=re.MULTILINE)
            while lines + text.count("\n") < LINES * (number + 1) // FILES:  # as long as files are on average
                more = python[(number * 7 + len(text)) % len(python)].replace("from __future__ import annotations", "")
                text += "\n" + more
        path = folder / f"package_{number // 50}" / f"module_{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        lines += text.count("\n")
    return FILES, lines


def make_small_files(folder: Path) -> int:
    """Write files of eleven lines that call each other, and return how many."""
    for number in range(SMALL):
        path = folder / f"part_{number // 100}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        before = f"from .module_{number - 1} import step_{number - 1} as before" if number % 100 else "before = max"
        path.write_text(
            f"import os\nimport torch\n{before}\n\n\ndef step_{number}(x, rank):\n    if rank == 0:\n"
            "        print(x)\n    for turn in range(10):\n        x = before(x, rank)\n    return os.fspath(x)\n",
            "utf-8",
        )
    return SMALL


def seconds(command: list[str], rounds: int) -> tuple[float, float]:
    """The best wall and CPU times of some rounds. Raises CalledProcessError for an exit code other than 0 and 1."""
    wall = cpu = float("inf")
    for _ in range(rounds):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall = min(wall, time.perf_counter() - began)
        cpu = min(cpu, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode not in (0, 1):
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return wall, cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check = [sys.executable, "-m", "ddp_scaffold", "check", "--format", "json"]
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-check-") as folder:
        files, lines = make_tree(Path(folder))
        ours, ours_cpu = seconds([*check, folder], options.rounds)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet", folder]
        ruff, ruff_cpu = seconds(command, options.rounds)
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-check-") as folder:
        make_small_files(Path(folder))
        small, small_cpu = seconds([*check, folder], options.rounds)
    rows = {
        f"ddp-scaffold check, {files} files, {lines} lines": (ours, ours_cpu),
        "ruff check, the same": (ruff, ruff_cpu),
        f"ddp-scaffold check, {SMALL} small files": (small, small_cpu),
    }
    for name, (wall, cpu) in rows.items():
        print(f"{name:<48} {wall:6.2f} s, {cpu:6.2f} s of CPU")
    row = {"files": files, "lines": lines, "check_s": round(ours, 2), "check_cpu_s": round(ours_cpu, 2)}
    row |= {"ruff_s": round(ruff, 2), "small_s": round(small, 2), "small_cpu_s": round(small_cpu, 2)}
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
