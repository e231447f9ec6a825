"""Every setting of a run. Values come from configs/train.yaml, DDP_<SECTION>__<KEY> variables and the command line."""

from typing import Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .data import DataSettings
from .ddp import CheckpointSettings, Clocks, LoaderSettings, LogSettings, PreemptSettings, RunSettings
from .evaluate import EvalSettings
from .model import ModelSettings
from .sample import SampleSettings


class TrainSettings(BaseModel, extra="forbid"):
    """The optimisation."""

    steps: int = Field(1000, ge=1, description="optimiser steps of the whole run")
    batch_size: int = Field(64, ge=1, description="samples a rank reads at once")
    accumulate: int = Field(1, ge=1, description="batches that a rank adds up for one optimiser step")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of autocast; fp16 scales the loss as well")
    compile: bool = Field(False, description="torch.compile; the first step takes as long as clocks.compile_s allows")
    learning_rate: float = Field(8e-3, gt=0, description="highest value, after warm-up")
    warmup_steps: int = Field(50, ge=0, description="steps in which the learning rate rises from zero")
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")
    max_nonfinite: int = Field(10, ge=0, description="steps skipped for a NaN or infinite gradient before the run ends")
    ema: float = Field(0.0, ge=0, lt=1, description="decay of the averaged weights that are evaluated; 0 keeps none")
    rehearse: bool = Field(True, description="before the first step, one of the largest batch: see ddp/rehearsal.py")

    @model_validator(mode="after")
    def _compiles_in_the_rehearsal(self) -> "TrainSettings":
        if self.compile and not self.rehearse:
            raise ValueError("train.compile needs train.rehearse: compiling takes longer than a phase of training may")
        return self


class Settings(BaseSettings):
    """All sections. The order is that of the printed table."""

    model_config = SettingsConfigDict(env_prefix="DDP_", env_nested_delimiter="__", extra="forbid")

    run: RunSettings = RunSettings()
    train: TrainSettings = TrainSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    eval: EvalSettings = EvalSettings()
    sample: SampleSettings = SampleSettings()
    loader: LoaderSettings = LoaderSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    clocks: Clocks = Clocks()
    preempt: PreemptSettings = PreemptSettings()

    @classmethod
    def settings_customise_sources(cls, *_: object, **sources: object) -> tuple[object, ...]:  # type: ignore[override]
        """Only what `ddp.settings.load` passes in: it reads the sources itself, to know who set each value."""
        return (sources["init_settings"],)
