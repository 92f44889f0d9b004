#!/usr/bin/env bash
# kernels.sh PYTHON SOURCE [FOLDER [NAME]]: compiles the kernels of SOURCE/train for an environment, into FOLDER or the
# environment itself. Where one cannot be compiled, it says why; the run is slower then, and otherwise the same up to
# rounding.
# - kernels/jpeg.cpp, against the libjpeg of the environment's Pillow, if it decodes to Pillow's bytes
# - kernels/winograd.cpp, for x86-64 CPUs with AVX2
set -euo pipefail
python=$1 source=$2/train
site=$("$python" -I -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
folder=${3:-$site} only=${4:-}
# A library that the kernel needs is found next to it, wherever the environment is.
near=\$ORIGIN
if [[ $folder != "$site" ]]; then near=$site; fi
compiler=${CXX:-g++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Each kernel's file, and what its absence means; `without REASON` removes the file and says both.
target='' what=''
without() { rm -f "$target" && echo "kernels.sh: $what: $1"; }
compile() {
  "$compiler" -std=c++17 -O3 -fPIC -shared -Wall -Wextra -o "$work/kernel.so" "$@" 2>"$work/log" && [[ -f $work/kernel.so ]]
}
first_error() { grep -m 1 -i error "$work/log" || echo "$compiler failed"; }

jpeg() {
  local library problem
  target=$folder/reference_training_jpeg.so what="no JPEG kernel, Pillow decodes"
  command -v "$compiler" >/dev/null || { without "no $compiler (Debian: apt install g++ libjpeg-dev)" && return; }
  library=$(printf '%s\n' "$site"/pillow.libs/libjpeg-*.so* | head -n 1)
  [[ -f $library ]] || { without "the installed Pillow brings no libjpeg" && return; }
  # Contracted products would round otherwise.
  compile -ffp-contract=off "$source/kernels/jpeg.cpp" "$library" -Wl,-rpath,"$near/pillow.libs" ||
    { without "$(first_error) (Debian: apt install libjpeg-dev)" && return; }
  problem=$(cd "$2" && LD_LIBRARY_PATH=$site/pillow.libs "$python" -I "$2/entrypoint/__main__.py" --module train.data.decoding.decoder "$work/kernel.so" 2>&1) ||
    { without "${problem##*$'\n'}" && return; }
  mv "$work/kernel.so" "$target"
}

winograd() {
  target=$folder/reference_training_winograd.so what="no Winograd kernel, torch computes convolutions"
  command -v "$compiler" >/dev/null || { without "no $compiler (Debian: apt install g++)" && return; }
  [[ $(uname -m) == x86_64 ]] || { without "it is for x86-64" && return; }
  compile -mavx2 -mfma "$source/kernels/winograd.cpp" || { without "$(first_error)" && return; }
  mv "$work/kernel.so" "$target"
}

[[ $only == winograd ]] || jpeg "$@"
[[ $only == jpeg ]] || winograd
