#!/usr/bin/env bash
# On a machine with one NVIDIA GPU, at most eight minutes: parity of the real kernels, the roofline, a step of a 1.3 B GPT.
# Uses the python3 that has torch (PYTHON to choose another); installs nothing. Arguments go to scripts/gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
