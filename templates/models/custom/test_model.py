"""The contract of data, model, evaluation and picture, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from {{ package }}.data import FEATURES, DataSettings, build_datasets
from {{ package }}.evaluate import add_up
from {{ package }}.model import ModelSettings, build_model, training_loss
from {{ package }}.sample import COLOURS, HEIGHT, WIDTH, SampleSettings, draw, save_picture

CPU = torch.device("cpu")


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSettings())


def first_batch(size: int) -> list[Tensor]:
    train, _ = build_datasets(DataSettings())
    batch: list[Tensor] = default_collate([train[index] for index in range(size)])
    return batch


def test_every_rank_makes_the_same_split_and_reading_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    first, again = build_datasets(DataSettings(split_seed=3)), build_datasets(DataSettings(split_seed=3))
    for one, two in zip(first, again, strict=True):
        assert len(one) == len(two)
        for index in range(len(one)):
            assert all(torch.equal(a, b) for a, b in zip(one[index], two[index], strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    other, _ = build_datasets(DataSettings(split_seed=4))
    assert not all(torch.equal(a, b) for a, b in zip(first[0][0], other[0], strict=True))


def test_the_two_sets_share_no_sample() -> None:
    train, val = build_datasets(DataSettings(val_fraction=0.2))
    assert len(val) / (len(val) + len(train)) == pytest.approx(0.2, abs=0.01)
    seen = {tuple(features.tolist()) for features, _ in (train[index] for index in range(len(train)))}
    assert not any(tuple(val[index][0].tolist()) in seen for index in range(len(val)))


def test_every_parameter_gets_a_gradient_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    model = new_model()
    training_loss(model, first_batch(8))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert list(model.named_buffers()) == []


def test_the_loss_is_a_sum_of_terms() -> None:
    """Two halves of a batch, on two ranks, have together the loss of the batch."""
    model, batch = new_model(), first_batch(8)
    loss, terms = training_loss(model, batch)
    halves = [training_loss(model, [tensor[half] for tensor in batch]) for half in (slice(3), slice(3, 8))]
    assert terms == 8
    assert [half[1] for half in halves] == [3, 5]
    assert sum(half[0].item() for half in halves) == pytest.approx(loss.item(), rel=1e-5)


def test_the_loss_never_reads_a_value_back_from_the_device() -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    batch = [tensor.to("meta") for tensor in first_batch(8)]
    training_loss(new_model().to("meta"), batch)[0].backward()


def test_the_loss_is_in_float32_whatever_the_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss, terms = training_loss(new_model(), first_batch(8))
    assert loss.dtype == terms.dtype == torch.float32


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
    assert losses[-1] < losses[0] / 2


def validate(model: nn.Module, dataset: Dataset[tuple[Tensor, ...]], batch_size: int) -> list[float]:
    return add_up(model, DataLoader(dataset, batch_size), CPU, lambda: None).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    model = new_model()
    val = Subset(build_datasets(DataSettings())[1], range(103))  # a prime: no share and no batch comes out even
    shares = [Subset(val, range(rank, len(val), world_size)) for rank in range(world_size)]
    found = [validate(model, share, batch_size=10 + rank) for rank, share in enumerate(shares)]
    right, count = validate(model, val, len(val))
    assert 0 < right < count == len(val)
    assert [sum(column) for column in zip(*found, strict=True)] == pytest.approx([right, count])


def test_validation_counts_right_answers() -> None:
    model, (_, val) = nn.Linear(FEATURES, 1), build_datasets(DataSettings())
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, -1)  # it always answers no
    assert validate(model, val, batch_size=50) == [(val.tensors[1] == 0).sum(), len(val)]


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
    model, (_, val), notes = new_model(), build_datasets(DataSettings()), list[str]()
    state = torch.get_rng_state()
    draw(model, val, SampleSettings(samples=20), CPU, notes.append, tmp_path / "samples" / "step_00000100")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert notes == ["20 answers"]
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["step_00000100.png"]


def test_the_picture_shows_who_is_what(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    save_picture(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]), path)  # both answers are wrong
    with Image.open(path) as picture:
        assert picture.size == (WIDTH, HEIGHT)
        low, high = (round(10 + (HEIGHT - 20) * (1 - probability)) for probability in (0.1, 0.9))
        left, right = (round(10 + (WIDTH - 20) * place) for place in (0.25, 0.75))
        assert colour(picture.getpixel((left, low))) == COLOURS[1]
        assert colour(picture.getpixel((right, high))) == COLOURS[0]


def colour(pixel: float | Sequence[int] | None) -> str:
    assert isinstance(pixel, tuple)
    return "#" + "".join(f"{part:02x}" for part in pixel)


def test_a_picture_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    save_picture(torch.zeros(1), torch.zeros(1), path)
    before = path.read_bytes()
    path.with_name("picture.png.tmp").mkdir()
    with pytest.raises(OSError, match=r"picture\.png\.tmp"):
        save_picture(torch.ones(1), torch.ones(1), path)
    assert path.read_bytes() == before
