#!/usr/bin/env bash
# Trains on this machine: launch/torchrun.sh [training arguments], from any directory. Relative paths are the project's.
#
#   NPROC          processes here (default: auto); auto is one a GPU, or two on a machine without GPUs
#   MAX_RESTARTS   restarts after a checkpointed stop or a stall (default: 3; several nodes: 0)
#   PREFLIGHT      1: look at GPUs, network and disks first; 0: do not (default: 1 on several nodes, 0 on one)
#   VENV           virtual environment (default: .venv, if it exists, else the current Python)
#   DDP_RUN__ID    the run to begin or to continue (default: the time); one start at a time, a second one is refused
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   these and DDP_RUN__ID, on each node: several nodes without a scheduler
#
# launch/torchrun.sh evaluate RUN, or sample RUN, looks at a checkpoint instead: python -m digits.evaluate --help.
#
# A list or a grid of settings: launch/sweep.py --help
#
# Exit codes: 0 done, 1 failed, 70 stalled, 75 stopped with a checkpoint, 78 wrong configuration.
# SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 or SIGUSR2 asks the ranks to save a checkpoint and stop. A second one makes
# torchrun end them, after 30 s with SIGKILL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

case " $* " in
*' -h '* | *' --help '*) show_help launch/torchrun.sh && exit ;;
esac
nnodes=${NNODES:-1}
nproc=${NPROC:-auto}
if [ "$nproc" = auto ]; then
  nproc=$(count_gpus)
  [ "$nproc" -gt 0 ] || nproc=2
fi
refuse_unless_number NPROC "$nproc" 1
refuse_unless_number NNODES "$nnodes" 1
prepare_environment "$nnodes" ""
case ${1:-} in
evaluate | sample) # they take no run directory, and are not started again
  version_of_torch >/dev/null || refuse_python
  if [ "$1" = sample ] || [ "$nproc" = 1 ]; then
    exec python -m "digits.$1" "${@:2}"
  fi
  aside=$(mktemp -d) # for torchrun, whose own words would stand last
  trap 'rm -rf "$aside"' EXIT
  trap 'interrupted=130 && kill -TERM "$!" 2>/dev/null || true' INT TERM
  python "$launch_folder/agent.py" "$aside/agent.log" --log-dir "$aside" --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 --nproc-per-node "$nproc" -m "digits.$1" "${@:2}" &
  code=0
  wait $! || code=$?
  wait $! 2>/dev/null || true # after a signal to this script, which ends the first
  if [ "$code" != 0 ] && grep -q 'exitcode *: 78 ' "$aside/agent.log"; then
    code=78 # torchrun makes 1 of it
  fi
  exit "${interrupted:-$code}"
  ;;
esac
refuse_unknown_settings "$@"

if [ "$nnodes" -gt 1 ]; then
  for name in NODE_RANK MASTER_ADDR MASTER_PORT DDP_RUN__ID; do
    [ -n "${!name:-}" ] || refuse "$name is not set, and NNODES=$nnodes" "set it on every node"
  done
fi
run_directory=$(python launch/outcome.py new "$(date +%Y%m%d-%H%M%S)" "$@")
export DDP_RUN__ID="${run_directory##*/}" DDP_RUN__DIR="${run_directory%/*}"
init_s=$(python launch/outcome.py setting clocks.init_s 300 "$@")
refuse_unless_number clocks.init_s "${init_s%.*}" 1
if [ "${NODE_RANK:-0}" = 0 ]; then
  claim_run_directory
  forget_request "$run_directory"
fi

if [ "$nnodes" -gt 1 ]; then
  [[ $MASTER_PORT =~ ^[1-9][0-9]{0,4}$ ]] && [ "$MASTER_PORT" -lt 65536 ] \
    || refuse_run launcher_misconfig "MASTER_PORT=$MASTER_PORT is no port" "set it to a number from 1 to 65535"
  [ "$NODE_RANK" != 0 ] || port_is_free "$MASTER_PORT" \
    || refuse_run port_in_use "port $MASTER_PORT of $this_host is in use already" "choose another MASTER_PORT on all nodes"
  # A node cannot know whether the others start again as well; it would wait for them in vain.
  max_restarts=${MAX_RESTARTS:-0}
  rendezvous=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    --rdzv-conf "timeout=${init_s%.*}")
  use_gloo_interface "$MASTER_ADDR" "$nnodes"
else
  max_restarts=${MAX_RESTARTS:-3}
  # Port 0 is any free one: two runs on this machine do not meet. 127.0.0.1 works whatever this host's name resolves to.
  rendezvous=(--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1)
  use_gloo_interface 127.0.0.1 1
fi
refuse_unless_number MAX_RESTARTS "$max_restarts" 0
preflight=${PREFLIGHT:-$((nnodes > 1))}

use_flight_recorder "$run_directory"
# Read by OpenMP and by torch on the CPU. torchrun sets 1 when it is unset, which leaves the other cores idle.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
fi

torchrun=
gave_up=
stopping=
interrupted=
# The first signal goes to the ranks, the second to torchrun. Never SIGKILL: torchrun would leave its workers behind.
stop() { # stop SIGNAL
  local before=$stopping
  interrupted=1 stopping=1 # at once: the second signal may come while this one is still handled
  if [ -z "$torchrun" ]; then
    say "got SIG$1"
  elif [ -z "$before" ]; then
    say "got SIG$1: asking the ranks to stop"
    # They get SIGTERM, which ends those that still import in silence; which signal it was stands in the file.
    [ "$1" = TERM ] || ask_to_stop "$run_directory" "$1" 2>/dev/null || true
    stop_ranks
  else
    say "got SIG$1: asking torchrun to stop"
    kill -TERM "$torchrun" 2>/dev/null || true
  fi
}
trap 'stop TERM' TERM
trap 'stop INT' INT
trap 'stop HUP' HUP
trap 'stop USR1' USR1
trap 'stop USR2' USR2

run_torchrun() { # run_torchrun NAME COMMAND...: torchrun's exit code, or the code of a stop before anything ran
  local name=$1 code=0
  shift
  # --log-dir: torchrun leaves its error files there, else in /tmp, where nobody removes them.
  start_torchrun "$run_directory/torchelastic/agent${NODE_RANK:-0}.log" --nnodes "$nnodes" --nproc-per-node "$nproc" "${rendezvous[@]}" \
    --rdzv-id "$DDP_RUN__ID.$attempt.$name" --log-dir "$run_directory/torchelastic" "$@"
  [ -z "$stopping" ] || kill -TERM "$torchrun" # asked to stop while nothing ran
  [ "$nnodes" = 1 ] || await_ranks $((${init_s%.*} + 10))
  wait_for "$torchrun" || code=$?
  [ -z "$gave_up" ] || code=70
  torchrun=
  end_orphans
  return "$code"
}

# forget_refused_start CODE: a start whose settings were refused leaves no run directory, unless others have begun there.
forget_refused_start() {
  [ "$1" = 78 ] && [ "$nnodes" = 1 ] && grep -qs '"kind": "bad_settings"' "$run_directory/outcome.json" \
    && ! grep -qs '"event": "start"' "$run_directory/attempts.jsonl" || return 0
  rm -rf "$run_directory/torchelastic" "$run_directory/flight_recorder"
  rm -f "$run_directory"/{outcome.json,attempts.jsonl,owner.json}
  rmdir "$run_directory" 2>/dev/null || true # it holds something of somebody else
}

attempt=${DDP_ATTEMPT:-0}
restarts=0
while :; do
  export DDP_ATTEMPT=$attempt
  # A terminal's Ctrl-C ends a command that runs just now, too: that must not be the end of this script.
  [ "${NODE_RANK:-0}" != 0 ] || rm -f "$run_directory/outcome.json" || true
  say "attempt $attempt of run $DDP_RUN__ID: $nnodes x $nproc processes, $run_directory"
  code=0
  events=0
  count_events events
  if [ "$preflight" != 0 ]; then run_torchrun preflight -m digits.ddp.preflight "$@" || code=$?; fi
  if [ "$code" = 0 ]; then run_torchrun train -m digits.train "$@" || code=$?; fi
  [ -z "$stopping" ] || trap '' TERM INT HUP USR1 USR2 # another one would only cut off what is said about the end
  note_import "$code" "$events"
  [ "$nnodes" -gt 1 ] || note_silence "$code" "$events" # ranks on other nodes may still be about to leave one
  read -r code restart what < <(python launch/outcome.py ended "$run_directory" "$attempt" "$code" "$(stopped_early "$events")")

  if [ "$restart" != restart ]; then decision="exit code $code"
  elif [ -n "$stopping" ]; then decision="this script was asked to stop, so no restart; exit code $code"
  elif [ "$restarts" -ge "$max_restarts" ]; then decision="no restarts left of $max_restarts; exit code $code"
  else decision=
  fi
  if [ -n "$decision" ]; then
    say "attempt $attempt ended, $what; $decision"
    say_where_it_began "$attempt"
    say_how_to_go_on "$code" NPROC,NNODES,NODE_RANK,MASTER_ADDR,MASTER_PORT,MAX_RESTARTS,PREFLIGHT,VENV,CUDA_VISIBLE_DEVICES,HIP_VISIBLE_DEVICES,ROCR_VISIBLE_DEVICES \
      launch/torchrun.sh "$@"
    forget_refused_start "$code"
    exit "$code"
  fi
  restarts=$((restarts + 1))
  say "attempt $attempt ended, $what; restarting, $restarts of $max_restarts"
  attempt=$((attempt + 1))
done
