"""Copies the kernel sources and the shipped configs into the built package; all else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = {"kernels": "_kernels", "configs": "_configs"}
"""Folder of the checkout -> folder inside the installed package (mok_megatron/paths.py looks for both)."""


class BuildWithSources(build_py):
    """``build_py`` that adds the SHIPPED folders; an editable install reads them from the checkout instead."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder, inside in SHIPPED.items():
            if not (ROOT / folder).is_dir():
                raise FileNotFoundError(f"{ROOT / folder} is missing: build from a complete checkout")
            target = Path(self.build_lib) / "mok_megatron" / inside
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__", "*.o", "*.so"))


setup(cmdclass={"build_py": BuildWithSources})
