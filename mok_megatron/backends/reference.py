"""The reference backend: the layer in plain torch, on any device, by the same schedule and in the same order of sums.

It is what runs where no CUDA backend exists, and what the CUDA backend is compared with. Its promises:

- Same inputs give bitwise the same results; a token's y and dx do not depend on other tokens, no result depends on
  the number of ranks. Row GEMMs therefore run in blocks of fixed height, because a BLAS may choose another order of
  sums for another number of rows, and weight gradients sum an expert's blocks one after the other.
- Values are rounded to the layer's dtype where the CUDA backend stores them (gate and up, h, the rows of y, dgate and
  dup, the weighted h, the rows of dX) and are fp32 in between (fp64 for an fp64 layer).

Unlike the CUDA backend it reads row counts on the host, to size its buffers and loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.backends.base import Saved, WeightGrads
from mok_megatron.backends.movement import Mover, gather_tables
from mok_megatron.config import Activation, MoeShape, MokConfig
from mok_megatron.schedule import Schedule, build_schedule, compact

_ACCUMULATE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


class ReferenceBackend:
    """Backend protocol (backends/base.py) in torch. ``group`` None means that all experts are on this rank."""

    name = "reference"

    def __init__(
        self,
        shape: MoeShape,
        config: MokConfig,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Raises ValueError for a dtype without an implementation and for a group of another size than ``ep_size``."""
        world = 1 if group is None else group.size()
        if world != shape.ep_size:
            raise ValueError(f"the expert-parallel group has {world} rank(s) but the layer has ep_size={shape.ep_size}")
        if dtype not in _ACCUMULATE:
            raise ValueError(f"the reference backend runs float32, bfloat16 and float64 layers, got {dtype}")
        self.shape = shape
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.block_rows = 32 if self.device.type == "cpu" else 128
        self._group = group if world > 1 else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._accumulate = _ACCUMULATE[dtype]

    def reserve(self, max_tokens: int) -> None:
        """Nothing is held."""

    def build_schedule(self, x: Tensor, probs: Tensor, routing_map: Tensor, *, layer: int) -> Schedule:
        """See ``Backend.build_schedule``. Weights are fp32, fp64 for an fp64 layer."""
        experts, weights = compact(probs, routing_map, self.shape.top_k, dtype=self._accumulate)
        return build_schedule(
            gather_tables(experts, self._group),
            weights,
            rank=self._rank,
            num_experts=self.shape.num_experts,
            block_rows=self.block_rows,
        )

    def forward(
        self, x: Tensor, schedule: Schedule, w1: Sequence[Tensor], w2: Sequence[Tensor], *, save: bool, layer: int
    ) -> tuple[Tensor, Saved | None]:
        """See ``Backend.forward``."""
        self._check(x, "x", schedule, w1, w2, layer)
        mover = Mover(schedule, self._group)
        with _full_precision():
            x_rows = mover.dispatch(x)
            gate_up = self._row_gemm(x_rows, schedule, [w.T for w in w1])
            hidden = _Swiglu(gate_up.to(self._accumulate), self.shape.activation).value().to(self.dtype)
            y_rows = self._row_gemm(hidden, schedule, [w.T for w in w2])
        y = mover.combine(y_rows, schedule.weights, self._accumulate)
        if not save:
            return y, None
        keep_gate_up = not self.config.recompute
        keep_rows = keep_gate_up and self.config.save_x
        return y, Saved(
            schedule=schedule,
            x=x,
            gate_up=gate_up if keep_gate_up else None,
            x_rows=x_rows if keep_rows else None,
        )

    def backward(
        self,
        dy: Tensor,
        saved: Saved,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        grads: WeightGrads,
        *,
        needs_dx: bool,
        dprobs: Tensor | None,
        layer: int,
    ) -> Tensor | None:
        """See ``Backend.backward``."""
        schedule = saved.schedule
        self._check(dy, "dy", schedule, w1, w2, layer)
        mover = Mover(schedule, self._group)
        weight_rows = mover.dispatch_slots(schedule.weights).unsqueeze(1)
        dy_rows = mover.dispatch(dy)
        x_rows = mover.dispatch(saved.x) if saved.x_rows is None else saved.x_rows
        with _full_precision():
            gate_up = saved.gate_up
            if gate_up is None:
                gate_up = self._row_gemm(x_rows, schedule, [w.T for w in w1])
            swiglu = _Swiglu(gate_up.to(self._accumulate), self.shape.activation)
            hidden = swiglu.value()
            # dA is the gradient before the router weight: its product with h is the weight's gradient, for any weight.
            d_hidden = self._row_gemm(dy_rows, schedule, w2, dtype=self._accumulate)
            d_weight_rows = self._row_dot(d_hidden, hidden)
            d_gate_up = swiglu.backward(d_hidden * weight_rows).to(self.dtype)
            dx_rows = self._row_gemm(d_gate_up, schedule, w1) if needs_dx else None
            self._weight_grads(grads.w1, d_gate_up, x_rows, schedule, grads.accumulate)
            self._weight_grads(grads.w2, dy_rows, (hidden * weight_rows).to(self.dtype), schedule, grads.accumulate)
        d_weights = mover.collect_slots(d_weight_rows)
        if dprobs is not None:
            dprobs.copy_(_on_experts(schedule.experts, d_weights, dprobs.shape[1]))
        return None if dx_rows is None else mover.combine(dx_rows, None, self._accumulate)

    def close(self) -> None:
        """Nothing is held."""

    def _check(
        self, rows: Tensor, name: str, schedule: Schedule, w1: Sequence[Tensor], w2: Sequence[Tensor], layer: int
    ) -> None:
        """Raise ValueError, naming ``layer``, for tensors that are not of this backend's layer."""
        hidden, inner, local = self.shape.hidden, self.shape.intermediate, self.shape.experts_per_rank
        expected = [(name, rows, (schedule.experts.shape[0], hidden))]
        for which, weights, size in (("w1", w1, (2 * inner, hidden)), ("w2", w2, (hidden, inner))):
            if len(weights) != local:
                raise ValueError(f"layer {layer}: {which} has {len(weights)} experts, the rank holds {local}")
            expected += [(f"{which}[{i}]", weight, size) for i, weight in enumerate(weights)]
        for label, tensor, size in expected:
            if tuple(tensor.shape) != size or tensor.dtype != self.dtype or tensor.device.type != self.device.type:
                raise ValueError(
                    f"layer {layer}: {label} must be {list(size)} {self.dtype} on {self.device.type}, "
                    f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                )

    def _row_gemm(
        self, rows: Tensor, schedule: Schedule, weights: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """``rows [R, A]``, ``weights[i] [A, B]`` -> ``[R, B]`` in ``dtype`` (default: the layer's), rounded once."""
        out = rows.new_empty(rows.shape[0], weights[0].shape[1], dtype=dtype or self.dtype)
        for (first, last), weight in zip(_groups(schedule), weights, strict=True):
            if first == last:
                continue
            operand = self._operand(weight)
            for begin in range(first, last, self.block_rows):
                block = slice(begin, begin + self.block_rows)
                out[block] = self._mm(self._operand(rows[block]), operand)
        return out

    def _weight_grads(
        self, sinks: Sequence[Tensor | None], left: Tensor, right: Tensor, schedule: Schedule, accumulate: bool
    ) -> None:
        """``sinks[i] [A, B]`` (+)= ``left^T right`` over the expert's rows; ``left [R, A]``, ``right [R, B]``."""
        for (first, last), sink in zip(_groups(schedule), sinks, strict=True):
            if sink is None:
                continue
            total = torch.zeros(sink.shape, dtype=self._accumulate, device=sink.device)
            for begin in range(first, last, self.block_rows):
                block = slice(begin, begin + self.block_rows)
                total += self._mm(self._operand(left[block]).T, self._operand(right[block]))
            if not accumulate:
                sink.copy_(total)
            elif first < last:
                sink += total

    def _row_dot(self, left: Tensor, right: Tensor) -> Tensor:
        """``[R, N]`` x ``[R, N]`` -> ``[R]``, in blocks, because a reduction may depend on the number of rows too."""
        out = left.new_empty(left.shape[0])
        for begin in range(0, left.shape[0], self.block_rows):
            block = slice(begin, begin + self.block_rows)
            out[block] = (left[block] * right[block]).sum(1)
        return out

    def _operand(self, matrix: Tensor) -> Tensor:
        """CPU BLAS sums bf16 in its own way, so bf16 is widened there (exactly); CUDA takes it as it is."""
        return matrix if matrix.is_cuda else matrix.to(self._accumulate)

    def _mm(self, left: Tensor, right: Tensor) -> Tensor:
        """Product with the accumulator's dtype as result."""
        if left.dtype == self._accumulate:
            return torch.mm(left, right)
        return torch.mm(left, right, out_dtype=self._accumulate)


class _Swiglu:
    """SwiGLU of ``gate_up [R, 2I]`` with Megatron's clamp and offset, and its derivative; dtype of the input."""

    def __init__(self, gate_up: Tensor, activation: Activation) -> None:
        self._gate, self._up = gate_up.chunk(2, dim=1)
        self._clamp = activation.clamp
        gate, linear = self._gate, self._up
        if self._clamp is not None:
            gate, linear = gate.clamp(max=self._clamp), linear.clamp(min=-self._clamp, max=self._clamp)
        self._sigmoid = torch.sigmoid(gate)
        self._silu = gate * self._sigmoid
        self._silu_slope = self._sigmoid * (1 + gate * (1 - self._sigmoid))
        self._linear = linear + activation.linear_offset

    def value(self) -> Tensor:
        """``[R, I]``."""
        return self._silu * self._linear

    def backward(self, d_hidden: Tensor) -> Tensor:
        """``[R, I]`` -> ``[R, 2I]``; a value on its limit still passes its gradient, one beyond it does not."""
        d_gate = d_hidden * self._linear * self._silu_slope
        d_up = d_hidden * self._silu
        if self._clamp is not None:
            d_gate = torch.where(self._gate <= self._clamp, d_gate, 0)
            d_up = torch.where(self._up.abs() <= self._clamp, d_up, 0)
        return torch.cat([d_gate, d_up], dim=1)


def _on_experts(experts: Tensor, d_weights: Tensor, num_experts: int) -> Tensor:
    """``experts [T, K]``, ``d_weights [T, K]`` -> ``[T, E]``, 0 off-route. Absent slots fall into a dropped column."""
    dense = d_weights.new_zeros(experts.shape[0], num_experts + 1)
    dense.scatter_(1, torch.where(experts < 0, num_experts, experts).long(), d_weights)
    return dense[:, :num_experts]


def _groups(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) row of each local expert, padding included."""
    bounds = schedule.expert_first_row.tolist()
    return pairwise(bounds)


@contextmanager
def _full_precision() -> Iterator[None]:
    """fp32 products on CUDA without TF32, whatever the process has chosen."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
