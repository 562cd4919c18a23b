"""One layer under Megatron's DistributedDataParallel and optimizer, for the GPU tests of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.gpu_layers import DEEPSEEK, TE, build, tokens

MICROBATCHES = 2

_SMOOTH_ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
"""With an eps far above the gradients Adam's steps are in proportion to them, so that noise stays noise."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run asks of Megatron, beside the layer: fields of its two configs, and whether accumulation is fused."""

    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    fuse: bool = True
    layer: dict[str, Any] = field(default_factory=dict)


_DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
_AWARE = {
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}

SETUPS: dict[str, Setup] = {
    "fp32 gradients": Setup(ddp={"grad_reduce_in_fp32": True}, fuse=False),
    "fp32 gradients, fused": Setup(ddp={"grad_reduce_in_fp32": True}),
    "bf16 gradients": Setup(fuse=False),
    "bf16 gradients, fused": Setup(),
    "distributed optimizer, overlaps, fp32": Setup(
        ddp={**_DISTRIBUTED, "grad_reduce_in_fp32": True}, optimizer={"use_distributed_optimizer": True}
    ),
    "distributed optimizer, overlaps, bf16": Setup(ddp=_DISTRIBUTED, optimizer={"use_distributed_optimizer": True}),
    "precision-aware optimizer, fp32": Setup(ddp={**_DISTRIBUTED, "grad_reduce_in_fp32": True}, optimizer=_AWARE),
    "precision-aware optimizer, bf16": Setup(
        ddp=_DISTRIBUTED, optimizer={**_AWARE, "main_grads_dtype": torch.bfloat16}
    ),
}


class Training:
    """A layer that trains step by step; its weights are the same at the start whatever the dispatcher."""

    def __init__(self, dispatcher: str, setup: Setup) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        changes = {**TE, **DEEPSEEK, "gradient_accumulation_fusion": setup.fuse, **setup.layer}
        self.layer = build(dispatcher, **changes)
        self.model = DistributedDataParallel(self.layer.config, DistributedDataParallelConfig(**setup.ddp), self.layer)
        settings = OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, **{**_SMOOTH_ADAM, **setup.optimizer})
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def accumulate(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Zero gradients, forward and backward of a step's microbatches, the gradients' reduction: every output."""
        self.model.zero_grad_buffer()
        outputs = []
        for leaf in leaves:
            leaf.grad = None
            with nullcontext() if leaf is leaves[-1] else self.model.no_sync():
                y = self.model(leaf)[0]
                y.float().square().mean().backward()
            outputs.append(y.detach())
        self.model.finish_grad_sync()
        return outputs

    def gradients(self) -> dict[str, Tensor]:
        """A copy of every parameter's main_grad."""
        return {f"d {name}": parameter.main_grad.clone() for name, parameter in self.layer.named_parameters()}

    def step(self, step: int) -> dict[str, Tensor]:
        """One training step: every parameter's main_grad before the update, and their norm."""
        self.optimizer.zero_grad()
        self.accumulate([tokens(10 * step + microbatch) for microbatch in range(MICROBATCHES)])
        found = self.gradients()
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        return {**found, "gradient norm": torch.tensor(norm)}

    def weights(self) -> dict[str, Tensor]:
        """A copy of every parameter, after whatever gather is under way."""
        if self.model.use_forward_hook:
            self.model.disable_forward_pre_hook()
            self.model.enable_forward_pre_hook()
        return {name: parameter.detach().clone() for name, parameter in self.layer.named_parameters()}
