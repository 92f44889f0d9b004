#!/usr/bin/env bash
# venv.sh FOLDER: makes or updates a virtual environment with the locked CPU-Intel stack, the tools of `make test` and
# `make check`, and this project itself. Wheels come from uv's cache, hard-linked. PYTHON names an interpreter; without
# it the newest supported one on PATH is used. `venv.sh --python` prints that interpreter and does nothing else.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
# torch 2.8 and Intel's extension have wheels for these; the newest first.
supported=(3.13 3.12 3.11)

fail() { echo "venv.sh: $1" >&2 && exit 2; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
  local version found
  if [[ -n ${PYTHON:-} ]]; then
    found=$(version_of "$PYTHON")
    [[ -n $found ]] || fail "PYTHON=$PYTHON: no such interpreter. Set PYTHON to Python ${supported[-1]} to ${supported[0]}."
    [[ " ${supported[*]} " == *" $found "* ]] ||
      fail "PYTHON=$PYTHON: is Python $found. Set PYTHON to Python ${supported[-1]} to ${supported[0]}."
    python=$PYTHON
    return
  fi
  for version in "${supported[@]}"; do
    for python in "python$version" python3 python; do
      [[ $(version_of "$python") == "$version" ]] && return
    done
  done
  fail "no Python ${supported[-1]} to ${supported[0]} on PATH. Install one (Debian: apt install python3 python3-venv) or set PYTHON."
}

find_python
if [[ $venv == --python ]]; then
  echo "$python"
  exit
fi
if [[ ! -x $venv/bin/python || ! -x $venv/tools/bin/uv ]]; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module. Install it (Debian: apt install python$(version_of "$python")-venv)."
fi
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
bash "$here/jpeg_kernel.sh" "$venv/bin/python" "$here/.."
