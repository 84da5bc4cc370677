#!/usr/bin/env bash
# Several machines over plain ssh, from any of them:   HOSTS="node1 node2" scripts/launch/ssh.sh RECIPE [key=value …]
#
# The checkout and the run directory are at the same path on every machine (shared storage). RANKS, CONFIG, PORT,
# LAUNCHER and PYTHON are passed to scripts/launch/node.sh. A machine that fails ends the job; Ctrl-C and SIGTERM save a
# checkpoint everywhere. SSH= names another remote shell.
set -euo pipefail
: "${HOSTS:?names the machines, the first one holds rank 0: HOSTS=\"node1 node2\" scripts/launch/ssh.sh RECIPE}"
[ $# -gt 0 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
SSH=${SSH:-ssh -o BatchMode=yes}
read -ra hosts <<< "$HOSTS"
job=${TMPDIR:-/tmp}/headstart-$(id -u)-$$

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

stop_all() {
    trap '' TERM INT
    for rank in "${!hosts[@]}"; do
        $SSH "${hosts[$rank]}" "kill -TERM \$(cat '$job-$rank.pid')" 2> /dev/null || true
    done
    trap stop_all TERM INT
}
trap stop_all TERM INT

pids=()
for rank in "${!hosts[@]}"; do
    $SSH "${hosts[$rank]}" "$(command_of "$rank" "$@")" < /dev/null &
    pids+=($!)
done
code=0
while [ "${#pids[@]}" -gt 0 ]; do
    sleep 0.5
    for rank in "${!pids[@]}"; do
        kill -0 "${pids[$rank]}" 2> /dev/null && continue
        one=0
        wait "${pids[$rank]}" || one=$?
        unset "pids[$rank]"
        if [ "$one" -ne 0 ] && [ "$code" -eq 0 ]; then
            code=$one
            echo "${hosts[$rank]} ended with code $one: stopping the others" >&2
            stop_all
        fi
    done
done
exit "$code"
