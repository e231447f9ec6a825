"""What a sample consists of, as text that is equal in two processes if, and only if, the samples are."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..same.layout import fingerprint, kind

MOST = 64  # items of a list or dict that are looked at
Parts = dict[str, str]  # where in the sample -> what is there


def parts_of(sample: Any) -> Parts:
    """For example {"[0]": "float32[8] [0.5, ...] (checksum 1a2b3c4d)", "[1]": "7", " length": "2"}."""
    return dict(_parts(sample))


def _parts(value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    inner: list[tuple[str, Any]] | None = None
    if isinstance(value, torch.Tensor):
        yield where, f"{kind(value)} {fingerprint(value)}"
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), set, frozenset)) or _plain(value):
        yield where, _text(value)
    elif hasattr(value, "tobytes") and str(getattr(value, "dtype", "")) != "object":  # of numpy; images
        size = getattr(value, "shape", getattr(value, "size", ""))
        what = str(getattr(value, "dtype", getattr(value, "mode", type(value).__name__)))
        yield where, f"{what}{list(size)} (checksum {zlib.crc32(value.tobytes()):08x})"
    elif isinstance(value, Mapping):
        inner = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(f"[{place}]", item) for place, item in enumerate(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        inner = [(f".{name}", item) for name, item in vars(value).items()]
    else:
        yield where, type(value).__name__
    if inner is not None and depth < 4:
        for name, item in inner[:MOST]:
            yield from _parts(item, where + without_addresses(name), depth + 1)
        yield f"{where} length", str(len(inner))


def _plain(value: Any) -> bool:
    """A list of nothing but numbers and strings, like the tokens of a text."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value)


def _text(value: Any) -> str:
    text = repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
    return text if len(text) <= 60 else f"{text[:60]}... (checksum {zlib.crc32(text.encode()):08x})"


def without_addresses(text: str) -> str:
    """`text` without the address that a repr ends in: it is another one in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
