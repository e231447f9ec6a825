"""The model, its loss and its picture, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from {{ package }}.data import CLASSES, IMAGE_SHAPE, DataSettings, build_datasets
from {{ package }}.ddp.trace.heartbeat import phase, snapshot
from {{ package }}.ddp.watch.whereabouts import waits
from {{ package }}.evaluate import embed
from {{ package }}.model import ModelSettings, build_model, contrastive_loss, training_loss, unit_features
from {{ package }}.sample import GREEN, RED, SampleSettings, draw, save_rows, search

CPU = torch.device("cpu")


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSettings())


def some_batch(size: int) -> tuple[Tensor, Tensor]:
    images, labels = build_datasets(DataSettings())[0].tensors
    which = torch.arange(size) * 61 % len(images)
    return images[which], labels[which]


def test_items_are_what_the_model_expects() -> None:
    train, val = build_datasets(DataSettings(val_fraction=0.2, query_fraction=0.25, unseen=3))
    image, label = train[0]
    assert image.shape == IMAGE_SHAPE
    assert image.dtype == torch.float32
    assert label.dtype == torch.int64
    assert -1 <= train.tensors[0].min() < 0 < train.tensors[0].max() <= 1
    images, labels, index, is_query, unseen = val.tensors
    assert images.shape[1:] == IMAGE_SHAPE
    assert index.tolist() == list(range(len(val)))
    assert is_query.float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert set(labels[unseen].tolist()) == {7, 8, 9}
    assert set(train.tensors[1].tolist()) == {digit + CLASSES * way for digit in range(7) for way in range(8)}
    assert len(build_datasets(DataSettings(unseen=0))[0]) == 8 * round(0.7 * 1797)


def test_every_rank_makes_the_same_split() -> None:
    first, again = build_datasets(DataSettings(split_seed=3)), build_datasets(DataSettings(split_seed=3))
    other = build_datasets(DataSettings(split_seed=4))
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not torch.equal(first[1].tensors[0], other[1].tensors[0])


def test_every_parameter_gets_a_gradient_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    model = new_model()
    training_loss(model, some_batch(8))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert list(model.named_buffers()) == []


def test_the_loss_never_reads_a_value_back_from_the_device() -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    model, (images, labels) = new_model().to("meta"), some_batch(8)
    training_loss(model, (images.to("meta"), labels.to("meta")))[0].backward()


def test_the_loss_is_that_of_its_definition() -> None:
    features = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = [0, 1, 0, 2, 0, 1]
    losses = contrastive_loss(features, torch.tensor(labels), temperature=0.2).tolist()
    for i, found in enumerate(losses):
        others = [j for j in range(6) if j != i]
        chances = dict(zip(others, (features[others] @ features[i] / 0.2).softmax(dim=0), strict=True))
        picks = [-chances[j].log().item() for j in others if labels[j] == labels[i]]
        assert found == pytest.approx(sum(picks) / len(picks) if picks else 0.0, abs=1e-5)


def test_a_batch_without_partners_has_a_finite_gradient() -> None:
    for size in (1, 2):
        model = new_model()
        loss, terms = training_loss(model, (torch.zeros(size, *IMAGE_SHAPE), torch.arange(size)))
        loss.backward()
        assert (loss.item(), terms.item()) == (0, size)
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_rank_that_gathers_the_features_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the forward, where a rank that stands still would be to blame."""
    waiting, all_gather = [], dist.all_gather

    def gathered(rows: list[Tensor], own: Tensor) -> None:
        waiting.append(waits(snapshot(0, "n1")))
        all_gather(rows, own)

    monkeypatch.setattr(dist, "all_gather", gathered)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with phase("forward"):
            training_loss(new_model(), some_batch(4))
    finally:
        dist.destroy_process_group()
    assert waiting == [True, True]


def test_features_are_compared_in_float32_whatever_autocast_says() -> None:
    batch, plain = some_batch(16), nn.Flatten()
    with torch.autocast("cpu", torch.bfloat16):
        half = training_loss(plain, batch)[0]
        assert unit_features(new_model(), batch[0]).dtype == torch.float32
    assert torch.equal(half, training_loss(plain, batch)[0])


def test_training_on_one_batch_lowers_the_loss() -> None:
    model, batch = new_model(), some_batch(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        loss, terms = training_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss / terms).item())
    assert losses[-1] < losses[0] / 2


def test_levels_that_do_not_fit_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.levels = 4 .*\n.*lower model\.levels"):
        ModelSettings(levels=4)


def test_embedding_restores_the_mode_even_when_stopped() -> None:
    model, calls = new_model(), []
    val = build_datasets(DataSettings())[1]
    batches, state = list(DataLoader(val, 16)), torch.get_rng_state()

    def stop_at_the_second_batch() -> None:
        calls.append(model.training)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        embed(model, batches, CPU, 16, stop_at_the_second_batch)
    assert calls == [False, False]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_search_finds_the_nearest_and_knows_which_are_right() -> None:
    val, model = build_datasets(DataSettings())[1], nn.Flatten()
    images, nearest, right = search(model, val, SampleSettings(queries=4), CPU, lambda _: None)
    assert torch.equal(images, val.tensors[0])
    features = unit_features(model, images)
    _, labels, _, is_query, _ = val.tensors
    for (query, *found), marks in zip(nearest.tolist(), right.tolist(), strict=True):
        assert is_query[query]
        similarity = (features @ features[query]).masked_fill(is_query, -2)
        assert found == similarity.topk(5).indices.tolist()
        assert marks == [bool(labels[i] == labels[query]) for i in found]


def test_drawing_disturbs_neither_random_numbers_nor_mode(tmp_path: Path) -> None:
    model, state, notes = new_model(), torch.get_rng_state(), list[str]()
    settings = SampleSettings(queries=3, nearest=4, images=100, batch_size=40)
    val = build_datasets(DataSettings())[1]
    draw(model, val, settings, CPU, notes.append, tmp_path / "samples" / "step_00000100")
    assert notes == ["image 0 of 100", "image 40 of 100", "image 80 of 100"]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["step_00000100.png"]


def test_the_picture_has_green_frames_for_right_and_red_for_wrong_images(tmp_path: Path) -> None:
    path = tmp_path / "rows.png"
    nearest, right = torch.tensor([[0, 1, 2]]), torch.tensor([[True, False]])
    save_rows(torch.full((3, *IMAGE_SHAPE), -1.0), nearest, right, path, scale=2, frame=3)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        side = 2 * IMAGE_SHAPE[1] + 2 * 3 + 3  # with what is white above and to the left
        assert picture.size == (3 * side + 3 * 3 + 3, side + 3)
        seen = [picture.getpixel((3 * 3 + number * side + 4, 4)) for number in (1, 2)]
        assert seen == [tuple(round(255 * part) for part in colour) for colour in (GREEN, RED)]
        assert picture.getpixel((10, 10)) == (0, 0, 0), "an image"
        assert picture.getpixel((0, 0)) == (255, 255, 255)


def test_a_picture_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.png"
    arguments = (torch.zeros(2, *IMAGE_SHAPE), torch.tensor([[0, 1]]), torch.tensor([[True]]), path)
    save_rows(*arguments)
    before = path.read_bytes()
    path.with_name("rows.png.tmp").mkdir()
    with pytest.raises(OSError, match=r"rows\.png\.tmp"):
        save_rows(*arguments)
    assert path.read_bytes() == before
