#!/usr/bin/env bash
# compare.sh cpu-intel|cuda: builds a Docker image twice without a cache and lists the files that differ.
set -euo pipefail
image=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

content() { # TAG: every file with mode and digest, every link with its target; what the engine mounts is left out
  docker run --rm --user 0 --entrypoint sh "$1" -c '
    cd / && set -- bin etc home lib lib64 opt root sbin srv usr var workspace
    find "$@" -xdev -printf "%y %m %p %l\n" | sort
    find "$@" -xdev -type f ! -path etc/hostname ! -path etc/hosts ! -path etc/resolv.conf -print0 | sort -z | xargs -0 sha256sum'
}

for turn in one two; do
  bash "$here/build.sh" docker "$image" --no-cache --quiet --tag "compare:$turn" >/dev/null
  content "compare:$turn" >"$work/$turn"
  docker rmi "compare:$turn" >/dev/null
done
if diff "$work/one" "$work/two"; then
  echo "$image: two builds hold the same $(wc -l <"$work/one") files, folders and links"
else
  exit 1
fi
