"""Render the example projects anew: python examples/render.py. A test fails when they differ from a fresh render."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = {
    "digits-local": ["--preset", "local"],
    "digits-slurm": ["--preset", "generic-slurm", "--set", "nodes=2", "--set", "gpus_per_node=4"],
}


def render(name: str, destination: Path) -> None:
    """Render one example into `destination`, without what changes in its answers file with each commit."""
    command = [sys.executable, "-m", "ddp_scaffold", "new", str(destination), "--yes", "--template", str(HERE.parent)]
    settings = ["--set", f"project_name={name}", "--set", "package=digits", *EXAMPLES[name]]
    subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(destination / ".git", ignore_errors=True)
    answers = destination / ".copier-answers.yml"
    kept = [
        line for line in answers.read_text().splitlines(keepends=True) if not line.startswith(("_commit", "_src_path"))
    ]
    answers.write_text(re.sub("(?<=Checked by that command: )[0-9a-f]{16}", "...", "".join(kept)))


if __name__ == "__main__":
    for example in EXAMPLES:
        shutil.rmtree(HERE / example, ignore_errors=True)
        render(example, HERE / example)
        print(HERE / example)
