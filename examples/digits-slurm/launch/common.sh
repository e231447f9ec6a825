# shellcheck shell=bash
# Sourced by the other launch scripts. The current directory is the project.

launch_folder=${BASH_SOURCE[0]%/*} # with a second cluster, there is one for each
this_host=$(uname -n) # not HOSTNAME: where that is set in the environment, bash keeps it, and it is the login node's

say() { printf '[launch] %s\n' "$*" >&2; }

refuse() { # refuse WHAT_IS_WRONG WHAT_TO_DO: exit code 78, a wrong configuration is never started again
  say "error: $1"
  say "       $2"
  exit 78
}

# refuse_run KIND WHAT_IS_WRONG WHAT_TO_DO: the same once there is a run directory, whose outcome.json says it then.
refuse_run() {
  python "$launch_folder/outcome.py" refuse "$run_directory" "${DDP_ATTEMPT:-0}" "$@"
  refuse "$2" "$3"
}

# ask COMMAND...: what it prints. One that does not answer in 30 s, as a scheduler's or a driver's tools may, is ended.
ask() {
  if command -v timeout >/dev/null; then timeout 30 "$@" </dev/null; else "$@" </dev/null; fi
}

# load_env FILE NODES PARTITION [container]: exports the KEY=VALUE lines of a file. A variable that is set already keeps
# its value. $NAME in a value stands for that variable. Lines below conditions in brackets count only where all of them
# hold, up to the next line in brackets: [nodes >= 2], [partition NAME], [gpu H100], [plugin <= 1.5, nodes >= 2].
load_env() {
  local line key value rest name here=1
  while read -r line || [ -n "$line" ]; do
    line=${line%$'\r'}
    key=${line%%=*}
    case $line in
    '' | '#'*) continue ;;
    '['*)
      here=
      if applies "$line" "${2:-}" "${3:-}" "${4:-}"; then here=1; fi
      continue
      ;;
    esac
    [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || refuse "$1: $line is not NAME=VALUE" "correct it"
    [ -n "$here" ] && [ -z "${!key+set}" ] || continue
    value='' rest=${line#*=}
    while [[ $rest == *\$* ]]; do
      value+=${rest%%\$*} rest=${rest#*\$}
      if [[ $rest =~ ^[A-Za-z_][A-Za-z0-9_]* ]]; then
        name=${BASH_REMATCH[0]} rest=${rest#"${BASH_REMATCH[0]}"}
        value+=${!name-}
      else
        value+=\$
      fi
    done
    export "$key=$value$rest"
  done <"$1"
}

applies() { # applies '[nodes >= 2, partition gpu]' NODES PARTITION [container]
  local conditions condition kind sign value holds=1
  local number='^[1-9][0-9]{0,8}$' version='^[0-9]{1,9}([.][0-9]{1,9})*$' word='^[A-Za-z0-9]+$'
  IFS=',' read -ra conditions <<<"${1//[\[\]]/}"
  for condition in "${conditions[@]:-}"; do # a mistake is refused in any case, and nothing is looked up in vain
    read -r kind sign value <<<"$condition"
    if [[ $kind == nodes && $sign == [\<\>]= && $value =~ $number ]]; then
      compares "$2" "$sign" "$value" || holds=''
    elif [[ $kind == partition && -n $sign && -z $value ]]; then
      [ "$3" = "$sign" ] || holds=''
    elif [[ $kind == gpu && $sign =~ $word && -z $value ]]; then
      [ -z "$holds" ] || gpu_is "$sign" || holds=''
    elif [[ $kind == plugin && $sign == [\<\>]= && $value =~ $version ]]; then
      [ -z "$holds" ] || plugin_is "$sign" "$value" "$4" || holds=''
    else
      refuse "$launch_folder/env: $1 is no condition" \
        "write [nodes >= 2], [nodes <= 1], [partition NAME], [gpu H100], [plugin >= 1.17] or [plugin <= 1.5]"
    fi
  done
  [ -n "$holds" ]
}

# compares 1.16.3 '>=' 1.9: as numbers, and only as many of them as the last one has: 1.5.3 is <= 1.5, and >= 1.5.
compares() {
  local have want i
  IFS=. read -ra have <<<"$1"
  IFS=. read -ra want <<<"$3"
  for i in "${!want[@]}"; do
    if [ "${have[i]:-0}" -ne "${want[i]}" ]; then
      if [ "${have[i]:-0}" -gt "${want[i]}" ]; then [ "$2" = '>=' ]; else [ "$2" = '<=' ]; fi
      return
    fi
  done
}

gpu_name='' plugin_version='' # looked up when the first condition asks; - stands for unknown

# gpu_is H100: whether the name of the first GPU of this node has this word, in any case. NVIDIA GB200 has no B200.
gpu_is() {
  if [ -z "$gpu_name" ]; then
    gpu_name=$(ask nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || gpu_name=''
    if [ -z "$gpu_name" ]; then
      # "Card series" until ROCm 6.0, then "Card Series" (ROCm/rocm_smi_lib python_smi_tools/rocm_smi.py);
      # MARKET_NAME (ROCm/amdsmi amdsmi_cli/README.md).
      gpu_name=$({ ask rocm-smi --showproductname || ask amd-smi static --asic; } 2>/dev/null \
        | sed -nE 's/.*(Card [Ss]eries|MARKET_NAME):[[:space:]]*//p')
    fi
    gpu_name=${gpu_name%%$'\n'*}
    [ -n "$gpu_name" ] || say "no GPU of $this_host is known to nvidia-smi, rocm-smi or amd-smi:" \
      "lines below [gpu ...] in $launch_folder/env do not count"
    gpu_name=${gpu_name:--}
  fi
  local words=" ${gpu_name//[!A-Za-z0-9]/ } "
  [[ ${words,,} == *" ${1,,} "* ]]
}

# plugin_is '>=' 1.17 [container]: whether the network plugin aws-ofi-nccl has such a version.
plugin_is() {
  if [ -z "$plugin_version" ]; then
    plugin_version=-
    if [ -n "${3:-}" ]; then
      say "the network plugin is in the container's image: lines below [plugin ...] in $launch_folder/env do not" \
        "count; set by hand those that its version needs"
    else
      find_plugin
    fi
  fi
  [ "$plugin_version" != - ] && compares "$plugin_version" "$1" "$2"
}

# find_plugin: the version in the text that the plugin prints at its start: "Initializing aws-ofi-nccl 1.16.3", "Using
# aws-ofi-nccl 1.5.0aws" (aws/aws-ofi-nccl src/nccl_ofi_net.cpp, PACKAGE_STRING; its names: src/Makefile.am).
find_plugin() {
  local directories directory files=() file found
  # As the dynamic linker looks; at last where EFA's installer and AWS's samples put it.
  IFS=: read -ra directories <<<"${LD_LIBRARY_PATH:-}"
  for directory in "${directories[@]:-}"; do
    [ -z "$directory" ] || files+=("$directory"/lib[nr]ccl-net*.so*)
  done
  while read -r file; do files+=("$file"); done \
    < <(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null </dev/null | sed -n 's/.*lib[nr]ccl-net.* => //p')
  for directory in /opt/amazon/ofi-nccl/lib{,64,/*} /opt/aws-ofi-nccl{,/install}/lib{,64}; do
    files+=("$directory"/lib[nr]ccl-net*.so*)
  done
  for file in "${files[@]}"; do # also those of others, which have no such text
    found=$(LC_ALL=C grep -aoE 'aws-ofi-nccl [0-9]{1,9}(\.[0-9]{1,9})*' "$file" 2>/dev/null) || continue
    read -r _ plugin_version <<<"$found"
    return
  done
  say "no network plugin aws-ofi-nccl with a known version was found (LD_LIBRARY_PATH, ldconfig -p, /opt):" \
    "lines below [plugin ...] in $launch_folder/env do not count"
}

# find_python [container]: `python` for these scripts, which need 3.9, and for a job without a container 3.10. The host of
# a container may have it under another name only: python3 of SUSE 15, on many Crays, is 3.6.
find_python() {
  local name found='' least=10
  [ -z "$1" ] || least=9
  for name in python ${1:+python3 python3.13 python3.12 python3.11 python3.10 python3.9}; do
    name=$(type -P "$name") || continue
    if "$name" -c "import sys; sys.exit(sys.version_info < (3, $least))" 2>/dev/null; then
      host_python=$name
      # shellcheck disable=SC2317,SC2329 # called by whatever sources this file
      [ "${name##*/}" = python ] || python() { "$host_python" "$@"; }
      return
    fi
    found=${found:-$name}
  done
  [ -n "$found" ] || refuse "there is no python on the PATH" "make .venv, or set VENV"
  refuse "$found is older than Python 3.$least, or does not start" \
    "load a module that has a newer one (launch/site.sh), make .venv with it, or set VENV"
}

# packages_for_image: what .venv-image adds to the image's Python, as an entry of PYTHONPATH, which every way into a
# container takes along. That environment is made inside the image, so only there its own `python` exists.
packages_for_image() {
  local directory
  for directory in .venv-image/lib/python3*/site-packages; do
    if [ -d "$directory" ]; then
      printf ':%s' "$PWD/$directory"
      return
    fi
  done
  say "there is no .venv-image: the ranks have the packages of the image alone"
}

# prepare_environment NODES PARTITION [container]: the Python of VENV (default .venv, if there is one), this project's
# code, and the settings below env/.
prepare_environment() {
  if [ -n "${VENV:-}" ] && [ ! -x "$VENV/bin/python" ]; then
    refuse "VENV=$VENV is not a virtual environment" "set VENV to one, or unset it to use .venv or the current Python"
  fi
  if [ -r "${VENV:-.venv}/bin/activate" ]; then
    # shellcheck disable=SC1091
    source "${VENV:-.venv}/bin/activate"
  elif [ -n "${VENV:-}" ]; then
    export PATH="$VENV/bin:$PATH" # of conda, which has no such file
  fi
  find_python "${3:-}"
  local packages=''
  if [ -n "${3:-}" ]; then packages=$(packages_for_image); fi
  export PYTHONPATH="$PWD/src$packages${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONUNBUFFERED=1 # read by Python: what a killed process had still in its buffer would be lost
  load_env "$launch_folder/env/recovery.env" "${1:-1}" "${2:-}" "${3:-}" # first: what is set there wins over nccl.env
  load_env "$launch_folder/env/nccl.env" "${1:-1}" "${2:-}" "${3:-}"
  local active
  active=$(grep -v '^[[:space:]]*\(#\|$\)' "$launch_folder/env/recovery.env" | tr '\n' ' ') || true
  [ -z "$active" ] || say "$launch_folder/env/recovery.env is in use: ${active}(its comments say what that costs)"
}

train_py=src/digits/train.py

# refuse_unknown_settings [training arguments]: a typo, before anything starts. Reads the source, imports nothing.
refuse_unknown_settings() {
  local code=0
  python "$launch_folder/settings.py" check "$train_py" "$@" || code=$?
  [ "$code" != 78 ] || exit 78 # with another code it is that script which has failed
}

# note_import CODE EVENTS: where the ranks have ended before they met, by themselves and without a word, it may be that
# train.py cannot be imported. Then an outcome says which line is at fault. What is printed, the ranks have printed before.
note_import() {
  [ "$1" != 0 ] && [ -z "$stopping" ] && [ ! -e "$run_directory/outcome.json" ] && [ "$(count_events)" -le "$2" ] \
    && version_of_torch >/dev/null || return 0
  python "$launch_folder/outcome.py" imported "$run_directory" "$DDP_ATTEMPT" digits.train >/dev/null 2>&1 </dev/null || true
}

# show_help SCRIPT: the comment at its beginning, and the names of all settings.
show_help() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$1"
  printf '\nTraining arguments, each with a value; a variable DDP_SECTION__KEY or %s do the same:\n\n' configs/train.yaml
  "$(command -v python3 || command -v python)" "$launch_folder/settings.py" list "$train_py"
  printf '\n  --fast-dev-run [STEPS]  try everything in a few steps, resuming included, in runs/fast-dev-run/\n'
  printf '  --profile FIRST:LAST    a trace of these steps, for Perfetto, in the run directory\n'
  printf '\nWhat they mean, and the defaults: python -m %s.train --help\n' digits
}

# prepend_library_path DIRECTORIES: read by the dynamic linker, where an empty entry would be the current directory.
prepend_library_path() {
  [ -z "$1" ] || export LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# use_caches DIRECTORY: home directories of clusters are small, slow, or read-only on compute nodes.
use_caches() {
  if [ "${1#/}" = "$1" ] || ! mkdir -p "$1/.cache" 2>/dev/null; then
    say "warning: caches stay where they are by default: no directory can be made in '$1'"
  else
    # Read by huggingface_hub, torch.hub and pip, among others: where each makes its cache directory.
    export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$1/.cache}"
  fi
}

# master_address HOST [OTHER]: how the other nodes find it. Slurm may know a host by a short name that compute nodes
# cannot resolve; with this host's DNS domain they can. OTHER is its plain name, where HOST is that of a fast network.
master_address() {
  local domain
  if ! command -v getent >/dev/null || getent hosts "$1" >/dev/null; then
    printf '%s\n' "$1"
    return
  fi
  domain=$(hostname -d 2>/dev/null) || true
  if [ -n "$domain" ] && getent hosts "$1.$domain" >/dev/null; then
    say "$1 cannot be resolved here, $1.$domain can"
    printf '%s\n' "$1.$domain"
  elif [ "${2:-$1}" != "$1" ]; then
    say "$1 cannot be resolved here: taking $2"
    master_address "$2"
  else
    say "warning: $1 cannot be resolved on $this_host"
    printf '%s\n' "$1"
  fi
}

# ipv4_of HOST: its address.
ipv4_of() {
  local address
  address=$(getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }') || true
  [ -n "$address" ] || refuse "$1 has no IPv4 address" "see getent ahostsv4 $1"
  printf '%s\n' "$address"
}

count_gpus() {
  local visible=${CUDA_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-unset}}
  if [ "$visible" != unset ]; then
    tr ',' '\n' <<<"$visible" | grep -c '^[0-9A-Za-z]' || true # -1 stands for none
  elif command -v nvidia-smi >/dev/null; then
    ask nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
  elif command -v rocm-smi >/dev/null; then
    ask rocm-smi --showid 2>/dev/null | grep -o '^GPU\[[0-9]*\]' | sort -u | wc -l
  else
    echo 0
  fi
}

# use_gpu_order 3,2,1,0: the GPU of local rank 0, 1, ... when this task sees all of them. One variable only: Slurm may
# set those of CUDA and of ROCm; HIP takes CUDA_VISIBLE_DEVICES for its own, and counts within what ROCR shows.
use_gpu_order() {
  local name all=${1//[!,]/}
  for name in CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES; do
    if [ -n "${!name:-}" ]; then
      if [ "$(tr ',' '\n' <<<"${!name}" | sort)" = "$(tr ',' '\n' <<<"$1" | sort)" ]; then
        export "$name=$1" # read by CUDA, HIP or ROCm's runtime
      fi
      return
    fi
  done
  [ "$(count_gpus)" != $((${#all} + 1)) ] || export CUDA_VISIBLE_DEVICES="$1" # HIP reads it, too
}

version_of_torch() {
  python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null
}

refuse_python() {
  refuse "$(command -v python) has no torch" "install this project there, or set VENV to where it is installed"
}

# use_flight_recorder RUN_DIRECTORY [container]: PyTorch's record of the last collectives, dumped there when NCCL times
# out. The names depend on the release of torch, found without importing it; if it is in a container, both are set.
use_flight_recorder() {
  local version minor
  version=$(version_of_torch) || version=${2:+2.10}
  [ -n "$version" ] || refuse_python
  minor=${version#*.}
  minor=${minor%%[!0-9]*}
  mkdir -p "$1/flight_recorder"
  # Read by torch since 2.8 or 2.9, which appends the rank. Jobs that share its default, below ~/.cache, overwrite it.
  export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$1/flight_recorder/rank_}"
  if [ "${version%%.*}" = 2 ] && [ "$minor" -lt 11 ]; then
    # Until 2.10, NCCL dumps only if this older name is set (ProcessGroupNCCL.cpp; its default became 2000 in 2.11,
    # pytorch PR #172843), and 2.7 knows only the older name of the file. From 2.11 both only print a warning.
    export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
    export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$TORCH_FR_DUMP_TEMP_FILE}"
  fi
}

# use_gloo_interface MASTER_HOST NODES: gloo, which carries the control group, else takes the address that this host's
# own name resolves to: often 127.0.1.1, where no other node finds it (pytorch/gloo issue #223). It wants the exact name
# of an interface, which may differ between nodes; the one towards the master can reach the others.
use_gloo_interface() {
  local address='' name=''
  [ -z "${GLOO_SOCKET_IFNAME:-}" ] && command -v ip >/dev/null && command -v getent >/dev/null || return 0
  address=$(getent ahosts "$1" | awk 'NR == 1 { print $1 }') || true
  if [ -z "$address" ]; then
    set -- "MASTER_ADDR=$1 cannot be resolved on $this_host" "set it to a name or address that every node can resolve"
    if [ -n "${run_directory:-}" ]; then refuse_run launcher_misconfig "$@"; else refuse "$@"; fi
  fi
  # On the master itself, the route to its own address would be lo.
  name=$(ip -o address show to "$address" | awk 'NR == 1 { print $2 }') || true
  [ -n "$name" ] || name=$(ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p') || true
  [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_.:-]*$ ]] || name='' # a message, or half a line
  if [ "$name" = lo ] && [ "$2" -gt 1 ]; then
    say "warning: on $this_host, $1 is the loopback address $address; if gloo cannot connect, set GLOO_SOCKET_IFNAME"
  elif [ -n "$name" ]; then
    export GLOO_SOCKET_IFNAME="$name"
  fi
}

# claim_run_directory: takes it for this script and its ranks (LAUNCH_CLAIM), until the script ends. Of two starts with
# one id, the second is refused while the first lives; what a kill leaves is no hindrance (ddp/start/owner.py).
claim_run_directory() {
  local code=0
  LAUNCH_CLAIM=$(python -m digits.ddp.start.owner "$run_directory" "$$") || code=$?
  [ "$code" = 0 ] || exit "$code"
  export LAUNCH_CLAIM
  trap release_run_directory EXIT
}

release_run_directory() {
  if grep -qsF "\"$LAUNCH_CLAIM\"" "$run_directory/owner.json"; then rm -f "$run_directory/owner.json"; fi
}

# port_is_free PORT: whether a store can listen there, on this host.
port_is_free() {
  python -c 'import socket, sys; socket.create_server(("", int(sys.argv[1]))).close()' "$1" 2>/dev/null
}

# A stop that ranks learn from a file: for launchers that pass no signal on, or another one than they got.
# `forget_request` removes it for a restart.
ask_to_stop() { # ask_to_stop RUN_DIRECTORY SIGNAL
  printf 'signal SIG%s to the launch script on %s\n' "$2" "$this_host" >"$1/stop"
}

forget_request() { # forget_request RUN_DIRECTORY
  if grep -qs '^signal ' "$1/stop"; then rm -f "$1/stop"; fi
}

count_events() { wc -l 2>/dev/null <"$run_directory/attempts.jsonl" || echo 0; }

# stopped_early EVENTS: says so if this script was asked to stop, and the ranks had not met by then.
stopped_early() { [ -z "$stopping" ] || [ "$(count_events)" -gt "$1" ] || echo early; }

# note_silence CODE EVENTS: where no rank has left an outcome though training had begun (there are more events than
# EVENTS), all were killed. Then one is made, with a report, from what is on disk.
note_silence() {
  [ "$1" != 0 ] && [ ! -e "$run_directory/outcome.json" ] && [ "$(count_events)" -gt "$2" ] || return 0
  python -m digits.ddp.report --ended "$run_directory" >&2 || true
}

# say_where_it_began ATTEMPT: kind, rank, phase, what to do and the report of an attempt that did not end well.
say_where_it_began() {
  python "$launch_folder/outcome.py" rows "$run_directory" "$1" >&2 || true
}

# say_how_to_go_on CODE VARIABLES COMMAND...: the last line of a run that can go on, to be copied. VARIABLES, joined by
# commas, go with it where they are set, as DDP_ ones do.
say_how_to_go_on() {
  local saved="start it again"
  case $run_directory in */fast-dev-run/*) return 0 ;; esac # each one begins anew
  compgen -G "$run_directory/checkpoints/step_*" >/dev/null && saved="go on from the newest checkpoint"
  case $1 in
  0) return 0 ;;
  70 | 75) say "to $saved:" ;;
  *)
    [ "$saved" != "start it again" ] || return 0
    say "when that is put right, to $saved:"
    ;;
  esac
  python "$launch_folder/outcome.py" again "${@:2}" >&2 || true
}

refuse_unless_number() { # refuse_unless_number NAME VALUE LEAST
  if ! [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || [ "$2" -lt "$3" ]; then
    refuse "$1=$2 is not a number from $3" "correct or unset $1"
  fi
}

# wait_for PID: the exit code of a child, also when trapped signals interrupt bash's wait (they set `interrupted`).
wait_for() {
  local code
  while :; do
    interrupted=
    code=0
    wait "$1" || code=$?
    [ -n "$interrupted" ] || return "$code"
  done
}

# free_port FIRST: the first port from FIRST on that nothing on this host listens at.
free_port() {
  python - "$1" <<'PYTHON'
import socket, sys
first = int(sys.argv[1])
for port in range(first, first + 100):
    try:
        socket.create_server(("", port)).close()  # with SO_REUSEADDR, as the store
    except OSError:
        print(f"[launch] port {port} is in use already, trying the next", file=sys.stderr)
        continue
    print(port)
    break
PYTHON
}

# start_torchrun LOG OPTION...: begins torchrun in the background; `torchrun` is its process id. agent.py keeps what it
# says in LOG, and off the terminal unless it is torchrun that fails.
# --max-restarts 0: torchrun's own restarts reuse the store of the failed attempt (pytorch issue #167288). The launch
# scripts begin each attempt with a new torchrun and a new store, which is in torchrun and not in rank 0: when rank 0
# dies, the others can still say so. (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 would cure the first and undo the second, so
# it is not set.) set -m gives it a process group of its own: Ctrl-C reaches the script only, which passes it on once.
# SIGUSR1 and SIGUSR2 are for the ranks; they would end torchrun at once, and leave the ranks behind.
start_torchrun() {
  set -m
  (
    trap '' USR1 USR2
    LAUNCHED_BY="$this_host.$$" exec python "$launch_folder/agent.py" "$1" --max-restarts 0 "${@:2}"
  ) &
  torchrun=$!
  set +m
}

# await_ranks SECONDS: until torchrun has started a rank, which it does when all nodes have come; else it is ended. Where
# another program has the port of its store and says nothing, torchrun would wait for ever (torch 2.13). Another node
# that refuses to start says so in outcome.json, on a file system that both see.
await_ranks() {
  local before deadline=$((SECONDS + $1)) why=''
  gave_up=
  command -v pgrep >/dev/null || return 0
  before=$(stat -c %i.%Y "$run_directory/outcome.json" 2>/dev/null) || true
  while kill -0 "$torchrun" 2>/dev/null && ! pgrep -P "$torchrun" >/dev/null; do
    if [ "$SECONDS" -ge "$deadline" ]; then
      why="torchrun on $this_host has started no rank within $1 s: not all nodes came, or another program has the port"
    elif [ -s "$run_directory/outcome.json" ] \
      && [ "$(stat -c %i.%Y "$run_directory/outcome.json" 2>/dev/null)" != "$before" ]; then
      why="another node has ended the start"
    fi
    if [ -n "$why" ]; then
      say "error: $why (MASTER_ADDR=$MASTER_ADDR, MASTER_PORT=$MASTER_PORT)"
      # shellcheck disable=SC2034 # the script that calls this reads it
      gave_up=1
      kill -KILL "$torchrun" 2>/dev/null || true # no rank is there to be left behind
      return 0
    fi
    sleep 0.5
  done
}

# Asks the ranks themselves to stop: torchrun would leave their checkpoint only 30 s. Before there are any, torchrun.
stop_ranks() {
  local ranks
  ranks=$(pgrep -P "$torchrun" 2>/dev/null) || ranks=$torchrun
  # shellcheck disable=SC2086 # a list of process ids
  kill -TERM $ranks 2>/dev/null || true
}

# If torchrun itself was killed, its workers live on without it, each in its own session, and hold their GPUs.
# They are known by a variable that only they inherit. 30 s of SIGTERM, in which they save a checkpoint, then SIGKILL.
end_orphans() {
  local signal=TERM orphans said='' deadline=$((SECONDS + 30))
  while :; do
    orphans=$(grep -lszxF "LAUNCHED_BY=$this_host.$$" /proc/[0-9]*/environ | tr -dc '0-9\n' || true)
    [ -n "$orphans" ] || break
    [ -n "$said" ] || say "torchrun on $this_host ended and left processes behind, ending them: ${orphans//$'\n'/ }"
    said=1
    [ "$SECONDS" -lt "$deadline" ] || signal=KILL
    if [ "$SECONDS" -gt $((deadline + 30)) ]; then
      say "error: these processes cannot be ended, look at their GPUs: ${orphans//$'\n'/ }"
      return
    fi
    # shellcheck disable=SC2086 # a list of process ids
    kill -"$signal" $orphans 2>/dev/null || true
    sleep 0.2
  done
}
