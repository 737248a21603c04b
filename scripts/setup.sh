#!/usr/bin/env bash
# Set flashtrain up in .venv: bash scripts/setup.sh [dev]
# With an NVIDIA GPU PyTorch comes in its CUDA build and the fused loss kernels with it, otherwise in its CPU build,
# which is a tenth of the size. A PyTorch that is already in .venv is kept. PYTHON names the interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "$0")/.."

extras="hf,plot,pathfinder"
[ "${1:-}" = dev ] && extras="dev"

[ -d .venv ] || "${PYTHON:-python3}" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  extras="$extras,gpu"
elif ! .venv/bin/python -c 'import torch' >/dev/null 2>&1; then
  pip install -q --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
fi
pip install -q -e ".[$extras]"
.venv/bin/python -c 'import torch; print("torch", torch.__version__, "on", "CUDA" if torch.cuda.is_available() else "the CPU")'
