"""What lies in examples/ is what the template renders today."""

from __future__ import annotations

import filecmp
import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
spec = importlib.util.spec_from_file_location("examples_render", EXAMPLES / "render.py")
assert spec is not None
assert spec.loader is not None
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", sorted(examples.EXAMPLES))
def test_the_example_equals_a_fresh_render(name: str, tmp_path: Path) -> None:
    fresh = tmp_path / name
    examples.render(name, fresh)
    tracked = {file for file in files(EXAMPLES / name) if "__pycache__" not in file}
    assert tracked == files(fresh), "run `make examples`"
    _, different, unreadable = filecmp.cmpfiles(EXAMPLES / name, fresh, tracked, shallow=False)
    assert (different, unreadable) == ([], []), "run `make examples`"
