"""The texts, their batches, the model, its loss, its validation and its samples.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from {{ package }}.data import BYTES, MASK, MULTIPLE, PAD, DataSettings, Texts, build_datasets, read_paragraphs
from {{ package }}.ddp.clocks import Clocks
from {{ package }}.ddp.errors import ConfigError
from {{ package }}.ddp.loading.shards import GlobalOrder
from {{ package }}.ddp.start.groups import Job
from {{ package }}.ddp.start.launcher import Place
from {{ package }}.evaluate import EvalSettings, add_up, hide_by_index
from {{ package }}.model import IGNORED, ModelSettings, build_model, hide, training_loss
from {{ package }}.sample import SampleSettings, draw

CPU = torch.device("cpu")


def new_model(checkpointing: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSettings(checkpointing=checkpointing))


def first_batch(size: int) -> tuple[Tensor, ...]:
    train, _ = build_datasets(DataSettings())
    return train.collate([train[index] for index in range(size)])


def test_every_rank_makes_the_same_honest_split() -> None:
    first, again = build_datasets(DataSettings(split_seed=3)), build_datasets(DataSettings(split_seed=3))
    assert [data.texts for data in first] == [data.texts for data in again]
    assert first[0].texts != build_datasets(DataSettings(split_seed=4))[0].texts
    train, val = build_datasets(DataSettings(max_length=10_000, val_fraction=0.2))
    assert len(val) / (len(val) + len(train)) == pytest.approx(0.2, abs=0.01)
    assert not set(train.texts) & set(val.texts), "nothing is in both sets"


def test_own_text_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("zwei\r\n \r\nähnlich\n\n".encode())
    (tmp_path / "a.txt").write_bytes(b"one\nline\n\n\ntwo\n\none\nline\n")
    (tmp_path / "c.md").write_bytes(b"no text file")
    assert read_paragraphs(str(tmp_path)) == [b"one\nline", b"two", b"zwei", "ähnlich".encode()]
    both = build_datasets(DataSettings(path=str(tmp_path), max_length=4, val_fraction=0.5))
    assert sorted(length for data in both for length in data.lengths) == [3, 4, 4, 4, 4, 4]
    with pytest.raises(ConfigError, match=r"data\.path = .*nowhere.* has no \.txt files"):
        build_datasets(DataSettings(path=str(tmp_path / "nowhere")))


def test_batches_are_padded_to_a_multiple() -> None:
    data = Texts([b"a", b"b" * 17])
    tokens, indices = (tensor.tolist() for tensor in data.collate([data[1], data[0]]))
    assert (tokens, indices) == ([[98] * 17 + [PAD] * (2 * MULTIPLE - 17), [97] + [PAD] * (2 * MULTIPLE - 1)], [1, 0])


def work(lengths: list[int], world_size: int, by_length: bool, size: int = 16) -> Tensor:
    """Return the bytes, with padding, that each rank computes in each step of an epoch, float64 [ranks, steps]."""
    ranks, seen = [], []
    for rank in range(world_size):
        place = Place("none", rank, rank, world_size, world_size, "n1", "127.0.0.1", 1, 0, False)
        job, known = Job(place, Clocks(), dist.HashStore(), ("n1",)), lengths if by_length else None
        order = GlobalOrder(len(lengths), job, seed=0, shuffle=True, uneven="pad", lengths=known, batch=size)
        batches = torch.tensor(list(order)).split(size)
        seen += torch.cat(batches).tolist()
        ranks.append([-(-max(lengths[i] for i in batch) // MULTIPLE) * MULTIPLE * len(batch) for batch in batches])
    assert set(seen) == set(range(len(lengths))), "every text is read"
    assert len(seen) - len(lengths) < world_size, "and only so many twice that all ranks have equally many"
    return torch.tensor(ranks, dtype=torch.float64)  # raises if one has more batches than another


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_by_length_waste_little_and_give_ranks_equal_work(world_size: int) -> None:
    lengths = build_datasets(DataSettings(max_length=1000))[0].lengths
    bucketed, mixed = (work(lengths, world_size, by_length) for by_length in (True, False))
    assert bucketed.sum() < 1.25 * sum(lengths), "padding"
    assert mixed.sum() > 1.5 * sum(lengths)
    # The share of the ranks' time in which they wait for the one that has most to do in a step.
    idle, idle_mixed = (1 - (each.mean(dim=0).sum() / each.amax(dim=0).sum()).item() for each in (bucketed, mixed))
    assert idle < 0.02
    assert world_size == 1 or idle_mixed > 0.05


class Concept(nn.Module):
    """A parameter that is added at every place, by one of two ways to copy it."""

    def __init__(self, copy: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.copy, self.concept, self.mix = copy, nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        copies = self.concept.expand(*x.shape) if self.copy == "expand" else self.concept.repeat(*x.shape[:2], 1)
        return (x * copies) @ self.mix + copies


def test_expand_in_forward_gives_the_gradients_of_repeat() -> None:
    """A public report blamed expand(), whose result shares memory, for a hang. DDP reduces the parameter's gradient."""
    x, gradients = torch.randn(4, 5, 8), []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for copy in ("expand", "repeat"):
            model = DistributedDataParallel(Concept(copy), gradient_as_bucket_view=True)
            model(x).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(*gradients)


def test_hiding_follows_the_rule_and_never_touches_padding() -> None:
    tokens = torch.randint(BYTES, (200, 256), generator=torch.Generator().manual_seed(0))
    tokens[:, 200:] = PAD
    tokens[0, 1:] = PAD  # a text of one byte
    inputs, targets = hide(tokens, torch.Generator().manual_seed(1))
    chosen = targets != IGNORED
    assert torch.equal(torch.where(chosen, targets, inputs), tokens)
    assert not (chosen & (tokens == PAD)).any()
    assert chosen.any(dim=1).all(), "something of each text"
    count, real = chosen.sum().item(), (tokens != PAD).sum().item()
    assert count / real == pytest.approx(0.15, abs=0.01)
    assert (inputs == MASK).sum().item() / count == pytest.approx(0.8, abs=0.02)
    assert (inputs == tokens)[chosen].sum().item() / count == pytest.approx(0.1, abs=0.02)


def test_padding_does_not_change_what_is_predicted() -> None:
    model, (tokens, _) = new_model(), first_batch(4)
    wider, real = nn.functional.pad(tokens, (0, 3 * MULTIPLE), value=PAD), tokens != PAD
    torch.testing.assert_close(model(tokens)[real], model(wider)[:, : tokens.shape[1]][real])


def test_every_parameter_gets_a_gradient_the_same_with_checkpointing_and_no_buffer_needs_broadcasting() -> None:
    """DDP waits forever for a gradient that never comes, and broadcasts every buffer in every forward."""
    models, calls, gradients = [new_model(), new_model(checkpointing=True)], list[nn.Module](), []
    blocks = [model.get_submodule("blocks.0") for model in models]
    for model, block in zip(models, blocks, strict=True):
        block.register_forward_pre_hook(lambda module, _: calls.append(module))
        training_loss(model, first_batch(4), torch.Generator().manual_seed(1))[0].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert None not in gradients[-1].values()
        assert list(model.named_buffers()) == []
    assert [calls.count(block) for block in blocks] == [1, 2], "computed again in the backward"
    torch.testing.assert_close(*gradients)


def test_the_loss_never_reads_a_value_back_from_the_device() -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    training_loss(new_model().to("meta"), [tensor.to("meta") for tensor in first_batch(4)])[0].backward()


def test_the_loss_repeats_from_a_restored_random_state_and_training_on_one_batch_lowers_it() -> None:
    model, batch, state = new_model(), first_batch(4), torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        torch.set_rng_state(state)
        losses.append(training_loss(model, batch)[0])
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_does_not_depend_on_ranks_or_batches_and_restores_the_mode(world_size: int) -> None:
    model, calls, (_, val) = new_model(), list[bool](), build_datasets(DataSettings())

    def validate(indices: range, size: int) -> Tensor:
        loader = DataLoader(Subset(val, indices), size, collate_fn=val.collate, generator=torch.Generator())
        return add_up(model, loader, CPU, EvalSettings(), lambda: calls.append(model.training))

    shares = [validate(range(rank, 103, world_size), 7 + rank) for rank in range(world_size)]
    right, *others = (torch.stack(shares).sum(dim=0) - validate(range(103), 103)).tolist()
    assert abs(right) <= 1, "rounding may decide between two bytes"
    assert others == pytest.approx([0, 0], abs=1e-2)
    assert calls
    assert not any(calls)
    assert model.training
    tokens = first_batch(1)[0].repeat(2, 1)
    assert not torch.equal(*hide_by_index(tokens, torch.tensor([0, 1]), 0)[1]), "two equal texts"


def test_the_texts_stand_in_one_file_and_drawing_disturbs_neither_random_numbers_nor_mode(tmp_path: Path) -> None:
    path, notes, settings = tmp_path / "samples" / "a", list[str](), SampleSettings(texts=3)
    model, (_, val), state = new_model(), build_datasets(DataSettings()), torch.get_rng_state()
    draw(model, val, settings, CPU, notes.append, path)
    assert notes == ["text 1 of 3", "text 2 of 3", "text 3 of 3"]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    before = path.with_suffix(".txt").read_bytes()
    assert before.count(b"truth   ") == 3
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"], "nothing half-written is left"
    path.with_name("a.txt.tmp").mkdir()
    with pytest.raises(OSError, match=r"a\.txt\.tmp"):
        draw(model, val, settings, CPU, notes.append, path)
    assert path.with_suffix(".txt").read_bytes() == before
