#!/usr/bin/env bash
# peers.sh VENV: makes .venv-stream, a copy-free addition to VENV with the loaders that bench-stream compares. Prints its
# interpreter. What does not install here is left out, and its row says so.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
venv=$1 peers=$here/.venv-stream
if [[ ! -x $peers/bin/python ]]; then
  "$venv/bin/python" -m venv --without-pip "$peers"
  # The packages of VENV are seen too.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$site')" >"$("$peers/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  uv=("$venv/tools/bin/uv" pip install --quiet --python "$peers/bin/python" --no-deps)
  for package in "simplejpeg" "timm huggingface-hub pyyaml tqdm" "webdataset braceexpand" \
    "mosaicml-streaming transformers tokenizers regex zstandard zstd catalogue xxhash brotli python-snappy cramjam" "spdl spdl-core spdl-io" \
    "nvidia-dali-cuda120 nvidia-nvimgcodec-cu12 nvidia-libnvcomp-cu12 optree astunparse six dm-tree wrapt attrs absl-py makefun gast"; do
    # shellcheck disable=SC2086
    "${uv[@]}" $package >&2 || echo "peers.sh: not installed: $package" >&2
  done
fi
echo "$peers/bin/python"
