"""The benchmark's Megatron layer on Megatron's real MoELayer, on the CPU, where each expert is an MLP of its own."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

from tests.distributed import run_ranks


def _without_transformer_engine(real_spec: Any) -> Any:
    """Megatron's spec with SequentialMLP, whose experts are also found where TEGroupedMLP has them."""

    def spec(use_te: bool, num_experts: int, moe_grouped_gemm: bool) -> Any:
        assert use_te and moe_grouped_gemm
        make = real_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False)

        def build(config: Any) -> Any:
            layer = make(config)
            for name in ("linear_fc1", "linear_fc2"):
                weights = {f"weight{i}": getattr(e, name).weight for i, e in enumerate(layer.experts.local_experts)}
                object.__setattr__(layer.experts, name, types.SimpleNamespace(**weights))
            return layer

        return build

    return spec


def _measure(rank: int, world: int) -> list[dict[str, Any]]:
    from tests.megatron_cpu import shim

    shim.install()
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer import transformer_config

    from scripts.bench.implementations import Implementation
    from scripts.bench.peers.megatron_te import MegatronLayer
    from tests.bench_case import measure, tiny_case

    real_config: Any = transformer_config.TransformerConfig
    kernels_of_transformer_engine = dict.fromkeys(
        ("moe_permute_fusion", "moe_grouped_gemm", "bias_activation_fusion"), False
    )
    modules: Any = (moe_module_specs, transformer_config)
    modules[0].get_moe_module_spec = _without_transformer_engine(moe_module_specs.get_moe_module_spec)
    modules[1].TransformerConfig = lambda **options: real_config(**(options | kernels_of_transformer_engine))
    entries = [
        Implementation(name="plain", build=MegatronLayer, unavailable=lambda case: None),
        Implementation(
            name="fused",
            build=partial(MegatronLayer, main_grad=True),
            unavailable=lambda case: None,
            directions=frozenset({"backward"}),
        ),
    ]
    return measure(tiny_case(), entries)


def test_megatrons_layer_takes_the_weights_of_the_case_and_gives_their_gradients() -> None:
    (results,) = run_ranks(1, _measure, timeout_s=120)
    assert [r.get("error") for r in results] == [None] * 5
    assert [r["direction"] for r in results[3:]] == ["forward+backward", "backward"]
