#!/usr/bin/env bash
# Write the exact versions of .venv into requirements/dev.lock. Usage: scripts/lock.sh
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/dev.lock
new=$(mktemp)
trap 'rm -f "$new"' EXIT
grep '^#' "$lock" >"$new"
.venv/bin/python -m pip list --format=freeze --exclude-editable | grep -viE '^(pip|mok[-_]megatron)==' | sort -f >>"$new"
.venv/bin/python -m pip check
diff "$lock" "$new" || true
cat "$new" >"$lock"
