"""What `check` reads, whatever lies there: encodings, notebooks, links in a circle, files that are too long or deep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_scaffold._errors import UsageError
from ddp_scaffold.check.files import SourceFile, collect, kind_of
from ddp_scaffold.check.findings import Finding
from ddp_scaffold.check.python import findings

ALONE = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
ROOT = Path(__file__).resolve().parents[2]


def check(folder: Path) -> list[Finding]:
    """Return the findings in a folder."""
    return list(findings(collect([folder])))


def test_the_projects_that_are_generated_are_clean() -> None:
    files = collect([ROOT / "examples"])
    assert sum(file.kind == "python" for file in files) > 100
    assert [f"{one.file}:{one.line} {one.rule} {one.message}" for one in findings(files)] == []


@pytest.mark.parametrize(
    "content",
    [
        ALONE.encode("utf-8-sig"),
        ALONE.encode("utf-16"),
        ("# -*- coding: latin-1 -*-\n# caf\xe9\n" + ALONE).encode("latin-1"),
        ("# caf\xe9, and nothing says in what\n" + ALONE).encode("latin-1"),
        ALONE.replace("\n", "\r\n").encode(),
        ALONE.replace("\n", "\r").encode(),
    ],
    ids=["utf-8 with a mark", "utf-16", "declared", "undeclared", "CRLF", "CR"],
)
def test_encodings_and_line_ends(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.py").write_bytes(content)
    assert [one.rule for one in check(tmp_path)] == ["DDP101"]


def test_a_notebook_names_the_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["if x:"]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", "!pip install torch\n", "import torch.distributed as dist"],
        },
        {"cell_type": "code", "source": ["%%bash\n", "if [ -f x ]; then"]},
        {"cell_type": "code", "source": "if dist.get_rank() == 0:\n    dist.barrier()"},
    ]
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}), "utf-8")
    assert [(one.rule, one.cell, one.line) for one in check(tmp_path)] == [("DDP101", 3, 2)]


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"cells": [3]}'])
def test_what_is_no_notebook(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.ipynb").write_text(text, "utf-8")
    assert {one.rule for one in check(tmp_path)} <= {"DDP601"}


@pytest.mark.parametrize(
    "text",
    ["x = " + "(" * 3000 + ")" * 3000, "x = " + "-" * 100_000 + "1", "x = 1\0", "x = " + "+".join(["1"] * 20_000)],
    ids=["parentheses", "signs", "a null byte", "a sum"],
)
def test_depth_and_nulls_are_one_remark_and_the_rest_is_checked(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text, "utf-8")
    (tmp_path / "train.py").write_text(ALONE, "utf-8")
    assert [one.rule for one in check(tmp_path) if not one.file.endswith("a.py")] == ["DDP101"]
    assert [one.rule for one in check(tmp_path) if one.file.endswith("a.py")] in ([], ["DDP601"])


def test_a_long_chain_of_elif_is_read(tmp_path: Path) -> None:
    chain = "".join(f"elif x == {n}:\n    y = {n}\n" for n in range(900))
    (tmp_path / "train.py").write_text(f"{ALONE}x = 1\nif x == -1:\n    y = 0\n{chain}", "utf-8")
    assert [one.rule for one in check(tmp_path)] == ["DDP101"]


def test_ten_megabytes_are_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text("x = 1\n" * (10 << 20 >> 2), "utf-8")
    assert [(one.rule, "more than 2 MiB" in one.message) for one in check(tmp_path)] == [("DDP601", True)]


def test_links_in_a_circle_and_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "none.py")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "a" / "train.py").write_text(ALONE, "utf-8")
    assert [one.rule for one in check(tmp_path)] == ["DDP101"]


def test_nothing_is_run_or_imported(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "train.py").write_text(f"open({str(mark)!r}, 'w')\n{ALONE}", "utf-8")
    modules = set(sys.modules)
    assert [one.rule for one in check(tmp_path)] == ["DDP101"]
    assert not mark.exists()
    assert "torch" not in set(sys.modules) - modules


def test_what_git_ignores_and_what_is_installed_is_left_out(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for folder in ("out", "env", "node_modules/x", "third_party", "src"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "train.py").write_text(ALONE, "utf-8")
    (tmp_path / ".gitignore").write_text("out/\nenv/\n", "utf-8")
    assert [file.inside for file in collect([tmp_path])] == ["src/train.py"]
    assert [file.inside for file in collect([tmp_path / "out"])] == ["train.py"]


def test_without_git_virtual_environments_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyvenv.cfg").write_text("", "utf-8")
    (tmp_path / "mine" / "x.py").write_text(ALONE, "utf-8")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "x.py").write_text(ALONE, "utf-8")
    assert [file.inside for file in collect([tmp_path])] == ["dist/x.py"]
    (tmp_path / "pyproject.toml").write_text("", "utf-8")
    assert [file.inside for file in collect([tmp_path]) if file.kind == "python"] == []


def test_a_file_is_there_once_and_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(ALONE, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert [file.path for file in collect(["."])] == ["train.py"]
    assert [file.path for file in collect([str(tmp_path / "train.py"), "train.py"])] == ["train.py"]
    with pytest.raises(UsageError, match="none\\.py"):
        collect(["none.py"])


def test_kinds() -> None:
    named = {
        name: kind_of(name) for name in ("a.py", "a.ipynb", "job.sbatch", ".env", "x.env", ".env.local", "Dockerfile")
    }
    assert list(named.values()) == ["python", "notebook", "shell", "env", "env", "env", "docker"]
    assert kind_of("run", "#!/usr/bin/env python3") == "python"
    assert kind_of("run", "#!/bin/bash -l") == "shell"


def test_tests_are_read_but_not_judged() -> None:
    helper = SourceFile("tests/helper.py", ALONE, "python", "tests/helper.py")
    assert list(findings([helper])) == []


LOOP = """
import torch
from torch.nn.parallel import DistributedDataParallel
%s

def main(rank, world_size, model, loader, optimizer):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world_size)
    %s
    for images in loader:
        loss = wrapped(images)
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


@pytest.mark.parametrize(
    ("above", "wraps"),
    [
        ("", "wrapped = DistributedDataParallel(model)"),
        ("", "wrapped = (DistributedDataParallel if world_size > 1 else Bare)(model)"),
        ("", "wrapped = (Bare if world_size == 1 else torch.nn.parallel.DistributedDataParallel)(model)"),
        ("", "make = torch.nn.parallel.DistributedDataParallel\n    wrapped = make(module=model)"),
        ("class Wrapper(DistributedDataParallel):\n    pass", "wrapped = Wrapper(model)"),
    ],
    ids=["by name", "or a class of its own", "the other way round", "by another name", "by an heir"],
)
def test_a_model_is_wrapped_in_many_ways(tmp_path: Path, above: str, wraps: str) -> None:
    """Only a program of several ranks is told what its steps cost."""
    (tmp_path / "train.py").write_text(LOOP % (above, wraps))
    assert [one.rule for one in check(tmp_path)] == ["DDP401"]


def test_what_is_not_wrapped_is_not_told_what_its_steps_cost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP % ("", "wrapped = model"))
    assert check(tmp_path) == []


BUILDING = """
from torch.nn.parallel import DistributedDataParallel
from models import MODELS


def build_model(name):
    return DistributedDataParallel(MODELS[name]().cuda())
"""
CALLING = """
from build import build_model


def train(loader, optimizer):
    model = build_model("resnet")
    for images in loader:
        loss = model(images)
        loss.backward()
        print(loss.item())
"""


@pytest.mark.parametrize(
    ("starts", "found"),
    [("from engine import train\nfrom launch import start\nstart(train)\n", ["DDP401"]), ("", [])],
    ids=["that somebody starts", "that nobody starts"],
)
def test_a_loop_that_trains_what_another_file_wraps(tmp_path: Path, starts: str, found: list[str]) -> None:
    """The file that wraps neither imports the loop nor makes the group."""
    (tmp_path / "build.py").write_text(BUILDING)
    (tmp_path / "models.py").write_text("MODELS = {}\n")
    (tmp_path / "engine.py").write_text(CALLING)
    (tmp_path / "main.py").write_text(starts)
    assert [one.rule for one in check(tmp_path)] == found
