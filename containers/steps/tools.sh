#!/usr/bin/env bash
# tools.sh: puts what builds an image, and is no part of it, into /opt/tools: uv, and the library that writes
# the SBOM.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip >/dev/null
python3 -m pip install --quiet --no-cache-dir --require-hashes --only-binary :all: --target /opt/tools \
  --root-user-action ignore -r "$here/uv.txt" -r "$here/sbom.txt"
