"""The settings file of the tests: your model and data. Your clocks, precision and so on must not decide about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

YOURS = Path(__file__).parents[2] / "configs" / "train.yaml"
OURS = ("run", "loader", "checkpoint", "log", "clocks", "preempt")
YOURS_IN_LOADER = ("drop_last",)  # what the model can be trained on
OURS_IN_TRAIN = ("steps", "accumulate", "precision", "compile", "rehearse", "ema", "max_nonfinite")


def write_config(path: Path) -> Path:
    """Write configs/train.yaml to `path` without what the tests are about, and return `path`."""
    sections: dict[str, Any] = yaml.safe_load(YOURS.read_text()) or {} if YOURS.is_file() else {}
    kept = {name: dict(values) for name, values in sections.items() if name not in OURS and values}
    loader = sections.get("loader") or {}
    kept |= {"loader": {name: loader[name] for name in YOURS_IN_LOADER if name in loader}}
    for name in OURS_IN_TRAIN:
        kept.get("train", {}).pop(name, None)
    path.write_text(yaml.safe_dump(kept))
    return path
