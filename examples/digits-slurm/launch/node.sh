#!/usr/bin/env bash
# What srun (LAUNCHER=torchrun) or ibrun starts, once for each node: one torchrun with the ranks of this node.
# node.sh RANKS_PER_NODE INIT_SECONDS RUN_DIRECTORY COMMAND [ARGUMENT...]
set -euo pipefail
source launch/common.sh
ranks=$1 init_s=$2 logs=$3/torchelastic/attempt$DDP_ATTEMPT
shift 3
# srun numbers the nodes of a step; ibrun starts MPI tasks, and leaves SLURM_NODEID as it was in the batch script.
node=${SLURMD_NODENAME:-$this_host} number=${SLURM_NODEID:-0} nodes=${SLURM_STEP_NUM_NODES:-$SLURM_JOB_NUM_NODES}
for variable in PMI_RANK OMPI_COMM_WORLD_RANK; do
  if [ "${LAUNCHED_WITH:-}" = ibrun ] && [ -n "${!variable:-}" ]; then
    node=${this_host%%.*} number=${!variable} nodes=$SLURM_JOB_NUM_NODES
  fi
done
unset PMI_RANK OMPI_COMM_WORLD_RANK # of this task, not of the ranks below it
mkdir -p "$logs/$node" # says that this node has started

# A signal from Slurm comes to this script; with proctrack/linuxproc also to torchrun, which gives the ranks 30 s.
# shellcheck disable=SC2317,SC2329 # the traps call it
stop() {
  interrupted=1 stopping=1
  [ -z "$torchrun" ] || stop_ranks
}
torchrun=
stopping=
interrupted=
trap stop TERM USR1 USR2 INT HUP

# The static rendezvous: node 0 serves the store, also the ranks'. `timeout`: all nodes must be there by then.
start_torchrun "$logs/agent$number.log" --nnodes "$nodes" --node-rank "$number" --nproc-per-node "$ranks" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$DDP_RUN__ID.$DDP_ATTEMPT" \
  --rdzv-conf "timeout=$init_s" --log-dir "$logs/$node" --no-python bash launch/task.sh "$@"
code=0
wait_for "$torchrun" || code=$?
end_orphans

if [ "$code" != 0 ] && [ -n "$stopping" ]; then
  code=75 # asked to stop, perhaps before training could leave an outcome
elif [ "$code" != 0 ] && [ -z "$(ls -A "$logs/$node")" ]; then # torchrun makes directories for its ranks
  missing=
  for other in $(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}"); do
    [ -d "$logs/$other" ] || missing+=" $other"
  done
  if [ -n "$missing" ]; then
    say "error: torchrun on $node started no rank in $init_s s, because these nodes did not come:$missing"
    say "       look at the output and the Slurm log of those nodes, or raise clocks.init_s"
  else
    say "error: torchrun on $node started no rank, and its own message above says why"
    say "       all nodes are here: look at the network between them, and whether $MASTER_ADDR:$MASTER_PORT is free"
  fi
  code=70
fi
exit "$code"
