#!/usr/bin/env bash
# One machine's part of a job:   scripts/launch/node.sh RECIPE [key=value …]
#
#   NODES=1 NODE_RANK=0 HEAD=127.0.0.1 PORT=29500   machines, this one's number, the first one's name, a free port on it
#   RANKS=8                                         ranks per machine
#   CONFIG=recipes/accelerate/two-nodes.yaml        accelerate configuration (fsdp2.yaml, zero2.yaml, … work as well)
#   LAUNCHER=accelerate                             torchrun starts CPU ranks
#   PIDFILE=                                        where this script's process id is written
#
# SIGTERM, SIGINT and SIGHUP are passed to the ranks, not to the launcher (which would kill them after 30 s): they save a
# checkpoint, and the exit code is 0. The same command then continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-0} HEAD=${HEAD:-127.0.0.1} PORT=${PORT:-29500} RANKS=${RANKS:-8}
CONFIG=${CONFIG:-recipes/accelerate/two-nodes.yaml} PYTHON=${PYTHON:-python}
[ $# -gt 0 ] || { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
if [ -n "${PIDFILE:-}" ]; then
    echo $$ > "$PIDFILE"
    trap 'rm -f "$PIDFILE"' EXIT
fi

case "${LAUNCHER:-accelerate}" in
accelerate)
    launch=("$PYTHON" -m accelerate.commands.launch --config_file "$CONFIG"
        --num_machines "$NODES" --num_processes $((NODES * RANKS)) --machine_rank "$NODE_RANK"
        --main_process_ip "$HEAD" --main_process_port "$PORT") ;;
torchrun)
    launch=("$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc_per_node "$RANKS" --node_rank "$NODE_RANK"
        --master_addr "$HEAD" --master_port "$PORT") ;;
*) echo "LAUNCHER: found $LAUNCHER, expected accelerate or torchrun" >&2; exit 2 ;;
esac

# a session of its own: a scheduler that signals this process group must not reach the launcher
setsid "${launch[@]}" -m headstart.train "$@" &
launcher=$!
signalled=0
pass_on() { signalled=1; pkill -TERM -P "$launcher" || true; }
trap pass_on TERM INT HUP
while true; do
    signalled=0 code=0
    wait "$launcher" || code=$?
    [ "$signalled" = 1 ] || break
done
exit "$code"
