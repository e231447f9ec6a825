"""The generated project: rendered from this working tree, with the peers' network and the calls of fault.py in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The peers' 20 seconds for a collective, the others in the proportion of the defaults (90 : 180 : 300). For the guard
# that would be 120, longer than a job has here.
CLOCKS = {"loader": 6, "stall": 12, "collective": 20, "guard": 30}
EVERY = {"checkpoint": 10, "sample": 20, "eval": 40, "log": 10}

Edits = list[tuple[str, str]]  # a line or a part of one, and what stands there instead

IMPORT = ("import torch\n", "import fault\nimport task\nimport torch\n")
MODEL: Edits = [IMPORT, ("return ResNet(settings, IMAGE_SHAPE[0], len(NAMES))", "return task.Network()")]
DATA: Edits = [
    IMPORT,
    (
        "return TensorDataset(images[train], labels[train]),",
        "return fault.Watched(TensorDataset(images[train], labels[train])),",
    ),
]
LOOP: Edits = [
    IMPORT,
    (
        "                at |= position\n",
        "                at |= position\n"
        "                fault.begin(step)\n"
        "                if fault.alone(step):\n"
        "                    dist.barrier()\n",
    ),
    (
        "            loss, terms = training_loss(model, batch)\n",
        '            fault.forward(at["step"])\n'
        "            loss, terms = training_loss(model, batch)\n"
        '            loss = fault.spoil(loss, at["step"])\n',
    ),
    (
        "                dist.all_reduce(totals)\n",
        "                if not fault.skips(step):\n"
        "                    dist.all_reduce(fault.misshapen(totals, step))\n",
    ),
    (
        "                draw(shown, val_data,",
        "                fault.sample(progress)\n                draw(shown, val_data,",
    ),
    (
        "    def save(must: bool = False) -> None:\n",
        '    def save(must: bool = False) -> None:\n        fault.saving(at["step"], network)\n',
    ),
    (
        "        at |= checkpoint.load(job, run.dir, state) or {}\n",
        "        at |= checkpoint.load(job, run.dir, state) or {}\n"
        '        if at["step"]:\n'
        '            fault.resumed(at["step"])\n',
    ),
    (
        "            if last:\n",
        "            if last:\n                fault.finished(step, network)\n",
    ),
]
# Two networks, the loss of the second through `.module`: nothing reduces its gradients.
SECOND: Edits = [
    (
        "    average = AveragedModel(",
        "    second = task.auxiliary().to(device)\n    extra = wrap(second)\n    average = AveragedModel(",
    ),
    ("        network.parameters(), lr=", "        [*network.parameters(), *second.parameters()], lr="),
    ('{"model": network, "optimizer": optimizer}', '{"model": network, "second": second, "optimizer": optimizer}'),
    (
        '            loss = fault.spoil(loss, at["step"])\n',
        '            loss = fault.spoil(loss, at["step"])\n'
        "            loss = loss + torch.nn.functional.cross_entropy(extra.module(batch[0]), batch[1])\n",
    ),
    ("gradient_norm(network.parameters())", "gradient_norm([*network.parameters(), *second.parameters()])"),
    ("clip_gradients(network.parameters(),", "clip_gradients([*network.parameters(), *second.parameters()],"),
    ("fault.finished(step, network)", "fault.finished(step, network, second)"),
]


def render(folder: Path, second: bool) -> None:
    """Make the project in `folder`. SystemExit when it no longer has the lines that are edited."""
    command = [sys.executable, "-m", "ddp_scaffold", "new", str(folder), "-y"]
    command += ["--model", "classifier", "--set", "package=digits"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scaffold")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        sys.exit(f"ddp-scaffold new failed:\n{done.stdout}{done.stderr}")
    source = folder / "src" / "digits"
    for name, edits in {"model.py": MODEL, "data.py": DATA, "train.py": LOOP + (SECOND if second else [])}.items():
        text = (source / name).read_text()
        for old, new in edits:
            if text.count(old) != 1:
                sys.exit(f"{name} of a generated project has {text.count(old)} times, not once: {old!r}")
            text = text.replace(old, new)
        (source / name).write_text(text)


def command(folder: Path, workers: int) -> list[str]:
    """How its README starts it, with the steps and the clocks of this comparison."""
    words = ["bash", str(folder / "launch" / "torchrun.sh"), "--train.steps", "40", "--train.batch_size", "32"]
    words += [word for name, steps in EVERY.items() for word in (f"--{name}.every_steps", str(steps))]
    if not workers:  # on a busy machine a worker may need longer than that to start; where there is one, nothing hangs
        words += [word for name, seconds in CLOCKS.items() for word in (f"--clocks.{name}_s", str(seconds))]
    return [*words, "--loader.workers", str(workers), "--run.device", "cpu", "--log.tracker", "none"]
