#!/usr/bin/env bash
# Run the CPU test suite in an environment of its own:   bash scripts/test.sh [pytest arguments]
# Makes .venv-test on first use. PYTHON=python3.12 chooses the interpreter, CONSTRAINTS=FILE other versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv "${VENV:-.venv-test}" "dev"
# tests that need the embedded target are skipped where it cannot be had
"$VENV_PYTHON" -m headstart target fetch smollm2-135m-instruct >/dev/null || echo "continuing without the embedded target" >&2
# the tensors of tests are too small to gain from threads, and threads on shared cores slow each other
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# threads that wait by spinning slow each other tenfold where the cores are shared
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"
# The whole suite runs in two processes (WORKERS=1: in one). Tests that you name run in this one, where their output shows.
[ $# -gt 0 ] || set -- --numprocesses "${WORKERS:-2}" --dist loadfile
exec "$VENV_PYTHON" -m pytest -m "not gpu and not browser" "$@"
