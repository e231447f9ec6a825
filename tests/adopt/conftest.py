"""Repositories to adopt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import adopt_repos
import pytest
from typer.testing import Result

# The cross-section for `make test`; the others are for `make test-update` and `make test-all`.
QUICK = (
    *(
        "test_json",
        "test_a_second_run_and_new_without_the_option_are_refused",
        "test_what_fails_half_way_is_taken_back",
    ),
    "test_the_changed_script_trains_stops_and_goes_on",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ours = item.path.name in ("test_adopt_command.py", "test_adopt_runs.py")
        if ours and item.name.partition("[")[0] not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`repository("mnist", FLAT)` makes it and goes there."""

    def make(name: str, files: dict[str, str]) -> Path:
        directory = adopt_repos.make(tmp_path / name, files)
        monkeypatch.chdir(directory)
        return directory

    return make


@pytest.fixture
def adopt(cli: Callable[..., Result]) -> Callable[..., Result]:
    """`adopt("--json")` adopts the current directory, which must succeed."""

    def run(*args: str) -> Result:
        result = cli("new", ".", "--into-existing", "-y", *args)
        assert result.exit_code == 0, result.output
        return result

    return run
