#!/usr/bin/env bash
# labels.sh IMAGE DOCKERFILE: prints the labels of an image's own stage in the Dockerfile, as `NAME VALUE` lines. What
# depends on build arguments comes from the environment: TORCH_BUILD, and ONECCL_INDEX.
set -euo pipefail
with=0
if [[ -n ${ONECCL_INDEX:-} ]]; then with=1; fi
awk -v stage="image-$1" '/^FROM / { mine = ($0 ~ " AS " stage "$") } mine' "$2" |
  sed -n -E 's/^(LABEL)? +([a-z.-]+)="(.*)"( \\)?$/\2 \3/p' |
  sed "s/\${TORCH_BUILD}/${TORCH_BUILD:-cpu}/; s/\${WITH_ONECCL:-0}/$with/"
