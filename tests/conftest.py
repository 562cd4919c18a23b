"""Deselects tests marked ``gpu`` where no CUDA device is."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    # device_count asks NVML and creates no CUDA context, which tests that fork or spawn ranks could not live with.
    if torch.cuda.device_count() == 0:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
