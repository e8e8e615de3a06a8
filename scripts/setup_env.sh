# Sourced by quickstart.sh and test.sh: makes .venv with pinned packages, and puts it first on PATH.
#   setup_env [extra]      e.g. setup_env dev
# Where no NVIDIA GPU is visible, torch's CPU build is taken from PyTorch's own index; a CUDA build is never downloaded there.

setup_env() {
    local extra="${1:-}" root stamp_now torch_version=2.13.0
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    cd "$root" || return 1
    stamp_now="$(cat pyproject.toml requirements/constraints.txt scripts/setup_env.sh | cksum) $extra"
    if [ -x .venv/bin/python ] && grep -qxF "$stamp_now" .venv/fuseline.stamp 2>/dev/null; then
        export PATH="$root/.venv/bin:$PATH"
        return 0
    fi
    local python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "$python is missing or older than Python 3.11; set PYTHON to a newer one" >&2
        return 1
    fi
    echo "setting up .venv ($("$python" --version))"
    "$python" -m venv .venv || { echo "python -m venv failed; is the venv module installed?" >&2; return 1; }
    export PATH="$root/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
    if ! python -c 'import torch' 2>/dev/null; then
        if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
            pip install -q "torch==$torch_version" -c requirements/constraints.txt || return 1
        else
            # "+cpu" names the CPU build, so that nothing else can be taken (macOS has only one build, without a name).
            # --no-deps keeps the CPU index out of the search for every other package.
            local build=+cpu
            [ "$(uname)" = Darwin ] && build=""
            pip install -q --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
                "torch==$torch_version$build" || return 1
        fi
    fi
    # A CUDA build brings its own Triton; beside a CPU build it is only there for the tests, in its interpreter (Linux).
    if [ "$extra" = dev ] && [ "$(uname)" = Linux ] && ! python -c 'import triton' 2>/dev/null; then
        pip install -q --no-deps "triton==3.9.0" || echo "no Triton: its tests are skipped" >&2
    fi
    echo "torch==$torch_version" >.venv/torch-constraint.txt
    pip install -q -c requirements/constraints.txt -c .venv/torch-constraint.txt -e ".${extra:+[$extra]}" || return 1
    echo "$stamp_now" >>.venv/fuseline.stamp
}
