"""The layer benchmark's shapes and routings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mok_megatron.config import MoeShape
from scripts.bench.inputs import make_case
from scripts.bench.routing import ROUTINGS, route
from scripts.bench.shapes import BAR_SHAPES, named_shapes
from tests.bench_case import ALONE, TINY, tiny_case


def test_named_shapes() -> None:
    shapes = {
        name: (s.hidden, s.intermediate, s.experts_per_rank, s.top_k, s.model_experts)
        for name, s in named_shapes().items()
    }
    assert shapes == {
        "deepseek-v3": (7168, 2048, 32, 8, 256),
        "glm-4.5": (5120, 1536, 20, 8, 160),
        "mixtral-8x7b": (4096, 14336, 8, 2, 8),
        "qwen3-30b-a3b": (2048, 768, 128, 8, 128),
        "kimi-k2": (7168, 2048, 48, 8, 384),
        "deepseek-v4-pro": (7168, 3072, 48, 6, 384),
    }
    assert set(BAR_SHAPES) <= set(shapes)
    assert named_shapes()["deepseek-v4-pro"].activation.clamp == 10.0


@pytest.mark.parametrize(
    ("name", "world", "experts"), [("deepseek-v3", 2, 64), ("deepseek-v3", 16, 256), ("mixtral-8x7b", 4, 8)]
)
def test_more_ranks_hold_more_experts_up_to_the_models(name: str, world: int, experts: int) -> None:
    shape = named_shapes()[name].on_ranks(world)
    assert (shape.num_experts, shape.ep_size) == (experts, world)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts=8 is not divisible by the expert-parallel size 3"):
        named_shapes()["mixtral-8x7b"].on_ranks(3)


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "all-remote"])
def test_every_token_has_k_different_experts_and_weights_that_sum_to_one(name: str) -> None:
    experts, weights = route(name, TINY, 500, 0, torch.Generator().manual_seed(1))
    assert experts.shape == weights.shape == (500, 2)
    assert (experts[:, 0] != experts[:, 1]).all() and experts.min() >= 0 and experts.max() < 8
    torch.testing.assert_close(weights.sum(1), torch.ones(500))
    again, _ = route(name, TINY, 500, 0, torch.Generator().manual_seed(1))
    assert torch.equal(experts, again)


def _counts(name: str, shape: MoeShape, rank: int = 0) -> Tensor:
    experts, _ = route(name, shape, 4000, rank, torch.Generator().manual_seed(2 + rank))
    return torch.bincount(experts.flatten(), minlength=shape.num_experts)


def test_uniform_is_even() -> None:
    assert _counts("uniform", TINY).float().div(1000).sub(1).abs().max() < 0.1


def test_zipf_follows_the_law_and_is_the_same_on_all_ranks() -> None:
    one = dataclasses.replace(TINY, top_k=1, ep_size=2)
    law = 1 / torch.arange(1, 9).float()
    counts = _counts("zipf", one)
    assert counts.sort(descending=True).values.div(4000).sub(law / law.sum()).abs().max() < 0.03
    assert int(counts.argmax()) == int(_counts("zipf", one, rank=1).argmax())


def test_single_hot_sends_every_token_to_expert_0() -> None:
    counts = _counts("single-hot", TINY)
    assert counts[0] == 4000 and counts[1:].max() < 700


def test_all_remote_avoids_the_own_rank() -> None:
    two = dataclasses.replace(TINY, ep_size=2)
    assert _counts("all-remote", two, rank=0)[:4].sum() == 0
    assert _counts("all-remote", two, rank=1)[4:].sum() == 0
    with pytest.raises(ValueError, match=r"all-remote needs top_k=2 experts on other ranks.* 0 are remote"):
        route("all-remote", TINY, 4, 0, torch.Generator())


def test_unknown_routing_and_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown routing 'even'; known are uniform"):
        route("even", TINY, 4, 0, torch.Generator())
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        make_case("tiny", TINY, ALONE, tokens=0, routing="uniform")


def test_a_case_says_how_uneven_it_is() -> None:
    assert tiny_case().load == 1.0
    case = tiny_case("single-hot")
    assert case.rows == 8 * 128 and case.ring_rows() is None
    assert case.ring_rows(0.25) == 256 and case.ring_rows(0.26) == 384 and case.ring_rows(1.0) == case.rows
    assert len(case.copies) == 2 and torch.equal(case.copies[0].w1, case.copies[1].w1)
    assert case.copies[0].w1.data_ptr() != case.copies[1].w1.data_ptr()
    assert float(case.copies[0].x.float().std()) == pytest.approx(1, rel=0.1)
