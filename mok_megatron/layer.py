"""MoELayer with the part behind the router replaced; imported only when a config asks for ``mok``."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from megatron.core import utils
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from mok_megatron import compat, options, refusals
from mok_megatron.config import Activation, MoeShape, MokConfig
from mok_megatron.fused import FusedExperts

TYPE_FIELD = "moe_token_dispatcher_type"
BUILT_AS = "allgather"
"""The base builds itself with this dispatcher, whose constructor touches no device, before ours takes its place."""


class RoutingCarrier(MoETokenDispatcher):
    """A dispatcher that moves nothing: it carries the routing map from the router to the fused experts."""

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.routing_map: Tensor | None = None
        self.hidden_shape: Any = None
        # What a CUDA graph of the router has to hand over to the experts outside it.
        self.cudagraph_attrs = ["routing_map"]

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens [S, B, H]`` -> ``[T, H]``; keeps the map ``[T, E]``."""
        self.hidden_shape = tokens.shape
        self.routing_map = routing_map
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The fused experts move the rows."""
        return hidden_states, probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The fused experts have combined."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` -> the shape of the layer's input."""
        return hidden_states.view(self.hidden_shape)

    def take_routing_map(self) -> Tensor:
        """The map of the call in flight; kept no longer, so that nothing of a finished call stays alive."""
        if self.routing_map is None:
            raise RuntimeError("the experts were called without a routing map: preprocess did not run before them")
        routing_map, self.routing_map = self.routing_map, None
        return routing_map


class MokMoELayer(moe_layer.MoELayer):
    """Megatron's MoELayer: its router, shared expert, latent projections and expert modules, our experts' compute."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Takes what MoELayer takes. Raises ValueError for what ``mok`` does not honour, before anything is built."""
        compat.require_fit()
        refusals.check_config(config, resolved=True)
        refusals.check_training_arguments(_training_arguments())
        bound = inspect.signature(moe_layer.MoELayer.__init__).bind(self, config, *args, **kwargs).arguments
        pg_collection = bound.get("pg_collection") or moe_layer.get_default_pg_collection()
        shape = _moe_shape(config, pg_collection)
        backend_options = options.current()

        chosen = getattr(config, TYPE_FIELD)
        setattr(config, TYPE_FIELD, BUILT_AS)
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            setattr(config, TYPE_FIELD, chosen)
        for module in self.modules():  # SequentialMLP keeps a copy of the config
            if getattr(getattr(module, "config", None), TYPE_FIELD, None) == BUILT_AS:
                setattr(module.config, TYPE_FIELD, chosen)

        self.token_dispatcher = RoutingCarrier(config, pg_collection)
        self.fused_experts = FusedExperts(
            self.experts,
            shape,
            group=pg_collection.ep,
            dtype=config.params_dtype,
            options=backend_options,
            fuse_grad_accumulation=config.gradient_accumulation_fusion,
            layer_number=self.layer_number,
            max_tokens=_most_tokens(config, backend_options),
        )
        if self.fused_experts.backend.name == "reference" and refusals.captures_experts(config):
            raise ValueError(
                f"moe_token_dispatcher_type='mok' with the reference backend does not support "
                f"cuda_graph_impl={config.cuda_graph_impl!r} around the experts: it reads row counts on the host. "
                f"Capture other modules (--cuda-graph-modules attn moe_router), or use the CUDA backend"
            )

    def set_layer_number(self, layer_number: int) -> None:
        """The number that messages name."""
        super().set_layer_number(layer_number)
        self.fused_experts.layer_number = layer_number

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """``hidden_states [T, H]``, ``probs [T, E]`` -> ``([T, H], None)``: dispatch, experts and combine."""
        return self.fused_experts(hidden_states, probs, self.token_dispatcher.take_routing_map()), None


def _moe_shape(config: Any, pg_collection: Any) -> MoeShape:
    """The layer's sizes from the config and the groups. Raises ValueError where they do not fit together."""
    expert_tp = utils.get_pg_size(pg_collection.expt_tp)
    if expert_tp != 1:
        raise ValueError(
            f"moe_token_dispatcher_type='mok' keeps every expert whole on one rank, but the expert tensor-parallel "
            f"group has {expert_tp} ranks: set --expert-tensor-parallel-size 1"
        )
    return MoeShape(
        hidden=config.moe_latent_size or config.hidden_size,
        intermediate=config.moe_ffn_hidden_size,
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        ep_size=utils.get_pg_size(pg_collection.ep),
        activation=Activation(
            clamp=config.activation_func_clamp_value, linear_offset=float(config.glu_linear_offset or 0.0)
        ),
    )


def _training_arguments() -> Any:
    """Megatron's parsed command line where ``megatron.training`` runs the model, else None."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def _most_tokens(config: Any, backend_options: MokConfig) -> int | None:
    """T of the largest call: the option, or else what a microbatch leaves on a rank; None where neither is known."""
    if backend_options.max_tokens is not None:
        return backend_options.max_tokens
    arguments = _training_arguments()
    sequences = [getattr(arguments, name, None) or 0 for name in ("micro_batch_size", "eval_micro_batch_size")]
    length = getattr(arguments, "seq_length", None) or 0
    per_context_rank = -(-max(sequences) * length // config.context_parallel_size)
    # Packed sequences that are spread over a varying number of ranks are bounded by this.
    per_context_rank = max(per_context_rank, getattr(config, "max_seqlen_per_dp_cp_rank", None) or 0)
    tensor_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return -(-per_context_rank // tensor_ranks) or None
