"""The model, its loss, its validation and its samples, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from {{ package }}.data import CLASSES, IMAGE_SHAPE, DataSettings, build_datasets
from {{ package }}.evaluate import EvalSettings, add_up
from {{ package }}.model import NO_LABEL, ModelSettings, build_model, training_loss, velocity_error
from {{ package }}.sample import SampleSettings, sample, save_grid

CPU = torch.device("cpu")


def new_model(settings: ModelSettings | None = None) -> nn.Module:
    """A model that answers: as it is built, its last layer is zero."""
    torch.manual_seed(0)
    model = build_model(settings or ModelSettings(depth=2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def first_batch(size: int) -> tuple[Tensor, Tensor]:
    train, _ = build_datasets(DataSettings())
    images, labels = train[:size]
    return images, labels


class Straight(nn.Module):
    """Knows the image that each label stands for, and so the velocity from anywhere: (x - image) / t."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images, self.times = images, list[Tensor]()

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        self.times.append(t)
        return (x - self.images[labels]) / t[:, None, None, None]


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
    again, _ = build_datasets(DataSettings(val_fraction=0.2))
    assert all(torch.equal(a, b) for a, b in zip(train.tensors, again.tensors, strict=True)), "on every rank"


def test_every_parameter_gets_a_gradient_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    model = build_model(ModelSettings())  # as it is built, with layers that are zero
    training_loss(model, first_batch(8))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert list(model.named_buffers()) == []


def test_a_perfect_velocity_has_no_loss_anywhere_on_the_path() -> None:
    images, _ = first_batch(8)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for t in (0.1, 0.5, 1.0):
        errors = velocity_error(Straight(images), images, torch.arange(8), torch.full((8,), t), noise)
        assert errors.shape == (8,)
        assert errors.max() < 1e-6


def test_times_are_logit_normal_and_cover_every_batch() -> None:
    images, labels = first_batch(8)
    model = Straight(images.new_zeros(CLASSES, *IMAGE_SHAPE))
    training_loss(model, (images.repeat(50, 1, 1, 1), labels.repeat(50)))
    logits = model.times[0].logit().sort().values
    assert logits.mean().item() == pytest.approx(0, abs=0.05)
    assert logits.std().item() == pytest.approx(1, abs=0.05)
    quantiles = torch.special.ndtr(logits)
    assert (quantiles.diff() < 1.01 / 400).all(), "evenly spaced"


def test_labels_matter_and_none_is_one_of_them() -> None:
    model, (images, _) = new_model(), first_batch(1)
    answers = [model(images, torch.tensor([0.5]), torch.tensor([label])) for label in (NO_LABEL, 0, 1)]
    assert not torch.allclose(answers[0], answers[1])
    assert not torch.allclose(answers[1], answers[2])


def test_checkpointing_changes_no_gradient() -> None:
    batch, gradients = first_batch(8), []
    for checkpointing in (False, True):
        model = new_model(ModelSettings(depth=2, checkpointing=checkpointing))
        training_loss(model, batch, generator=torch.Generator().manual_seed(1))[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*gradients, strict=True))


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
    torch.manual_seed(0)
    model, batch = build_model(ModelSettings()), first_batch(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(100):
        loss, _ = training_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < losses[0] / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": 3}, r"model\.patch = 3 .*\n.*change model\.patch"),
        ({"width": 64, "heads": 3}, r"model\.width = 64 .*\n.*change one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSettings.model_validate(settings)


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


def test_validation_and_sampling_disturb_neither_random_numbers_nor_mode() -> None:
    model, state = new_model(), torch.get_rng_state()
    _, val = build_datasets(DataSettings())
    batches, calls = list(DataLoader(val, 128, generator=torch.Generator())), list[bool]()
    add_up(model, batches, CPU, EvalSettings(), lambda: calls.append(model.training))
    assert calls == [False] * len(batches)
    settings, steps = SampleSettings(images=3, euler_steps=4), list[str]()
    images = sample(model, settings, CPU, steps.append)
    assert steps == [f"Euler step {step} of 4" for step in (1, 2, 3, 4)]
    assert torch.equal(sample(model, settings, CPU, steps.append), images)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("steps", [1, 7])
def test_straight_paths_lead_to_the_images_in_any_number_of_steps(steps: int) -> None:
    images = build_datasets(DataSettings())[0].tensors[0][:CLASSES]
    drawn = sample(Straight(images), SampleSettings(images=13, euler_steps=steps, guidance=1), CPU, lambda _: None)
    assert torch.allclose(drawn, images[torch.arange(13) % CLASSES], atol=1e-5)


def test_the_picture_is_a_png_with_one_column_a_class_and_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "step_00000100.png"
    _, height, width = IMAGE_SHAPE
    save_grid(torch.full((CLASSES + 3, *IMAGE_SHAPE), -1.0), path, scale=4, gutter=2)
    with Image.open(path) as picture:
        assert picture.size == (CLASSES * (4 * width + 2) + 2, 2 * (4 * height + 2) + 2)
        assert picture.getpixel((0, 0)) == 255, "white between the images"
        assert picture.getpixel((2, 2)) == 0, "an image"
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written is left"
    before = path.read_bytes()
    path.with_name("step_00000100.png.tmp").mkdir()
    with pytest.raises(OSError, match=r"png\.tmp"):
        save_grid(torch.ones(1, *IMAGE_SHAPE), path)
    assert path.read_bytes() == before
