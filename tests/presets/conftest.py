"""An installation with the two presets that others extend, and no clusters; stand-ins for commands on the PATH."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from preset_helpers import Tool

from ddp_scaffold.presets import load


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of presets of such an installation, for the tests to add to."""
    directory = tmp_path / "installed"
    directory.mkdir()
    for name in ("local", "generic-slurm"):
        shutil.copy(load.CHECKOUT / f"{name}.yml", directory)
    monkeypatch.setattr(load, "CHECKOUT", directory)
    return directory


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """`tool("sinfo", text)` puts a stand-in on the PATH, which holds nothing else, that prints the text.

    With several texts, the arguments decide: `tool("scontrol", **{"show config": ..., "show partition": ...})`.
    `script=` gives its lines instead. The current directory is empty.
    """
    directory, work = tmp_path / "bin", tmp_path / "work"
    directory.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", str(directory))
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "SCRATCH"):
        monkeypatch.delenv(name, raising=False)

    def make(name: str, text: str | bytes = "", *, script: str = "", **texts: str) -> None:
        cases = ""
        for number, (words, content) in enumerate({"": text, **texts}.items()):
            output = tmp_path / f"{name}.{number}.txt"
            output.write_bytes(content if isinstance(content, bytes) else content.encode())
            cases += f"'{words}'*) exec /bin/cat '{output}' ;;\n" if words else ""
        last = script or (f"exec /bin/cat '{tmp_path / f'{name}.0.txt'}'" if not texts else "exit 1")
        path = directory / name
        path.write_text(f'#!/bin/sh\n# A stand-in for {name}.\ncase "$*" in\n{cases}*) {last} ;;\nesac\n')
        path.chmod(0o755)

    return make
