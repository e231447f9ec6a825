"""The data: Python's own language reference, about 350 kB of prose and examples that Python ships. No download.

To train on your own text, set `data.path` to a directory of .txt files. For anything else, let `build_datasets` return
your own pair of map-style datasets with the same items. Keep three habits: the split depends on nothing but the
settings and the text, so that every rank and every restart makes the same one; reading a sample draws no random number,
so that a resumed run sees what it would have seen; and `__init__` stays cheap, because every rank and every loader
worker runs it. Slow preparation (unpacking, a large vocabulary) belongs in a script that runs before the job.

A token is a byte: there is no vocabulary to build, to ship or to get wrong, and it works for every language.

Paragraphs have very different lengths. A data set with `lengths` gets batches from the loader in which all samples of
a step, on all ranks, are about equally long: little is padded, and no rank waits for one that has more to do.
"""

import re
from pathlib import Path
from pydoc_data.topics import topics  # one module of fixed content for each Python version: use the same on all nodes

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor
from torch.utils.data import Dataset

BYTES = 256  # the vocabulary; beyond it stand two tokens that no text contains
PAD, MASK = BYTES, BYTES + 1
MULTIPLE = 16  # lengths of batches are multiples of it: few shapes for the compiler and the memory allocator
BLANK_LINE = b"\n\n"


class DataSettings(BaseModel, extra="forbid"):
    """What to train on."""

    path: str = Field(default="", description="directory of .txt files, the same for every rank; empty: Python's docs")
    max_length: int = Field(default=256, ge=2, description="bytes of a text; longer paragraphs are cut into several")
    val_fraction: float = Field(default=0.1, gt=0, lt=1, description="share of the paragraphs held out for validation")
    split_seed: int = Field(default=0, ge=0, description="seed of the split; a run and its restarts must share it")


def build_datasets(settings: DataSettings) -> tuple["Texts", "Texts"]:
    """Return the training and the validation set, the same ones on every rank.

    Raises ConfigError if there is no text.
    """
    train, val = split(read_paragraphs(settings.path), settings.val_fraction, settings.split_seed)
    # Validation is read in order: sorted, its batches need little padding, too.
    return Texts(cut(train, settings.max_length)), Texts(sorted(cut(val, settings.max_length), key=len))


class Texts(Dataset[tuple[Tensor, ...]]):
    """Texts of different lengths. An item is (bytes, index): int64 [length] and an int64 scalar.

    The index names the sample whichever rank evaluates it; see `evaluate.py`.
    """

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        self.lengths = [len(text) for text in texts]  # the loader looks for it

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return torch.tensor(list(self.texts[index])), torch.tensor(index)

    @staticmethod
    def collate(samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return a batch: tokens, int64 [N, T], the texts padded to a common length T, and indices, int64 [N]."""
        texts, indices = zip(*samples, strict=True)
        length = -(-max(map(len, texts)) // MULTIPLE) * MULTIPLE
        return torch.stack([F.pad(text, (0, length - len(text)), value=PAD) for text in texts]), torch.stack(indices)


def cut(paragraphs: list[bytes], length: int) -> list[bytes]:
    """Return the paragraphs in pieces of at most so many bytes."""
    return [text[at : at + length] for text in paragraphs for at in range(0, len(text), length)]


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
        from .ddp import ConfigError  # only where it is raised: model.py needs this file, but not ddp/

        problem = f"data.path = {path!r} has no .txt files with two different paragraphs in them"
        raise ConfigError(problem, "name a directory of .txt files that every node can read", "bad_settings")
    return unique
