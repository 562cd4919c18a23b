"""The routed experts as one module-like object: ``forward(hidden, probs, routing_map)``."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok_megatron.autograd import apply_experts
from mok_megatron.backend_pool import shared_backend
from mok_megatron.backends.base import Backend
from mok_megatron.config import MoeShape, MokConfig
from mok_megatron.experts import ExpertReader, check_parameters, expert_weights

logger = logging.getLogger("mok_megatron")


class FusedExperts:
    """Dispatch, experts and combine of one layer, on the weights of Megatron's expert modules.

    Not an ``nn.Module``: it owns no parameters, and stays out of the model's module tree and checkpoints. The
    signature of ``forward`` is that of a megakernel called after the router.
    """

    def __init__(
        self,
        experts: nn.Module,
        shape: MoeShape,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        options: MokConfig,
        fuse_grad_accumulation: bool,
        layer_number: int | None,
        max_tokens: int | None = None,
    ) -> None:
        """Creates or joins the group's backend: collective over ``group``, at model build.

        ``max_tokens`` is the most tokens per rank that a call will bring, the same number on all ranks; None where that
        is not known.

        Raises ValueError when the weights are not the shape's, or the backend cannot run the layer.
        """
        self.experts = experts
        self.shape = shape
        self.group = group
        self.dtype = dtype
        self.options = options
        self.fuse_grad_accumulation = fuse_grad_accumulation
        self.layer_number = layer_number
        self.max_tokens = max_tokens
        self._reader = ExpertReader(experts, shape.experts_per_rank)
        self._check_weights()
        self.device = _device(experts, group)
        self.backend = self._join_backend()

    def __call__(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        """See ``forward``."""
        return self.forward(hidden, probs, routing_map)

    def forward(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        """``hidden [T, H]``, ``probs [T, E]`` dense, ``routing_map [T, E]`` bool -> ``y [T, H]``.

        ``y[t]`` sums ``probs[t, e] * expert_e(hidden[t])`` over the experts that the map names. Collective over the EP
        group; T may differ per rank. Raises ValueError for inputs that do not fit, before anything was changed.
        """
        if hidden.dtype != self.dtype:
            raise ValueError(
                f"layer {self.layer_number}: hidden states are {hidden.dtype} but the experts' weights are {self.dtype}"
            )
        if hidden.device != self.device:
            # A model that was built on the CPU and moved afterwards, under a group that did not tell.
            logger.warning("mok_megatron: layer %s moved to %s: a new backend", self.layer_number, hidden.device)
            self.device = hidden.device
            self.backend = self._join_backend()
        w1, w2 = self._reader.read()
        return apply_experts(
            self.backend,
            hidden,
            probs,
            routing_map,
            w1,
            w2,
            layer=self.layer_number or 0,
            fuse_grad_accumulation=self.fuse_grad_accumulation,
        )

    def _join_backend(self) -> Backend:
        backend = shared_backend(self.shape, self.options, self.group, self.device, self.dtype)
        if self.max_tokens is not None:
            backend.reserve(self.max_tokens)
        return backend

    def _check_weights(self) -> None:
        shape = self.shape
        w1, w2 = expert_weights(self.experts, shape.experts_per_rank)
        check_parameters(self.experts, (w1, w2))
        expected = ([2 * shape.intermediate, shape.hidden], [shape.hidden, shape.intermediate])
        for name, params, size in zip(("linear_fc1", "linear_fc2"), (w1, w2), expected, strict=True):
            for matrix in params.matrices():
                if list(matrix.shape) != size or matrix.dtype != self.dtype:
                    raise ValueError(
                        f"layer {self.layer_number}: {name} of {type(self.experts).__name__} has a weight "
                        f"{list(matrix.shape)} {matrix.dtype}, expected {size} {self.dtype}"
                    )


def _device(experts: nn.Module, group: dist.ProcessGroup | None) -> torch.device:
    """Where the layer will run: where its weights are, or where its group's NCCL says that they will be moved.

    Weights are still on the CPU (or nowhere, on ``meta``) at model build when Megatron initialises them there.
    """
    device = next(experts.parameters()).device
    if device.type in ("cpu", "meta"):
        on_gpu = group is not None and "nccl" in dist.get_backend(group)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return device
