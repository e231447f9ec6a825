"""A text model: batches are dicts with a name in them, texts have unequal lengths, a stream is trained on, dropout."""

DATA = """
import torch
from pydantic import BaseModel
from torch.utils.data import Dataset, IterableDataset

TEXTS = ["the cat sat on the mat", "a stream of words", "one more line", "to be or not to be", "every rank reads all"]
WORDS = sorted({word for text in TEXTS for word in text.split()})
VOCABULARY = {word: number for number, word in enumerate(WORDS, start=2)}


class DataSettings(BaseModel):
    texts: int = 400


def tokens(number):
    words = torch.randint(len(WORDS), (3 + number % 7,), generator=torch.Generator().manual_seed(number))
    ids = torch.tensor([1, *(VOCABULARY[WORDS[word]] for word in words)])
    return {"ids": ids, "name": f"text {number}"}


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    return {"ids": ids, "mask": ids > 0, "name": [sample["name"] for sample in samples]}


class Stream(IterableDataset):
    collate = staticmethod(collate)

    def __init__(self, numbers):
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.numbers), generator=torch.Generator().manual_seed(self.epoch))
        for place in order.tolist():
            yield tokens(self.numbers[place])


class Texts(Dataset):
    collate = staticmethod(collate)

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return tokens(self.numbers[index])


def build_datasets(settings):
    return Stream(range(settings.texts)), Texts(range(10**6, 10**6 + settings.texts // 4))
"""

MODEL = """
import torch
from pydantic import BaseModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .data import VOCABULARY


class ModelSettings(BaseModel):
    width: int = 16


class Words(nn.Module):
    def __init__(self, width, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.norm = nn.LayerNorm(width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, ids):
        hidden, _ = self.rnn(self.norm(self.embed(ids)))
        return self.out(self.drop(hidden))


def build_model(settings):
    return Words(settings.width, len(VOCABULARY) + 2)


def wrap(network, compile=False):
    return DistributedDataParallel(network)


def training_loss(model, batch):
    ids, mask = batch["ids"], batch["mask"]
    logits = model(ids[:, :-1]).float()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum(), mask[:, 1:].sum()
"""

EVALUATE = """
import torch
from pydantic import BaseModel

from .ddp import to_device, total
from .model import training_loss

METRIC = "perplexity"


class EvalSettings(BaseModel):
    every_steps: int = 100
    batch_size: int = 64


def evaluate(model, batches, job, settings, progress):
    sums = torch.zeros(2, device=job.device)
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            sums += torch.stack(training_loss(model, to_device(batch, job.device)))
            progress()
    model.train()
    loss, count = total(job, sums).tolist()
    return {METRIC: torch.tensor(loss / count).exp().item(), "words": int(count)}
"""

SAMPLE = """
import torch
from pydantic import BaseModel

from .data import WORDS


class SampleSettings(BaseModel):
    every_steps: int = 100


def draw(model, dataset, settings, device, progress, path):
    ids = torch.tensor([[1]], device=device)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for step in range(5):
            progress(f"word {step}")
            ids = torch.cat([ids, model(ids)[:, -1:, 2:].argmax(-1) + 2], 1)
    model.train(was_training)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(" ".join(WORDS[number - 2] for number in ids[0, 1:].tolist()))
"""

TRAIN = {"learning_rate": 0.003, "batch_size": 8}
