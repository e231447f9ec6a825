"""A stand-in for W&B: what ddp/trackers.py calls, with the names and signatures of wandb 0.31.

FAKE_WANDB says what it does: hang, raise, or write each call as a line of JSON to that file. Like the real one, it
drops what is logged for a step that is over (docs.wandb.ai, `Run.log`: steps must increase).
"""

import json
import os
import time
from types import SimpleNamespace
from typing import Any

Settings = SimpleNamespace


def login(prompt: bool = True) -> bool:
    return not prompt


def init(**options: Any) -> "Run":
    if os.environ["FAKE_WANDB"] == "hang":
        time.sleep(1_000_000)
    if os.environ["FAKE_WANDB"] == "raise":
        raise RuntimeError("the service is not there")
    _write("init", {name: value for name, value in options.items() if name not in ("settings", "dir")})
    return Run()


class Run:
    offline = False
    url = "https://wandb.example/run"

    def __init__(self) -> None:
        self.summary = SimpleNamespace(update=lambda values: _write("summary", values))
        self._step = -1

    def log(self, values: dict[str, Any], step: int) -> None:
        if step >= self._step:
            self._step = step
            _write("log", {"step": step, **values})

    def finish(self, exit_code: int) -> None:
        _write("finish", {"exit_code": exit_code})


def Image(image: Any) -> str:
    return f"image of {image.width} x {image.height}"


def Html(text: str) -> str:
    return text


def _write(call: str, values: dict[str, Any]) -> None:
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps([call, values]) + "\n")
