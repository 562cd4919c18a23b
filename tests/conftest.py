"""Deselects tests marked ``gpu`` where no CUDA device is; fixtures of the whole-run tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron_cpu.client import PretrainServer
from tests.pretrain import Pretrain


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    # device_count asks NVML and creates no CUDA context, which tests that fork or spawn ranks could not live with.
    if torch.cuda.device_count() == 0:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quarter mebibyte of text in Megatron's format."""
    folder = tmp_path_factory.mktemp("corpus")
    script = Path(__file__).parents[1] / "scripts" / "prepare_corpus.py"
    command = [sys.executable, str(script), str(folder), "--mebibytes", "0.25"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def pretrain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pretrain]:
    """Runs whole trainings on the CPU; one warm process serves the session."""
    server = PretrainServer(tmp_path_factory.mktemp("pretrain"), os.environ)
    yield Pretrain(server, corpus)
    server.close()
