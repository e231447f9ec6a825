"""The data: Python's own language reference, about 350 kB of prose and examples that Python ships. No download.

To train on your own text, set `data.path` to a directory of .txt files. For anything else, let `build_datasets` return
your own pair of map-style datasets with the same items. Keep three habits: the split depends on nothing but the
settings and the text, so that every rank and every restart makes the same one; reading a sample draws no random number,
so that a resumed run sees what it would have seen; and `__init__` stays cheap, because every rank and every loader
worker runs it. Slow preparation (unpacking, a large vocabulary) belongs in a script that runs before the job.

A token is a byte: there is no vocabulary to build, to ship or to get wrong, and it works for every language.
"""

import re
from pathlib import Path
from pydoc_data.topics import topics  # one module of fixed content for each Python version: use the same on all nodes

import torch
from pydantic import BaseModel, Field
from torch.utils.data import TensorDataset

BYTES = 256  # the vocabulary
BLANK_LINE = b"\n\n"


class DataSettings(BaseModel, extra="forbid"):
    """What to train on."""

    path: str = Field(default="", description="directory of .txt files, the same for every rank; empty: Python's docs")
    context: int = Field(default=128, ge=2, description="bytes that the model sees at once")
    val_fraction: float = Field(default=0.1, gt=0, lt=1, description="share of the paragraphs held out for validation")
    split_seed: int = Field(default=0, ge=0, description="seed of the split; a run and its restarts must share it")


def build_datasets(settings: DataSettings) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation set, the same ones on every rank.

    An item is one window of the text: (bytes,), uint8 [context + 1]. The model reads all but its last byte and predicts
    all but its first. A window begins with the byte that the one before it ends with, so each byte is predicted once.

    Raises ConfigError if there is no text, or too little of it for one window.
    """
    train, val = split(read_paragraphs(settings.path), settings.val_fraction, settings.split_seed)
    return windows(train, settings.context), windows(val, settings.context)


def windows(paragraphs: list[bytes], context: int) -> TensorDataset:
    """Return the windows of the paragraphs, packed one after the other; a rest that fills no window is left out."""
    text = bytearray(BLANK_LINE.join(paragraphs))
    if len(text) <= context:
        from .ddp import ConfigError  # only where it is raised, as below: model.py needs this file, but not ddp/

        problem = f"a part of the text has {len(text)} bytes, and data.context = {context} needs one more than that"
        remedy = "give data.path more text, or change data.context or data.val_fraction"
        raise ConfigError(problem, remedy, "bad_settings")
    # A view: the text is in memory once.
    return TensorDataset(torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, context))


def split(paragraphs: list[bytes], val_fraction: float, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Return the paragraphs to train on and those to validate with, each in their order in the text."""
    order = torch.randperm(len(paragraphs), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = max(1, round(val_fraction * len(paragraphs)))
    val, train = sorted(order[:held_out]), sorted(order[held_out:])
    return [paragraphs[i] for i in train], [paragraphs[i] for i in val]


def read_paragraphs(path: str) -> list[bytes]:
    """Return the paragraphs of the .txt files in `path`, or of Python's documentation, without repetitions.

    A paragraph ends at a blank line. Repetitions are left out because the split must not put one of two equal
    paragraphs into the training and the other into the validation set. Raises ConfigError if there are not even two.
    """
    if path:
        files = sorted(file for file in Path(path).glob("*.txt") if file.is_file())
        text = BLANK_LINE.join(file.read_bytes().replace(b"\r\n", b"\n") for file in files)
    else:
        documents = "\n\n".join(topics[name] for name in sorted(topics))
        # Lines without a letter, the rulers below headings and in tables, would make every score look better.
        text = re.sub(r"^[^\w\n]+$", "", documents, flags=re.MULTILINE).encode()
    paragraphs = [part.strip(b"\n") for part in re.split(rb"\n\s*\n", text) if part.strip()]
    unique = list(dict.fromkeys(paragraphs))
    if len(unique) < 2:
        from .ddp import ConfigError

        problem = f"data.path = {path!r} has no .txt files with two different paragraphs in them"
        raise ConfigError(problem, "name a directory of .txt files that every node can read", "bad_settings")
    return unique
