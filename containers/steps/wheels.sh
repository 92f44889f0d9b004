#!/usr/bin/env bash
# wheels.sh cpu-intel|cuda: installs a stack's locked wheels into /opt/venv; the images cuda and cpu share one.
# From the environment: UV (the tool), OWNER (who may install more), TORCH_BUILD (cpu, pypi), and for cpu-intel
# ONECCL_INDEX, which adds oneCCL's bindings.
set -euo pipefail
umask 022
stack=$1
here=$(cd "$(dirname "$0")/.." && pwd)
venv=/opt/venv
tool=${UV:-/opt/tools/bin/uv}
build=${TORCH_BUILD:-cpu}
if [[ $build != cpu && $build != pypi ]]; then
  echo "wheels.sh: TORCH_BUILD=$build: no such build for an image. Use cpu or pypi." >&2
  exit 2
fi
# What a site's own certificate authority signs is trusted where the base image trusts it.
export UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
interpreters=(/usr/bin/python3.[0-9][0-9]) # the one of packages.txt
"$tool" venv --quiet --python "${interpreters[0]}" "$venv"
uv=("$tool" pip)
to=(--quiet --python "$venv/bin/python")

# shellcheck source=containers/torch.sh
. "$here/torch.sh"
choose_torch "$here/$stack" "$build" "$venv/bin/python"
"${uv[@]}" sync "${to[@]}" "$here/$stack/requirements.txt" "${torch[@]}"
if [[ -n ${ONECCL_INDEX:-} ]]; then
  "${uv[@]}" install "${to[@]}" --no-deps --no-index --find-links "$ONECCL_INDEX" -r "$here/$stack/oneccl.txt"
fi

cd "$venv/lib"
shopt -s globstar
sed '/^#/d' "$here/wheels.excludes" | while read -r pattern; do
  # The pattern is one of names, to be expanded.
  # shellcheck disable=SC2086
  rm -rf $pattern
done
# Compiled files that hold no times: the same in every build, and not looked at again before each import. By force,
# since the interpreter has by now compiled what starts with it. Some packages carry templates that are no Python,
# which compileall counts as failures.
"$venv/bin/python" -W ignore -m compileall -qf -j 0 --invalidation-mode unchecked-hash "$venv/lib" >/dev/null || true
rm -f "$venv/.lock"
# The image's user adds packages without becoming root; in a SIF nobody does.
if [[ -n ${OWNER:-} ]]; then chown -R "$OWNER" "$venv"; fi
