#!/usr/bin/env bash
# Set everything up, pretrain a tiny DeepSeek-style model with Megatron's own dispatcher and with mok, and compare.
# Usage: scripts/quickstart.sh [--iterations N] [--folder FOLDER]      results: runs/quickstart/
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
exec .venv/bin/python scripts/quickstart.py "$@"
