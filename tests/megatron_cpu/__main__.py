"""``python -m tests.megatron_cpu SCRIPT [ARGS...]``: run a Megatron script on the CPU, as ``python SCRIPT`` would."""

import runpy
import sys

from tests.megatron_cpu.shim import install

if len(sys.argv) < 2:
    raise SystemExit("usage: python -m tests.megatron_cpu SCRIPT [ARGS...]")
install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
