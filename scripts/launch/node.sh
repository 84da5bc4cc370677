#!/usr/bin/env bash
# One machine's part of a job:   scripts/launch/node.sh RECIPE [key=value …]
#
#   NODES=1 NODE_RANK=0 HEAD=127.0.0.1 PORT=29500   machines, this one's number, the first one's name, a free port on it
#   RANKS=8                                         ranks per machine
#   CONFIG=recipes/accelerate/two-nodes.yaml        accelerate configuration (fsdp2.yaml, zero2.yaml, … work as well)
#   LAUNCHER=accelerate                             torchrun starts CPU ranks
#   MEET_S=300                                      seconds within which the launchers of all machines must have met
#   PIDFILE=                                        where this script's process id is written
#   STOPPED=                                        a file to create when a signal has stopped this part
#
# SIGTERM, SIGINT and SIGHUP are passed to the ranks, not to the launcher (which would kill them after 30 s): they save a
# checkpoint, and the exit code is 0, also while the ranks still start. The same command then continues. Paths are
# relative to the checkout (or the folder of `headstart scripts`), whatever directory this is called from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-0} HEAD=${HEAD:-127.0.0.1} PORT=${PORT:-29500} RANKS=${RANKS:-8}
CONFIG=${CONFIG:-recipes/accelerate/two-nodes.yaml} PYTHON=${PYTHON:-python} MEET_S=${MEET_S:-300}
[ $# -gt 0 ] || { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
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

handles_sigterm() { # whether process $1 already catches, blocks or ignores SIGTERM (bit 14)
    local name value
    while read -r name value; do
        case $name in SigBlk: | SigIgn: | SigCgt:) if ((16#${value: -8} & 0x4000)); then return 0; fi ;; esac
    done 2> /dev/null < "/proc/$1/status"
    return 1
}

tell_ranks() { # SIGTERM to every rank, once, as soon as it can take it; some may not have been started yet
    trap '' TERM INT HUP
    local rank told=" "
    while kill -0 "$launcher" 2> /dev/null; do
        for rank in $(pgrep -P "$launcher"); do
            if [[ $told != *" $rank "* ]] && handles_sigterm "$rank" && kill -TERM "$rank" 2> /dev/null; then
                told+="$rank "
            fi
        done
        sleep 0.2 > /dev/null 2>&1 # must not keep our output open for its reader
    done
}

end_without_ranks() { # a launcher may wait for another machine for ever and say nothing
    local second
    for ((second = 0; second < MEET_S; second++)); do
        sleep 1 > /dev/null 2>&1
        kill -0 "$launcher" 2> /dev/null || return 0
        if pgrep -f -P "$launcher" headstart.train > /dev/null; then return 0; fi
    done
    echo "error: machine $NODE_RANK of $NODES: within $MEET_S s the launcher started no rank, because the machines did not" \
        "all meet at HEAD=$HEAD PORT=$PORT. Give every machine the same HEAD (machine 0's name), PORT (free there, open to" \
        "the others) and NODES, and its own NODE_RANK" >&2
    kill -USR1 $$ # this script's own exit code says so too
    kill -TERM "$launcher" 2> /dev/null
    for ((second = 0; second < 50; second++)); do
        sleep 0.1
        kill -0 "$launcher" 2> /dev/null || return 0
    done
    kill -KILL "$launcher" 2> /dev/null
}

watched_by() { # process $1 watches the launcher and must end with it
    helpers+=" $1"
    disown "$1" 2> /dev/null || true # a signal may have come in between and started another
}

launcher="" stopping=0 early=0 alone=0 helpers=""
stop() {
    signalled=1
    [ "$stopping" = 0 ] || return 0
    stopping=1
    [ -z "${STOPPED:-}" ] || touch "$STOPPED"
    launcher=${launcher:-${!:-}} # not set yet right after the start
    [ -n "$launcher" ] || exit 0
    if ! pgrep -P "$launcher" > /dev/null; then # there is no rank yet, so the launcher may simply end
        early=1
        kill -TERM "$launcher" 2> /dev/null || true
    fi
    tell_ranks &
    watched_by $!
}
trap stop TERM INT HUP
trap 'signalled=1 alone=1' USR1
if [ -n "${PIDFILE:-}" ]; then
    echo $$ > "$PIDFILE"
    trap 'rm -f "$PIDFILE"' EXIT
fi

# a session of its own: a scheduler that signals this process group must not reach the launcher
setsid "${launch[@]}" -m headstart.train "$@" &
launcher=$!
end_without_ranks &
watched_by $!
while true; do
    signalled=0 code=0
    wait "$launcher" || code=$?
    [ "$signalled" = 1 ] || break # otherwise it was the signal that ended the wait
done
# the helpers watch a process id that another process may get
for helper in $helpers; do
    if pgrep -P $$ | grep -qx "$helper"; then kill -KILL "$helper" 2> /dev/null || true; fi # still ours
done
[ "$alone" = 0 ] || code=1
[ "$early" = 0 ] || code=0
exit "$code"
