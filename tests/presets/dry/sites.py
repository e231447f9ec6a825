"""What a site has beside what its preset says: where its plugin comes from, whose mpiexec it has, where queues lead.

Sources stand beside each. What no source says is not here; `unknown` of make_clusters.py lists it for people.
"""

from __future__ import annotations

from dataclasses import replace

from sandbox import Site

from ddp_scaffold.presets.schema import Preset

SITES = {
    # mpiexec: HPE PALS; prod is a routing queue: argonne-lcf/user-guides docs/polaris/running-jobs/index.md.
    # The plugin: the source of library_paths in the preset.
    "alcf-polaris": Site(
        frozenset(), "pals", {"prod": "small"}, plugin_from="/soft/libraries/aws-ofi-nccl/v1.6.0-libfabric-1.22.0/lib"
    ),
    # The module that the preset loads for it: the source of modules there.
    "olcf-frontier": Site(frozenset(), plugin_from="rccl-net-plugin"),
    # The default view of the uenv has the plugin: the source of needs in the preset.
    "cscs-clariden": Site(frozenset(), plugin_from="uenv"),
    # Modules that a user adds, as needs in the preset names them.
    "nersc-perlmutter": Site(frozenset({"pytorch", "nccl"}), plugin_from="nccl"),
    "generic-slurm-slingshot": Site(frozenset({"python", "aws-ofi-nccl"}), plugin_from="aws-ofi-nccl"),
    # gIB's directory, also inside the container: the source of env_scripts and container in the preset.
    "gcp-a3-ultra": Site(frozenset(), plugin_from="/usr/local/gib/lib64"),
    # mpiexec: Cray PALS, NCAR/HPC-Docs docs/compute-systems/derecho/compiling-code-on-derecho/index.md (PALS_CPU_BIND);
    # queues: docs/pbs/charging.md, of jobs that ask for GPUs.
    "ncar-derecho": Site(frozenset(), "pals", {"main": "gpu", "develop": "gpu", "preempt": "pgpu"}),
    # The module, and the script that its brics/apptainer-multi-node has in every container, which ends in the command
    # behind it: the sources of modules and container in the preset.
    "isambard-ai": Site(frozenset(), plugin_from="brics/nccl", adapts="/host/adapt.sh"),
    # The source of library_paths in the preset: TCPX is there.
    "gcp-a3-high": Site(frozenset(), plugin_from="/var/lib/tcpx/lib64"),
}


def site_of(preset: Preset) -> Site:
    """Return the site of a preset: it knows the modules that the preset loads, on the host or with a container."""
    container = preset.container.value if preset.container else None
    modules = {*(preset.modules.value or [] if preset.modules else []), *((container and container.modules) or [])}
    known = SITES.get(preset.name, Site(frozenset()))
    return replace(known, known_modules=known.known_modules | modules)
