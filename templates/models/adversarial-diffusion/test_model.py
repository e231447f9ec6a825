"""The model, its losses, its validation and its samples, in one process.

Goes with the example: delete the folder when you replace model.py, data.py, evaluate.py or sample.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from {{ package }}.data import BLOCK, PATCH, DataSettings, build_datasets, cut
from {{ package }}.evaluate import EvalSettings, add_up, psnr
from {{ package }}.model import Generators, ModelSettings, build_model, discriminator_loss, generator_loss, signal
from {{ package }}.sample import SampleSettings, draw, posterior
from {{ package }}.train import frozen

CPU = torch.device("cpu")
SETTINGS = ModelSettings(channels=8)


def new_model(settings: ModelSettings = SETTINGS) -> tuple[Generators, nn.Module]:
    torch.manual_seed(0)
    return build_model(settings)


def first_batch(size: int) -> Sequence[Tensor]:
    return [tensor[:size] for tensor in build_datasets(DataSettings())[0].tensors]


def judged(generators: Generators, discriminator: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss = discriminator_loss(discriminator, generators.coarse, generators.refiner, batch, SETTINGS)[0]
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    return loss


def made(generators: Generators, discriminator: nn.Module, batch: Sequence[Tensor], weight: float = 0.1) -> Tensor:
    settings = SETTINGS.model_copy(update={"adversarial_weight": weight})
    with frozen(discriminator):
        loss = generator_loss(discriminator, generators.coarse, generators.refiner, batch, settings)[0]
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    return loss


def learning(network: nn.Module) -> set[bool]:
    return {parameter.grad is not None for parameter in network.parameters()}


def test_items_are_what_the_model_expects() -> None:
    train, val = build_datasets(DataSettings())
    inputs, target = train[0]
    assert (inputs.shape, target.shape) == ((2, PATCH, PATCH), (1, PATCH, PATCH))
    assert inputs.dtype == target.dtype == torch.float32
    assert -1 <= train.tensors[0].min() < 0 < train.tensors[0].max() <= 1
    assert val.tensors[2].tolist() == list(range(len(val)))


def test_every_rank_makes_the_same_split() -> None:
    first, again, other = (build_datasets(DataSettings(split_seed=seed)) for seed in (3, 3, 4))
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not torch.equal(first[0].tensors[0], other[0].tensors[0])


def test_blocks_are_held_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.arange(20.0)[:, None, None, None].expand(20, 3, BLOCK, BLOCK)
    monkeypatch.setattr("{{ package }}.data._load", lambda: blocks)
    train, val = (set(dataset.tensors[1].flatten().tolist()) for dataset in build_datasets(DataSettings()))
    assert (len(train), len(val), train & val) == (16, 4, set())
    image = torch.arange(2 * 3 * 4.0).reshape(1, 2, 3, 4)
    assert torch.equal(cut(image, 2), torch.stack([image[0, :, :2, :2], image[0, :, :2, 2:]]))


def test_each_half_of_the_step_makes_its_own_gradients_all_of_them_and_no_others() -> None:
    """DDP waits forever for a gradient that never comes; one that should not come is reduced by nobody, or too late."""
    (generators, discriminator), batch = new_model(), first_batch(8)
    made(generators, discriminator, batch)
    assert (learning(generators), learning(discriminator)) == ({True}, {False})
    generators.zero_grad()
    judged(generators, discriminator, batch)
    assert (learning(generators), learning(discriminator)) == ({False}, {True}), "no longer frozen"
    assert [*generators.named_buffers(), *discriminator.named_buffers()] == [], "broadcast in every forward"


def test_the_adversarial_part_goes_through_the_frozen_discriminator_to_both_generators() -> None:
    (generators, discriminator), batch, found = new_model(), first_batch(8), []
    for weight in (0.0, 1.0):
        torch.manual_seed(1)
        made(generators, discriminator, batch, weight)
        found.append([cast(Tensor, each.first.weight.grad) for each in (generators.coarse, generators.refiner)])
        generators.zero_grad(set_to_none=True)
    assert not any(torch.equal(without, with_it) for without, with_it in zip(*found, strict=True))


def test_each_half_of_the_step_runs_every_network_once() -> None:
    """DDP reduces the gradients of only one of two forwards. Without gradients it prepares nothing."""
    (generators, discriminator), batch = new_model(), first_batch(8)
    runs: list[tuple[nn.Module, bool]] = []
    networks = (generators.coarse, generators.refiner, discriminator)
    for network in networks:
        network.register_forward_hook(lambda module, *_: runs.append((module, torch.is_grad_enabled())))
    for half, graphs in ((judged, (False, False, True)), (made, (True, True, True))):
        runs.clear()
        half(generators, discriminator, batch)
        assert runs == list(zip(networks, graphs, strict=True))


@pytest.mark.parametrize("loss_of", [judged, made])
def test_a_loss_repeats_from_a_restored_random_state(loss_of: Any) -> None:
    networks, batch, state = new_model(), first_batch(8), torch.get_rng_state()
    loss = loss_of(*networks, batch)
    assert not torch.equal(loss_of(*networks, batch), loss)
    torch.set_rng_state(state)
    assert torch.equal(loss_of(*networks, batch), loss)


@pytest.mark.parametrize("loss_of", [judged, made])
def test_a_loss_never_reads_a_value_back_from_the_device(loss_of: Any) -> None:
    """A tensor on the meta device has no values: whatever would make the host wait for the device raises here."""
    networks = [network.to("meta") for network in new_model()]
    loss_of(*networks, [tensor.to("meta") for tensor in first_batch(8)])


def test_checkpointed_activations_change_no_gradient() -> None:
    models = [new_model(SETTINGS.model_copy(update={"checkpointing": again})) for again in (False, True)]
    for model in models:
        torch.manual_seed(0)
        made(*model, first_batch(8))
    pairs = zip(*(generators.parameters() for generators, _ in models), strict=True)
    assert all(torch.equal(cast(Tensor, one.grad), cast(Tensor, other.grad)) for one, other in pairs)


def test_training_on_one_batch_lowers_either_loss_while_the_other_side_stands_still() -> None:
    (generators, discriminator), batch = new_model(), first_batch(16)
    for network, loss_of, share in ((generators, made, 0.5), (discriminator, judged, 0.98)):
        optimizer, losses = torch.optim.AdamW(network.parameters(), lr=5e-3), []
        for _ in range(60):
            loss = loss_of(generators, discriminator, batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert sum(losses[-10:]) / 10 < share * losses[0]


def test_a_denoising_step_leads_to_where_the_forward_process_has_been() -> None:
    assert signal(torch.tensor([0, 4]), 4).flatten().tolist() == pytest.approx([1, 0], abs=1e-3)
    x0, noise, again = torch.randn(3, 100_000, 1, 1, 1)
    for t in (2, 3, 4):
        now, before = (signal(torch.tensor([time]), 4) for time in (t, t - 1))
        earlier = posterior(x0, now.sqrt() * x0 + (1 - now).sqrt() * noise, again, torch.tensor([t]), 4)
        assert (earlier - before.sqrt() * x0).std().item() == pytest.approx((1 - before).sqrt().item(), rel=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    model, _ = new_model()
    val = Subset(build_datasets(DataSettings())[1], range(103))  # a prime: no share and no batch comes out even
    shares = [DataLoader(Subset(val, range(rank, 103, world_size)), 10 + rank) for rank in range(world_size)]
    shares.insert(0, DataLoader(val, 103))
    whole, *parts = (add_up(model, share, CPU, EvalSettings(), lambda: None) for share in shares)
    assert whole[3] == 103 * PATCH**2
    assert torch.stack(parts).sum(dim=0).tolist() == pytest.approx(whole.tolist(), rel=1e-6)
    assert psnr(0.04) == pytest.approx(20)


def test_validation_reports_progress_and_restores_the_mode_even_when_stopped() -> None:
    (model, _), (_, val) = new_model(), build_datasets(DataSettings())
    batches, state, calls = list(DataLoader(val, 16)), torch.get_rng_state(), []

    def stop_at_the_second_batch() -> None:
        calls.append(model.training)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        add_up(model, batches, CPU, EvalSettings(), stop_at_the_second_batch)
    assert calls == [False, False]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_drawing_repeats_and_disturbs_neither_random_numbers_nor_mode_nor_the_last_picture(tmp_path: Path) -> None:
    (model, _), (_, val), steps = new_model(), build_datasets(DataSettings()), list[str]()
    state, path = torch.get_rng_state(), tmp_path / "samples" / "step_00000100"
    draw(model, val, SampleSettings(images=3), CPU, steps.append, path)
    assert steps == [f"denoising step {step} of 4" for step in (1, 2, 3, 4)]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    picture = path.with_suffix(".png").read_bytes()
    draw(model, val, SampleSettings(images=3), CPU, steps.append, path)
    assert path.with_suffix(".png").read_bytes() == picture
    assert [file.name for file in path.parent.iterdir()] == ["step_00000100.png"], "nothing half-written is left"
    with Image.open(path.with_suffix(".png")) as image:  # both inputs, coarse, refined, truth, and two in colour
        assert image.size == (7 * (4 * PATCH + 4) + 4, 3 * (4 * PATCH + 4) + 4)
        assert image.getpixel((0, 0)) == (255, 255, 255), "white between the images"
    path.with_name("step_00000100.png.tmp").mkdir()
    with pytest.raises(OSError, match=r"step_00000100\.png\.tmp"):
        draw(model, val, SampleSettings(images=1), CPU, steps.append, path)
    assert path.with_suffix(".png").read_bytes() == picture, "the last one is still there"
