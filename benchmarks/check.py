"""How long `ddp-scaffold check` takes for 1,000 files and 200,000 lines, beside ruff on the same tree.

    python benchmarks/check.py [--rounds 3] [--json FILE]

The tree is made of the training code, scripts and tests of examples/, each file once as it is and then with other names
for what it defines, until both numbers are reached. Wall times of whole processes, the best of the rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES, LINES = 1000, 200_000


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


def seconds(command: list[str], rounds: int) -> float:
    """The best wall time of some rounds. Raises CalledProcessError for an exit code that is neither 0 nor 1."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=False)
        best = min(best, time.perf_counter() - began)
        if done.returncode not in (0, 1):
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-check-") as folder:
        files, lines = make_tree(Path(folder))
        check = seconds([sys.executable, "-m", "ddp_scaffold", "check", "--format", "json", folder], options.rounds)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet", folder]
        ruff = seconds(command, options.rounds)
    row = {"files": files, "lines": lines, "check_s": round(check, 2), "ruff_s": round(ruff, 2)}
    print(f"{files} files, {lines} lines\n  ddp-scaffold check  {check:6.2f} s\n  ruff check          {ruff:6.2f} s")
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
