#!/usr/bin/env bash
# Several machines over plain ssh, from any of them:   HOSTS="node1 node2" scripts/launch/ssh.sh RECIPE [key=value …]
#
# The checkout (or the folder of `headstart scripts`) and the run directory are at the same path on every machine (shared
# storage); relative paths are relative to it. RANKS, CONFIG, PORT, LAUNCHER and PYTHON are passed to node.sh beside it.
# A machine that fails ends the job; Ctrl-C and SIGTERM save a checkpoint everywhere. SSH= names another remote shell.
set -euo pipefail
: "${HOSTS:?names the machines, the first one holds rank 0: HOSTS=\"node1 node2\" scripts/launch/ssh.sh RECIPE}"
[ $# -gt 0 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
SSH=${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4}
read -ra hosts <<< "$HOSTS"
job=/tmp/headstart-$(id -u)-$HOSTNAME-$$ # on each machine

command_of() { # command_of NODE_RANK ARGUMENT…
    local rank=$1; shift
    printf 'cd %q && ' "$here"
    printf '%s=%q ' NODES "${#hosts[@]}" NODE_RANK "$rank" HEAD "${HEAD:-${hosts[0]}}" PIDFILE "$job-$rank.pid"
    local name
    for name in RANKS CONFIG PORT LAUNCHER PYTHON; do
        [ -z "${!name:-}" ] || printf '%s=%q ' "$name" "${!name}"
    done
    printf 'bash scripts/launch/node.sh'
    printf ' %q' "$@"
}

stopping=0
trap 'stopping=1' TERM INT
stop_machine() { # its part may not have been started yet: called again until it ends
    $SSH "${hosts[$1]}" "kill -TERM \$(cat '$job-$1.pid')" < /dev/null > /dev/null 2>&1
}

pids=()
for rank in "${!hosts[@]}"; do
    # a session of its own: Ctrl-C must end the remote parts, not the connections to them
    setsid $SSH "${hosts[$rank]}" "$(command_of "$rank" "$@")" < /dev/null &
    pids+=($!)
done
code=0 ticks=0
while [ "${#pids[@]}" -gt 0 ]; do
    if [ "$stopping" = 1 ] && [ $((ticks++ % 4)) = 0 ]; then
        for rank in "${!pids[@]}"; do stop_machine "$rank" & done
    fi
    sleep 0.5 || true
    for rank in "${!pids[@]}"; do
        kill -0 "${pids[$rank]}" 2> /dev/null && continue
        one=0
        wait "${pids[$rank]}" || one=$?
        unset "pids[$rank]"
        if [ "$one" -ne 0 ] && [ "$code" -eq 0 ]; then
            code=$one stopping=1
            echo "${hosts[$rank]} ended with code $one: stopping the others" >&2
            stop_machine "$rank" & # if only the connection was lost, its part still runs
        fi
    done
done
exit "$code"
