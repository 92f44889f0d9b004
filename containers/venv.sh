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

# shellcheck source=containers/torch.sh
. "$here/torch.sh"
choose_torch "$here/cpu-intel" auto "$venv/bin/python"
"${uv[@]}" sync "${to[@]}" "${locked[@]}" "${torch[@]}"
"${uv[@]}" install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --no-index \
  --config-setting editable_mode=compat --editable "$here/.."
cp "$here/entrypoint.pth" "$venv"/lib/python3.*/site-packages/
