"""``python -m mok_megatron.launch SCRIPT [ARGUMENT ...]``: run a Megatron script with ``mok`` registered.

For places where autoload is switched off. Under torchrun: ``torchrun ... -m mok_megatron.launch pretrain_gpt.py ...``.
The script runs as ``__main__``, with its own folder first on ``sys.path`` and its own ``sys.argv``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mok_megatron import hooks


def main(arguments: list[str]) -> None:
    """Run ``arguments[0]`` with the remaining arguments. Raises SystemExit with a message for bad usage."""
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("usage: python -m mok_megatron.launch SCRIPT [ARGUMENT ...]")
    script = arguments[0]
    path = Path(script)
    if not path.is_file():
        raise SystemExit(f"mok_megatron.launch: no such script: {script}")
    if not hooks.install():
        raise SystemExit(
            f"mok_megatron.launch: {hooks.DISABLE_VARIABLE}=1 switches the plugin off: unset it, or run the script"
        )
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
