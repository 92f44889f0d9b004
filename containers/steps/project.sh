#!/usr/bin/env bash
# project.sh cpu-intel|cuda|cpu: installs this project over its wheels, with its tests, the bill of materials, what keeps
# torch when a user adds packages, and what the image says of itself. From the environment: REVISION, and CREATED, the
# time that the bill of materials carries (default: now).
set -euo pipefail
umask 022
image=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
venv=/opt/venv
tools=${TOOLS:-/opt/tools}
ours=/opt/reference-training
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export UV_NO_CACHE=1 UV_LINK_MODE=copy

# setuptools writes into the folder that it builds.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
export TMPDIR=$source
cp -r "$here"/{pyproject.toml,setup.py,README.md,LICENSE,reference_training,entrypoint,train} "$source"
"$tools/bin/uv" build --quiet --wheel --no-build-isolation --offline --python "$venv/bin/python" --out-dir "$source/wheel" "$source"
"$tools/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-index "$source"/wheel/*.whl
# These say where and when it was built.
rm -rf "$site"/reference_training-*.dist-info/{direct_url.json,uv_cache.json}
sed -i '/direct_url.json\|uv_cache.json/d' "$site"/reference_training-*.dist-info/RECORD
# In the image the packages have their own names too, after those of the image's other packages.
own=$site/reference_training/_own
echo "$own" >"$site/image_of_reference_training.pth"
bash "$here/train/kernels/kernels.sh" "$venv/bin/python" "$source"
[[ -f $site/reference_training_jpeg.so ]]
[[ $(uname -m) != x86_64 || -f $site/reference_training_winograd.so ]]

mkdir -p "$ours"
cp -r "$here"/{pyproject.toml,README.md,LICENSE,tests,tools} "$ours/"
rm -rf "$ours"/tests/{containers,project,benchmarks} "$ours"/tools/{check_prose.py,check_size.py,settings_docs.py,benchmarks_docs.py,words.txt}
cp "$here/containers/environment.sh" "$ours/"
find "$ours" "$site/reference_training" -name __pycache__ -prune -exec rm -rf {} +
"$venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash \
  "$site/reference_training" "$ours"/{tests,tools}
PYTHONPATH=$tools PYTHONDONTWRITEBYTECODE=1 CREATED=${CREATED:-$(date -u +%Y-%m-%dT%H:%M:%SZ)} \
  "$(readlink -f "$venv/bin/python")" "$here/containers/steps/sbom.py" "$image" "$venv" >"$ours/sbom.json"

# Names and versions as they are installed, such as torch==2.8.0+cpu.
installed=$("$venv/bin/python" -c '
import importlib.metadata, re
for one in importlib.metadata.distributions():
    print(re.sub("[-_.]+", "-", one.name).lower() + "==" + one.version)' | sort)
{
  echo "# torch and what is built against it or with it: pip keeps these versions. To replace one, remove its line."
  grep -E '^((torch|torchvision|(pytorch-)?triton|intel-extension-for-pytorch|oneccl-bind-pt|intel-openmp)==|nvidia-|cuda-)' \
    <<<"$installed" | grep -v '^nvidia-ml-py='
} >"$ours/constraints.txt"
mkdir -p /etc/xdg/pip
cp "$here/containers/pip.conf" /etc/xdg/pip/
build=pypi oneccl="not for this image" ends=
if grep -q '^torch==.*+cpu$' <<<"$installed"; then build=cpu; fi
if [[ $image == cpu-intel ]]; then
  oneccl="left out (no ONECCL_INDEX)"
  if grep -q '^oneccl-bind-pt==' <<<"$installed"; then oneccl=installed; fi
  ends="torch $(sed -n 's/^torch==\([0-9.]*\).*/\1/p' <<<"$installed") and Intel's extension get no more fixes"
fi
printf '{"name": "%s", "revision": "%s", "torch_build": "%s", "oneccl": "%s", "end_of_life": "%s"}\n' \
  "$image" "${REVISION:-unknown}" "$build" "$oneccl" "$ends" >"$ours/image.json"
# Any UID may train here where nothing is bound.
mkdir -p /workspace
chmod 1777 /workspace
rm -f "$venv/.lock"
