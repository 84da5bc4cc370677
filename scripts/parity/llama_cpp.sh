#!/usr/bin/env bash
# Parity gate: an EAGLE-3 head in llama.cpp (llama-server on the CPU, float32) against Headstart's own loop.
#   bash scripts/parity/llama_cpp.sh [--data FILE.jsonl …] [--heads DIR] [--limit N] [--depth K] [--out FILE.json] …
# Makes what is missing: Headstart's environment in VENV (.venv), llama.cpp in PARITY_LLAMA_CPP (.llama-cpp): its sources
# come with the source distribution of llama-cpp-python, and building them takes about 15 minutes on two cores.
# PARITY_PYTHON=… names an environment that is there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/venv.sh
release=0.3.36

if [ -z "${PARITY_PYTHON:-}" ]; then
    make_venv "${VENV:-.venv}"
    PARITY_PYTHON="$VENV_PYTHON"
fi

engine="$(realpath -m "${PARITY_LLAMA_CPP:-.llama-cpp}")"
if [ ! -f "$engine/.ready" ]; then
    echo "building llama.cpp in $engine (minutes, once) …" >&2
    mkdir -p "$engine"
    pip=("$PARITY_PYTHON" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" install --target "$engine/tools" cmake ninja sentencepiece protobuf
    "${pip[@]}" download --no-binary llama-cpp-python --no-deps --dest "$engine" "llama-cpp-python==$release"
    tar -xzf "$engine"/llama_cpp_python-"$release".tar.gz -C "$engine"
    ln -sfn "$engine/llama_cpp_python-$release/vendor/llama.cpp" "$engine/source"
    export PYTHONPATH="$engine/tools" PATH="$engine/tools/bin:$PATH"
    cmake -S "$engine/source" -B "$engine/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=OFF
    ninja -C "$engine/build" -j "$(nproc)" llama-server
    unset PYTHONPATH
    touch "$engine/.ready"
fi

export PARITY_LLAMA_CPP="$engine"
exec "$PARITY_PYTHON" -m headstart.parity.llama_cpp "$@"
