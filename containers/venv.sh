#!/usr/bin/env bash
# venv.sh FOLDER: makes or updates a virtual environment with a locked stack, the tools of `make test` and `make check`,
# and this project itself. STACK chooses: cuda, current torch, is the default; cpu-intel is the book's, for x86-64 and up
# to Python 3.13, where its wheels end. Wheels come from uv's cache, hard-linked. PYTHON names an interpreter; without it
# the newest is used. `venv.sh --python` prints interpreter and stack, and does nothing else.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
stack=${STACK:-cuda}
supported=(3.14 3.13 3.12 3.11)

fail() { echo "venv.sh: $1" >&2 && exit 2; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

case $stack in
  cuda) ;;
  cpu-intel)
    [[ $(uname -m) == x86_64 ]] || fail "STACK=cpu-intel: its wheels are for x86-64 alone. Leave STACK out: current torch."
    supported=(3.13 3.12 3.11)
    ;;
  *) fail "STACK=$stack: no such stack. Use cuda, which is current torch, or cpu-intel, which is torch 2.8." ;;
esac
range="Python ${supported[-1]} to ${supported[0]}"

find_python() {
  local version found
  if [[ -n ${PYTHON:-} ]]; then
    found=$(version_of "$PYTHON")
    [[ -n $found ]] || fail "PYTHON=$PYTHON: no such interpreter. Set PYTHON to $range."
    [[ " ${supported[*]} " == *" $found "* ]] ||
      fail "PYTHON=$PYTHON: is Python $found. Set PYTHON to $range."
    python=$PYTHON
    return
  fi
  for version in "${supported[@]}"; do
    for python in "python$version" python3 python; do
      [[ $(version_of "$python") == "$version" ]] && return
    done
  done
  fail "no $range on PATH. Install one (Debian: apt install python3 python3-venv) or set PYTHON."
}

find_python
if [[ $venv == --python ]]; then
  echo "$python, $stack"
  exit
fi
if [[ ! -x $venv/bin/python || ! -x $venv/tools/bin/uv ]]; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module. Install it (Debian: apt install python$(version_of "$python")-venv)."
fi
# A first `make` brings gigabytes: say so, and show uv's progress on a terminal.
echo "venv.sh: $venv: Python $(version_of "$python"), the stack $stack; downloads and unpacks up to 6 GB if it is new" >&2
quiet=(--quiet)
if [[ -t 2 ]]; then quiet=(); fi
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
[[ -x $venv/tools/bin/uv ]] || {
  "$python" -m venv "$venv/tools"
  "$venv/tools/bin/python" -m pip install --quiet --require-hashes --only-binary :all: -r "$here/uv.txt"
}
uv=("$venv/tools/bin/uv" pip)
to=("${quiet[@]}" --python "$venv/bin/python" --compile-bytecode)
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
