#!/usr/bin/env bash
# wheels.sh cpu-intel|cuda: installs the image's locked wheels into /opt/venv, with the tools of tools.sh.
# From the environment: TORCH_BUILD (auto, cpu, pypi), WITH_ONECCL (1, 0) and ONECCL_INDEX, all for cpu-intel.
set -euo pipefail
umask 022
image=$1
here=$(cd "$(dirname "$0")/.." && pwd)
venv=/opt/venv
tools=${TOOLS:-/opt/tools}
if [[ $image == cpu-intel && ${WITH_ONECCL:-1} == 1 && -z ${ONECCL_INDEX:-} ]]; then
  echo "wheels.sh: WITH_ONECCL=1 needs ONECCL_INDEX, Intel's wheel index for oneccl-bind-pt; or set WITH_ONECCL=0" >&2
  exit 2
fi
# What a site's own certificate authority signs is trusted where the base image trusts it.
export UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
"$tools/bin/uv" venv --quiet --python /usr/bin/python3.11 "$venv"
uv=("$tools/bin/uv" pip)
to=(--quiet --python "$venv/bin/python")

if [[ $image == cuda ]]; then
  "${uv[@]}" sync "${to[@]}" --require-hashes "$here/cuda/requirements.txt"
else
  # shellcheck source=containers/torch.sh
  . "$here/torch.sh"
  choose_torch "$here/cpu-intel" "${TORCH_BUILD:-auto}" "$venv/bin/python"
  "${uv[@]}" sync "${to[@]}" "$here/cpu-intel/requirements.txt" "${torch[@]}"
  if [[ ${WITH_ONECCL:-1} == 1 ]]; then
    "${uv[@]}" install "${to[@]}" --no-deps --no-index --find-links "$ONECCL_INDEX" -r "$here/cpu-intel/oneccl.txt"
  fi
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
"$venv/bin/python" -m compileall -qf -j 0 --invalidation-mode unchecked-hash "$venv/lib" >/dev/null || true
rm -f "$venv/.lock"
