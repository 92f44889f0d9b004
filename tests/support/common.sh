# shellcheck shell=bash
# What the starters in this folder share: one-line errors, help, packages. Exit codes: 0 done, 1 failed,
# 2 wrong command line, 3 the machine lacks something.
# shellcheck disable=SC2034 # the starters read these two
NAME=$(basename "$0") HERE=$(dirname "$(realpath "$0")")
export DEBIAN_FRONTEND=noninteractive

fail() { # CODE TEXT
  echo "$NAME: $2" >&2
  exit "$1"
}

# The comment at the top of the starter is its help.
show_help() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

wrong_command() { # TEXT
  fail 2 "$1; '$NAME --help' lists the verbs"
}

need_count() { # N
  [[ ${1:-} =~ ^[1-9][0-9]?$ ]] || wrong_command "up ${1:-}: a number from 1 to 99 must follow"
}

need_root() { [[ $(id -u) == 0 ]] || fail 3 "needs root, since it makes namespaces and mounts; run it as root"; }

# Installs packages by apt-get; says in one line which are missing where that fails.
install_packages() { # PACKAGE…
  local log
  log=$(mktemp)
  if ! { command -v apt-get && apt-get -qq update &&
    apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@"; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    rm -f "$log"
    fail 3 "missing packages, which apt-get could not install: $*"
  fi
  rm -f "$log"
}

# Installs the packages of commands that are not there.
need_commands() { # COMMAND=PACKAGE…
  local pair missing=()
  for pair in "$@"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
  done
  [[ ${#missing[@]} == 0 ]] || install_packages "${missing[@]}"
}

# Waits for a command to succeed.
wait_until() { # SECONDS COMMAND…
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || return 1
    sleep 0.1
  done
}

# Ends processes and waits until they are gone: SIGTERM, after five seconds SIGKILL.
end_processes() { # PID…
  local pid
  [[ $# != 0 ]] || return 0
  kill "$@" 2>/dev/null || true
  for pid in "$@"; do
    wait_until 5 process_is_gone "$pid" || kill -9 "$pid" 2>/dev/null || true
  done
}

process_is_gone() { # PID
  [[ ! -e /proc/$1 ]] || grep -q '^State:.Z' "/proc/$1/status"
}

# The mirror of Debian that this machine uses, else Debian's own.
debian_mirror() {
  local found
  found=$(find /etc/apt \( -name '*.sources' -o -name '*.list' \) -exec cat {} + |
    awk '($1 == "URIs:" || $1 == "deb") && $2 ~ /\/debian\/?$/ && !found { found = $2 } END { print found }')
  echo "${found:-http://deb.debian.org/debian}"
}

# Unpacks packages of another Debian into a folder, with all they depend on; this machine's own packages stay as they are.
unpack_packages_of() { # SUITE FOLDER PACKAGE…
  local suite=$1 folder=$2 work options archive
  shift 2
  command -v apt-get >/dev/null || fail 3 "needs apt-get, to fetch $* of Debian $suite"
  work=$(mktemp -d)
  mkdir -p "$work"/{lists/partial,cache/archives/partial} "$folder"
  touch "$work/status"
  echo "deb [signed-by=$(debian_keyring)] $(debian_mirror) $suite main" >"$work/sources.list"
  options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o Dir::Etc::preferencesparts=-
    -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
    -o APT::Sandbox::User=root -o APT::Install-Recommends=false -o Acquire::Languages=none)
  if ! { apt-get "${options[@]}" update && apt-get "${options[@]}" install -y --download-only "$@"; } >"$work/log" 2>&1; then
    tail -n 5 "$work/log" >&2
    rm -rf "$work"
    fail 3 "missing packages of Debian $suite, which apt-get could not fetch: $*"
  fi
  for archive in "$work"/cache/archives/*.deb; do dpkg-deb -x "$archive" "$folder"; done
  rm -rf "$work"
}

debian_keyring() {
  local file=/usr/share/keyrings/debian-archive-keyring.gpg
  [[ -e $file ]] || install_packages debian-archive-keyring
  echo "$file"
}

# Makes a small Debian by debootstrap, which trusts the certificate authorities that were added to this machine.
make_debian_root() { # SUITE FOLDER
  local log=$2.log
  need_commands debootstrap=debootstrap
  [[ ! -e $2/complete ]] || return 0
  rm -rf "${2:?}"
  mkdir -p "$2"
  debootstrap --variant=minbase --include=ca-certificates --keyring="$(debian_keyring)" "$1" "$2" "$(debian_mirror)" \
    >"$log" 2>&1 || { tail -n 5 "$log" >&2; fail 1 "debootstrap of Debian $1 failed; $log has more"; }
  cp /usr/local/share/ca-certificates/*.crt "$2/usr/local/share/ca-certificates/" 2>/dev/null || true
  chroot "$2" update-ca-certificates >/dev/null 2>&1
  printf 'Acquire::Check-Valid-Until "false";\nAcquire::Check-Date "false";\nAcquire::Languages "none";\n' \
    >"$2/etc/apt/apt.conf.d/99clock" # the clock of a test machine may be wrong
  touch "$2/complete"
}
