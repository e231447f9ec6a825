"""The model, its loss, its validation and its picture, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from {{ package }}.data import IMAGE_SHAPE, NAMES, DataSettings, build_datasets
from {{ package }}.evaluate import add_up
from {{ package }}.model import ModelSettings, build_model, shifted, training_loss
from {{ package }}.sample import BLUE, CELL, MARGIN, RED, SampleSettings, confusion, draw, picture, save

CPU = torch.device("cpu")


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSettings())


def first_batch(size: int) -> tuple[Tensor, Tensor]:
    train, _ = build_datasets(DataSettings())
    images, labels = train[:size]
    return images, labels


def test_items_are_what_the_model_expects() -> None:
    train, val = build_datasets(DataSettings(val_fraction=0.2))
    image, label = train[0]
    assert image.shape == IMAGE_SHAPE
    assert image.dtype == torch.float32
    assert label.dtype == torch.int64
    assert sorted(set(train.tensors[1].tolist())) == list(range(len(NAMES)))
    assert -1 <= train.tensors[0].min() < 0 < train.tensors[0].max() <= 1
    assert len(val) / (len(val) + len(train)) == pytest.approx(0.2, abs=0.01)


def test_every_rank_makes_the_same_split() -> None:
    first, again = build_datasets(DataSettings(split_seed=3)), build_datasets(DataSettings(split_seed=3))
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))


def test_every_parameter_gets_a_gradient_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    model = new_model()
    training_loss(model, first_batch(8))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert list(model.named_buffers()) == []


def test_an_answer_does_not_depend_on_the_other_images_of_the_batch() -> None:
    """With BatchNorm it would, and so it would depend on how many ranks share a batch."""
    model, (images, _) = new_model(), first_batch(8)
    assert torch.allclose(model(images)[:3], model(images[:3]), atol=1e-5)


def test_checkpointing_changes_no_gradient() -> None:
    batch, gradients = first_batch(8), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = build_model(ModelSettings(checkpointing=checkpointing))
        training_loss(model, batch, torch.Generator().manual_seed(1))[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_images_are_shifted_one_by_one_by_at_most_the_reach() -> None:
    images = torch.full((300, 2, 5, 4), -1.0)
    images[:, :, 2, 1] = 1.0
    moved = shifted(images, reach=1, generator=torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert torch.equal(moved[:, 0], moved[:, 1]), "all channels alike"
    found = (moved[:, 0] == 1).nonzero()
    assert found[:, 0].tolist() == list(range(300)), "each image keeps its one bright pixel"
    places = {(row, column) for _, row, column in found.tolist()}
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2)}
    assert torch.equal(shifted(images, reach=0), images)
    assert shifted(images + 1, reach=1, generator=torch.Generator().manual_seed(0)).min() == -1, "background comes in"


def test_the_loss_repeats_from_a_restored_random_state() -> None:
    model, batch, state = new_model(), first_batch(8), torch.get_rng_state()
    loss, terms = training_loss(model, batch)
    assert terms == 8
    assert not torch.equal(training_loss(model, batch)[0], loss)
    torch.set_rng_state(state)
    assert torch.equal(training_loss(model, batch)[0], loss)


def test_the_loss_never_reads_a_value_back_from_the_device() -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    model, (images, labels) = new_model().to("meta"), first_batch(8)
    training_loss(model, (images.to("meta"), labels.to("meta")))[0].backward()


def test_training_on_one_batch_halves_the_loss() -> None:
    model, batch = new_model(), first_batch(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(30):
        loss, _ = training_loss(model, batch, smoothing=0, reach=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def validate(model: nn.Module, dataset: Dataset[tuple[Tensor, ...]], batch_size: int) -> list[float]:
    return add_up(model, DataLoader(dataset, batch_size), CPU, lambda: None).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    model = new_model()
    val = Subset(build_datasets(DataSettings())[1], range(103))  # a prime: no share and no batch comes out even
    shares = [Subset(val, range(rank, len(val), world_size)) for rank in range(world_size)]
    found = [validate(model, share, batch_size=10 + rank) for rank, share in enumerate(shares)]
    loss, right, count = (sum(column) for column in zip(*found, strict=True))
    whole = validate(model, val, len(val))
    assert count == len(val)
    assert right == whole[1]
    assert loss == pytest.approx(whole[0], rel=1e-5)


def test_validation_counts_the_images_that_are_recognised() -> None:
    data = TensorDataset(torch.eye(4)[:, None, None], torch.tensor([0, 1, 2, 0]))  # pixels are the logits
    loss, right, count = validate(nn.Flatten(), data, batch_size=3)
    assert (right, count) == (3, 4)
    assert loss == pytest.approx(4 * torch.tensor([3 + torch.e]).log().item() - 3, rel=1e-5)


def test_validation_reports_progress_and_restores_the_mode_even_when_stopped() -> None:
    model = new_model()
    _, val = build_datasets(DataSettings())
    batches, state = list(DataLoader(val, 16)), torch.get_rng_state()
    calls = []

    def stop_at_the_second_batch() -> None:
        calls.append(model.training)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        add_up(model, batches, CPU, stop_at_the_second_batch)
    assert calls == [False, False]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_drawing_disturbs_neither_random_numbers_nor_mode_and_leaves_one_whole_file(tmp_path: Path) -> None:
    (_, val), model, notes, state = build_datasets(DataSettings()), new_model(), list[str](), torch.get_rng_state()
    draw(model, val, SampleSettings(batch_size=50, images=120), CPU, notes.append, tmp_path / "new" / "step_00000100")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert notes == [f"{done} of 120 images" for done in (50, 100, 120)]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["step_00000100.png"]


def test_the_matrix_has_a_row_for_each_class_and_a_column_for_each_answer() -> None:
    counts = confusion(torch.tensor([3, 3, 3, 5]), torch.tensor([3, 3, 8, 5]))
    assert counts.sum() == 4
    assert [int(counts[cell]) for cell in ((3, 3), (3, 8), (5, 5))] == [2, 1, 1]
    image = picture(counts, torch.zeros(0, *IMAGE_SHAPE), [], [])

    def corner(row: int, column: int) -> object:
        return image.getpixel((MARGIN + column * CELL + 3, MARGIN + row * CELL + 3))

    assert corner(5, 5) == BLUE, "a whole row in its place"
    assert corner(8, 3) == (255, 255, 255)
    assert corner(3, 8) not in (RED, (255, 255, 255)), "a third of a row out of its place"


def test_a_picture_holds_every_image_grey_or_in_colour(tmp_path: Path) -> None:
    counts = confusion(torch.zeros(7, dtype=torch.int64), torch.zeros(7, dtype=torch.int64))
    for channels in (1, 3):
        large = picture(counts, torch.ones(7, channels, 8, 8), ["1 as 7, 99%"] * 7, [RED] * 7)
        assert large.width > picture(counts, torch.ones(0, channels, 8, 8), [], []).width
        save(large, tmp_path / "picture.png")
        with Image.open(tmp_path / "picture.png") as image:
            assert image.size == large.size


def test_a_picture_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    save(Image.new("L", (2, 2)), path)
    before = path.read_bytes()
    path.with_name("picture.png.tmp").mkdir()
    with pytest.raises(OSError, match=r"picture\.png\.tmp"):
        save(Image.new("L", (3, 3)), path)
    assert path.read_bytes() == before
