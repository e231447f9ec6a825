"""The plumbing of distributed training. Owned by the template: `ddp-scaffold update` brings fixes to these files.

This module has what a project's own files import, but for `session`: import it from `.session`, whose name it shares.
Names are imported at their first use, since launch scripts start parts of the plumbing that must not wait for PyTorch.

The map, from top to bottom: a module imports from its own line and from the lines below, never from one above.

    inference               the commands that evaluate a checkpoint of a run, and draw from it
    adopted                 what a loop that was there before calls: it stops, and resumes
    session variables       `with session(...) as run`, from the start to the exit code; the settings of existing code
    preflight/              before the job: what is wrong with which machine or link
    watch/                  who is to blame for a hang (verdict), an exception (blame); stragglers are told (slow_ranks)
    fast_dev_run            a trial of everything in a few steps, resuming included
    rehearsal               before step 1, a step of the largest batch
    export                  the weights of a checkpoint alone, for inference
    loader checkpoint       make_loader and batches; checkpoints that training does not wait for
    loading/                behind the loader: whose samples (shards), and which worker is at fault (fetch)
    saving/                 behind the checkpoint: the copy (snapshot), who writes it, what is visible when (directory)
    same/                   before step 1: are code, networks and buffers the same on all ranks
    averages                the moving average of the weights
    storable restore        what a checkpoint may hold, and how objects are filled from it
    summary                 parameters, and the memory that they cost, in a line or two
    profiling               a trace of some steps, for Perfetto
    patience                early stopping, on all ranks at the same step
    agree guard metrics     what ranks decide together; rank-0 work; norms, skipped steps, the metric log
    trackers                TensorBoard and W&B, which get what the metric log writes
    meter                   time, throughput, waiting and memory, for the metric log
    trace/                  what a rank knows of itself: phase (heartbeat), collectives, slow steps, drift, time (spent)
    faults                  fault injection
    start/                  from the launcher's variables to process groups; why a run stops (stop), who owns it (owner)
    report/                 what a run writes about itself: outcome.json, report.md, the picture of a failure
    best                    which checkpoint is the best, by the metrics in their manifests
    kinds                   the kinds of outcome, and what to do about each
    rank_state              the state that a rank publishes
    rng errors clocks       states of random generators; exit codes and exceptions; every timeout
    process_group polling   the hook into every collective; waiting by looking
    ranks processes         how ranks are named: rank 3 (n2); and processes told from later ones of the same number
"""

from importlib import import_module
from typing import TYPE_CHECKING

_NAMES = {
    "agree": "gather total",
    "averages": "moving_average",
    "checkpoint": "CheckpointSettings Position",
    "clocks": "Clocks",
    "errors": "ConfigError NonFinite StopRequested",
    "fast_dev_run": "parts",
    "guard": "Progress on_rank0",
    "loader": "LoaderSettings batches endless full_batches make_loader to_device",
    "loading.lockstep": "polled",
    "metrics": "LogSettings clip_gradients global_norm gradient_norm step_if_finite",
    "patience": "Patience",
    "rehearsal": "largest_batch rehearse",
    "rng": "seed_generators",
    "start.groups": "Job",
    "start.settings": "RunSettings effective load load_settings settings_table",
    "start.stop": "PreemptSettings",
    "trace.heartbeat": "phase progress step_done",
}

if TYPE_CHECKING:  # the same names, for mypy and editors
    from .agree import gather as gather
    from .agree import total as total
    from .averages import moving_average as moving_average
    from .checkpoint import CheckpointSettings as CheckpointSettings
    from .checkpoint import Position as Position
    from .clocks import Clocks as Clocks
    from .errors import ConfigError as ConfigError
    from .errors import NonFinite as NonFinite
    from .errors import StopRequested as StopRequested
    from .fast_dev_run import parts as parts
    from .guard import Progress as Progress
    from .guard import on_rank0 as on_rank0
    from .loader import LoaderSettings as LoaderSettings
    from .loader import batches as batches
    from .loader import endless as endless
    from .loader import full_batches as full_batches
    from .loader import make_loader as make_loader
    from .loader import to_device as to_device
    from .loading.lockstep import polled as polled
    from .metrics import LogSettings as LogSettings
    from .metrics import clip_gradients as clip_gradients
    from .metrics import global_norm as global_norm
    from .metrics import gradient_norm as gradient_norm
    from .metrics import step_if_finite as step_if_finite
    from .patience import Patience as Patience
    from .rehearsal import largest_batch as largest_batch
    from .rehearsal import rehearse as rehearse
    from .rng import seed_generators as seed_generators
    from .start.groups import Job as Job
    from .start.settings import RunSettings as RunSettings
    from .start.settings import effective as effective
    from .start.settings import load as load
    from .start.settings import load_settings as load_settings
    from .start.settings import settings_table as settings_table
    from .start.stop import PreemptSettings as PreemptSettings
    from .trace.heartbeat import phase as phase
    from .trace.heartbeat import progress as progress
    from .trace.heartbeat import step_done as step_done
else:

    def __getattr__(name):
        """Import a name at its first use (PEP 562)."""
        for module, names in _NAMES.items():
            if name in names.split():
                globals()[name] = found = getattr(import_module(f"{__name__}.{module}"), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        """For completion at a prompt."""
        return sorted([*globals(), *" ".join(_NAMES.values()).split()])
