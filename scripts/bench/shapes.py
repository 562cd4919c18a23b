"""The layer shapes that are measured, by the name of the model that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mok_megatron.config import Activation, MoeShape
from mok_megatron.model_config import load_model_config

EP_OF_MODELS = 8
"""The EP size whose share of a large model's experts one rank holds here: one node of eight GPUs."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One model's MoE layer as one rank sees it.

    Attributes:
        experts_per_rank: e. A run on W ranks has ``e * W`` experts, as an EP group of that size would in a job with
            the same experts per rank, but never more than the model.
        model_experts: experts of the whole model.
    """

    name: str
    hidden: int
    intermediate: int
    experts_per_rank: int
    model_experts: int
    top_k: int
    activation: Activation = field(default_factory=Activation)

    def on_ranks(self, world: int) -> MoeShape:
        """The layer on ``world`` ranks. Raises ValueError where the experts do not divide."""
        return MoeShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=min(self.experts_per_rank * world, self.model_experts),
            top_k=self.top_k,
            ep_size=world,
            activation=self.activation,
        )


def _from_config(name: str, experts_per_rank: int | None = None) -> LayerShape:
    """The routed experts of a shipped model config; by default an eighth of them per rank."""
    moe = load_model_config(name).architecture.moe_shape()
    return LayerShape(
        name=name,
        hidden=moe.hidden,
        intermediate=moe.intermediate,
        experts_per_rank=experts_per_rank or moe.num_experts // EP_OF_MODELS,
        model_experts=moe.num_experts,
        top_k=moe.top_k,
        activation=moe.activation,
    )


BAR_SHAPES = ("deepseek-v3", "glm-4.5", "mixtral-8x7b", "qwen3-30b-a3b")
"""The shapes that the project's speed is judged by, and the default of the benchmark."""


def named_shapes() -> Mapping[str, LayerShape]:
    """Every shape by name, in the order in which they are reported."""
    mixtral = LayerShape(
        name="mixtral-8x7b", hidden=4096, intermediate=14336, experts_per_rank=8, model_experts=8, top_k=2
    )
    shapes = [
        _from_config("deepseek-v3"),
        _from_config("glm-4.5"),
        mixtral,
        _from_config("qwen3-30b-a3b", experts_per_rank=128),
        _from_config("kimi-k2"),
        _from_config("deepseek-v4-pro"),
    ]
    return {shape.name: shape for shape in shapes}
