"""The megatron-core releases that the plugin is tested against, each unpacked beside the installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

VERSIONS = ("0.17.1", "0.18.2", "0.19.2")
"""The last release of each supported minor version."""

FOLDER_VARIABLE = "MOK_WHEEL_DIR"


def megatron_path(number: str) -> Path | None:
    """A folder for PYTHONPATH that holds megatron-core ``number``; None where it is the installed one.

    The wheel is fetched once into MOK_WHEEL_DIR, or else into the system's folder for temporary files. Raises
    RuntimeError with pip's words where that fails.
    """
    if version("megatron-core") == number:
        return None
    root = os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir(), f"mok-megatron-wheels-{os.getuid()}")
    target = Path(root) / f"megatron-core-{number}"
    if not target.is_dir():
        Path(root).mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=root, prefix="part-"))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        # The wheels hold one compiled helper, for building data indices, which no test of the plugin uses.
        command += ["--only-binary", ":all:", "--python-version", "3.12", "--target", part, f"megatron-core=={number}"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if run.returncode:
            shutil.rmtree(part)
            raise RuntimeError(f"cannot fetch megatron-core {number} (set {FOLDER_VARIABLE}?): {run.stderr.strip()}")
        try:
            part.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return target
