"""A main function with everything that a run needs: what existing code is turned into.

Its names are those that training scripts are not likely to have for something else: `checkpoint` and `phase` are not.
"""

from __future__ import annotations

SKETCH = """\
from PACKAGE.ddp import on_rank0
from PACKAGE.ddp import phase as ddp_phase
from PACKAGE.ddp.adopted import ddp_session, resumed_batches, resumed_epochs, watched_batches

def main():
    with ddp_session() as run:  # DDP_ variables over defaults; your own arguments and files stay yours
        network = build_model().to(run.job.device)
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(network.parameters())
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in resumed_epochs(range(EPOCHS), model=model, optimizer=optimizer):  # schedulers and scalers, too
            sampler.set_epoch(epoch)
            for batch in resumed_batches(loader):  # between two steps all ranks agree on a stop, and save
                with ddp_phase("forward"):
                    loss = loss_of(model, batch)
                with ddp_phase("backward"):
                    loss.backward()
                with ddp_phase("optim"):
                    optimizer.step()
                    optimizer.zero_grad()
            on_rank0(run.job, "evaluate", lambda progress: evaluate(network))  # every rank calls it
"""


def sketch(package: str) -> list[str]:
    """Return the lines of a main function with everything that a run needs."""
    return SKETCH.replace("PACKAGE", package).splitlines()
