#!/usr/bin/env bash
# venv.sh FOLDER: makes or updates a virtual environment with the locked CPU-Intel stack, the tools of `make
# test` and `make check`, and this project itself. Wheels come from uv's cache, hard-linked; what has not
# changed is not installed again. PYTHON names the interpreter (default python3.11).
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3.11}

command -v "$python" >/dev/null || { echo "venv.sh: PYTHON=$python: no such interpreter; install Python 3.11 or set PYTHON" >&2; exit 2; }
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
[[ -x $venv/tools/bin/uv ]] || {
  "$python" -m venv "$venv/tools"
  "$venv/tools/bin/python" -m pip install --quiet --require-hashes --only-binary :all: -r "$here/uv.txt"
}
uv=("$venv/tools/bin/uv" pip)
to=(--quiet --python "$venv/bin/python" --compile-bytecode)
locked=("$here/cpu-intel/requirements.txt" "$here/dev.txt")

# PyTorch's own index has the CPU build (0.2 GB); the package index has only the CUDA build (3 GB to fetch).
if UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10 "${uv[@]}" install --quiet --dry-run --no-deps --reinstall --python "$venv/bin/python" \
  --torch-backend cpu -r "$here/cpu-intel/torch-cpu.txt" 2>/dev/null; then
  echo "venv.sh: torch: PyTorch's own CPU build"
  "${uv[@]}" sync "${to[@]}" --torch-backend cpu "${locked[@]}" "$here/cpu-intel/torch-cpu.txt"
else
  echo "venv.sh: torch: the package index's CUDA build (PyTorch's CPU wheel index is not reachable from here)"
  "${uv[@]}" sync "${to[@]}" --require-hashes "${locked[@]}" "$here/cpu-intel/torch-pypi.txt"
fi
"${uv[@]}" install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --no-index \
  --config-setting editable_mode=compat --editable "$here/.."
cp "$here/entrypoint.pth" "$venv"/lib/python3.*/site-packages/
