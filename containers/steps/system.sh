#!/usr/bin/env bash
# system.sh LIST…: installs the Debian packages of these lists, and leaves nothing behind but them.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
# What is left out is left out of this step alone: packages that a user adds to the image come whole.
excludes=/etc/dpkg/dpkg.cfg.d/reference-training
trap 'rm -f "$excludes"' EXIT
cp "$here/dpkg.excludes" "$excludes"
apt-get -qq update
# The base is one of a digest: what Debian has fixed since then comes with the packages.
DEBIAN_FRONTEND=noninteractive apt-get upgrade -y -qq >/dev/null
sed '/^#/d' "$@" | DEBIAN_FRONTEND=noninteractive xargs apt-get install -y -qq --no-install-recommends >/dev/null
# A slim base may lack /usr/share/doc, where the bill of materials reads licenses: they come from the packages themselves.
# Some have a link to another one's folder in place of a file.
work=$(mktemp -d)
dpkg-query -W -f '${binary:Package}=${Version} ${Package}\n' | while read -r package name; do
  if [[ -e /usr/share/doc/$name/copyright ]]; then continue; fi
  if (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$package"); then
    dpkg-deb --fsys-tarfile "$work"/*.deb | tar -xC / --wildcards './usr/share/doc/*/copyright' 2>/dev/null || true
    rm "$work"/*.deb
  fi
done
rm -r "$work"
# A container's user needs nobody else's rights.
find /etc /home /opt /root /usr /var/lib -xdev -type f -perm /6000 -exec chmod a-s {} +
# Lists, logs and caches; the last two are rewritten at every run of dpkg and ldconfig, with the time in them.
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/log/* \
  /var/cache/ldconfig/aux-cache
