"""The model, its loss, its validation and its samples, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from digits.data import CLASSES, IMAGE_SHAPE, DataSettings, build_datasets
from digits.evaluate import EvalSettings, add_up
from digits.model import ModelSettings, build_model, training_loss
from digits.sample import SampleSettings, sample, save_grid

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
    assert 0 <= label < CLASSES
    assert -1 <= train.tensors[0].min() < 0 < train.tensors[0].max() <= 1
    assert len(val) / (len(val) + len(train)) == pytest.approx(0.2, abs=0.01)
    assert val.tensors[2].tolist() == list(range(len(val)))


def test_every_rank_makes_the_same_split() -> None:
    first, again = build_datasets(DataSettings(split_seed=3)), build_datasets(DataSettings(split_seed=3))
    other = build_datasets(DataSettings(split_seed=4))
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not torch.equal(first[0].tensors[0], other[0].tensors[0])


def test_every_parameter_gets_a_gradient_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    model = new_model()
    training_loss(model, first_batch(8))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert list(model.named_buffers()) == []


def test_the_loss_repeats_from_a_restored_random_state() -> None:
    model, batch, state = new_model(), first_batch(8), torch.get_rng_state()
    loss, terms = training_loss(model, batch)
    assert terms == 8
    assert not torch.equal(training_loss(model, batch)[0], loss)
    torch.set_rng_state(state)
    assert torch.equal(training_loss(model, batch)[0], loss)


def test_a_given_generator_leaves_the_default_one_alone() -> None:
    model, batch, state = new_model(), first_batch(8), torch.get_rng_state()
    losses = [training_loss(model, batch, generator=torch.Generator().manual_seed(1))[0] for _ in range(2)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_never_reads_a_value_back_from_the_device() -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    model, (images, labels) = new_model().to("meta"), first_batch(8)
    training_loss(model, (images.to("meta"), labels.to("meta")))[0].backward()


def test_training_on_one_batch_halves_the_loss() -> None:
    model, batch = new_model(), first_batch(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        loss, _ = training_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < losses[0] / 2


def test_levels_that_do_not_fit_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.levels = 5 .*\n.*lower model\.levels"):
        ModelSettings(levels=5)


def validate(model: nn.Module, dataset: Dataset[tuple[Tensor, ...]], batch_size: int) -> Tensor:
    return add_up(model, DataLoader(dataset, batch_size), CPU, EvalSettings(), lambda: None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    model = new_model()
    val = Subset(build_datasets(DataSettings())[1], range(103))  # a prime: no share and no batch comes out even
    shares = [Subset(val, range(rank, len(val), world_size)) for rank in range(world_size)]
    totals = torch.stack([validate(model, share, batch_size=10 + rank) for rank, share in enumerate(shares)]).sum(dim=0)
    assert totals[1] == len(val)
    assert totals[0].item() == pytest.approx(validate(model, val, len(val))[0].item(), rel=1e-6)


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
        add_up(model, batches, CPU, EvalSettings(), stop_at_the_second_batch)
    assert calls == [False, False]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_disturbs_neither_random_numbers_nor_mode() -> None:
    model, state = new_model(), torch.get_rng_state()
    settings = SampleSettings(images=3, ddim_steps=4)
    steps: list[str] = []
    images = sample(model, settings, CPU, steps.append)
    assert images.shape == (3, *IMAGE_SHAPE)
    assert images.isfinite().all()
    assert images.abs().max() <= 1
    assert steps == [f"DDIM step {step} of 4" for step in (1, 2, 3, 4)]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(sample(model, settings, CPU, steps.append), images)


def test_the_picture_is_a_png_with_one_column_a_class(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "step_00000100.png"
    _, height, width = IMAGE_SHAPE
    save_grid(torch.full((CLASSES + 3, *IMAGE_SHAPE), -1.0), path, scale=4, gutter=2)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == (CLASSES * (4 * width + 2) + 2, 2 * (4 * height + 2) + 2)
        assert picture.getpixel((0, 0)) == 255, "white between the images"
        assert picture.getpixel((2, 2)) == 0, "an image"
        assert picture.getpixel((picture.width - 3, picture.height - 3)) == 255, "no image in the rest of the last row"
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written is left"


def test_a_picture_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    save_grid(torch.zeros(1, *IMAGE_SHAPE), path)
    before = path.read_bytes()
    path.with_name("grid.png.tmp").mkdir()
    with pytest.raises(OSError, match=r"grid\.png\.tmp"):
        save_grid(torch.ones(1, *IMAGE_SHAPE), path)
    assert path.read_bytes() == before
