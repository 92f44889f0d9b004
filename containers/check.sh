#!/usr/bin/env bash
# check.sh: formatting, lint, types, import contracts, words, shell scripts and Dockerfiles of the whole tree.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v git >/dev/null || { echo "check.sh: git is not installed. Install it: the checks ask it for the files." >&2; exit 2; }
ruff format --check --quiet . || { ruff format --diff --quiet .; exit 1; }
ruff check --quiet .
mypy --no-error-summary
report=$(mktemp)
trap 'rm -f "$report"' EXIT
lint-imports --no-cache >"$report" || { cat "$report"; exit 1; }
mapfile -t texts < <(git ls-files --cached --others --exclude-standard '*.md' '*.py' '*.toml' '*.sh' '*.sbatch' '*.yaml' 'Makefile' '.ci/*' 'tests/support/*')
codespell --dictionary tools/words.txt "${texts[@]}"
python tools/check_prose.py
python tools/check_trust.py
python tools/check_size.py
mapfile -t scripts < <(git ls-files --cached --others --exclude-standard '*.sh' '*.sbatch' '.ci/*' 'tests/support/*' ':!*.py')
shellcheck --external-sources "${scripts[@]}"
mapfile -t dockerfiles < <(git ls-files --cached --others --exclude-standard '*Dockerfile*')
((${#dockerfiles[@]} == 0)) || hadolint "${dockerfiles[@]}"
echo "check: clean, ${#scripts[@]} shell scripts and ${#dockerfiles[@]} Dockerfiles among it"
