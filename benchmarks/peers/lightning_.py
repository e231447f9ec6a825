"""Lightning, after its guides: a LightningModule, the Trainer with DDP, ModelCheckpoint, and ckpt_path="last".

https://lightning.ai/docs/pytorch/stable/common/checkpointing.html
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import fault
import lightning as L
import task
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

RANKS = int(os.environ["PEERS_RANKS"])


class Classifier(L.LightningModule):
    """Both networks are one module to Lightning, and DDP is around it: no loss can pass DDP by."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.extra = task.Network(), task.auxiliary()

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        images, labels = batch
        step = self.global_step
        fault.begin(step)
        fault.forward(step)
        loss = F.cross_entropy(self.network(images), labels) + F.cross_entropy(self.extra(images), labels)
        if fault.alone(step):
            self.trainer.strategy.barrier()
        if not fault.skips(step):
            mean = self.all_gather(fault.misshapen(loss.detach(), step)).mean()
            self.log("loss", mean)
        return fault.spoil(loss, step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fault.resumed(checkpoint["global_step"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fault.saving(checkpoint["global_step"], self)

    def on_train_end(self) -> None:
        fault.finished(self.global_step, self)


class Sampling(Callback):
    """Rank 0 draws what the model gives."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % task.SAMPLE_EVERY == 0 and trainer.is_global_zero:
            fault.sample()


def main() -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(timeout=timedelta(seconds=task.TIMEOUT_S)),
        max_steps=task.STEPS,
        callbacks=[
            ModelCheckpoint("checkpoints", every_n_train_steps=task.SAVE_EVERY, save_top_k=-1, save_last=True),
            Sampling(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(task.digits(), task.BATCH, shuffle=True, drop_last=True, num_workers=fault.workers())
    trainer.fit(Classifier(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
