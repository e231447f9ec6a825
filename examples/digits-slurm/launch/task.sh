#!/usr/bin/env bash
# What srun or torchrun starts, once for each rank: sets what differs between nodes, then becomes the command in its
# arguments.
set -euo pipefail
source launch/common.sh
use_gloo_interface "$MASTER_ADDR" "$SLURM_STEP_NUM_NODES"
# A signal to stop that comes while Python still imports must not kill the rank; training sets its own handlers.
trap '' TERM USR1 USR2
exec "$@"
