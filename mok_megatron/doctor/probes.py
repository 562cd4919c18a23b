"""Fills ``Facts`` from the machine. Imports torch and Megatron, creates no CUDA context, compiles nothing."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from mok_megatron import compat, hooks
from mok_megatron.backends import build
from mok_megatron.doctor.driver import probe_driver
from mok_megatron.doctor.facts import Cache, Compiler, Facts, Package, Plugin
from mok_megatron.nvml import probe_node
from mok_megatron.paths import cache_dir

SHOWN_VARIABLES = re.compile(
    r"(MOK_|CUDA_(HOME|PATH|VISIBLE_DEVICES|DEVICE_|LAUNCH)|TORCH_|NCCL_|NVIDIA_VISIBLE|SLURM_J)"
)
"""Environment variables that a bug report needs; others may hold secrets and are never shown."""


def collect_facts() -> Facts:
    """Everything about this machine and this Python. Takes the seconds that importing torch and Megatron takes."""
    torch = _import_package("torch", ["torch"])
    megatron = _import_package("megatron-core", list(hooks.TARGETS)) if torch.error is None else Package()
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        mok_megatron=_installed("mok-megatron") or "unknown",
        torch=torch,
        torch_cuda=getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None),
        megatron=megatron,
        transformer_engine=_installed("transformer-engine"),
        plugin=_plugin(),
        driver=probe_driver(),
        fabric=probe_node(),
        compiler=find_compiler(),
        cache=_cache(),
        kernel_architectures=tuple(build.SOURCES),
        environment={key: value for key, value in sorted(os.environ.items()) if SHOWN_VARIABLES.match(key)},
    )


def find_compiler() -> Compiler | None:
    """The nvcc that a build would take, with its version; None where there is none."""
    path = build.find_nvcc()
    if path is None:
        return None
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Compiler(path=path, version=None)
    match = re.search(r"release (\d+)\.(\d+)", output)
    return Compiler(path=path, version=(int(match[1]), int(match[2])) if match else None)


def _import_package(distribution: str, modules: list[str]) -> Package:
    """Import the modules with their warnings and output kept away from the report."""
    try:
        noise = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            warnings.simplefilter("ignore")
            for module in modules:
                importlib.import_module(module)
    except ModuleNotFoundError as error:
        found = _installed(distribution)
        return Package(version=found, error=f"{error}" if found else "not installed")
    except Exception as error:
        return Package(version=_installed(distribution), error=f"{type(error).__name__}: {error}")
    return Package(version=_megatron_version() if distribution == "megatron-core" else _installed(distribution))


def _megatron_version() -> str:
    """Version of the Megatron that was imported: a checkout on the path wins over the installed one.

    Megatron appends the revision of the git repository of the working folder, even to a wheel's version; where the
    installed version is the same, that one is the truth.
    """
    imported, installed = compat.megatron_version(), _installed("megatron-core")
    return installed if installed is not None and imported.split("+")[0] == installed else imported


def _plugin() -> Plugin:
    """What the import of Megatron, just done, left behind."""
    misfit = None
    try:
        compat.require_fit()
    except RuntimeError as error:
        misfit = str(error)
    return Plugin(
        disabled_by=f"{hooks.DISABLE_VARIABLE}=1" if hooks.disabled() else None,
        autoload_disabled=os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0",
        misfit=misfit,
    )


def _cache() -> Cache:
    folder = cache_dir()
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    built = tuple(architecture for architecture in build.SOURCES if build.library_path(architecture).exists())
    return Cache(path=str(folder), writable=existing.is_dir() and os.access(existing, os.W_OK), libraries=built)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
