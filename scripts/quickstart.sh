#!/usr/bin/env bash
# From a fresh checkout to a measured draft head on two CPU cores:   bash scripts/quickstart.sh [key=value …]
# Makes .venv on first use, fetches SmolLM2-135M-Instruct, distils, trains, evaluates and exports.
# Running it again continues where it stopped and skips what is finished. Everything lands in runs/quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv "${VENV:-.venv}"
export TOKENIZERS_PARALLELISM=false
# threads that wait by spinning slow each other tenfold where the cores are shared
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"
exec "$VENV_PYTHON" -m headstart run recipes/quickstart.yaml "$@"
