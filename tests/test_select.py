"""Which backend is chosen, and that a choice never falls back in silence."""

from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mok_megatron.backends import library, select
from mok_megatron.config import MoeShape, MokConfig
from mok_megatron.model_config import load_model_config, shipped_configs
from tests.distributed import run_ranks

SHAPE = MoeShape(hidden=16, intermediate=8, num_experts=4, top_k=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_reported", set())


def test_auto_on_cpu_takes_the_reference_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backends = [select.create_backend(SHAPE, MokConfig(), None, "cpu", torch.float32) for _ in range(3)]
    assert {backend.name for backend in backends} == {"reference"}
    reason = library.cuda_unavailable_reason(CPU, SHAPE, torch.float32)
    assert reason
    assert [str(warning.message).endswith(reason) for warning in caught] == [True]
    assert [record.message.endswith(reason) for record in caplog.records] == [True]


def test_an_explicit_reference_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = select.create_backend(SHAPE, MokConfig(backend="reference"), None, "cpu", torch.bfloat16)
    assert backend.name == "reference"


def test_an_explicit_cuda_never_falls_back() -> None:
    reason = library.cuda_unavailable_reason(CPU, SHAPE, torch.bfloat16)
    assert reason
    with pytest.raises(ValueError, match=r"backend=cuda cannot run this layer on cpu.*choose backend=auto") as error:
        select.create_backend(SHAPE, MokConfig(backend="cuda"), None, "cpu", torch.bfloat16)
    assert reason in str(error.value)


def _backend_where_one_rank_has_no_kernels(rank: int, world_size: int) -> tuple[str, list[str]]:
    """Rank 1 alone misses its compiler. No rank may go on with the CUDA backend, which would wait for it."""
    select.cuda_unavailable_reason = lambda *_: "no nvcc" if rank == 1 else None  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shape = replace(SHAPE, ep_size=world_size)
        backend = select.create_backend(shape, MokConfig(), dist.group.WORLD, "cpu", torch.bfloat16)
    return backend.name, [str(warning.message) for warning in caught if "slow reference" in str(warning.message)]


def test_a_group_falls_back_together_and_says_for_which_rank() -> None:
    (name_0, warnings_0), (name_1, warnings_1) = run_ranks(2, _backend_where_one_rank_has_no_kernels)
    assert name_0 == name_1 == "reference"
    assert len(warnings_0) == len(warnings_1) == 1
    assert warnings_0[0].endswith(": rank 1 of its expert-parallel group: no nvcc")
    assert warnings_1[0].endswith("): no nvcc")


@pytest.mark.parametrize("name", shipped_configs())
def test_a_hopper_gpu_takes_every_shipped_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's model as well, so that the same command runs the kernels where there are some."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(library, "load_library", lambda _architecture: SimpleNamespace(load_kernels=lambda: None))
    config = load_model_config(name)
    for layout in config.layouts.values():
        shape = config.architecture_for(layout).moe_shape(layout.ep)
        assert library.cuda_unavailable_reason(torch.device("cuda", 0), shape, torch.bfloat16) is None
