"""The model: two generators that synthesise a missing modality, and one discriminator; and the losses of both sides.

The coarse generator predicts the target from the inputs at once. The refiner is the generator of a denoising diffusion
GAN (Xiao, Kreis and Vahdat 2022, arXiv:2112.07804): a few large denoising steps, in each of which it predicts the clean
image from a noisy one, the inputs and the coarse image. The discriminator tells real from refined images, given the
inputs. The generators' loss is L1 of both images plus a small adversarial part, which reaches both through the chain.

Each network has a DDP wrapper of its own, which runs once and then gets all its gradients, or does not run at all:
`discriminator_loss` calls the generators outside DDP and without a graph, `generator_loss` the discriminator outside
DDP and frozen. There is no gradient penalty: DDP does not work with torch.autograd.grad (see its documentation).
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .data import INPUTS

GIVEN, MADE = len(INPUTS), 1  # channels of the inputs and of the target
GROUPS = 8  # of every GroupNorm; it keeps no running statistics, so nothing has to be synchronised between ranks


class ModelSettings(BaseModel, extra="forbid"):
    """The size of the networks, and how they are set against each other."""

    channels: int = Field(default=16, ge=GROUPS, multiple_of=GROUPS, description="feature maps at full resolution")
    denoising_steps: int = Field(default=4, ge=1, le=1000, description="steps of the refiner from noise to image")
    adversarial_weight: float = Field(default=0.02, ge=0, description="of the adversarial part; L1 has weight 1")
    discriminator_rate: float = Field(default=0.1, gt=0, description="its learning rate, in units of the generators'")
    checkpointing: bool = Field(default=False, description="compute activations twice instead of keeping them")


class Generators(nn.Module):
    """Both generators: what is averaged, evaluated and drawn. They are called one by one, so there is no `forward`."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.steps = settings.denoising_steps
        self.coarse = UNet(GIVEN, settings.channels, 0, settings.checkpointing)
        self.refiner = UNet(MADE + GIVEN + MADE, settings.channels, self.steps, settings.checkpointing)


def build_model(settings: ModelSettings) -> tuple[Generators, nn.Module]:
    """Return the generators and the discriminator, initialised from the default generator of random numbers."""
    return Generators(settings), Discriminator(settings.channels)


def wrap(network: nn.Module, compile: bool = False) -> DistributedDataParallel:
    """DDP around one of the three networks, with what it needs and nothing out of superstition.

    No find_unused_parameters: each network gets all its gradients whenever its wrapper has run. Nothing about buffers:
    there are none. Parameters need no broadcast by hand: DDP makes it here. No device_ids: the network is on its device
    already, and its inputs are moved in the loop. A backward through two wrappers makes their reductions in the order
    of the graph, which is the same on all ranks.
    """
    compiled = cast(nn.Module, torch.compile(network)) if compile else network
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True)  # the view saves a copy of the gradients


def discriminator_loss(
    discriminator: nn.Module, coarse: nn.Module, refiner: nn.Module, batch: Sequence[Tensor], settings: ModelSettings
) -> tuple[Tensor, Tensor]:
    """Return the discriminator's loss summed over a batch and the number of its terms, two scalars on the device.

    batch: inputs, float [N, 2, H, W], and targets, float [N, 1, H, W]. `discriminator` is the DDP wrapper; `coarse` and
    `refiner` are bare modules. Draws from the default generator of the device, and never waits for the device.
    """
    inputs, target = batch
    with torch.no_grad():  # detached from the beginning: nothing of this loss can reach the generators
        _, refined = generate(coarse, refiner, batch, settings.denoising_steps)
    # Real and refined in one forward: after two, DDP reduces the gradients of only one of two backwards, and the ranks
    # drift apart in silence (seen with torch 2.13).
    judged = discriminator(torch.cat([target, refined]), torch.cat([inputs, inputs]))
    real, fake = judged.float().chunk(2)
    errors = (F.softplus(-real) + F.softplus(fake)).mean(dim=(1, 2, 3))
    return errors.sum(), torch.ones_like(errors).sum()


def generator_loss(
    discriminator: nn.Module, coarse: nn.Module, refiner: nn.Module, batch: Sequence[Tensor], settings: ModelSettings
) -> tuple[Tensor, Tensor]:
    """Return the generators' loss summed over a batch and the number of its terms, as `discriminator_loss` does.

    Here `coarse` and `refiner` are the DDP wrappers, and `discriminator` is the bare module, `frozen` until the
    backward is over. Its wrapper would prepare a reduction, for which no gradients come now, and make it in the next
    backward, even inside no_sync (seen with torch 2.13). Not frozen, it would collect gradients that nobody reduces.
    """
    inputs, target = batch
    first, refined = generate(coarse, refiner, batch, settings.denoising_steps)
    judged = discriminator(refined, inputs).float()
    distance = (refined - target).abs() + (first - target).abs()
    errors = distance.mean(dim=(1, 2, 3)) + settings.adversarial_weight * F.softplus(-judged).mean(dim=(1, 2, 3))
    return errors.sum(), torch.ones_like(errors).sum()


def generate(coarse: nn.Module, refiner: nn.Module, batch: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Return the coarse image and what the refiner makes of a noisy target, float32 [N, 1, H, W] each.

    The times go round, 1 to `steps`, from a random one on, so that every batch holds all levels of noise.
    """
    inputs, target = batch
    n, device = len(target), target.device
    t = (torch.arange(n, device=device) + torch.randint(steps, (1,), device=device)) % steps + 1
    kept = signal(t, steps)
    noisy = kept.sqrt() * target + (1 - kept).sqrt() * torch.randn_like(target)
    first = coarse(inputs).float()
    return first, refine(refiner, noisy, inputs, first, t)


def refine(refiner: nn.Module, noisy: Tensor, inputs: Tensor, first: Tensor, t: Tensor) -> Tensor:
    """Return the clean image, float32 [N, 1, H, W], of a noisy one at times t [N]: the coarse one, improved."""
    improvement: Tensor = refiner(torch.cat([noisy, inputs, first], dim=1), t)
    return first + improvement.float()


def signal(t: Tensor, steps: int) -> Tensor:
    """Return the share of the image in the variance at times t [N] from 0 (all) to `steps`, float32 [N, 1, 1, 1].

    The schedule of arXiv:2011.13456 (VP, beta from 0.1 to 20) at equal distances, as in arXiv:2112.07804; a function
    and no table in a buffer, which DDP would broadcast in each forward.
    """
    time = t[:, None, None, None].float() / steps
    return torch.exp(-0.1 * time - 0.5 * (20 - 0.1) * time.square())


class UNet(nn.Module):
    """An image [N, 1, H, W] from images [N, before, H, W] and, if `steps` is not 0, times [N] from 1 to `steps`.

    The blocks work at half the resolution, the other convolutions at the full one; H and W are even.
    """

    def __init__(self, before: int, channels: int, steps: int, checkpointing: bool) -> None:
        super().__init__()
        self.steps, self.checkpointing = steps, checkpointing
        condition = 4 * channels if steps else 0
        self.time = nn.Linear(steps, condition) if steps else None
        self.first = nn.Conv2d(before, channels, 3, padding=1)
        self.low = nn.ModuleList(Block(width, 2 * channels, condition) for width in (channels, 2 * channels))
        self.join = nn.Conv2d(3 * channels, channels, 1)
        self.fine = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, MADE, 1)

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        condition = None
        if self.time is not None and t is not None:
            one_hot = t[:, None] == torch.arange(1, self.steps + 1, device=t.device)  # F.one_hot waits for the device
            condition = F.silu(self.time(one_hot.float()))
        fine = F.silu(self.first(x))
        low = F.avg_pool2d(fine, 2)
        for block in self.low:
            # Not reentrant: the only kind that works with DDP and torch.compile without further settings.
            again = self.checkpointing and torch.is_grad_enabled()
            low = checkpoint(block, low, condition, use_reentrant=False) if again else block(low, condition)
        joined = F.silu(self.join(torch.cat([F.interpolate(low, scale_factor=2.0), fine], dim=1)))
        image: Tensor = self.last(joined + F.silu(self.fine(joined)))
        return image


class Block(nn.Module):
    """Two convolutions with a shortcut; the condition [N, D], if any, scales and shifts the features between them."""

    def __init__(self, before: int, after: int, condition: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, after)  # only here: the level of the inputs, which tells the colour, passes by
        self.modulate = nn.Linear(condition, 2 * after) if condition else None
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        h = self.norm(self.conv1(F.silu(x)))
        if self.modulate is not None and condition is not None:
            scale, shift = self.modulate(condition)[:, :, None, None].chunk(2, dim=1)
            h = h * (1 + scale) + shift
        result: Tensor = self.shortcut(x) + self.conv2(F.silu(h))
        return result


class Discriminator(nn.Module):
    """How real each region of 4x4 pixels looks, given the inputs: logits [N, 1, H / 4, W / 4]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(MADE + GIVEN, channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * channels, 1, 3, padding=1),
        )

    def forward(self, candidate: Tensor, inputs: Tensor) -> Tensor:
        judged: Tensor = self.layers(torch.cat([candidate, inputs], dim=1))
        return judged
