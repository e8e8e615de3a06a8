#!/usr/bin/env bash
# All set-up, then lint, types and tests, two at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env dev
ruff format --check .
ruff check .
pyright
python -m pytest -n 2 --dist worksteal "$@"
