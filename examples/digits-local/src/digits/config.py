"""Every setting of a run: defaults here, then configs/train.yaml, DDP_<SECTION>__<KEY> variables, the command line.

The later wins. A field that you add to a section is a setting at once, in all of these places.
"""

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from .data import DataSettings
from .ddp.session import SessionSettings
from .evaluate import EvalSettings
from .model import ModelSettings
from .sample import SampleSettings


class TrainSettings(BaseModel, extra="forbid"):
    """Optimisation."""

    steps: int = Field(1000, ge=1, description="optimiser steps of the whole run")
    batch_size: int = Field(64, ge=1, description="samples in a batch of one rank")
    accumulate: int = Field(1, ge=1, description="gradient accumulation: batches of a rank for one optimiser step")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "fp32", description="autocast to it; auto: bf16 on GPUs that have it, else fp32; fp16 also scales the loss"
    )
    compile: bool = Field(False, description="torch.compile; the first step may take up to clocks.compile_s")
    learning_rate: float = Field(8e-3, gt=0, description="highest value, after warm-up")
    warmup_steps: int = Field(50, ge=0, description="steps of linear warm-up of the learning rate")
    weight_decay: float = Field(0.01, ge=0, description="of AdamW")
    clip_norm: float = Field(1.0, gt=0, description="clip gradients to this global norm")
    max_nonfinite: int = Field(10, ge=0, description="a start ends after more skipped steps (NaN or infinite gradient)")
    ema: float = Field(0.0, ge=0, lt=1, description="decay of the averaged weights, which are evaluated; 0: none")
    rehearse: bool = Field(True, description="a trial step of the largest batch before training, see ddp/rehearsal.py")
    fast_dev_run: int = Field(0, ge=0, description="try everything in so many steps; --fast-dev-run: 4 steps; 0: off")

    @model_validator(mode="after")
    def _compile_needs_rehearsal(self) -> "TrainSettings":
        if self.compile and not self.rehearse:
            raise ValueError("train.compile needs train.rehearse: compiling takes longer than a phase of training may")
        return self


# The most that these may be with --fast-dev-run: a sample is drawn then, too, but a small one.
FAST_DEV_RUN = {"sample.images": 10, "sample.ddim_steps": 3}


class Settings(SessionSettings):
    """Every setting. The sections `run`, `loader`, `checkpoint`, `log`, `clocks` and `preempt` come from `ddp/`."""

    train: TrainSettings = TrainSettings()
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = DataSettings()
    eval: EvalSettings = EvalSettings()
    sample: SampleSettings = SampleSettings()
