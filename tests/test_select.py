"""Which backend is chosen, and that a choice never falls back in silence."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from mok_megatron.backends import select
from mok_megatron.config import MoeShape, MokConfig

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
    reason = select.cuda_unavailable_reason(CPU, SHAPE, torch.float32)
    assert reason
    assert [str(warning.message).endswith(reason) for warning in caught] == [True]
    assert [record.message.endswith(reason) for record in caplog.records] == [True]


def test_an_explicit_reference_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = select.create_backend(SHAPE, MokConfig(backend="reference"), None, "cpu", torch.bfloat16)
    assert backend.name == "reference"


def test_an_explicit_cuda_never_falls_back() -> None:
    reason = select.cuda_unavailable_reason(CPU, SHAPE, torch.bfloat16)
    assert reason
    with pytest.raises(ValueError, match=r"backend=cuda cannot run this layer on cpu.*choose backend=auto") as error:
        select.create_backend(SHAPE, MokConfig(backend="cuda"), None, "cpu", torch.bfloat16)
    assert reason in str(error.value)
