#!/usr/bin/env bash
# Run a small layer, forward and backward, under compute-sanitizer: memcheck, then racecheck. Needs a GPU and CUDA's tools.
#
#   scripts/sanitize.sh [WORLD ...]
#
# WORLD is a number of virtual ranks on the one GPU (default: 1). torch's allocator is off, so that a write behind an
# ordinary tensor is seen, too. Exit code 1 with the first tool that finds something.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for world in "${@:-1}"; do
  for tool in memcheck racecheck; do
    echo "sanitize: $tool, W=$world"
    compute-sanitizer --tool "$tool" --error-exitcode 1 .venv/bin/python -m tests.sanitized_layer "$world"
  done
done
