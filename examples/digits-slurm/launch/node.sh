#!/usr/bin/env bash
# What srun starts with LAUNCHER=torchrun, once for each node: one torchrun with the ranks of this node.
# node.sh RANKS_PER_NODE INIT_SECONDS RUN_DIRECTORY COMMAND [ARGUMENT...]
set -euo pipefail
source launch/common.sh
ranks=$1 init_s=$2 logs=$3/torchelastic/attempt$DDP_ATTEMPT
shift 3
mkdir -p "$logs/$SLURMD_NODENAME" # says that this node has started

# A signal from Slurm comes to this script; with proctrack/linuxproc also to torchrun, which gives the ranks 30 s.
# shellcheck disable=SC2317,SC2329 # the traps call it
stop() {
  interrupted=1 stopping=1
  [ -z "$torchrun" ] || stop_ranks
}
torchrun=
stopping=
interrupted=
trap stop TERM USR1 USR2

# The static rendezvous: node 0 serves the store, also the ranks'. `timeout`: all nodes must be there by then.
start_torchrun --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$ranks" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$DDP_RUN__ID.$DDP_ATTEMPT" \
  --rdzv-conf "timeout=$init_s" --log-dir "$logs/$SLURMD_NODENAME" --no-python bash launch/task.sh "$@"
code=0
wait_for "$torchrun" || code=$?
end_orphans

if [ "$code" != 0 ] && [ -n "$stopping" ]; then
  code=75 # asked to stop, perhaps before training could leave an outcome
elif [ "$code" != 0 ] && [ -z "$(ls -A "$logs/$SLURMD_NODENAME")" ]; then # torchrun makes directories for its ranks
  missing=
  for node in $(scontrol show hostnames "$SLURM_STEP_NODELIST"); do
    [ -d "$logs/$node" ] || missing+=" $node"
  done
  if [ -n "$missing" ]; then
    say "error: torchrun on $SLURMD_NODENAME started no rank in $init_s s, because these nodes did not come:$missing"
    say "       look at the output and the Slurm log of those nodes, or raise clocks.init_s"
  else
    say "error: torchrun on $SLURMD_NODENAME started no rank, and its own message above says why"
    say "       all nodes are here: look at the network between them, and whether $MASTER_ADDR:$MASTER_PORT is free"
  fi
  code=70
fi
exit "$code"
