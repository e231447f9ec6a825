"""What can be said of every model family without training it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cross_section import every
from family_runs import FAMILIES, PROMISED, ROOT, SHALLOW, SHORT, train
from launch_helpers import environment

pytest.importorskip("torch")
Family = Callable[..., Path]


def test_every_family_stands_in_the_table_of_the_documentation() -> None:
    assert sorted(PROMISED) == FAMILIES


@pytest.mark.parametrize("model", every(4, FAMILIES))
def test_linters_have_nothing_to_say(model: str, family: Family) -> None:
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        tool(family(model), *command)


@pytest.mark.slow  # `diffusion` is looked at in tests/runtime
@pytest.mark.parametrize("model", FAMILIES)
def test_the_type_checker_has_nothing_to_say(model: str, family: Family, mypy_cache: Path) -> None:
    tool(family(model), "mypy", "--cache-dir", str(mypy_cache))


def tool(project: Path, *command: str) -> None:
    found = subprocess.run([sys.executable, "-m", *command], cwd=project, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("model", every(4, FAMILIES))
def test_files_stay_short(model: str, family: Family) -> None:
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in (family(model) / "src" / "digits").glob("*.py")
    }
    lengths.pop("train.py")  # it is read from top to bottom, and has what it needs for that
    assert max(lengths.values()) <= 200, lengths


EXPORTED = """
import yaml, safetensors.torch
from pathlib import Path
from digits.ddp.export import weights
from digits.model import ModelSettings, build_model

built = build_model(ModelSettings())
network = built[0] if isinstance(built, tuple) else built
tensors, tied = weights(network.state_dict())
safetensors.torch.save_file(tensors, "weights.safetensors", metadata={"format": "pt", **tied})
Path("settings.yaml").write_text(yaml.safe_dump({"model": ModelSettings().model_dump()}))
print(sum(tensor.double().sum().item() for tensor in network.state_dict().values()))
"""
LOADED = """
import sys
{snippet}
print(sum(tensor.double().sum().item() for tensor in network.state_dict().values()))
assert not [name for name in sys.modules if name.startswith("digits.ddp")]
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", every(4, FAMILIES))
def test_exported_weights_load_where_ddp_is_not(model: str, family: Family, tmp_path: Path) -> None:
    """With the lines of the project's README."""
    pytest.importorskip("safetensors")
    readme = (family(model) / "README.md").read_text()
    snippet = readme.split("### The weights alone")[1].split("```python\n")[1].split("```")[0]
    saved = python(family(model) / "src", EXPORTED, tmp_path)
    assert saved.returncode == 0, saved.stderr
    bare = tmp_path / "src/digits"
    shutil.copytree(family(model) / "src/digits", bare, ignore=shutil.ignore_patterns("ddp", "__pycache__"))
    assert not (bare / "ddp").exists()
    loaded = python(bare.parent, LOADED.format(snippet=snippet), tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == saved.stdout, "other weights"


# A value that does not fit the data or another value, and what is said of it: what is wrong, and what to do.
MISFITS = {
    "causal-lm": ("--model.width 60", "model.width = 60 is no multiple of 8, twice model.heads\n  -> positions"),
    "diffusion": ("--model.levels 5", "model.levels = 5 needs sides that are multiples of 16, not 8x8\n  -> lower"),
    "masked-lm": ("--model.heads 3", "model.width = 64 is no multiple of 6, twice model.heads\n  -> positions"),
    "rectified-flow": ("--model.patch 3", "model.patch = 3 needs sides that are multiples of it, not 8x8\n  -> change"),
    "retrieval": ("--model.levels 4", "model.levels = 4 needs sides of 16 pixels or more, not 8x8\n  -> lower"),
}
LOADING = "from digits.config import Settings\nfrom digits.ddp import load\nload(Settings, strict_variables=False)"


@pytest.mark.parametrize("model", every(6, list(MISFITS)))
def test_a_model_that_does_not_fit_its_data_is_refused_with_the_settings(
    model: str, family: Family, tmp_path: Path
) -> None:
    """Before the process does anything with the other ranks."""
    arguments, message = MISFITS[model]
    ended = python(family(model) / "src", LOADING, tmp_path, *arguments.split())
    assert ended.returncode == 78, ended.stderr
    assert f"error: {message}" in ended.stderr


def test_a_default_that_does_not_fit_the_data_is_refused_like_a_value_that_is_given(
    family: Family, tmp_path: Path
) -> None:
    """As after an edit of the constants in data.py: not a traceback, and another value can be given."""
    code = f"from digits import data\ndata.IMAGE_SHAPE = (3, 9, 9)\n{LOADING}"
    refused = python(family("diffusion") / "src", code, tmp_path)
    assert (refused.returncode, refused.stdout) == (78, "")
    assert "error: model.levels = 2 needs sides that are multiples of 2, not 9x9\n  -> lower model" in refused.stderr
    assert python(family("diffusion") / "src", code, tmp_path, "--model.levels", "1").returncode == 0


# Sizes that a network is said to take: its family, what follows from an edit in data.py, and settings.
FITS = [
    ("retrieval", (1, 7, 9), {"levels": 1}),
    ("retrieval", (1, 28, 28), {"levels": 3}),
    ("retrieval", (3, 7, 9), {"levels": 2}),
    ("classifier", (1, 7, 9), {"stages": 6}),
    ("classifier", (1, 1, 28), {"stages": 3}),
    ("diffusion", (1, 7, 9), {"levels": 1}),
    ("diffusion", (1, 12, 20), {"levels": 3}),
    ("rectified-flow", (1, 7, 9), {"patch": 1}),
    ("rectified-flow", (1, 6, 9), {"patch": 3}),
]
TRAINS = """
import json, sys, torch
from digits import data
shape, settings = json.loads(sys.argv[1])
data.IMAGE_SHAPE = tuple(shape)
from digits.model import ModelSettings, build_model, training_loss

network = build_model(ModelSettings(**settings))
loss, _ = training_loss(network, (torch.rand(4, *shape), torch.tensor([0, 1, 0, 1])))
loss.backward()
assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
"""


@pytest.mark.parametrize(("model", "shape", "settings"), every(10, FITS))
def test_sizes_that_a_network_takes_are_not_refused(
    model: str, shape: tuple[int, ...], settings: dict[str, int], family: Family, tmp_path: Path
) -> None:
    trained = python(family(model) / "src", TRAINS, tmp_path, json.dumps([shape, settings]))
    assert trained.returncode == 0, trained.stderr


@pytest.mark.slow
def test_the_remedy_for_images_that_are_too_small_can_be_followed(family: Family, tmp_path: Path) -> None:
    for side, levels, remedy in ((1, "1", "pad the images in data.py"), (7, "3", "lower model.levels to 2 or less")):
        code = f"from digits import data\ndata.IMAGE_SHAPE = (1, {side}, 28)\n{LOADING}"
        refused = python(family("retrieval") / "src", code, tmp_path, "--model.levels", levels)
        assert refused.returncode == 78, refused.stderr
        assert f"pixels or more, not {side}x28\n  -> {remedy}" in refused.stderr


UNTYPED = """
import os, some_library
class Thing( object ):
    def __init__(self, size = 3): self.size : str = size
    def grow(self, by): return self.size + by
def make(x): return Thing(x).grow("a" + 1)
"""
USES = """
from .vendor.things import Thing, make


class Other(Thing):
    def twice(self) -> int:
        return 2 * int(make(Thing(4).grow(1)))
"""


@pytest.mark.slow
def test_linters_leave_code_of_others_alone(family: Family, tmp_path: Path, mypy_cache: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(family("custom"), project)
    for place in ("src/digits/vendor/things", "third_party/things", "src/third_party", "tests/vendor"):
        (project / place).mkdir(parents=True)
        (project / place / "core.py").write_text(UNTYPED)
        (project / place / "__init__.py").write_text("from .core import Thing, make\n")
    (project / "src/digits/uses.py").write_text(USES.lstrip())
    commands = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "--cache-dir", str(mypy_cache)]]
    for command in commands:
        tool(project, *command)
    (project / "src/digits/core.py").write_text(UNTYPED)
    for command in commands:
        with pytest.raises(AssertionError, match=r"core\.py"):
            tool(project, *command)


GROUPED = """
import torch
from digits.config import Settings
from digits.data import build_datasets, identities
from digits.ddp import load

settings, _ = load(Settings, strict_variables=False)
labels = build_datasets(settings.data)[0].tensors[1]
order = identities(labels, 4)
first, again, second = order(0, 3), order(0, 3), order(1, 3)
assert torch.equal(first, again) and not torch.equal(first, second)
assert len(first) == len(first.unique()) > 0.9 * len(labels), "no sample comes twice"
groups = labels[first].view(-1, 4)
assert (groups == groups[:, :1]).all()
assert all(len(groups[start : start + 16].unique()) == 16 for start in range(0, 48, 16)), "a batch of 64"
few = identities(torch.tensor([5, 5, 5, 6, 6]), 3)(0, 0)
assert sorted(few.tolist()) == [0, 1, 2]
"""


@pytest.mark.slow
def test_the_documented_order_has_groups_of_one_identity(family: Family, tmp_path: Path) -> None:
    text = (ROOT / "docs/models.md").read_text().split("### Batches of identities")[1]
    function, argument = [block.split("```")[0] for block in text.split("```python\n")[1:3]]
    project = tmp_path / "project"
    shutil.copytree(family("retrieval"), project)
    data, loop = project / "src/digits/data.py", project / "src/digits/train.py"
    imports = "from collections.abc import Callable\n\nimport torch\n"
    data.write_text(data.read_text().replace("import torch\n", imports, 1) + f"\n\n{function}")
    text = loop.read_text().replace("import build_datasets\n", "import build_datasets, identities\n")
    loop.write_text(text.replace("        full=options.compile,", f"{argument}        full=options.compile,"))
    tool(project, "ruff", "check", ".")
    tool(project, "ruff", "format", "--check", ".")
    grouped = python(project / "src", GROUPED, tmp_path)
    assert grouped.returncode == 0, grouped.stderr
    run = train(project, *SHORT, *SHALLOW["retrieval"])
    assert run.code == 0, run.output
    assert run.outcome["kind"] == "benign"


def python(source: Path, code: str, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    surroundings = environment(PYTHONPATH=str(source), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=where, env=surroundings, capture_output=True, text=True, check=False)
