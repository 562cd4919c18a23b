"""The megatron-core versions that tests run against: the installed one, and those in ``<prefix>/megatrons/<version>``.

``scripts/setup.sh`` puts them there. A test takes one by running a process with ``environment(version)``.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(sys.prefix) / "megatrons"


def megatron_versions() -> list[str]:
    """Full versions, oldest first; the last is the installed one."""
    lock = (ROOT / "requirements" / "megatrons.lock").read_text().splitlines()
    return [*(line.split("==")[1] for line in lock if not line.startswith("#")), version("megatron-core")]


def import_path(megatron: str) -> tuple[Path, ...]:
    """What PYTHONPATH needs for a process to import this megatron-core: its folder; nothing for the installed one."""
    if megatron == version("megatron-core"):
        return ()
    folder = FOLDER / megatron
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: run scripts/setup.sh, or pip install --no-deps --target")
    return (folder,)


def environment(megatron: str) -> dict[str, str]:
    """Environment for a process that is to import this megatron-core and this checkout."""
    paths = [
        *map(str, import_path(megatron)),
        str(ROOT),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
