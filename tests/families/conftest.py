"""One rendered project for each family and preset."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def family(render: Callable[..., Path]) -> Callable[..., Path]:
    """`family("retrieval")` is the project of this family, with the preset `local` or another."""

    @cache
    def rendered(model: str, preset: str = "local") -> Path:
        project = render({"model": model, "preset": preset, "package": "digits"})
        (project / "runs").mkdir()
        return project

    return rendered
