"""What TensorBoard and W&B get: each value once, pictures, texts, and how a run ended; neither is in the way."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT, QUICK, Launch
from pydantic import ValidationError

from digits.ddp.errors import DONE, FAILED
from digits.ddp.kinds import Verdict
from digits.ddp.trackers import Trackers, TrackerSettings

WELL = Verdict(DONE, "benign", "training is done")
BADLY = Verdict(FAILED, "cuda_oom", "rank 1 (n2) is out of memory", [1], "forward", 12, "use a smaller batch")


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress(b"".join(b"\0" + bytes(width) for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def track(run_dir: Path, settings: TrackerSettings, steps: list[int], verdict: Verdict) -> None:
    """One start of a run, of which metrics.jsonl has each step, as MetricLog writes it."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "settings.yaml").write_text("train: {steps: 30}\n")
    picture, text = run_dir / "step_00000005.png", run_dir / "step_00000005.txt"
    picture.write_bytes(png(6, 4))
    text.write_text("what the <model> wrote")
    trackers = Trackers(settings, run_dir)
    for step in steps:
        trackers.numbers(step, {"loss": 1 / step})
        trackers.drawn(step, [("samples", picture), ("texts", text)])
    trackers.end(verdict)
    trackers.close(60)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in steps)


def tensorboard(run_dir: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    return found.Reload()


def text_of(found: Any, name: str) -> str:
    return str(found.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode())


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The stand-in in the place of W&B, and the file to which it writes its calls."""
    monkeypatch.syspath_prepend(str(PROJECT / "tests" / "matrix" / "fakes"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "calls"))
    for name in ("WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "calls"


def calls(file: Path, name: str) -> list[dict[str, Any]]:
    return [values for call, values in map(json.loads, file.read_text().splitlines()) if call == name]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = TrackerSettings()
    track(tmp_path / "run", settings, [5, 10, 15], BADLY)
    track(tmp_path / "run", settings, [10, 15, 20], WELL)
    found = tensorboard(tmp_path / "run")
    assert [event.step for event in found.Scalars("loss")] == [5, 10, 15, 20]
    image = found.Images("samples")[-1]
    assert (image.width, image.height, image.encoded_image_string) == (6, 4, png(6, 4))
    assert "what the <model> wrote" in text_of(found, "texts")
    assert "training is done" in text_of(found, "outcome")
    assert "steps: 30" in text_of(found, "settings")


def test_a_picture_that_is_drawn_anew_hides_no_number_of_its_step(tmp_path: Path) -> None:
    """A stop has cut it short, after the evaluation of that step, which is not repeated."""
    pytest.importorskip("tensorboard")
    track(tmp_path / "run", TrackerSettings(), [5, 10], BADLY)
    trackers = Trackers(TrackerSettings(), tmp_path / "run")
    trackers.drawn(10, [("samples", tmp_path / "run" / "step_00000005.png")])
    trackers.numbers(15, {"loss": 1 / 15})
    trackers.end(WELL)
    trackers.close(60)
    assert [event.step for event in tensorboard(tmp_path / "run").Scalars("loss")] == [5, 10, 15]


def test_tensorboard_says_why_a_run_failed_even_without_a_value(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    track(tmp_path / "run", TrackerSettings(), [5], WELL)
    track(tmp_path / "run", TrackerSettings(), [], BADLY)
    found = tensorboard(tmp_path / "run")
    assert [event.step for event in found.Scalars("loss")] == [5], "nothing of the start before is hidden"
    for words in ("cuda_oom", "rank 1 (n2) is out of memory", "use a smaller batch"):
        assert words in text_of(found, "outcome")


def test_wandb_has_one_run_for_all_starts(tmp_path: Path, wandb: Path) -> None:
    pytest.importorskip("PIL")
    settings = TrackerSettings(tracker="wandb", project="mine", name="long", tags="a, b")
    track(tmp_path / "run", settings, [5, 10, 15], BADLY)
    track(tmp_path / "run", settings, [10, 15, 20], WELL)
    first, second = calls(wandb, "init")
    assert first["id"] == second["id"]
    assert first["id"].startswith("run-"), "not the name alone, which others of the project may have taken"
    assert (first["project"], first["name"], first["tags"], first["resume"]) == ("mine", "long", ["a", "b"], "allow")
    assert first["config"] == {"train": {"steps": 30}}
    assert [row["step"] for row in calls(wandb, "log") if "loss" in row] == [5, 10, 15, 20]
    assert calls(wandb, "log")[1]["samples"] == "image of 6 x 4"
    assert calls(wandb, "log")[2]["texts"] == "<pre>what the &lt;model&gt; wrote</pre>"
    assert [end["exit_code"] for end in calls(wandb, "finish")] == [1, 0]
    failed, well = calls(wandb, "summary")
    assert (failed["outcome/kind"], failed["outcome/advice"]) == ("cuda_oom", "use a smaller batch")
    assert well["outcome/advice"] is None, "what the first start left is over"


def test_an_agent_of_wandb_chooses_the_id_of_all_starts(
    tmp_path: Path, wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "x3k9")
    track(tmp_path / "run", TrackerSettings(tracker="wandb"), [5], BADLY)
    monkeypatch.delenv("WANDB_RUN_ID")  # it goes on by hand
    track(tmp_path / "run", TrackerSettings(tracker="wandb"), [10], WELL)
    assert [start["id"] for start in calls(wandb, "init")] == ["x3k9", "x3k9"]


def test_what_a_kill_has_left_of_metrics_does_not_switch_wandb_off(tmp_path: Path, wandb: Path) -> None:
    track(tmp_path / "run", TrackerSettings(tracker="wandb"), [5, 10], BADLY)
    with open(tmp_path / "run/metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe{"st\n{"step": 1e999}\n{"step": "x"}\n[1]\n')
    track(tmp_path / "run", TrackerSettings(tracker="wandb"), [10, 15], WELL)
    assert [row["step"] for row in calls(wandb, "log") if "loss" in row] == [5, 10, 15]


def test_a_run_from_nothing_is_another_one_in_wandb(tmp_path: Path, wandb: Path) -> None:
    run_dir = tmp_path / "run"
    for resume in ("true", "false"):
        run_dir.mkdir(exist_ok=True)
        (run_dir / "settings.yaml").write_text(f"run: {{resume: {resume}}}\n")
        trackers = Trackers(TrackerSettings(tracker="wandb"), run_dir)
        trackers.numbers(5, {"loss": 1.0})
        trackers.end(WELL)
        trackers.close(60)
        (run_dir / "metrics.jsonl").write_text('{"step": 5}\n')
    first, second = calls(wandb, "init")
    assert first["id"] != second["id"]
    assert [row["step"] for row in calls(wandb, "log")] == [5, 5]


def test_a_tracker_that_fails_does_not_take_the_other_with_it(
    tmp_path: Path, wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("FAKE_WANDB", "raise")
    track(tmp_path / "run", TrackerSettings(tracker="wandb,tensorboard"), [5], WELL)
    assert [event.step for event in tensorboard(tmp_path / "run").Scalars("loss")] == [5]


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(ValidationError, match="'tensorbord' is no tracker"):
        TrackerSettings(tracker="tensorbord")


def test_training_gives_what_it_draws_to_the_tracker(launch: Launch) -> None:
    """A failed run tells the tracker why."""
    pytest.importorskip("tensorboard")
    options = ["--log.tracker", "tensorboard", "--sample.every_steps", "4", "--log.every_steps", "2"]
    done = launch(*QUICK, *options, ranks=0, faults="raise@rank=0,step=7")
    assert done.code != 0, done.output
    found = tensorboard(done.run_dir)
    assert "InjectedFault" in text_of(found, "outcome")
    drawn = {path.suffix for path in (done.run_dir / "samples").iterdir()}
    if not drawn & {".png", ".txt"}:
        pytest.skip("this model draws neither pictures nor texts")
    names = [name for kind in ("images", "tensors") for name in found.Tags()[kind]]
    assert any(name.startswith("samples") for name in names), names
