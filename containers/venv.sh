#!/usr/bin/env bash
# venv.sh FOLDER: makes or updates a virtual environment with a locked stack, the tools of `make test` and `make check`,
# and this project itself. The stack is cpu-intel's on x86-64 up to Python 3.13, where its wheels end, else current torch.
# Wheels come from uv's cache, hard-linked. PYTHON names an interpreter; without it the newest that cpu-intel's stack
# supports is used, or a newer one. `venv.sh --python` prints interpreter and stack, and does nothing else.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
# The first ones have wheels of torch 2.8 and Intel's extension; the newest first. The last has those of current torch.
supported=(3.13 3.12 3.11 3.14)

fail() { echo "venv.sh: $1" >&2 && exit 2; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
  local version found
  if [[ -n ${PYTHON:-} ]]; then
    found=$(version_of "$PYTHON")
    [[ -n $found ]] || fail "PYTHON=$PYTHON: no such interpreter. Set PYTHON to Python 3.11 to 3.14."
    [[ " ${supported[*]} " == *" $found "* ]] ||
      fail "PYTHON=$PYTHON: is Python $found. Set PYTHON to Python 3.11 to 3.14."
    python=$PYTHON
    return
  fi
  for version in "${supported[@]}"; do
    for python in "python$version" python3 python; do
      [[ $(version_of "$python") == "$version" ]] && return
    done
  done
  fail "no Python 3.11 to 3.14 on PATH. Install one (Debian: apt install python3 python3-venv) or set PYTHON."
}

find_python
stack=cpu-intel
if [[ $(version_of "$python") == 3.14 || $(uname -m) != x86_64 ]]; then stack=cuda; fi
if [[ $venv == --python ]]; then
  echo "$python, $stack"
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
locked=("$here/$stack/requirements.txt" "$here/dev.txt")

# shellcheck source=containers/torch.sh
. "$here/torch.sh"
choose_torch "$here/$stack" auto "$venv/bin/python"
"${uv[@]}" sync "${to[@]}" "${locked[@]}" "${torch[@]}"
# What the wheel brings, for this checkout: the folder on the path, the command, and what each rank imports.
site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
(cd "$here/.." && pwd) >"$site/checkout_of_reference_training.pth"
cp "$here/../reference_training/reference_training.pth" "$site/"
rm -f "$site/entrypoint.pth" # of earlier versions
install -m 755 "$here/../reference_training/entrypoint" "$venv/bin/entrypoint"
bash "$here/../train/kernels/kernels.sh" "$venv/bin/python" "$here/.."
