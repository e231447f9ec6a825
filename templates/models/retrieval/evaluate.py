"""Validation: exact mAP and CMC of every query against the whole gallery, the same numbers however many ranks share it.

Each rank embeds its share of the images, then ranks its own queries against the gallery, which passes by in chunks that
one rank after the other broadcasts. No rank ever holds the gallery of the others, nor queries x gallery: only its own
queries x the images of the largest identity. The shares may differ in size, also be empty, since all ranks know all
sizes before the first chunk and so take part in equally many collectives.

Exact means that no sum depends on its order. The features are rounded to whole numbers (of 2**-24), whose products and
sums stay below 2**53, where float64 adds without rounding; images are ordered by 64-bit integers, in which those that
are equally similar go by their index; and average precision is added up in integers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .ddp import ConfigError, Job, gather, phase, total
from .model import unit_features

METRIC = "val_map"  # the number to watch
HIGHER_IS_BETTER = True
# A table has a row for each image, float64: its features, and in the last columns what data.py says about it.
LABEL, INDEX, IS_QUERY, UNSEEN, ABOUT = -4, -3, -2, -1, 4
LOWEST = torch.iinfo(torch.int64).min  # below every key
BITS = 40  # average precision is counted in units of 2**-40


class EvalSettings(BaseModel, extra="forbid"):
    """When and how to validate."""

    every_steps: int = Field(default=150, ge=0, description="training steps between validations; 0: none")
    batch_size: int = Field(default=128, ge=1, description="images a rank embeds at once")
    chunk: int = Field(default=1024, ge=1, description="queries and gallery images compared at once; bounds the memory")


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    job: Job,
    settings: EvalSettings,
    progress: Callable[[], None],
) -> dict[str, float]:
    """Return the metrics, the same on every rank. All ranks must call it.

    `val_map` is the mean average precision over the queries, `val_rank1` and `val_rank5` (CMC) the share of queries
    with a right image among the nearest 1 and 5, `val_map_unseen` the mAP of the queries of unseen identities. Queries
    without any right image in the gallery are left out. All are NaN if a feature is.

    `batches` yields the items described in `data.py`, this rank's share of them, without repeats. `model` is the bare
    module, as the DDP wrapper may communicate in its forward. `progress` is called after every batch and every chunk.
    Raises ConfigError if no query has an answer.
    """
    table = embed(model, batches, job.device, settings.batch_size, progress)
    is_query = table[:, IS_QUERY] == 1
    queries, gallery = table[is_query], table[~is_query]
    shapes: list[Sequence[int]] = gather(job, tuple(gallery.shape))
    width = max(columns for _, columns in shapes)  # a rank without any image does not know it

    def chunks() -> Iterator[Tensor]:
        for source, (rows, _) in enumerate(shapes):
            for start in range(0, rows, settings.chunk):
                size = min(settings.chunk, rows - start)
                mine = source == job.rank
                piece = gallery[start : start + size] if mine else gallery.new_empty(size, width)
                with phase("agree"):
                    dist.broadcast(piece, source)
                yield piece
                progress()

    sums = torch.cat([score(queries, chunks, settings.chunk), (~table.isfinite()).sum()[None]])
    precision, first, five, count, precision_unseen, _, _, count_unseen, broken = total(job, sums).tolist()
    if count == 0:
        raise ConfigError("no query has an image of its label in the gallery", "raise data.val_fraction")
    found = {METRIC: precision / (count << BITS), "val_rank1": first / count, "val_rank5": five / count}
    if count_unseen:
        found["val_map_unseen"] = precision_unseen / (count_unseen << BITS)
    return dict.fromkeys(found, math.nan) if broken else found


def embed(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    device: torch.device,
    batch_size: int,
    progress: Callable[[], None],
) -> Tensor:
    """Return the table of these images, float64 [N, D + ABOUT], or [0, ABOUT] if there are none, on `device`.

    Kernels are chosen by shape and add up in different orders. So smaller batches are filled up to `batch_size`.
    """
    tables = []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for images, *about in batches:
                blank = images.new_zeros(max(0, batch_size - len(images)), *images.shape[1:])
                features = unit_features(model, torch.cat([images, blank]).to(device, non_blocking=True))
                whole = (features[: len(images)].double() * 2**24).round()
                facts = torch.stack([column.double() for column in about], dim=1)
                tables.append(torch.cat([whole, facts.to(device, non_blocking=True)], dim=1))
                progress()
    finally:
        model.train(was_training)
    return torch.cat(tables) if tables else torch.zeros(0, ABOUT, dtype=torch.float64, device=device)


def order(queries: Tensor, gallery: Tensor) -> Tensor:
    """Return how near each gallery image is to each query, int64 [Q, G]: the higher the nearer, no two of a row equal.

    The cosine in units of 2**-30 stands above the lower 32 bits, which hold the index: of equal ones, the lower wins.
    """
    similarity = queries[:, :-ABOUT] @ gallery[:, :-ABOUT].T  # whole numbers up to 2**48
    return (similarity / 2**18).round().long() * 2**32 - gallery[:, INDEX].long()


def score(queries: Tensor, chunks: Callable[[], Iterable[Tensor]], block: int) -> Tensor:
    """Return sums over this table of queries, int64 [8]: four of all queries, then four of those of unseen identities.

    The four are the average precision (in units of 2**-BITS), how many have a right image in the first place, in the
    first five, and at all. Each call of `chunks` yields the tables of the gallery, on every rank the same. The first
    time the right images of each query are looked up, the second time the images before each of them are counted.
    """
    parts = queries.split(block) if len(queries) else ()
    right = [torch.zeros(len(part), 0, dtype=torch.int64, device=part.device) for part in parts]  # descending
    for chunk in chunks():
        for number, part in enumerate(parts):
            keys = order(part, chunk).masked_fill(part[:, LABEL, None] != chunk[:, LABEL], LOWEST)
            keys = torch.cat([right[number], keys], dim=1).sort(dim=1, descending=True).values
            most = int((keys > LOWEST).sum(dim=1).max())
            right[number] = keys[:, :most].clone()  # a view would keep all columns in memory
    before = [torch.zeros_like(keys) for keys in right]
    for chunk in chunks():
        for part, keys, count in zip(parts, right, before, strict=True):
            count += len(chunk) - torch.searchsorted(order(part, chunk).sort(dim=1).values, keys, right=True)

    sums = torch.zeros(2, 4, dtype=torch.int64, device=queries.device)
    for part, keys, count in zip(parts, right, before, strict=True):
        exists, place = keys > LOWEST, count + 1
        nth = torch.arange(1, keys.shape[1] + 1, device=keys.device)  # of n right images up to place p, precision n / p
        precision = ((nth << BITS) // place * exists).sum(dim=1) // exists.sum(dim=1).clamp(min=1)
        within = [(exists & (place <= places)).any(dim=1) for places in (1, 5)]
        rows = torch.stack([precision, *(found.long() for found in (*within, exists.any(dim=1)))])
        sums += torch.stack([rows.sum(dim=1), (rows * part[:, UNSEEN].long()).sum(dim=1)])
    return sums.flatten()


if __name__ == "__main__":  # python -m {{ package }}.evaluate runs/<id>: measures a checkpoint, see --help
    from .ddp.inference import evaluate_run

    evaluate_run()
