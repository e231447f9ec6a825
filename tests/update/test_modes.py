"""Files that can be executed: what copier tells git of them, and when it has to."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from copier._main import Worker
from update_helpers import git

from ddp_scaffold.template.copier_calls import modes_left_to_git

ASKING = "_sync_git_index_executable_bit"


@pytest.mark.parametrize(("mode", "asks"), [("true", False), ("", False), ("false", True), ("off", True)])
def test_git_is_asked_after_each_file_only_where_it_does_not_see_modes_itself(
    tmp_path: Path, mode: str, asks: bool
) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", *(["core.fileMode", mode] if mode else ["--unset", "core.fileMode"]))
    before = vars(Worker)[ASKING]  # gone from copier: then modes_left_to_git can go, too
    with suppress(KeyboardInterrupt), modes_left_to_git(tmp_path / "not" / "there"):
        assert (vars(Worker)[ASKING] is before) == asks
        raise KeyboardInterrupt
    assert vars(Worker)[ASKING] is before
