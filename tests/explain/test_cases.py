"""`ddp-scaffold explain` on seven hangs that were made on purpose on two GPUs, each with what a reader can know."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddp_scaffold.explain.explain import explain

CASES = sorted(path.parent for path in (Path(__file__).parent / "cases").glob("*/answer.yaml"))
# What the answers allow besides: where a log does not tell the two apart, either is honest. An order of lines in one
# file is no proof of an order in time, so only a named culprit counts, not how sure the verdict is.
ALSO = {"rank0work": {"missing_rank"}, "shape": {"missing_rank"}}


def test_all_seven_are_there() -> None:
    assert len(CASES) == 7


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_hangs_come_out_right(case: Path) -> None:
    answer = yaml.safe_load((case / "answer.yaml").read_text())
    found = explain([str(case / "log.txt")])[0]
    assert found.verdict.kind in {answer["kind"]} | ALSO.get(case.name, set()), found.verdict
    ranks = set(found.verdict.first_ranks or ())
    assert ranks == set(answer["first_ranks"] or ()), found.verdict
    assert not ranks & set(answer["must_not_blame"])
    assert not {row.rank for row in found.ranks if row.role == "culprit"} & set(answer["must_not_blame"])
