"""The text, the model, its loss, its validation and its samples, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from {{ package }}.data import DataSettings, build_datasets, read_paragraphs
from {{ package }}.ddp.errors import ConfigError
from {{ package }}.evaluate import add_up
from {{ package }}.model import ModelSettings, build_model, byte_losses, training_loss
from {{ package }}.sample import SampleSettings, draw, go_on

CPU = torch.device("cpu")


def new_model(checkpointing: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSettings(checkpointing=checkpointing))


def first_batch(size: int) -> tuple[Tensor, ...]:
    train, _ = build_datasets(DataSettings())
    return tuple(train[:size])


def test_windows_cover_the_text_and_the_split_is_honest() -> None:
    train, val = build_datasets(DataSettings(context=32, val_fraction=0.2))
    windows = train.tensors[0]
    assert windows.dtype == torch.uint8
    assert windows.shape[1:] == (33,)
    assert torch.equal(windows[:-1, -1], windows[1:, 0]), "every byte is predicted once"
    assert len(val) / (len(val) + len(train)) == pytest.approx(0.2, abs=0.03)
    text, held_out = (bytes(data.tensors[0][:, 1:].flatten().tolist()) for data in (train, val))
    long = [part for part in held_out.split(b"\n\n")[1:-1] if len(part) > 200]
    assert len(long) > 50
    assert not [part for part in long if part in text], "nothing is in both sets"


def test_every_rank_makes_the_same_split() -> None:
    first, again = build_datasets(DataSettings(split_seed=3)), build_datasets(DataSettings(split_seed=3))
    other = build_datasets(DataSettings(split_seed=4))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.tensors[0], two.tensors[0])
    assert not torch.equal(first[0].tensors[0][:100], other[0].tensors[0][:100])


def test_own_text_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("zwei\r\n \r\nähnlich\n\n".encode())
    (tmp_path / "a.txt").write_bytes(b"one\nline\n\n\ntwo\n\none\nline\n")
    (tmp_path / "c.md").write_bytes(b"no text file")
    assert read_paragraphs(str(tmp_path)) == [b"one\nline", b"two", b"zwei", "ähnlich".encode()]
    train, val = build_datasets(DataSettings(path=str(tmp_path), context=4, val_fraction=0.5))
    assert len(train) + len(val) >= 4
    with pytest.raises(ConfigError, match=r"data\.context = 128 needs one more"):
        build_datasets(DataSettings(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"data\.path = .*nowhere.* has no \.txt files"):
        build_datasets(DataSettings(path=str(tmp_path / "nowhere")))


def test_every_parameter_gets_a_gradient_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    model = new_model()
    training_loss(model, first_batch(4))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert list(model.named_buffers()) == []


def test_checkpointing_computes_blocks_again_and_changes_no_gradient() -> None:
    models, calls = [new_model(), new_model(checkpointing=True)], list[nn.Module]()
    blocks = [model.get_submodule("blocks.0") for model in models]
    for model, block in zip(models, blocks, strict=True):
        block.register_forward_pre_hook(lambda module, _: calls.append(module))
        training_loss(model, first_batch(4))[0].backward()
    assert [calls.count(block) for block in blocks] == [1, 2]
    for kept, recomputed in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(kept.grad, recomputed.grad)


def test_the_loss_never_reads_a_value_back_from_the_device() -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    training_loss(new_model().to("meta"), (first_batch(4)[0].to("meta"),))[0].backward()


def test_a_byte_is_predicted_from_those_before_it_only() -> None:
    model, windows = new_model(), first_batch(2)[0]
    changed = windows.clone()
    changed[:, 50] ^= 1
    before, after = (byte_losses(model, data).unflatten(0, (2, -1)) for data in (windows, changed))
    assert torch.equal(before[:, :49], after[:, :49]), "byte i + 1 of a window is target i"
    assert (before[:, 50:] != after[:, 50:]).any(dim=1).all(), "the later ones do see it"
    assert training_loss(model, (windows,))[1] == windows[:, 1:].numel()


class Successor(nn.Module):
    """Knows that byte b is followed by byte b + 1."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 100.0 * nn.functional.one_hot((tokens + 1) % 256, 256)


def test_the_loss_is_about_the_next_byte() -> None:
    windows = torch.arange(200, dtype=torch.uint8).reshape(2, 100)
    assert byte_losses(Successor(), windows).max() < 1e-6
    assert byte_losses(Successor(), windows.flip(1)).min() > 50


def test_an_untrained_model_knows_nothing_and_training_on_one_batch_halves_the_loss() -> None:
    model, batch = new_model(), first_batch(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        loss, terms = training_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss / terms).item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert losses[-1] < losses[0] / 2


def test_heads_that_do_not_share_the_width_in_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.width = 60 .*\n.*choose another width"):
        ModelSettings(width=60, heads=4)


def validate(model: nn.Module, dataset: Dataset[tuple[Tensor, ...]], batch_size: int) -> Tensor:
    return add_up(model, DataLoader(dataset, batch_size), CPU, lambda: None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    model = new_model()
    val = Subset(build_datasets(DataSettings())[1], range(53))  # a prime: no share and no batch comes out even
    shares = [Subset(val, range(rank, len(val), world_size)) for rank in range(world_size)]
    totals = torch.stack([validate(model, share, batch_size=10 + rank) for rank, share in enumerate(shares)]).sum(dim=0)
    assert totals[1] == 53 * DataSettings().context
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
        add_up(model, batches, CPU, stop_at_the_second_batch)
    assert calls == [False, False]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_going_on_disturbs_neither_random_numbers_nor_mode() -> None:
    model, state = new_model(), torch.get_rng_state()
    prompts, settings = first_batch(3)[0][:, :20], SampleSettings(length=40)
    notes: list[str] = []
    texts = go_on(model, prompts, settings, context=32, progress=notes.append)
    assert torch.equal(texts[:, :20], prompts.long())
    assert texts.shape == (3, 60)
    assert notes == ["byte 0 of 40", "byte 16 of 40", "byte 32 of 40"]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(go_on(model, prompts, settings, context=32, progress=notes.append), texts)


def test_the_model_sees_at_most_its_context() -> None:
    lengths: list[int] = []
    model = new_model()
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    go_on(model, first_batch(1)[0][:, :30], SampleSettings(length=4), context=32, progress=lambda _: None)
    assert lengths == [30, 31, 32, 32]


def test_the_texts_stand_in_one_file_that_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path, (_, val) = tmp_path / "samples" / "step_00000100", build_datasets(DataSettings())
    settings = SampleSettings(texts=2, prompt=1000, length=8)  # more than a window has
    draw(new_model(), val, settings, CPU, lambda _: None, path)
    written = path.with_suffix(".txt")
    before = written.read_text(encoding="utf-8")
    assert before.count("the model goes on") == 2
    assert f"text 1: given\n{bytes(val.tensors[0][0, :128].tolist()).decode()}\n-----" in before
    assert [file.name for file in path.parent.iterdir()] == [written.name], "nothing half-written is left"
    written.with_name("step_00000100.txt.tmp").mkdir()
    with pytest.raises(OSError, match=r"step_00000100\.txt\.tmp"):
        draw(new_model(), val, settings, CPU, lambda _: None, path)
    assert written.read_text(encoding="utf-8") == before
