#!/usr/bin/env bash
# Set up .venv and run the tests: those for the CPU in parallel, then those for the GPU where there is one.
# Usage: scripts/test.sh [PYTEST ARGUMENT ...]      e.g. scripts/test.sh tests/test_cli.py -k help
# JOBS=n runs n tests at once (default: one per core, at most 4).
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cores=$(nproc 2>/dev/null || echo 2)
jobs=${JOBS:-$((cores < 4 ? cores : 4))}
no_tests_collected=5

# Run pytest; a selection that leaves nothing is no failure of this half.
run_pytest() {
  local code=0
  .venv/bin/python -m pytest "$@" || code=$?
  ((code == 0 || code == no_tests_collected)) || exit "$code"
  ((code == 0)) && passed_any=yes || true
}

passed_any=no
# By file, because the tests of a file share costly things in their process.
run_pytest -n "$jobs" --dist loadfile -m "not gpu" "$@"
if .venv/bin/python -c 'import sys, torch; sys.exit(torch.cuda.device_count() == 0)'; then
  run_pytest -m gpu "$@"
else
  echo "test: no GPU here, the tests marked gpu were left out"
fi
[[ $passed_any == yes ]] || { echo "test: no test matches: $*" >&2 && exit "$no_tests_collected"; }
