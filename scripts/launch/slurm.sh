#!/usr/bin/env bash
# Slurm, two nodes of eight GPUs:   sbatch scripts/launch/slurm.sh RECIPE [key=value …]
#
# Other sizes: sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh RECIPE. Submit from the checkout, or the folder
# of `headstart scripts`, on shared storage as the run directory is. Before the time limit and at a pre-emption the ranks
# get SIGTERM, save and exit 0, and the job goes back in the queue and on from its checkpoint. A rank that dies ends it.
#SBATCH --job-name=headstart
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD NODES=$SLURM_NNODES RANKS=${SLURM_GPUS_ON_NODE:-8} PORT=$((20000 + SLURM_JOB_ID % 20000))
export CONFIG=${CONFIG:-recipes/accelerate/two-nodes.yaml}
# a pre-emption may signal the steps and not this script, so the nodes create this file
export STOPPED=$PWD/.slurm-$SLURM_JOB_ID.stopped
rm -f "$STOPPED"
trap 'rm -f "$STOPPED"' EXIT
# a requeued job continues, also if its command says train.resume=false
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || set -- "$@" train.resume=true

# from Slurm 22.05 on a step does not take over the job's CPUs per task
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash scripts/launch/node.sh "$@"' node "$@" &
step=$!

signal_step() { # until it ends: it may not have been started on every node yet
    trap '' TERM
    exec > /dev/null 2>&1 # must not keep our output open for its reader
    while kill -0 "$step" 2> /dev/null; do
        scancel --signal=TERM "$SLURM_JOB_ID" || true # the job's steps, not this script
        sleep 5
    done
}
stopping=0
stop() {
    signalled=1
    [ "$stopping" = 1 ] || signal_step &
    stopping=1
}
trap stop TERM
while true; do
    signalled=0 code=0
    wait "$step" || code=$?
    [ "$signalled" = 1 ] || break
done
if [ "$code" = 0 ] && { [ "$stopping" = 1 ] || [ -e "$STOPPED" ]; }; then
    echo "saved; back in the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
