#!/usr/bin/env bash
# lock.sh: resolves the *.in files of its folder into locked requirements with hashes, for Python 3.11 and newer and for
# x86-64 and aarch64: one version a package, with a marker where a package is for some of them only.
#
# Each stack is written in three files, since its torch comes as two builds of one version:
#   requirements.txt   everything but torch's own family
#   torch-pypi.txt     the package index's build of torch, with the CUDA packages it cannot load without
#   torch-cpu.txt      PyTorch's own CPU build (written by hand: its index is not reachable from everywhere)
set -euo pipefail
cd "$(dirname "$0")"
uv=${UV:-uv}

# pyproject.toml says that all this is for Linux, on two architectures: no line has to say it again.
both="platform_machine == '(aarch64|x86_64)'"
lock() { # IN OUT
  "$uv" pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 \
    --override overrides.txt --excludes excludes.txt --generate-hashes --no-header --no-annotate "$1" -o "$2"
  sed -i -E "s/ and sys_platform == 'linux'//g; s/ ; \\($both\\) or \\($both\\)//;
    s/\\((.*) and $both\\) or \\(\\1 and $both\\)/\\1/" "$2"
}

# A requirement is a line that starts in the first column, with its hashes on the indented lines below it.
family='^(torch|torchvision|triton|nvidia-[a-z0-9-]*|cuda-[a-z-]*)=='
split() { # FAMILY FILE
  awk -v family="$family" -v want="$1" \
    '/^[^ ]/ { mine = ($0 ~ family && $0 !~ /^nvidia-ml-py==/) } mine == want' "$2"
}

lock uv.in uv.txt
lock sbom.in sbom.txt
for stack in cuda cpu-intel; do
  lock $stack/requirements.in $stack/requirements.txt
  mv $stack/requirements.txt $stack/requirements.all
  split 1 $stack/requirements.all >$stack/torch-pypi.txt
  split 0 $stack/requirements.all >$stack/requirements.txt
done
lock dev.in dev.txt
lock notebook.in notebook.txt

# What a tool needs and every image already locks stands once: in the image's own file. What one of the images lacks, or
# locks for some machines only, and torch's family, which comes in two builds, are the exceptions.
grep -hE '^[a-z]' cuda/requirements.all cpu-intel/requirements.all | grep -v platform_machine | sed 's/==.*//' |
  sort | uniq -d >locked.names
for tools in dev.txt notebook.txt; do
  awk 'NR == FNR { locked[$0] = 1; next }
    /^[^ ]/ { name = $0; sub(/==.*/, "", name); mine = !(name in locked) } mine' locked.names "$tools" >"$tools.new"
  split 0 "$tools.new" >"$tools"
  rm "$tools.new"
done
rm ./*/requirements.all locked.names
