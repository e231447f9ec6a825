#!/usr/bin/env bash
# What srun, mpiexec or torchrun starts, once for each rank: sets what differs between nodes, then becomes the command
# in its arguments.
set -euo pipefail
source launch/common.sh
use_gloo_interface "$MASTER_ADDR" "${LAUNCH_NODES:-${SLURM_STEP_NUM_NODES:-1}}"
if [ "${LOCAL_RANK:-${SLURM_LOCALID:-${PMI_LOCAL_RANK:-0}}}" = 0 ]; then
  say "$this_host: gloo by ${GLOO_SOCKET_IFNAME:-the interface of its host name}"
fi
# A signal to stop that comes while Python still imports must not kill the rank; training sets its own handlers.
trap '' TERM USR1 USR2 INT
exec "$@"
