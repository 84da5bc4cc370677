#!/usr/bin/env bash
# Slurm, two nodes of eight GPUs:   sbatch scripts/launch/slurm.sh RECIPE [key=value …]
#
# Other sizes: sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh RECIPE. Submit from the checkout, which lies on
# shared storage as the run directory does. Before the time limit and at a pre-emption the ranks get SIGTERM, save and
# exit 0, and the job puts itself back in the queue; it continues from its checkpoint. A rank that dies ends the job.
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

stopped=0
stop() { stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"; } # the job's steps, not this script
trap stop TERM
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash scripts/launch/node.sh "$@"' node "$@" &
step=$!
code=0
wait "$step" || code=$?
[ "$stopped" = 0 ] || { code=0; wait "$step" || code=$?; }
if [ "$stopped" = 1 ] && [ "$code" = 0 ]; then
    echo "saved; back in the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
