#!/usr/bin/env bash
# build.sh docker|sif cpu|cuda|cpu-intel: builds an image from this checkout, labelled with its revision.
#   docker   reference-training:NAME, from containers/Dockerfile
#   sif      $SIFS/NAME.sif (default: sif/), from containers/apptainer.def
# From the environment: ONECCL_INDEX (adds oneCCL's bindings to cpu-intel), TORCH_BUILD (cpu, pypi; cuda has pypi's),
# BASE (another base image, such as debian:trixie-slim without its digest), APPTAINER (the command), MKSQUASHFS (its
# arguments), and BOOTSTRAP=docker-daemon to take the base image from the local engine.
set -euo pipefail
kind=$1 image=$2
cd "$(dirname "$0")/.."
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain -- containers entrypoint train tests tools pyproject.toml README.md LICENSE 2>/dev/null) ]] || revision+=-dirty
source=$(git config --get remote.origin.url || true)
[[ $source == *://* ]] || source=unknown # a folder of this machine is nobody else's source
# The commit's time, so that two builds of one commit hold the same bytes.
created=$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || true)
images=(cpu cuda cpu-intel)
if [[ " ${images[*]} " != *" $image "* ]]; then
  echo "build.sh: $image: no such image. Use one of: ${images[*]}." >&2
  exit 2
fi
build=${TORCH_BUILD:-cpu}
if [[ $build != cpu && $build != pypi ]]; then
  echo "build.sh: TORCH_BUILD=$build: no such build for an image. Use cpu or pypi." >&2
  exit 2
fi
# Asked before anything is built; who names a build has it tried.
index=https://download.pytorch.org/whl/cpu/torch/
if [[ -z ${TORCH_BUILD:-} && $image != cuda ]] && command -v curl >/dev/null; then
  curl --silent --fail --head --location --max-time 10 --output /dev/null "$index" || {
    echo "build.sh: $image: $index, which has torch's CPU builds, cannot be reached from here. Reach it, or set" \
      "TORCH_BUILD=pypi: the package index's CUDA build, which makes an image 4 to 6 GB larger." >&2
    exit 3
  }
fi
args=(--build-arg "IMAGE=$image" --build-arg "REVISION=$revision" --build-arg "SOURCE=$source" --build-arg "CREATED=$created")
args+=(${BASE:+--build-arg "BASE=$BASE"})
if [[ $image != cuda ]]; then args+=(--build-arg "TORCH_BUILD=$build"); fi
if [[ $image == cpu-intel ]]; then args+=(--build-arg "ONECCL_INDEX=${ONECCL_INDEX:-}"); fi

if [[ $kind == docker ]]; then
  export DOCKER_BUILDKIT=1
  if [[ -n $created ]]; then args+=(--label "org.opencontainers.image.created=$created"); fi
  docker build --file containers/Dockerfile --tag "reference-training:$image" "${args[@]}" "${@:3}" .
else
  sifs=${SIFS:-sif}
  mkdir -p "$sifs"
  definition=containers/apptainer.def
  if [[ -n ${BOOTSTRAP:-} ]]; then
    sed "s/^Bootstrap: docker$/Bootstrap: $BOOTSTRAP/" "$definition" >"$sifs/$image.def"
    definition=$sifs/$image.def
  fi
  read -ra command <<<"${APPTAINER:-apptainer}"
  "${command[@]}" build --force ${MKSQUASHFS:+--mksquashfs-args "$MKSQUASHFS"} "${args[@]}" "$sifs/$image.sif" "$definition"
fi
