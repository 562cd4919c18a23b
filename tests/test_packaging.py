"""What a wheel contains, that it works without the checkout, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mok_megatron import paths

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A wheel built from a copy of the checkout, so that nothing of the build stays in it."""
    folder = tmp_path_factory.mktemp("wheel")
    kept = ["mok_megatron", "kernels", "configs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"]
    source = folder / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in kept), str(source)], check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    yield next(folder.glob("*.whl"))


def files_of(folder: Path) -> set[str]:
    kept = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in kept}


def test_wheel_has_every_kernel_config_and_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("kernels", "_kernels"), ("configs", "_configs")):
        shipped = {name.split("/", 2)[2] for name in names if name.startswith(f"mok_megatron/{inside}/")}
        assert shipped == files_of(ROOT / folder)
    modules = {name for name in files_of(ROOT / "mok_megatron") if name.endswith((".py", "py.typed"))}
    assert {f"mok_megatron/{name}" for name in modules} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "kernels/", "configs/", "build/"))]


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    entries = archive.read(f"{info}/entry_points.txt").decode()
    assert "[torch.backends]\nmok_megatron = mok_megatron.autoload:activate" in entries
    assert "mok-megatron = mok_megatron.cli:main" in entries
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.12" in metadata
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_unpacked_wheel_finds_its_configs_and_kernels(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mok_megatron; "
        "from mok_megatron.paths import kernels_dir, configs_dir; "
        "from mok_megatron.model_config import load_model_config; "
        "print(mok_megatron.__file__, kernels_dir(), configs_dir(), load_model_config('tiny-deepseek').name)"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    package = tmp_path / "mok_megatron"
    assert done.stdout.split() == [
        str(package / "__init__.py"), str(package / "_kernels"), str(package / "_configs"), "tiny-deepseek",
    ]  # fmt: skip


def test_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "mok_megatron")
    with pytest.raises(FileNotFoundError, match="kernels folder of mok-megatron is missing"):
        paths.kernels_dir()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("MOK_MEGATRON_CACHE", raising=False)
    assert paths.cache_dir() == Path("/x/mok_megatron")
    monkeypatch.setenv("MOK_MEGATRON_CACHE", "/y/z")
    assert paths.cache_dir() == Path("/y/z")


def test_entry_point_is_installed() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="torch.backends")}
    assert found.get("mok_megatron") == "mok_megatron.autoload:activate"


def test_import_is_cheap() -> None:
    """Milliseconds of CPU time, neither torch nor Megatron: it is imported in every process that imports torch."""
    code = (
        "import time, sys; started = time.process_time(); import mok_megatron; "
        "print(time.process_time() - started, 'torch' in sys.modules, 'megatron' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        taken, *imported = done.stdout.split()
        assert imported == ["False", "False"]
        seconds.append(float(taken))
    assert min(seconds) < 0.1


def test_lock_pins_everything_exactly() -> None:
    lines = [line for line in (ROOT / "requirements" / "dev.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = {line.split("==")[0].lower() for line in lines}
    assert {
        "torch",
        "megatron-core",
        "numpy",
        "pyyaml",
        "pytest",
        "ruff",
        "mypy",
        "clang-format",
        "setuptools",
    } <= names
