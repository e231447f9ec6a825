"""What of a long list of similar cases stays in `make test`; the others are for `make test-all`, or `test-long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(
    nth: int, cases: Iterable[Any], ids: Iterable[str] | None = None, others: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """Parameters of a test, of which the first and from it every nth are not marked as `others`. A tuple is several."""
    names: Sequence[str | None] = list(ids) if ids is not None else [None] * len(cases := list(cases))
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[others] if number % nth else [], id=name)
        for number, (case, name) in enumerate(zip(cases, names, strict=True))
    ]
