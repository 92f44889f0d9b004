#!/usr/bin/env bash
# lock.sh: resolves the *.in files of its folder into locked requirements with hashes.
#
# cpu-intel is written in three files, since torch 2.8.0 comes as two builds of one version:
#   requirements.txt   everything but torch's own family
#   torch-pypi.txt     the package index's build of torch, with the CUDA packages it cannot load without
#   torch-cpu.txt      PyTorch's own CPU build (written by hand: its index is not reachable from everywhere)
set -euo pipefail
cd "$(dirname "$0")"
uv=${UV:-uv}

lock() { # IN OUT
  "$uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --override overrides.txt --generate-hashes --no-header --no-annotate "$1" -o "$2"
}

lock uv.in uv.txt
lock sbom.in sbom.txt
lock cuda/requirements.in cuda/requirements.txt
lock cpu-intel/requirements.in cpu-intel/requirements.txt
lock dev.in dev.txt
lock notebook.in notebook.txt

# A requirement is a line that starts in the first column, with its hashes on the indented lines below it.
family='^(torch|torchvision|triton|nvidia-.*-cu12)=='
split() { awk -v family="$family" -v want="$1" '/^[^ ]/ { mine = ($0 ~ family) } mine == want' cpu-intel/requirements.all; }
mv cpu-intel/requirements.txt cpu-intel/requirements.all
split 1 >cpu-intel/torch-pypi.txt
split 0 >cpu-intel/requirements.txt

# What a tool needs and the image already locks stands once: in the image's own file.
for tools in dev.txt notebook.txt; do
  awk 'NR == FNR { if ($0 ~ /^[a-z]/) { sub(/==.*/, ""); locked[$0] = 1 } next }
    /^[^ ]/ { name = $0; sub(/==.*/, "", name); mine = !(name in locked) } mine' cpu-intel/requirements.all "$tools" >"$tools.new"
  mv "$tools.new" "$tools"
done
rm cpu-intel/requirements.all
