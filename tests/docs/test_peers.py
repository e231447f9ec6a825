"""The side-by-side tables are what was measured, and the command explains itself without the libraries it compares."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_peers", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_pages_say_what_was_measured(peers: ModuleType) -> None:
    kept = json.loads(peers.KEPT.read_text())
    for path, text in peers.pages(kept).items():
        assert path.read_text() == text, f"{path.name}: python benchmarks/peers.py --table --write"


def test_every_fault_was_measured_on_every_peer(peers: ModuleType) -> None:
    rows = json.loads(peers.KEPT.read_text())["results"]
    assert {(row["fault"], row["peer"]) for row in rows} == {
        (fault, peer) for fault in peers.FAULTS for peer in peers.PEERS
    }


def test_merging_replaces_what_was_measured_again(peers: ModuleType) -> None:
    kept = json.loads(peers.KEPT.read_text())
    row = next(row for row in kept["results"] if (row["fault"], row["peer"]) == ("kill", "project"))
    new = {"peers": {"project": {"versions": {}, "date": "2100-01-01"}}, "results": [{**row, "seconds": 123.0}]}
    merged = peers.merged(kept, new)
    assert len(merged["results"]) == len(kept["results"])
    assert [row["seconds"] for row in merged["results"] if (row["fault"], row["peer"]) == ("kill", "project")] == [
        123.0
    ]
    assert merged["peers"]["plain"] == kept["peers"]["plain"]


def test_help_needs_neither_torch_nor_the_peers() -> None:
    command = [sys.executable, "-I", "-S", str(SCRIPT), "--help"]  # -S: nothing that pip installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install accelerate lightning" in done.stdout


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Timed out\n[rank1]: KeyError: 0\n",
            0,
        ),
        (
            "[rank0]: RuntimeError: Closed\nRoot Cause (first observed failure):\n[0]:\n  time : now\n"
            "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n  error_file: <N/A>\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 7\n",
            1,
        ),
        ("RuntimeError: nobody says which rank\n", None),
    ],
)
def test_who_is_named(peers: ModuleType, tmp_path: Path, text: str, rank: int | None) -> None:
    (tmp_path / "log").write_text(text)
    named, words = peers.who("plain", tmp_path)
    assert named == rank
    assert words
