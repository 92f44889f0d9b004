#!/usr/bin/env bash
# jpeg_kernel.sh PYTHON SOURCE: compiles SOURCE/train/data/jpeg_kernel.cpp for an environment, against the libjpeg of its
# Pillow. Where it cannot be compiled, or would not decode to Pillow's bytes, it says why, and Pillow decodes.
set -euo pipefail
python=$1 source=$2/train/data/jpeg_kernel.cpp
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
target=$site/reference_training_jpeg.so

without() { rm -f "$target" && echo "jpeg_kernel.sh: no JPEG kernel, Pillow decodes: $1" && exit 0; }

compiler=${CXX:-g++}
command -v "$compiler" >/dev/null || without "no $compiler (Debian: apt install g++ libjpeg-dev)"
library=$(printf '%s\n' "$site"/pillow.libs/libjpeg-*.so* | head -n 1)
[[ -f $library ]] || without "the installed Pillow brings no libjpeg"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The library is found next to the kernel, wherever the environment is. Contracted products would round otherwise.
"$compiler" -std=c++17 -O3 -fPIC -shared -ffp-contract=off -Wall -Wextra -o "$work/kernel.so" "$source" \
  "$library" -Wl,-rpath,"\$ORIGIN/pillow.libs" 2>"$work/log" ||
  without "$(grep -m 1 -i error "$work/log") (Debian: apt install libjpeg-dev)"
problem=$(cd "$2" && LD_LIBRARY_PATH=$site/pillow.libs "$python" -m train.data.jpeg_kernel "$work/kernel.so" 2>&1) ||
  without "${problem##*$'\n'}"
mv "$work/kernel.so" "$target"
