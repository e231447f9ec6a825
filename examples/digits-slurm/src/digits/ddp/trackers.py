"""TensorBoard and W&B, each in a thread of its own behind a bounded queue: whatever they do, training goes on.

Only rank 0 has any. A tracker gets the numbers, what `draw` of sample.py has written, the settings, and how it ended.
"""

from __future__ import annotations

import html
import logging
import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, Field, field_validator

from .errors import DONE, STOPPED
from .kinds import Verdict
from .report import json_lines

log = logging.getLogger("ddp")
KNOWN = ("tensorboard", "wandb")
PNG = b"\x89PNG\r\n\x1a\n"
TOLD = ("outcome", "kind", "reason", "advice", "first_ranks", "phase", "step", "exit_code")
CLOSE_S = 5.0  # for the rest, at an orderly end


class TrackerSettings(BaseModel, extra="forbid"):
    """Where metrics go besides metrics.jsonl, and under which names."""

    tracker: str = Field("tensorboard", description="tensorboard, wandb, both with a comma between them, or none")
    project: str = Field("", description="W&B's project; empty is $WANDB_PROJECT, or the package's name")
    name: str = Field("", description="the run's name in W&B; empty is run.id")
    tags: str = Field("", description="tags in W&B, with commas between them")

    @field_validator("tracker")
    @classmethod
    def _known(cls, value: str) -> str:
        names = value.replace(" ", "").split(",")
        if names != ["none"] and not set(names) <= set(KNOWN):
            raise ValueError(f"{value!r} is no tracker\nuse tensorboard, wandb, tensorboard,wandb or none")
        return ",".join(dict.fromkeys(names))


class Tracker(Protocol):
    """What a thread calls of a tracker. Each may block and raise as it likes."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step; a step may come twice, with other names."""

    def drawn(self, step: int, name: str, content: bytes) -> None:
        """A picture (PNG) or a text (UTF-8)."""

    def end(self, verdict: Verdict) -> None:
        """How it ended; nothing comes after it."""


class Trackers:
    """Those of one run. No method waits, but for `close`."""

    def __init__(self, settings: TrackerSettings, run_dir: Path) -> None:
        global _of_this_run
        kinds = [kind for kind in settings.tracker.split(",") if kind != "none"]
        made: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(run_dir),
            "wandb": lambda: WandB(settings, run_dir),
        }
        self._threads = [_Thread(kind, made[kind]) for kind in kinds]
        _of_this_run = self

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the scalars of one step."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.numbers(step, values))

    def drawn(self, step: int, files: list[tuple[str, Path]]) -> None:
        """Hand over finished files, each with its name in the tracker. They are read in the tracker's thread."""
        for thread in self._threads:
            for name, path in files:
                thread.put(partial(_read, step=step, name=name, path=path))

    def end(self, verdict: Verdict) -> None:
        """Hand over how it ended. Only the first end counts."""
        for thread in self._threads:
            thread.end(verdict)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Give the trackers so long, all of them together, to write the rest after `end`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(deadline - time.monotonic())


_of_this_run: Trackers | None = None


def end_with(verdict: Verdict) -> None:
    """Tell the trackers of this process, if it has any, how the run has ended; they write it while others are told."""
    if _of_this_run:
        _of_this_run.end(verdict)


def close(seconds: float) -> None:
    """Give the trackers of this process so long to write the end."""
    if _of_this_run:
        _of_this_run.close(seconds)


def _read(tracker: Tracker, step: int, name: str, path: Path) -> None:
    tracker.drawn(step, name, path.read_bytes())


class _Thread:
    """One tracker and its queue."""

    def __init__(self, kind: str, make: Callable[[], Tracker]) -> None:
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(maxsize=1000)
        self._kind, self._make, self._dead, self._ended = kind, make, False, False
        self._thread = threading.Thread(target=self._run, name=f"tracker {kind}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        if self._dead or self._ended:
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._give_up("it has taken no values for a long time")

    def end(self, verdict: Verdict) -> None:
        self.put(lambda tracker: tracker.end(verdict))
        self.put(None)
        self._ended = True

    def join(self, seconds: float) -> None:
        if self._dead:
            return
        self._thread.join(timeout=max(0.0, seconds))
        if self._thread.is_alive():
            log.warning("%s has not taken all values in time; they are in metrics.jsonl", self._kind)

    def _give_up(self, why: object) -> None:
        self._dead = True
        log.warning("%s is switched off: %s. Metrics still go to metrics.jsonl.", self._kind, why)

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (call := self._queue.get()) is not None:
                call(tracker)
        except Exception as error:  # a logger may fail in any way, and none of them may end training
            remedy = f"; pip install -e '.[{self._kind}]'" if isinstance(error, ModuleNotFoundError) else ""
            self._give_up(f"{type(error).__name__}: {error}{remedy}")


class TensorBoard:
    """Files in <run>/tensorboard, opened with the first values.

    Their step is that after which this start goes on: what an earlier one has written from there on is hidden
    (`purge_step`, torch/utils/tensorboard/writer.py), or the curves would go back and forth.
    """

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._run_dir, self._step = run_dir, 0
        (run_dir / "tensorboard").mkdir(parents=True, exist_ok=True)
        self._open: Callable[[int | None], Any] = lambda step: SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=step
        )
        self._writer: Any = None

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._at(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def drawn(self, step: int, name: str, content: bytes) -> None:
        writer = self._at(step, hidden_from=step + 1)  # a picture that a stop cut short is drawn anew, alone
        if content.startswith(PNG):
            # As it is: add_image wants the pixels, and encodes them again.
            from tensorboard.compat.proto.summary_pb2 import Summary

            width, height = struct.unpack(">II", content[16:24])  # https://www.w3.org/TR/png-3/#11IHDR
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
            writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
        else:
            writer.add_text(name, _indented(content.decode(errors="replace")), step)

    def end(self, verdict: Verdict) -> None:
        writer = self._writer or self._begin(None, verdict.step or 0)  # without a value, nothing is to be hidden
        told = [f"**{name}**: {value}" for name, value in _told(verdict).items()]
        writer.add_text("outcome", "\n\n".join(told), max(self._step, verdict.step or 0))
        writer.close()

    def _at(self, step: int, hidden_from: int | None = None) -> Any:
        self._step = max(self._step, step)
        return self._writer or self._begin(step if hidden_from is None else hidden_from, step)

    def _begin(self, purge_step: int | None, step: int) -> Any:
        self._writer = self._open(purge_step)
        if config := _config(self._run_dir):
            self._writer.add_text("settings", _indented(yaml.safe_dump(config, sort_keys=False)), step)
        return self._writer


class WandB:
    """One run in W&B for all starts of a run; its id is kept in wandb/id.txt. WANDB_MODE=offline needs no network.

    W&B keeps the first values of a step and drops later ones. So do we, since an offline run cannot know: steps that a
    start makes again after a resume are not sent again.
    """

    def __init__(self, settings: TrackerSettings, run_dir: Path) -> None:
        import wandb

        self._wandb = wandb
        _never_ask(wandb)
        config = _config(run_dir)
        run_id, self._sent = _identity(run_dir, fresh=config.get("run", {}).get("resume") is False)
        # It would put itself between Python and the terminal, and print its own summary among the words about the end.
        ours = {"console": "off", "quiet": True}
        ours = {name: value for name, value in ours.items() if f"WANDB_{name}".upper() not in os.environ}
        self._run = wandb.init(
            project=settings.project or os.environ.get("WANDB_PROJECT") or __name__.split(".")[0],
            name=settings.name or os.environ.get("WANDB_NAME") or run_dir.name,
            tags=[tag.strip() for tag in settings.tags.split(",") if tag.strip()] or None,
            config=config,
            allow_val_change=True,  # of settings, at a later start
            dir=run_dir,
            id=run_id,
            resume="allow",
            settings=wandb.Settings(**ours),
        )
        later = f"offline; where there is a network: wandb sync {run_dir / 'wandb'}/offline-run-*"
        log.info("wandb: %s", later if self._run.offline else self._run.url)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._sent:
            self._run.log(dict(values), step=step)

    def drawn(self, step: int, name: str, content: bytes) -> None:
        if step <= self._sent:
            return
        if content.startswith(PNG):
            import io

            from PIL import Image

            self._run.log({name: self._wandb.Image(Image.open(io.BytesIO(content)))}, step=step)
        else:
            text = html.escape(content.decode(errors="replace"))
            self._run.log({name: self._wandb.Html(f"<pre>{text}</pre>")}, step=step)

    def end(self, verdict: Verdict) -> None:
        told = _told(verdict)  # what an earlier start has left under the other names is over
        self._run.summary.update({f"outcome/{name}": told.get(name) for name in TOLD})
        self._run.finish(exit_code=0 if verdict.exit_code in (DONE, STOPPED) else verdict.exit_code)


def _never_ask(wandb: Any) -> None:
    """Without a key, W&B asks on the terminal. Nobody answers questions in a job."""
    online = os.environ.get("WANDB_MODE", "online") == "online"
    if online and "prompt" in signature(wandb.login).parameters and not wandb.login(prompt=False):
        raise RuntimeError("no API key: run `wandb login` once, or set WANDB_MODE=offline")


def _identity(run_dir: Path, fresh: bool) -> tuple[str, int]:
    """W&B's id of this run, and the last step that earlier starts have sent, -1 if none has.

    A new id is no name that somebody else in the project has used, or has deleted: W&B takes none twice. In a sweep
    of W&B, its agent has chosen the id, and W&B goes by that whatever it is given.
    """
    path = run_dir / "wandb" / "id.txt"
    if not fresh:
        with suppress(OSError):
            return path.read_text().strip(), _last_step(run_dir)
        if path.parent.is_dir():  # begun with release 0.5 or before, where the name was the id
            return run_dir.name, _last_step(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((os.environ.get("WANDB_RUN_ID") or f"{run_dir.name}-{secrets.token_hex(4)}") + "\n")
    return path.read_text().strip(), -1


def _last_step(run_dir: Path) -> int:
    """Of metrics.jsonl, before this start."""
    with suppress(OSError):
        steps = [row.get("step") for row in json_lines.read(run_dir / "metrics.jsonl")]
        return max((int(step) for step in steps if json_lines.is_number(step)), default=-1)
    return -1


def _config(run_dir: Path) -> dict[str, Any]:
    """The settings of this start, by section, as session.py has just written them."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        content = yaml.safe_load((run_dir / "settings.yaml").read_text())
        return content if isinstance(content, dict) else {}
    return {}


def _told(verdict: Verdict) -> dict[str, Any]:
    """What a tracker shows of an outcome."""
    content = verdict.as_dict()
    return {name: content[name] for name in TOLD if content[name] not in (None, "", [])}


def _indented(text: str) -> str:
    """As Markdown shows it line by line."""
    return "\n".join(f"    {line}" for line in text.splitlines())
