"""Several processes find what one finds, whatever imports what; a process that dies is made good."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_scaffold.check import processes
from ddp_scaffold.check.files import SourceFile, collect
from ddp_scaffold.check.findings import Finding
from ddp_scaffold.check.processes import divided, found_in
from ddp_scaffold.check.python.parts import concerns, parts_of

HELPER = "import torch.distributed as dist\ndef meet():\n    dist.barrier()\n"
CALLER = "import torch.distributed as dist\n{}\nif dist.get_rank() == 0:\n    {}()\n"


def source(name: str, text: str) -> SourceFile:
    return SourceFile(name, text, "python", name)


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("from b.helper import meet", "meet"),
        ("from b import helper", "helper.meet"),
        ("import b.helper", "b.helper.meet"),
        ("import os, b.helper as h", "h.meet"),
        ("from b import (\n    # the one (of two) that waits\n    helper as h,\n)", "h.meet"),
        ("from b \\\n    import helper", "helper.meet"),
        ("try: from b.helper import *\nexcept ImportError: pass", "meet"),
    ],
)
def test_files_that_import_each_other_stay_together(statement: str, call: str) -> None:
    files = [source("train.py", CALLER.format(statement, call)), source("b/helper.py", HELPER), source("c.py", "x = 1")]
    together = [{file.inside for file in part} for part in parts_of(files)]
    assert {"train.py", "b/helper.py"} in together, together
    assert {"c.py"} in together


def test_parts_are_never_cut_and_nothing_is_lost() -> None:
    parts = [[source(f"{n}{m}.py", "x" * (n * 7 % 5 + 1)) for m in range(n % 3 + 1)] for n in range(20)]
    bins = divided(parts, 4)
    assert sorted(file.inside for files in bins for file in files) == sorted(f.inside for part in parts for f in part)
    for part in parts:
        assert sum(all(file in files for file in part) for files in bins) == 1


def test_what_is_not_about_training_is_looked_through_for_syntax_only() -> None:
    assert not concerns([source("a.py", "print(1)")])
    assert concerns([source("a.py", "print(1)"), source("b.py", "import torch")])
    assert [one.rule for one in found_in([source("a.py", "print(1"), source("b.py", "print(2)")])] == ["DDP601"]


@pytest.fixture
def tree(tmp_path: Path) -> list[SourceFile]:
    for number in range(8):
        folder = tmp_path / f"p{number}"
        folder.mkdir()
        (folder / "helper.py").write_text(HELPER)
        (folder / "train.py").write_text(CALLER.format("from .helper import meet", "meet"))
        (folder / "run.sh").write_text("#!/bin/bash\nexport NCCL_TIMEOUT=1\ntorchrun train.py\n")
    return collect([tmp_path])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def with_cpus(cpus: int) -> None:
        monkeypatch.setattr(processes, "LARGE", 0)
        monkeypatch.setattr(processes, "_may_fork", lambda: True)
        monkeypatch.setattr(processes, "_cpus", lambda: cpus)

    return with_cpus


def test_processes_find_the_same(tree: list[SourceFile], large: Callable[[int], None]) -> None:
    alone = sorted(found_in(tree))
    assert {one.rule for one in alone} >= {"DDP101", "DDP553"}
    large(2)
    assert sorted(found_in(tree)) == alone
    large(1)
    assert sorted(found_in(tree)) == alone


def test_a_process_that_dies_is_made_good(
    tree: list[SourceFile], large: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = sorted(found_in(tree))
    large(2)
    mine = os.getpid()
    real = processes.check_scripts

    def dies(*given: object) -> list[Finding]:
        if os.getpid() != mine:
            os._exit(9)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(processes, "check_scripts", dies)
    assert sorted(found_in(tree)) == alone
