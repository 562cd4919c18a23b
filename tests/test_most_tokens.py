"""How many tokens the workspace is made for: what is known at model build, and what is agreed on where nothing is."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron.backends import cuda
from mok_megatron.config import MokConfig
from tests.distributed import run_ranks


def _most_tokens(monkeypatch: pytest.MonkeyPatch, arguments: Any, options: MokConfig, **config: Any) -> int | None:
    from mok_megatron.layer import _most_tokens

    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))
    sizes = {"context_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False, **config}
    return _most_tokens(SimpleNamespace(**sizes), options)


ARGUMENTS = SimpleNamespace(micro_batch_size=2, eval_micro_batch_size=2, seq_length=4096)

CASES: dict[str, tuple[Any, MokConfig, dict[str, Any], int | None]] = {
    "a microbatch": (ARGUMENTS, MokConfig(), {}, 8192),
    "context parallel": (ARGUMENTS, MokConfig(), {"context_parallel_size": 4}, 2048),
    "tensor parallel": (ARGUMENTS, MokConfig(), {"tensor_model_parallel_size": 2}, 8192),
    "sequence parallel": (ARGUMENTS, MokConfig(), {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4096),
    "odd split": (SimpleNamespace(micro_batch_size=1, seq_length=10), MokConfig(), {"context_parallel_size": 4}, 3),
    "larger validation": (
        SimpleNamespace(micro_batch_size=1, eval_micro_batch_size=3, seq_length=64),
        MokConfig(),
        {},
        192,
    ),
    "packed sequences": (ARGUMENTS, MokConfig(), {"max_seqlen_per_dp_cp_rank": 16384}, 16384),
    "the option": (ARGUMENTS, MokConfig(max_tokens=77), {}, 77),
    "the option alone": (None, MokConfig(max_tokens=77), {}, 77),
    "no training arguments": (None, MokConfig(), {}, None),
    "arguments without sizes": (SimpleNamespace(micro_batch_size=None, seq_length=None), MokConfig(), {}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_known_at_model_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, options, config, expected = CASES[name]
    assert _most_tokens(monkeypatch, arguments, options, **config) == expected


def _agree(rank: int, world: int) -> tuple[int, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    cuda._logger.addHandler(handler)
    group = dist.new_group(list(range(world)))
    return cuda._agree_on_tokens([5, 0, 9][rank], group, torch.device("cpu")), said


def test_a_group_agrees_on_the_most_tokens_and_one_rank_says_how_to_set_it() -> None:
    results = run_ranks(3, _agree)
    assert [agreed for agreed, _ in results] == [9, 9, 9]
    assert [len(said) for _, said in results] == [1, 0, 0]
    assert "made for 9" in results[0][1][0] and "--mok-max-tokens" in results[0][1][0]
