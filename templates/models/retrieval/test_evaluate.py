"""The metrics: exact, whatever the shares of the ranks and the chunks are. Some of it runs in three real processes.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from {{ package }} import evaluate as evaluation
from {{ package }}.data import DataSettings, build_datasets
from {{ package }}.ddp.clocks import Clocks, seconds
from {{ package }}.ddp.errors import ConfigError
from {{ package }}.ddp.start.groups import Job
from {{ package }}.ddp.start.launcher import Place
from {{ package }}.evaluate import ABOUT, BITS, IS_QUERY, LABEL, METRIC, EvalSettings, embed, evaluate, order, score
from {{ package }}.model import training_loss, unit_features

from .test_model import new_model, some_batch

CPU = torch.device("cpu")


def random_items(count: int, classes: int = 5) -> TensorDataset:
    """Vectors of 6 small whole numbers, so that many are equal or equally similar; of one class there is one image."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randint(-1, 2, (count, 6), generator=generator).float()
    labels = torch.randint(0, classes, (count,), generator=generator)
    labels[0] = classes  # a query without an answer
    index = torch.randperm(count, generator=generator) + 2**31  # its own order, and no small numbers
    is_query = torch.rand(count, generator=generator) < 0.3
    is_query[0] = True
    return TensorDataset(vectors, labels, index, is_query, labels >= classes - 2)


def by_definition(items: Dataset[Any], model: nn.Module, places: tuple[int, ...] = (1, 5)) -> list[float]:
    """mAP, CMC and the mAP of unseen identities, query by query, from the whole matrix of similarities."""
    images, labels, index, is_query, unseen = next(iter(DataLoader(items, 10**6)))
    with torch.inference_mode():
        features = unit_features(model.eval(), images).double()
    gallery = [i for i in range(len(images)) if not is_query[i]]
    found = []
    for query in is_query.nonzero().flatten().tolist():
        similarity = {i: round((features[query] @ features[i]).item(), 7) for i in gallery}
        ranked = sorted(gallery, key=lambda i: (-similarity[i], index[i].item()))
        right = [place for place, i in enumerate(ranked, start=1) if labels[i] == labels[query]]
        if right:
            precision = sum(number / place for number, place in enumerate(right, start=1)) / len(right)
            found.append([precision, *(float(right[0] <= place) for place in places), float(unseen[query])])
    *columns, of_unseen = zip(*found, strict=True)
    unseen_precision = [row[0] for row in found if row[-1]]
    return [*(sum(column) / len(found) for column in columns), sum(unseen_precision) / sum(of_unseen)]


def means(sums: list[int]) -> list[float]:
    return [sums[0] / 2**BITS / sums[3], sums[1] / sums[3], sums[2] / sums[3], sums[4] / 2**BITS / sums[7]]


@pytest.mark.parametrize("sizes", [[101], [51, 50], [30, 60, 11], [101, 0], [1, 99, 1]])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_metrics_are_exact_for_every_sharding_and_chunk(sizes: list[int], chunk: int) -> None:
    items, plain = random_items(101), nn.Identity()
    whole = embed(plain, DataLoader(items, 101), CPU, 101, lambda: None)
    assert len(whole[:, :-ABOUT].unique(dim=0)) < len(whole), "some vectors are equal"
    shares = torch.arange(101).split(sizes)
    tables = [embed(plain, DataLoader(Subset(items, share.tolist()), 8), CPU, 8, lambda: None) for share in shares]

    def chunks() -> Iterator[Tensor]:
        for table in tables:
            rows = table[table[:, IS_QUERY] == 0]
            yield from rows.split(chunk) if len(rows) else ()

    parts = [score(table[table[:, IS_QUERY] == 1], chunks, chunk) for table in tables]
    together = torch.stack(parts).sum(dim=0).tolist()
    is_query = whole[:, IS_QUERY] == 1
    assert together == score(whole[is_query], lambda: [whole[~is_query]], 1000).tolist(), "equal to the bit"
    assert means(together) == pytest.approx(by_definition(items, plain), abs=1e-11)


def test_similarities_do_not_depend_on_the_order_of_summation() -> None:
    vectors = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    table = embed(nn.Identity(), [[vectors, *[torch.zeros(50)] * ABOUT]], CPU, 50, lambda: None)
    features = table[:, :-ABOUT]
    assert torch.equal(features, features.round())
    assert torch.equal(features @ features.T, features.flip(1) @ features.flip(1).T)
    assert (features @ features.T).max() < 2**49
    assert torch.equal(order(table[:3], table), torch.cat([order(table[:3], row) for row in table.split(1)], dim=1))


def test_equally_similar_images_go_by_their_index() -> None:
    vectors = torch.tensor([[3.0, 4.0], [1.0, 0.0], [30.0, 40.0], [3.0, 4.0], [0.0, 1.0]])
    about = [torch.zeros(5), torch.tensor([9, 2, 7, 5, 1]), torch.tensor([1, 0, 0, 0, 0]), torch.zeros(5)]
    table = embed(nn.Identity(), [[vectors, *about]], CPU, 5, lambda: None)
    keys = order(table[:1], table[1:])
    assert keys.argsort(descending=True).tolist() == [[2, 1, 3, 0]]
    assert keys.unique().numel() == 4


def test_memory_is_bounded_by_the_chunk_and_the_largest_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, kept, searchsorted = [], [], torch.searchsorted

    def noting_order(queries: Tensor, gallery: Tensor) -> Tensor:
        compared.append(max(len(queries), len(gallery)))
        return order(queries, gallery)

    def noting_search(ranked: Tensor, keys: Tensor, *, right: bool) -> Tensor:
        kept.append(keys.untyped_storage().nbytes())
        return searchsorted(ranked, keys, right=right)

    monkeypatch.setattr(evaluation, "order", noting_order)
    monkeypatch.setattr(torch, "searchsorted", noting_search)
    table = embed(nn.Identity(), DataLoader(random_items(101), 101), CPU, 101, lambda: None)
    table = table[table[:, LABEL].argsort()]  # one identity after the other: chunks differ most
    is_query = table[:, IS_QUERY] == 1
    gallery = table[~is_query]
    score(table[is_query], lambda: gallery.split(7), 7)
    assert max(compared) == 7
    assert max(kept) <= 7 * int(gallery[:, LABEL].long().bincount().max()) * 8, "bytes that a block of queries keeps"


def job_of(rank: int, world_size: int) -> Job:
    place = Place("none", rank, rank, world_size, world_size, "n1", "127.0.0.1", 1, 0, False)
    return Job(place, Clocks(), dist.HashStore(), ("n1",) * world_size, control=dist.group.WORLD)


def shares_of(items: TensorDataset) -> list[Subset[Any]]:
    """Very uneven shares of three ranks: the first has no queries, the last nothing at all."""
    is_query = items.tensors[3]
    first = (~is_query).nonzero().flatten()[:40].tolist()
    return [Subset(items, first), Subset(items, sorted({*range(len(items))} - {*first})), Subset(items, [])]


def one_rank(rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=seconds(60))
    torch.set_num_threads(1)
    share = shares_of(build_datasets(DataSettings())[1])[rank]
    job, settings, found = job_of(rank, world_size), EvalSettings(batch_size=32, chunk=7), []
    for model in (nn.Flatten(), new_model()):
        found.append(evaluate(model, DataLoader(share, 32) if len(share) else (), job, settings, lambda: None))
    model = new_model()
    loss, terms = training_loss(model, [part.chunk(world_size)[rank] for part in some_batch(48)])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.save((found, loss.detach(), terms, gradients), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What three real processes have computed together."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(one_rank, (3, folder), nprocs=3)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(3)]


def test_several_processes_find_what_one_finds(ranks: list[Any]) -> None:
    val = build_datasets(DataSettings())[1]
    for number, model in enumerate((nn.Flatten(), new_model())):
        assert ranks[0][0][number] == ranks[1][0][number] == ranks[2][0][number]
        found = ranks[0][0][number]
        assert list(found) == [METRIC, "val_rank1", "val_rank5", "val_map_unseen"]
        assert list(found.values()) == pytest.approx(by_definition(val, model), abs=1e-3 if number else 1e-9)


def test_the_losses_and_gradients_of_all_processes_add_up_to_those_of_one(ranks: list[Any]) -> None:
    model = new_model()
    loss, terms = training_loss(model, some_batch(48))
    loss.backward()
    assert sum(rank[1] for rank in ranks).item() == pytest.approx(loss.item(), rel=1e-5)
    assert sum(rank[2] for rank in ranks) == terms == 48
    for number, parameter in enumerate(model.parameters()):
        torch.testing.assert_close(sum(rank[3][number] for rank in ranks), parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.fixture
def alone() -> Iterator[Job]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield job_of(0, 1)
    dist.destroy_process_group()


def test_what_cannot_be_measured_is_not_made_up(alone: Job) -> None:
    items, settings, calls = random_items(60), EvalSettings(chunk=10), []
    found = evaluate(nn.Identity(), DataLoader(items, 20), alone, settings, lambda: calls.append(1))
    assert 0 < found[METRIC] < 1
    assert len(calls) > 3 + 2, "at every batch, and at every chunk both times"
    images, *about = items.tensors
    about[-1] = torch.zeros(60, dtype=torch.bool)
    assert "val_map_unseen" not in evaluate(nn.Identity(), [[images, *about]], alone, settings, lambda: None)
    images = images.clone()
    images[3] = torch.nan
    broken = evaluate(nn.Identity(), [[images, *about]], alone, settings, lambda: None)
    assert all(value != value for value in broken.values())
    with pytest.raises(ConfigError, match=r"data\.val_fraction"):
        evaluate(nn.Identity(), DataLoader(Subset(items, [0, 1, 2]), 3), alone, settings, lambda: None)
