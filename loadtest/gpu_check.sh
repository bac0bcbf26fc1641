#!/usr/bin/env bash
# Checks and measures --device cuda on this machine's first GPU, in at most 8 minutes: docs/gpu.md.
#
#   loadtest/gpu_check.sh [--output FILE.json] [--device cpu --quick]
#
# PYTHON names the Python that has torch and Pellucid's packages; default: .venv's, else python3.
# Exits with 0 where everything that was compared held, with 1 where not, with 2 where there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

if [ -z "${PYTHON:-}" ]; then
  PYTHON="$root/.venv/bin/python"
  [ -x "$PYTHON" ] || PYTHON=python3
fi
# Also where nothing is installed but what the engine needs: the packages are found in the tree.
export PYTHONPATH="$root/proto:$root/model:$root/server:$root/loadtest${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "$root/loadtest/gpu_check.py" "$@"
