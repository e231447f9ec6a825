"""docs/recipes/: each page's code, put into a fresh project, keeps what the page promises, on two ranks."""

from __future__ import annotations

import importlib.util
import io
import math
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recipe_pages
from family_runs import Run, train
from launch_helpers import environment

torch = pytest.importorskip("torch", reason="recipes train")
pytestmark = pytest.mark.timeout(400)  # each trains up to four times

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in recipe_pages.RECIPES.glob("*.md"))
QUIET = [
    *("--run.device", "cpu", "--log.tracker", "none", "--log.every_steps", "1", "--train.precision", "fp32"),
    *("--preempt.poll_s", "0.01", "--sample.every_steps", "0", "--checkpoint.every_steps", "1000"),
]
SMALL = ["--train.batch_size", "8", "--model.stages", "1", "--model.blocks", "1"]  # of the classifier

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def fresh(render: Make) -> Callable[[str], Path]:
    """`fresh(family)`: a project of it, rendered once."""
    found: dict[str, Path] = {}

    def project(family: str) -> Path:
        if family not in found:
            found[family] = render({"model": family, "package": "digits"}, name=family)
        return found[family]

    return project


@pytest.fixture
def made(fresh: Callable[[str], Path], tmp_path: Path) -> Make:
    """`made(page, family, sections...)`: a project of `family`, changed as the page says, or these sections of it."""

    def make(page: str, family: str = "custom", *sections: str) -> Path:
        project = tmp_path / "project"
        shutil.copytree(fresh(family), project)
        changed = [path for path in recipe_pages.follow(page, project, *sections) if path.suffix == ".py"]
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--ignore", "I", *changed],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout
        return project

    return make


def run(project: Path, *more: str, ends: int = 0, **options: Any) -> Run:
    ended = train(project, *QUIET, *more, **options)
    assert ended.code == ends, ended.output
    return ended


def state(found: Run) -> dict[str, Any]:
    newest = max((found.dir / "checkpoints").glob("step_*"))
    return dict(torch.load(newest / "state.pt", weights_only=True))


def equal(a: Any, b: Any) -> bool:
    """Equal to the bit, through dictionaries and lists."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def stopped_and_resumed(project: Path, *more: str, then: tuple[str, ...] = (), steps: int = 40) -> tuple[Run, Run]:
    """An uninterrupted run, and one that a signal to rank 1 stops and that goes on, with `then` as well."""
    more = ("--train.steps", str(steps), "--eval.every_steps", "1000", *more)
    whole = run(project, *more, run_id="whole")
    stopped = run(project, *more, ends=75, run_id="again", DDP_FAULTS="term@rank=1,step=4,phase=backward")
    assert 4 <= stopped.outcome["step"] < steps
    resumed = run(project, *more, *then, run_id="again", DDP_ATTEMPT="1")
    assert "resumed from" in resumed.output
    return whole, resumed


def of_training(found: Run, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in found.metrics if "loss" in row}


def own_tests(project: Path, *names: str) -> None:
    """The project's own tests."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *names],
        cwd=project,
        env=environment(TEST_PATIENCE="3"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


def in_project(project: Path, code: str) -> str:
    """What `code` prints, run in the project."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=environment(PYTHONPATH=str(project / "src"), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# One process over the whole validation set, with the network and the data set `val` of the project.
VALIDATE = """
import torch, sys
from digits.config import Settings
from digits.data import *
from digits.ddp import load_settings
from digits.evaluate import add_up
from digits.model import build_model
settings, _ = load_settings(Settings, {arguments!r}, strict_variables=False)
network = build_model(settings.model)
network.load_state_dict(torch.load({file!r}, weights_only=True)["objects"]["model"])
val = {val}
print(*add_up(network, [[torch.stack(part) for part in zip(*val)]], torch.device("cpu"), lambda: None).tolist())
"""


def validated(project: Path, found: Run, arguments: list[str], val: str) -> list[float]:
    file = max((found.dir / "checkpoints").glob("step_*")) / "state.pt"
    printed = in_project(project, VALIDATE.format(arguments=[*QUIET, *arguments], file=str(file), val=val))
    return [float(word) for word in printed.split()]


# ---------------------------------------------------------------------------------------------------- all pages


def test_every_page_is_in_the_index_and_says_what_checks_it() -> None:
    index = (recipe_pages.RECIPES / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        if page != "index.md":
            assert f"]({page}" in index, f"{page} is not in the table of wishes"
            assert "**What checks it:**" in (recipe_pages.RECIPES / page).read_text(encoding="utf-8"), page
            assert f'"{page}"' in Path(__file__).read_text(encoding="utf-8"), f"no test is about {page}"


# Page, the family that it is for, and the section of it, where its sections exclude each other.
CASES = [
    ("augmentation.md", "classifier", ""),
    ("batchnorm.md", "classifier", ""),
    ("dropout.md", "custom", ""),
    ("early-stopping.md", "custom", ""),
    ("hugging-face.md", "causal-lm", ""),
    ("image-folder.md", "classifier", ""),
    ("optimizer.md", "custom", "Another optimiser"),
    ("optimizer.md", "custom", "Parameter groups"),
    ("predictions.md", "custom", ""),
    ("pretrained.md", "classifier", ""),
    ("schedule.md", "custom", "Another schedule"),
    ("schedule.md", "custom", "A scheduler of torch"),
    ("schedule.md", "custom", "When a metric stands still"),
    ("schedule.md", "custom", "Learning rate by world size"),
    ("validation-sets.md", "custom", ""),
    ("webdataset.md", "classifier", ""),
]


@pytest.mark.parametrize(("page", "family", "section"), CASES)
def test_code_of_a_page_fits_a_fresh_project(
    fresh: Callable[[str], Path], tmp_path: Path, page: str, family: str, section: str
) -> None:
    """Unmarked, since a change of the template breaks a page in silence; the slow tests see what its code does."""
    project = tmp_path / "project"
    shutil.copytree(fresh(family), project)
    for path in recipe_pages.follow(page, project, *filter(None, [section])):
        if path.suffix == ".py":
            compile(path.read_text(encoding="utf-8"), path, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "family", "section"), CASES)
def test_code_of_a_page_is_formatted_and_typed(
    made: Make, mypy_cache: Path, page: str, family: str, section: str
) -> None:
    project = made(page, family, *filter(None, [section]))
    for words in (
        ["ruff", "check", "--quiet", "--select", "I", "--fix", "src"],  # the order of imports is left to it
        ["ruff", "format", "--diff", "src"],
        ["mypy", "--cache-dir", str(mypy_cache), "--ignore-missing-imports", "src"],
    ):
        command = [sys.executable, "-m", *words]
        checked = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


# ----------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_a_run_without_pictures(made: Make) -> None:
    page = "no-pictures.md"
    project = made(page)
    few = [word for word in QUIET if word not in ("--sample.every_steps", "0")]
    ended = train(project, *few, "--train.steps", "6")
    assert ended.code == 0, ended.output
    assert not list((ended.dir / "samples").iterdir())
    assert [row["step"] for row in ended.metrics if "val_accuracy" in row] == [6]

    (arguments,) = recipe_pages.arguments(page)
    neither = train(project, *few, *arguments, "--train.steps", "6", "--eval.every_steps", "0")
    assert neither.code == 0, neither.output
    assert not list((neither.dir / "samples").iterdir())
    assert not [row for row in neither.metrics if "val_accuracy" in row]
    assert list((neither.dir / "checkpoints").glob("step_00000006"))


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_one_batch(fresh: Callable[[str], Path]) -> None:
    page, project = "accumulating.md", fresh("custom")
    (arguments,) = recipe_pages.arguments(page)
    assert arguments[::2] == ["--train.batch_size", "--train.accumulate"]
    same = ("--train.steps", "6", "--eval.every_steps", "0")
    once = run(project, *same, "--train.batch_size", "8", "--train.accumulate", "1")
    added = run(project, *same, "--train.batch_size", "2", "--train.accumulate", arguments[3])
    assert list(of_training(added, "loss").values()) == pytest.approx(
        list(of_training(once, "loss").values()), rel=1e-5
    )
    assert list(of_training(added, "grad_norm").values()) == pytest.approx(
        list(of_training(once, "grad_norm").values()), rel=1e-4
    )


@pytest.mark.slow
def test_dropout_goes_on_with_its_masks_and_differs_between_ranks(made: Make) -> None:
    project = made("dropout.md")
    whole, resumed = stopped_and_resumed(project, "--model.dropout", "0.5")
    assert equal(state(whole)["objects"], state(resumed)["objects"])
    assert equal(state(whole)["rng"], state(resumed)["rng"])
    first, second = state(whole)["rng"]
    assert not equal(first["torch"], second["torch"])
    own_tests(project, "tests/test_parity.py", "-k", "2-1")


@pytest.mark.slow
def test_early_stopping_ends_all_ranks_at_one_step_and_stays_ended(made: Make) -> None:
    project = made("early-stopping.md")
    # A rate so small that no answer changes: the first evaluation stays the best one.
    still = (
        "--train.learning_rate",
        "1e-12",
        "--train.patience",
        "3",
        "--eval.every_steps",
        "20",
        "--train.steps",
        "400",
    )
    ended = run(project, *still, run_id="early")
    assert ended.outcome["outcome"] == "done"
    assert "early stop at step 80" in ended.output  # the best at 20, and three more evaluations
    for rank in (0, 1):
        assert '"step": 80' in (ended.dir / "heartbeats" / f"rank{rank}.json").read_text()
    assert list((ended.dir / "checkpoints").glob("step_00000080"))

    again = run(project, *still, run_id="early", DDP_ATTEMPT="1")
    assert again.outcome["outcome"] == "done"
    assert max(row["step"] for row in again.metrics) == 80
    assert "training is done: early stop: no better value than" in again.outcome["reason"]

    stopped = run(project, *still, ends=75, run_id="halves", DDP_FAULTS="term@rank=1,step=22,phase=backward")
    assert 22 <= stopped.outcome["step"] < 80
    resumed = run(project, *still, run_id="halves", DDP_ATTEMPT="1")
    assert "early stop at step 80" in resumed.output


@pytest.mark.slow
def test_each_validation_set_has_its_metrics(made: Make) -> None:
    project = made("validation-sets.md")
    ended = run(project, "--train.steps", "8", "--eval.every_steps", "4")
    for name in ("val_accuracy", "noisy_val_accuracy"):
        assert [row["step"] for row in ended.metrics if name in row] == [4, 8]
    right, count = validated(project, ended, [], 'more_validation_sets(settings.data)["noisy"]')
    (found,) = (row["noisy_val_accuracy"] for row in ended.metrics if row["step"] == 8 and "noisy_val_accuracy" in row)
    assert found == pytest.approx(right / count)


@pytest.mark.slow
def test_another_optimiser_trains_like_one_process(made: Make) -> None:
    project = made("optimizer.md", "custom", "Another optimiser")
    groups = state(run(project, "--train.steps", "4"))["objects"]["optimizer"]["param_groups"]
    assert [(group["momentum"], group["nesterov"]) for group in groups] == [(0.9, True)]
    own_tests(project, "tests/test_parity.py", "-k", "2-1")


@pytest.mark.slow
def test_parameter_groups_keep_what_is_theirs_and_train_like_one_process(made: Make) -> None:
    project = made("optimizer.md", "custom", "Parameter groups")
    ended = run(project, "--train.steps", "4", "--train.weight_decay", "0.5")
    groups = state(ended)["objects"]["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert [len(group["params"]) for group in groups] == [3, 3]
    own_tests(project, "tests/test_parity.py", "-k", "2-1")


@pytest.mark.slow
def test_the_rate_follows_the_schedule_and_the_ranks(made: Make) -> None:
    project = made("schedule.md", "custom", "Another schedule", "Learning rate by world size")
    steps = ("--train.steps", "10", "--train.warmup_steps", "2", "--train.learning_rate", "0.01")
    ended = run(project, *steps, "--train.batch_size", "8", "--train.reference_batch", "64")
    shape = [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1 - math.sqrt(0.5)]
    scaled = math.sqrt(2 * 8 / 64)
    rates = of_training(ended, "learning_rate")
    assert list(rates.values()) == pytest.approx([0.01 * scaled * part for part in shape], rel=1e-5)

    settings = project / "configs/train.yaml"
    settings.write_text(settings.read_text().replace("train:\n", "train:\n  reference_batch: 64\n"))
    parity = next((project / "tests").rglob("test_parity.py"))  # as the page says
    parity.write_text(parity.read_text().replace("STEPS = [", 'STEPS = ["--train.reference_batch", "0", ', 1))
    own_tests(project, str(parity), "-k", "2-1")


@pytest.mark.slow
def test_a_scheduler_of_torch_goes_on_after_a_stop(made: Make) -> None:
    project = made("schedule.md", "custom", "A scheduler of torch")
    whole, resumed = stopped_and_resumed(project, "--train.learning_rate", "0.01")
    assert equal(state(whole)["objects"], state(resumed)["objects"])
    rates = list(of_training(resumed, "learning_rate").values())
    expected = [0.005 * (1 + math.cos(math.pi * step / 10)) for step in range(1, 10)] + [0.01]
    assert rates[:10] == pytest.approx(expected, rel=1e-5)
    assert rates == list(of_training(whole, "learning_rate").values())


@pytest.mark.slow
def test_a_metric_that_stands_still_lowers_the_rate_also_after_a_stop(made: Make) -> None:
    project = made("schedule.md", "custom", "When a metric stands still")
    train_py = project / "src/digits/train.py"
    train_py.write_text(train_py.read_text().replace("metrics[METRIC])", "0.5)"))
    more = ("--train.learning_rate", "0.01", "--eval.every_steps", "2")
    stopped = run(
        project, *more, "--train.steps", "20", ends=75, run_id="again", DDP_FAULTS="term@rank=1,step=5,phase=backward"
    )
    assert 5 <= stopped.outcome["step"] < 20
    whole = run(project, *more, "--train.steps", "20", run_id="whole")
    resumed = run(project, *more, "--train.steps", "20", run_id="again", DDP_ATTEMPT="1")
    rates = of_training(whole, "learning_rate")
    assert {step: rates[step] for step in (1, 10, 11, 18, 19)} == {1: 0.01, 10: 0.01, 11: 0.005, 18: 0.005, 19: 0.0025}
    assert of_training(resumed, "learning_rate") == rates
    assert equal(state(whole)["objects"], state(resumed)["objects"])


@pytest.mark.slow
def test_a_run_goes_on_with_another_rate_and_more_steps(fresh: Callable[[str], Path]) -> None:
    project, settings = fresh("custom"), ("--train.warmup_steps", "0", "--eval.every_steps", "0")
    run(project, *settings, "--train.steps", "4", "--train.learning_rate", "0.01", run_id="longer")
    ended = run(project, *settings, "--train.steps", "8", "--train.learning_rate", "0.001", run_id="longer")
    assert "train.learning_rate 0.01 -> 0.001" in ended.output
    rates = list(of_training(ended, "learning_rate").values())
    expected = [
        rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        for rate, steps, own in ((0.01, 4, range(4)), (0.001, 8, range(4, 8)))
        for step in own
    ]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_predictions_come_in_order_from_any_number_of_ranks(made: Make) -> None:
    project = made("predictions.md")
    trained = run(project, "--train.steps", "20", "--train.batch_size", "8", "--eval.every_steps", "20")
    with_source = environment(PYTHONPATH=str(project / "src"), OMP_NUM_THREADS="1")

    def do(*words: str) -> None:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=project, env=with_source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    export = str(trained.dir / "export")
    do("digits.ddp.export", str(trained.dir))
    do("digits.predict", export, "one.csv")
    do("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "digits.predict", export, "two.csv")
    one = [line.split(",") for line in (project / "one.csv.0").read_text().splitlines()]
    two = [line.split(",") for rank in range(2) for line in (project / f"two.csv.{rank}").read_text().splitlines()]
    assert [int(index) for index, _ in one] == list(range(114))
    answers = {int(index): float(answer) for index, answer in two}
    assert len(two) == 114
    assert answers == pytest.approx({int(index): float(answer) for index, answer in one}, abs=1e-5)
    truth = "from digits.data import *; print(*build_datasets(DataSettings())[1].tensors[1].tolist())"
    right = [
        (answers[index] > 0.5) == (float(each) > 0) for index, each in enumerate(in_project(project, truth).split())
    ]
    found = next(row["val_accuracy"] for row in reversed(trained.metrics) if "val_accuracy" in row)
    assert sum(right) / 114 == pytest.approx(found)


@pytest.mark.slow
def test_pretrained_parts_are_loaded_and_frozen_ones_stay(made: Make) -> None:
    project = made("pretrained.md", "classifier")
    before = run(project, *SMALL, "--train.steps", "4", "--eval.every_steps", "0", run_id="before")
    exported = subprocess.run(
        [sys.executable, "-m", "digits.ddp.export", str(before.dir)],
        cwd=project,
        env=environment(PYTHONPATH=str(project / "src")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert exported.returncode == 0, exported.stderr
    from safetensors.torch import load_file

    export = project / "runs/first/export"  # where the page says that it is
    shutil.copytree(before.dir / "export", export)
    old = load_file(export / "weights.safetensors")
    larger = (
        "--config",
        "configs/finetune.yaml",
        "--train.batch_size",
        "8",
        "--model.stages",
        "2",
        "--model.blocks",
        "1",
    )
    whole, resumed = stopped_and_resumed(project, *larger)
    assert "parts loaded; new in the network: ['blocks.1." in whole.output
    assert equal(state(whole)["objects"], state(resumed)["objects"])
    new = state(resumed)["objects"]["model"]
    kept = {name for name in old if name.startswith(("first.", "blocks.0."))}
    assert len(kept) >= 6
    assert all(torch.equal(old[name], new[name]) for name in kept)
    trained = {name for name in new if name not in kept}
    assert trained >= {"last.bias", "blocks.1.conv1.weight"}
    assert not torch.equal(old["last.bias"], new["last.bias"])

    torch.save({"else": torch.zeros(1)}, project / "else.pt")
    for wrong, said in (
        (("--train.pretrained", "else.pt"), "no tensor in else.pt fits the network"),
        (("--train.frozen", "blocks.0. backbone."), "nothing begins with ['backbone.']"),
    ):
        refused = train(project, *QUIET, *SMALL, *wrong)
        assert refused.code == 78, refused.output
        assert said in refused.output


@pytest.mark.slow
def test_statistics_of_batchnorm_are_the_same_in_an_evaluation(made: Make) -> None:
    project = made("batchnorm.md", "classifier")
    ended = run(project, *SMALL, "--train.steps", "6", "--eval.every_steps", "6")
    loss, _right, count = validated(project, ended, SMALL, "build_datasets(settings.data)[1]")
    (found,) = (row["val_loss"] for row in ended.metrics if "val_loss" in row)
    assert found == pytest.approx(loss / count, rel=1e-5)
    assert "running_mean" in " ".join(state(ended)["objects"]["model"])


def test_syncbn_does_not_train_on_the_cpu() -> None:
    """When it does, the condition in `wrap` of batchnorm.md can go."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            torch.nn.SyncBatchNorm(3)(torch.randn(4, 3))
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------------------------------- data


@pytest.mark.slow
def test_augmentation_with_workers_resumes_to_the_bit(made: Make) -> None:
    project = made("augmentation.md", "classifier")
    settings = (project / "configs/train.yaml").read_text()
    assert "seed_samples: true" in settings
    workers = ("--loader.workers", "2", "--loader.batch_mb", "0.1")
    whole, resumed = stopped_and_resumed(project, *SMALL, *workers, then=("--loader.workers", "1"))
    assert equal(state(whole)["objects"], state(resumed)["objects"])


# The torchvision of PyPI is built for GPUs: beside a torch for CPUs its compiled operators cannot be loaded, nor it be
# imported without them. Folders and transforms use none: declaring the two that its import asks for will do.
DECLARED = """
from importlib.util import find_spec
from pathlib import Path

import torch

try:
    torch.ops.load_library(next(Path(find_spec("torchvision").origin).parent.glob("_C*.so")))
except OSError:
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@pytest.mark.slow
def test_images_in_folders(made: Make) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision: pip install -e '.[recipes]'")
    from PIL import Image
    from sklearn.datasets import load_digits

    project = made("image-folder.md", "classifier")
    pixels, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(pixels[:300], labels[:300], strict=True)):
        path = project / "images" / ("val" if number % 5 == 0 else "train") / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image.reshape(8, 8) * 15).astype("uint8")).resize((40, 40)).save(path)
    (project / "src/digits/__init__.py").write_text(DECLARED)
    workers = ("--loader.workers", "1", "--loader.batch_mb", "0.1")
    whole, resumed = stopped_and_resumed(project, *SMALL, *workers, steps=14)  # less than an epoch
    assert equal(state(whole)["objects"], state(resumed)["objects"])
    drawn = run(project, *SMALL, "--train.steps", "2", "--sample.every_steps", "2")
    assert list((drawn.dir / "samples").glob("*.png"))

    (project / "images/val/8").rename(project / "images/val/eight")
    refused = train(project, *QUIET, *SMALL)
    assert refused.code == 78, refused.output
    assert "let NAMES be the names of the folders" in refused.output


@pytest.mark.slow
def test_streams_from_tar_files(made: Make) -> None:
    pytest.importorskip("webdataset")
    import numpy
    from sklearn.datasets import load_digits

    project = made("webdataset.md", "classifier")
    pixels, labels = load_digits(return_X_y=True)
    (project / "shards").mkdir()
    for shard in range(8):
        with tarfile.open(project / "shards" / f"{shard}.tar", "w") as file:
            for number in range(40 * shard, 40 * shard + 40):
                content = io.BytesIO()
                numpy.save(content, (pixels[number].reshape(1, 8, 8) / 8 - 1).astype("float32"))
                for ending, data in (("npy", content.getvalue()), ("cls", str(labels[number]).encode())):
                    info = tarfile.TarInfo(f"{number:06}.{ending}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))
    read = in_project(project, STREAM.format(workers=2))
    assert sorted(map(float, read.split())) == sorted(pixels[:320].sum(axis=1).tolist())
    workers = ("--loader.workers", "2", "--loader.batch_mb", "0.1")
    whole, resumed = stopped_and_resumed(project, *SMALL, *workers, steps=14)  # less than an epoch
    assert equal(state(whole)["objects"], state(resumed)["objects"])


# What two ranks read in an epoch with DataLoader's workers: each sample by the sum of its pixels.
STREAM = """
from torch.utils.data import DataLoader
from digits.data import DataSettings, build_datasets
if __name__ == "__main__":
    for rank in range(2):
        stream, _ = build_datasets(DataSettings())
        stream.rank, stream.ranks = rank, 2
        stream.set_epoch(3)
        for image, _ in DataLoader(stream, batch_size=None, num_workers={workers}):
            print(((image + 1) * 8).sum().item())
"""


@pytest.mark.slow
def test_a_hugging_face_data_set_and_tokenizer(made: Make) -> None:
    for name in ("datasets", "transformers", "tokenizers"):
        pytest.importorskip(name)
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    project = made("hugging-face.md", "causal-lm")
    texts = [topics[name] for name in sorted(topics)[:20]]
    (project / "texts").mkdir()
    (project / "texts/all.txt").write_text("\n\n".join(texts))
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=["[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(project / "tokenizer")
    prepared = subprocess.run(
        [sys.executable, "-m", "digits.prepare", "texts", "tokenizer", "prepared", "--context", "32"],
        cwd=project,
        env=environment(PYTHONPATH=str(project / "src"), HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert prepared.returncode == 0, prepared.stderr
    small = ("--train.batch_size", "4", "--model.layers", "1", "--model.width", "16", "--loader.workers", "1")
    small = (*small, "--loader.batch_mb", "0.1")
    whole, resumed = stopped_and_resumed(project, *small, "--sample.every_steps", "1000", "--sample.length", "8")
    assert equal(state(whole)["objects"], state(resumed)["objects"])
    assert any("val_bits_per_token" in row for row in resumed.metrics)
    (text,) = (path.read_text() for path in (resumed.dir / "samples").glob("*.txt"))
    assert "the model goes on" in text
