# Sourced by quickstart.sh and test.sh:   make_venv DIRECTORY [EXTRAS]   → VENV_PYTHON
# Installs the checkout, editable, at the tested versions; does nothing when that was done before.

make_venv() {
    local directory="$1" extras="${2:-}" python="${PYTHON:-}" constraints="${CONSTRAINTS:-constraints.txt}" candidate
    if [ -z "$python" ]; then
        for candidate in python3.11 python3.12 python3.13 python3; do
            # a command may exist and not run (version managers put stand-ins on the path)
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                python="$candidate"
                break
            fi
        done
    fi
    if [ -z "$python" ]; then
        echo "error: Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python" >&2
        return 1
    fi
    VENV_PYTHON="$PWD/$directory/bin/python"
    local stamp="$directory/.headstart-installed" wanted
    wanted="$(cat pyproject.toml "$constraints" 2>/dev/null | cksum) $extras $PWD"
    if [ -x "$VENV_PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "installing into $directory (about two minutes, once) …" >&2
    [ -x "$VENV_PYTHON" ] || "$python" -m venv "$directory"
    # without an NVIDIA GPU the CPU build of torch saves gigabytes; its index is asked only where it answers
    local index=()
    if ! command -v nvidia-smi >/dev/null && "$python" - <<'PROBE' 2>/dev/null
import urllib.request
urllib.request.urlopen("https://download.pytorch.org/whl/cpu/torch/", timeout=3).close()
PROBE
    then
        index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    fi
    # modules are compiled when they are first imported, because two thirds of them never are
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile ${index[@]+"${index[@]}"} \
        -c "$constraints" -e ".${extras:+[$extras]}"
    printf '%s' "$wanted" >"$stamp"
}
