"""Somebody replaces model and data as the README says: what fails then is a broken promise, and says so."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")
SWAPS = Path(__file__).parent / "swaps"
PAGE = (Path(__file__).parents[2] / "docs/contract.md").read_text()
TESTS = [f"tests/test_{name}.py" for name in ("contract", "commands", "parity", "train", "faults")]


def replaced(project: Path, name: str) -> Path:
    """Replace the example by what stands in `swaps/`, or on the page: four files, the settings, the folder of tests."""
    new = runpy.run_path(str(SWAPS / f"{name}.py")) if name != "page" else page()
    for part in ("data", "model", "evaluate", "sample"):
        (project / "src/digits" / f"{part}.py").write_text(new[part.upper()].lstrip())
    (project / "configs/train.yaml").write_text(new.get("SETTINGS") or yaml.safe_dump({"train": new["TRAIN"]}))
    shutil.rmtree(project / "tests/example")
    return project


def page() -> dict[str, Any]:
    blocks = re.findall(r'```python title="src/myproj/(\w+)\.py"\n(.*?)```', PAGE, re.DOTALL)
    settings = re.findall(r'```yaml title="configs/train.yaml"\n(.*?)```', PAGE, re.DOTALL)
    return {name.upper(): text for name, text in blocks} | {"SETTINGS": settings[0]}


def run(project: Path, *command: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DDP_", "PYTEST"))}
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_page_names_each_test_of_the_contract(render: Callable[..., Path]) -> None:
    text = (render({"package": "digits"}) / "tests/test_contract.py").read_text()
    assert set(re.findall(r"`(test_\w+)`", PAGE)) == set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


@pytest.mark.timeout(300)
def test_the_four_files_of_the_page(render: Callable[..., Path], mypy_cache: Path) -> None:
    """Its tests pass, and nothing is asked of its style: the files are neither formatted nor typed."""
    project = replaced(render({"package": "digits"}), "page")
    (project / "src/digits/mine.py").write_text("import os, sys\nCACHE = {}\ndef f( l ):\n  x = 1; return lambda: l\n")
    for command in (
        ("pytest", "-q", "tests/test_contract.py"),
        ("ruff", "check", "--no-cache", "."),
        ("mypy", "--cache-dir", str(mypy_cache)),
    ):
        code, output = run(project, *command)
        assert code == 0, output
    with (project / "src/digits/mine.py").open("a") as file:
        file.write("def g(x: int) -> str:\n    return x\nprint(nobody_has_defined_this)\n")
    code, output = run(project, "ruff", "check", "--no-cache", ".")
    assert code == 1
    assert "F821" in output
    code, output = run(project, "mypy", "--cache-dir", str(mypy_cache))
    assert code == 1
    assert 'Incompatible return value type (got "int", expected "str")' in output, "what its author writes is held to"


def test_what_the_page_leaves_of_the_settings_keeps_the_best_checkpoint(render: Callable[..., Path]) -> None:
    before = yaml.safe_load((render({"package": "digits"}) / "configs/train.yaml").read_text())
    assert yaml.safe_load(page()["SETTINGS"])["checkpoint"].keys() == before["checkpoint"].keys()
    assert yaml.safe_load(page()["SETTINGS"])["checkpoint"]["keep_best"] is True


def test_batchnorm_on_an_odd_number_of_samples_passes_once_it_does_what_the_test_says(
    render: Callable[..., Path],
) -> None:
    """1001 samples in batches of 10: an epoch of one rank ends with a single sample."""
    project = replaced(render({"package": "digits"}), "page")
    for name, before, after in (
        ("src/digits/model.py", "nn.ReLU(), ", "nn.BatchNorm1d(settings.width), nn.ReLU(), "),
        ("src/digits/data.py", "samples: int = 1000", "samples: int = 1201"),
        ("src/digits/data.py", "800", "1001"),
        ("configs/train.yaml", "batch_size: 32", "batch_size: 10"),
    ):
        text = (project / name).read_text()
        assert before in text
        (project / name).write_text(text.replace(before, after))
    command = ("pytest", "-q", "tests/test_contract.py", "-k", "last_batch")
    code, output = run(project, *command)
    assert code == 1
    assert "What to do: set loader.drop_last to true in configs/train.yaml" in output
    with (project / "configs/train.yaml").open("a") as file:
        file.write("loader:\n  drop_last: true\n")
    code, output = run(project, *command)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["page", *sorted(path.stem for path in SWAPS.glob("*.py"))])
def test_what_replaces_the_example_passes(render: Callable[..., Path], name: str) -> None:
    code, output = run(replaced(render({"package": "digits"}), name), "pytest", "-q", *TESTS)
    assert code == 0, output


BROKEN = {
    "data.py": ("generator = torch.Generator().manual_seed(0)", "generator = torch.Generator()\n    generator.seed()"),
    "model.py": ("return loss, torch.ones_like(loss)", "return loss, torch.full_like(loss, len(x))"),
    "evaluate.py": ("    model.train()\n", ""),
    "sample.py": ("every_steps: int = 0", "every_steps: int = 100"),
}
SAYS = {
    "the_split_repeats_and_its_halves_do_not_overlap": "two calls of build_datasets differ",
    "a_step_repeats_from_the_same_random_state": "from the same random state, two steps had other losses",
    "the_loss_is_a_sum_and_comes_with_the_number_of_its_terms": "a term in batches of 4",
    "evaluation_repeats_returns_numbers_and_restores_the_mode": "evaluate left another mode behind",
    "a_picture_appears_and_training_does_not_notice": "draw wrote no step_00000001.*",
}


@pytest.mark.slow
def test_a_broken_promise_says_why_it_matters_and_what_to_do(render: Callable[..., Path]) -> None:
    project = replaced(render({"package": "digits"}), "page")
    for name, (before, after) in BROKEN.items():
        text = (project / "src/digits" / name).read_text()
        assert before in text
        (project / "src/digits" / name).write_text(text.replace(before, after))
    code, output = run(project, "pytest", "-q", "tests/test_contract.py")
    assert code == 1, output
    assert set(re.findall(r"^FAILED tests/test_contract.py::test_(\w+)", output, re.MULTILINE)) == set(SAYS)
    for found in SAYS.values():
        assert re.search(rf"E +AssertionError: [^\n]*{re.escape(found)}", output), output
    for line in ("Why it matters: ", "What to do: "):
        assert len(re.findall(rf"^E +{line}", output, re.MULTILINE)) == len(SAYS), output
