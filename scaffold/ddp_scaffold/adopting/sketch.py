"""A main function with everything that a run needs: what existing code is turned into."""

from __future__ import annotations

SKETCH = """\
from PACKAGE.ddp import StopRequested, checkpoint, endless, make_loader, on_rank0, phase, step_done
from PACKAGE.ddp.session import session
from PACKAGE.ddp.variables import read_variables

def main():
    ddp, rows = read_variables()  # DDP_ variables over defaults; your own arguments and files stay yours
    with session(ddp.run, ddp.clocks, ddp.log, ddp.preempt, rows) as run:
        network = build_model().to(run.job.device)
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(network.parameters())
        loader = make_loader(dataset, run.job, ddp.loader, batch_size=32)
        state = {"model": network, "optimizer": optimizer}
        at = {"step": 0, "epoch": 0, "used": 0, "begun": 0}
        at |= checkpoint.load(run.job, run.dir, state) or {}
        step_done(at["step"], at["epoch"])
        try:
            for position, batch in endless(loader, run.job, at["epoch"], at["used"], at["begun"]):
                run.agreement.poll(at["step"])  # raises StopRequested on all ranks at the same step
                at |= position
                with phase("forward"):
                    loss = loss_of(model, batch)
                with phase("backward"):
                    loss.backward()
                with phase("optim"):
                    optimizer.step()
                    optimizer.zero_grad()
                at["step"] += 1
                step_done(at["step"], at["epoch"])
                last = at["step"] >= STEPS
                if at["step"] % 500 == 0 or last:
                    on_rank0(run.job, "evaluate", lambda progress: evaluate(network))  # every rank calls it
                    checkpoint.save(run.job, run.dir, at, state, keep=ddp.checkpoint.keep, must=last)
                if last:
                    break
        except StopRequested:
            checkpoint.save(run.job, run.dir, at, state, keep=ddp.checkpoint.keep, must=True)
            raise
"""


def sketch(package: str) -> list[str]:
    """Return the lines of a main function with everything that a run needs."""
    return SKETCH.replace("PACKAGE", package).splitlines()
