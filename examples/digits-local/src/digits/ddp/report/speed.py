"""The numbers beside the metrics of training, in metrics.jsonl and in the report; ddp/meter.py makes them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# In the order of a line. run-directory.md of the documentation says what they mean.
NUMBERS = (
    "step_seconds",
    "samples_per_second",
    "data_wait_share",
    "rank_wait_share",
    "checkpoint_seconds",
    "learning_rate",
    "peak_memory_gib",
    "tflops_per_gpu",
    "mfu",
    "elapsed_seconds",
    "time",
)
SHOWN = {
    "step_seconds": ("a step", "{:.3g} s"),
    "samples_per_second": ("samples a second, all ranks", "{:.4g}"),
    "data_wait_share": ("waiting for data, share of a step", "{:.1%}"),
    "rank_wait_share": ("waiting for other ranks, share of a step", "{:.1%}"),
    "peak_memory_gib": ("peak memory of the fullest GPU", "{:.3g} GiB"),
    "tflops_per_gpu": ("TFLOP/s a GPU", "{:.4g}"),
    "mfu": ("of the GPU's peak (MFU)", "{:.1%}"),
    "checkpoint_seconds": ("stood still for checkpoints", "{:.3g} s"),
}
Rows = Sequence[Mapping[str, Any]]


def without_numbers(row: Mapping[str, Any]) -> set[str]:
    """The names of the metrics in a line, and step: what the line is about."""
    return set(row) - set(NUMBERS)


def speed_rows(metrics: Rows, since: float) -> list[list[str]]:
    """Of each number the median and the last, from the lines written after `since` (unix seconds).

    Seconds stood still are a sum.
    """
    lines = [row for row in metrics if row.get("step_seconds") is not None and (row.get("time") or 0.0) >= since]
    found = []
    for name, (label, form) in SHOWN.items():
        values = [row[name] for row in lines if row.get(name) is not None]
        if not values:
            continue
        middle = [f"{form.format(sum(values))} in all", ""] if name == "checkpoint_seconds" else []
        found.append([label, *(middle or [form.format(statistics.median(values)), form.format(values[-1])])])
    return found
