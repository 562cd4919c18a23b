#!/usr/bin/env bash
# The gate of lint, types and formatting, as CI runs it. Usage: scripts/lint.sh [--fix]
set -uo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh || exit 1
bin=.venv/bin
mapfile -t sources < <(find kernels tests -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \))
mapfile -t shell < <(find scripts examples .ci -type f \( -name '*.sh' -o -name run \))

if [[ ${1:-} == --fix ]]; then
  "$bin/ruff" check --fix . && "$bin/ruff" format .
  ((${#sources[@]} == 0)) || "$bin/clang-format" -i "${sources[@]}"
fi

failed=()
check() {
  local name=$1
  shift
  echo "lint: $name"
  "$@" || failed+=("$name")
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
for script in "${shell[@]}"; do
  check "bash -n $script" bash -n "$script"
done
((${#sources[@]} == 0)) || check "clang-format" "$bin/clang-format" --dry-run -Werror "${sources[@]}"
if ((${#failed[@]})); then
  printf 'lint: FAILED: %s\n' "${failed[@]}" >&2
  echo "lint: scripts/lint.sh --fix repairs what can be repaired by itself" >&2
  exit 1
fi
echo "lint: all good"
