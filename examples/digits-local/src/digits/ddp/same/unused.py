"""Parameters of which DDP and the network do not think alike: without a gradient, or changed after DDP was made."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from ..agree import gather
from ..errors import ConfigError, KindName
from ..ranks import named
from ..start.groups import Job
from ..trace.replicas import wrapped

UNUSED = (
    "let the loss depend on them, freeze them (requires_grad_(False)) before DDP wraps the network, or remove them; "
    "find_unused_parameters=True is for those that other steps use"
)
ON_SOME = "look for an `if` on this rank's samples or number: each forward must use them, on all ranks"
WRAP_LAST = "change the network first (adapters, tying, a new head, requires_grad), then wrap it in DDP"
NO_WAY_BACK = "look for detach(), item(), no_grad(), or a loss that is made of something else than the output"


def without_gradient(model: DistributedDataParallel) -> tuple[list[str], int]:
    """Names of the parameters that should have a gradient and have none, and how many should have one."""
    left_out = set(model.parameters_to_ignore)
    trained = [
        (name.replace("_orig_mod.", ""), parameter.grad is None)  # torch.compile's
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in left_out
    ]
    missing = [name for name, absent in trained if absent]
    may_lack = model.find_unused_parameters or model.static_graph
    return ([] if may_lack and len(missing) < len(trained) else missing), len(trained)


def refuse_unused(job: Job, name: str, found: tuple[list[str], int]) -> None:
    """After a first backward without a reduction: say which parameters of the network `name` had no part in it.

    Args:
        found: what `without_gradient` returned on this rank.

    Raises:
        ConfigError: on all ranks, with names, and the ranks if it is not all of them.
    """
    missing, trained = found
    everywhere = gather(job, (missing[:4], len(missing)))
    most = max(count for _, count in everywhere)
    if most == 0:
        return
    ranks = [rank for rank, (_, count) in enumerate(everywhere) if count == most]
    names, _ = everywhere[ranks[0]]
    same = all(row == everywhere[0] for row in everywhere)
    where = "" if same else f" on {named(ranks, job.hosts)}"
    kind: KindName = "rank_exception" if same else "ranks_differ"
    if most == trained:
        problem = f"no parameter of {name} got a gradient{where}: the loss does not lead back to the model"
        raise ConfigError(problem, NO_WAY_BACK, kind)
    listing = ", ".join(names) + (f" and {most - len(names)} others" if most > len(names) else "")
    what = f"{most} of {trained} parameters of {name} get" if most > 1 else f"a parameter of {name} gets"
    problem = f"{what} no gradient{where}, since no forward and loss used {'them' if most > 1 else 'it'}: {listing}"
    raise ConfigError(problem, UNUSED if same else ON_SOME, kind)


def refuse_changed(job: Job, model: DistributedDataParallel) -> None:
    """Before the first backward: DDP has its hooks on the parameters that there were when it was made.

    A later one is trained by each rank for itself, in silence; one that is gone is waited for.

    Raises:
        ConfigError: on all ranks, with the parameter.
    """
    everywhere = gather(job, _changed(model))
    most = max(len(found) for found in everywhere)
    if most == 0:
        return
    ranks = [rank for rank, found in enumerate(everywhere) if len(found) == most]
    same = all(found == everywhere[0] for found in everywhere)
    more = f" (and {most - 1} others)" if most > 1 else ""
    where = "" if same else f", on {named(ranks, job.hosts)}"
    problem = f"{type(model.module).__name__}: {everywhere[ranks[0]][0]}{more}{where}"
    raise ConfigError(problem, WRAP_LAST, "rank_exception" if same else "ranks_differ")


def _changed(model: DistributedDataParallel) -> list[str]:
    """What is no longer as it was: by identity, since pruning gives a parameter another name only."""
    before = wrapped(model)
    if not before:  # of a smaller group: not noted
        return []
    known = {id(parameter): trained for parameter, trained in before.values()}
    present = {name: each for name, each in model.module.named_parameters() if name not in model.parameters_to_ignore}
    found = []
    for name, parameter in present.items():
        if parameter.requires_grad and not known.get(id(parameter)):
            told = name.replace("_orig_mod.", "")  # torch.compile's
            if id(parameter) in known:
                found.append(f"{told} was frozen when DDP was made: DDP does not reduce its gradient")
            elif name in before:
                found.append(f"{told} was replaced after DDP was made: DDP reduces the gradient of the old one")
            else:
                found.append(f"{told} was added after DDP was made: DDP does not reduce its gradient")
    held = {id(parameter) for parameter in model.module.parameters()}
    if not (model.find_unused_parameters or model.static_graph):
        found += [
            f"{name.replace('_orig_mod.', '')} was removed or tied after DDP was made: DDP waits for its gradient"
            for name, (parameter, trained) in before.items()
            if trained and name not in {*present, *model.parameters_to_ignore} and id(parameter) not in held
        ]
    return found
