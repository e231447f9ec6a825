"""Accelerate, after its guides: prepare, gather, save_state with automatic names, load_state of the newest.

https://huggingface.co/docs/accelerate/usage_guides/checkpoint
"""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from pathlib import Path

import fault
import task
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader


class Progress:
    """Where training stands, for register_for_checkpointing."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=task.TIMEOUT_S))],
        project_config=ProjectConfiguration(".", automatic_checkpoint_naming=True),
    )
    set_seed(0)
    network, second = task.Network(), task.auxiliary()
    optimizer = torch.optim.AdamW([*network.parameters(), *second.parameters()], lr=1e-3)
    loader = DataLoader(task.digits(), task.BATCH, shuffle=True, drop_last=True, num_workers=fault.workers())
    model, extra, optimizer, loader = accelerator.prepare(network, second, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if saved := list(Path("checkpoints").glob("checkpoint_*")):
        accelerator.project_configuration.iteration = len(saved)  # load_state does not set it, save_state needs it
        accelerator.load_state()
        fault.resumed(progress.step)

    for epoch in count(progress.step // len(loader)):
        loader.set_epoch(epoch)
        for images, labels in loader:
            step = progress.step
            fault.begin(step)
            optimizer.zero_grad()
            fault.forward(step)
            loss = F.cross_entropy(model(images), labels) + F.cross_entropy(fault.bypass(extra)(images), labels)
            accelerator.backward(fault.spoil(loss, step))
            if fault.alone(step):
                accelerator.wait_for_everyone()
            optimizer.step()
            if not fault.skips(step):
                accelerator.gather(fault.misshapen(loss.detach(), step)).mean()
            progress.step = step = step + 1
            if step % task.SAMPLE_EVERY == 0:
                if accelerator.is_main_process:
                    fault.sample()
                accelerator.wait_for_everyone()
            if step % task.SAVE_EVERY == 0:
                fault.saving(step, model, extra)
                accelerator.save_state()
            if step == task.STEPS:
                fault.finished(step, model, extra)
                accelerator.end_training()
                return


if __name__ == "__main__":
    main()
