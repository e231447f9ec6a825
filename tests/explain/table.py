"""Print, kind by kind, how many of the look-alike logs come out right, honestly unknown, or wrong.

python tests/explain/table.py
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "scaffold")]
from lookalikes import CASES, Case  # noqa: E402

from ddp_scaffold.explain.explain import explain  # noqa: E402
from ddp_scaffold.explain.explanation import Verdict  # noqa: E402


def answer(case: Case, folder: Path) -> Verdict:
    """Return the verdict about a case, read from a file."""
    path = folder / "job.out"
    path.write_text(case.log)
    return explain([str(path)])[0].verdict


def outcome(case: Case, verdict: Verdict) -> str:
    """Return right, unknown (also: the right kind, and no rank where the log has one) or wrong."""
    kind = verdict.kind in {case.kind, *case.also}
    if kind and verdict.first_ranks == case.ranks:
        return "right"
    if verdict.confidence == "unknown" or (kind and verdict.first_ranks is None):
        return "unknown"
    return "wrong"


def main() -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            verdict = answer(case, Path(name))
            result = outcome(case, verdict)
            counts[case.kind][result] += 1
            if result != "right":
                print(
                    f"{case.name}: {case.kind} {case.ranks} came out as {verdict.kind} {verdict.first_ranks}"
                    f" ({verdict.confidence})"
                )
    print(f"{'kind':26}right  unknown  wrong")
    for kind, row in sorted(counts.items()):
        print(f"{kind:26}{row['right']:5}{row['unknown']:9}{row['wrong']:7}")
    total = sum(counts.values(), Counter())
    print(f"{'all':26}{total['right']:5}{total['unknown']:9}{total['wrong']:7}")


if __name__ == "__main__":
    main()
