#!/usr/bin/env bash
# Installs the checkout, editable, at the tested versions, into .venv:   bash scripts/install.sh && . .venv/bin/activate
# Without an NVIDIA GPU it takes the CPU build of torch, which saves gigabytes. VENV=DIRECTORY names another place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv "${VENV:-.venv}"
echo "installed; next: . ${VENV:-.venv}/bin/activate"
