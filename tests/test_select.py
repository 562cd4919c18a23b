"""Which backend is chosen, and that a choice never falls back in silence."""

from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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


HOPPER = torch.device("cuda", 0)
LAYER = MoeShape(hidden=128, intermediate=64, num_experts=512, top_k=2)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of ``capability`` whose library loads unless ``error`` says why not."""
    gpu = SimpleNamespace(capability=(9, 0), error=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: gpu.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    loaded = SimpleNamespace(load_kernels=lambda: gpu.error)
    monkeypatch.setattr(library, "load_library", lambda _architecture: loaded)
    return gpu


def test_a_layer_that_the_kernels_run(a_gpu: SimpleNamespace) -> None:
    assert library.cuda_unavailable_reason(HOPPER, LAYER, torch.bfloat16) is None
    many = replace(LAYER, num_experts=1024, ep_size=2, hidden=7168, top_k=16)
    assert library.cuda_unavailable_reason(HOPPER, many, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 96}, "hidden size 96 is not a multiple of 64"),
        ({"intermediate": 100}, "expert intermediate size 100 is not a multiple of 64"),
        ({"num_experts": 513}, "513 experts per rank and 513 in all exceed the kernels' 512 and 1024"),
        ({"num_experts": 1026, "ep_size": 3}, "342 experts per rank and 1026 in all exceed the kernels' 512 and 1024"),
    ],
)
def test_a_layer_that_they_do_not_run(a_gpu: SimpleNamespace, changes: dict[str, Any], reason: str) -> None:
    assert library.cuda_unavailable_reason(HOPPER, replace(LAYER, **changes), torch.bfloat16) == reason


def test_dtypes_and_devices_that_they_do_not_run(a_gpu: SimpleNamespace) -> None:
    for dtype in (torch.float16, torch.float32):
        reason = library.cuda_unavailable_reason(HOPPER, LAYER, dtype)
        assert reason == f"the kernels run bfloat16 layers, this one is {dtype}"
    a_gpu.capability = (8, 0)
    assert library.cuda_unavailable_reason(HOPPER, LAYER, torch.bfloat16) == (
        "there are no kernels for a GPU (compute capability 8.0), only for 9.0 (Hopper)"
    )


def test_a_library_without_code_for_the_device(a_gpu: SimpleNamespace) -> None:
    """Built elsewhere and shipped, or left in a cache that several kinds of nodes share."""
    a_gpu.error = "mok.so: route kernel: no kernel image is available"
    assert library.cuda_unavailable_reason(HOPPER, LAYER, torch.bfloat16) == (
        "mok.so: route kernel: no kernel image is available: a GPU (compute capability 9.0) needs code for sm90a. "
        "Delete the file, or rebuild it with `mok-megatron build --arch sm90a`"
    )


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
