#!/usr/bin/env bash
# check.sh: formatting, lint, types, shell scripts and Dockerfiles of the whole tree; says what it looked at.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff format --check --quiet . || { ruff format --diff --quiet .; exit 1; }
ruff check --quiet .
mypy --no-error-summary
lint-imports --no-cache >/tmp/imports.$$ || { cat /tmp/imports.$$; exit 1; }
mapfile -t scripts < <(git ls-files --cached --others --exclude-standard '*.sh' '*.sbatch' '.ci/*')
shellcheck "${scripts[@]}"
mapfile -t dockerfiles < <(git ls-files --cached --others --exclude-standard '*Dockerfile*')
((${#dockerfiles[@]} == 0)) || hadolint "${dockerfiles[@]}"
echo "check: ruff and mypy are clean, so are ${#scripts[@]} shell scripts and ${#dockerfiles[@]} Dockerfiles"
