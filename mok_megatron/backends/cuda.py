"""The CUDA backend: three small schedule kernels and one persistent megakernel per direction, without a host sync.

A launch knows its peers as an array of base addresses and its SMs as a number. So one process can hold W *virtual*
ranks on one GPU (``virtual_ranks``), each on a stream of its own with its share of the SMs; everything except NVLink
itself is then the same as on W GPUs.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import memory, preflight
from mok_megatron.backends import failures
from mok_megatron.backends.abi import (
    MAX_EXPERTS,
    MAX_LOCAL_EXPERTS,
    PROBS_TYPES,
    BackwardParams,
    CallParams,
    ForwardParams,
    Library,
    ReopenParams,
    ScheduleParams,
)
from mok_megatron.backends.base import Saved, WeightGrads
from mok_megatron.backends.build import BuildError, architecture_of, build
from mok_megatron.backends.grad_tables import GradTables, grad_type_of
from mok_megatron.backends.weight_maps import Maps, WeightMaps, check_operand
from mok_megatron.backends.workspace import Sizes, Workspace
from mok_megatron.config import MoeShape, MokConfig
from mok_megatron.schedule import Schedule
from mok_megatron.tile_order import BLOCK_ROWS, FC1_TILE_COLUMNS, fc2_lag

_SAY_MOST = "give the largest number of tokens per rank as max_tokens (--mok-max-tokens)"

_logger = logging.getLogger(__name__)
_libraries: dict[str, Library] = {}


def load_library(architecture: str) -> Library:
    """The kernel library of an architecture, compiled if need be. Raises BuildError."""
    if architecture not in _libraries:
        _libraries[architecture] = Library(build(architecture))
    return _libraries[architecture]


def cuda_unavailable_reason(device: torch.device, shape: MoeShape, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run a layer on ``device``, or None where it can. Compiles the kernels if need be."""
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU"
    if dtype != torch.bfloat16:
        return f"the kernels run bfloat16 layers, this one is {dtype}"
    for name, value in (("hidden size", shape.hidden), ("expert intermediate size", shape.intermediate)):
        if value % 64:
            return f"{name} {value} is not a multiple of 64"
    if shape.experts_per_rank > MAX_LOCAL_EXPERTS or shape.num_experts > MAX_EXPERTS:
        return (
            f"{shape.experts_per_rank} experts per rank and {shape.num_experts} in all exceed the kernels' "
            f"{MAX_LOCAL_EXPERTS} and {MAX_EXPERTS}"
        )
    capability = torch.cuda.get_device_capability(device)
    architecture = architecture_of(capability)
    if architecture is None:
        return (
            f"there are no kernels for {torch.cuda.get_device_name(device)} (compute capability "
            f"{capability[0]}.{capability[1]}), only for 9.0 (Hopper)"
        )
    try:
        library = load_library(architecture)
    except BuildError as error:
        return str(error)
    with torch.cuda.device(device):
        return library.load_kernels()


class CudaBackend:
    """Backend protocol (backends/base.py) on a Hopper GPU. See ``create`` and ``virtual_ranks``."""

    name = "cuda"
    block_rows = BLOCK_ROWS

    def __init__(self, shape: MoeShape, config: MokConfig, device: torch.device, *, rank: int, sms: int) -> None:
        self.shape = shape
        self.config = config
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.rank = rank
        architecture = architecture_of(torch.cuda.get_device_capability(device))
        assert architecture is not None  # unavailable_reason has been asked
        self.library = load_library(architecture)
        self.sms = sms
        self.workspace: Workspace | None = None
        self._group: dist.ProcessGroup | None = None
        self._weight_maps = WeightMaps(self.library, shape, self.device)
        self._schedule_params = ScheduleParams()
        self._forward_params = ForwardParams()
        self._reopen_params = ReopenParams()
        self._backward_params = BackwardParams()
        self._grad_tables = GradTables(self.device)

    @classmethod
    def create(
        cls, shape: MoeShape, config: MokConfig, group: dist.ProcessGroup | None, device: torch.device
    ) -> CudaBackend:
        """This process's rank of ``group``. Raises ValueError for a group of another size than ``ep_size``."""
        world = 1 if group is None else group.size()
        if world != shape.ep_size:
            raise ValueError(f"the expert-parallel group has {world} rank(s) but the layer has ep_size={shape.ep_size}")
        rank = 0 if group is None else group.rank()
        backend = cls(shape, config, device, rank=rank, sms=_multiprocessors(device))
        backend._group = group if world > 1 else None
        return backend

    @classmethod
    def virtual_ranks(
        cls, shape: MoeShape, config: MokConfig, device: torch.device, *, max_tokens: int
    ) -> list[CudaBackend]:
        """All ``ep_size`` ranks on one GPU, for tests: call each on its own stream, with its share of the SMs.

        Raises ValueError when the GPU has too few SMs for a cluster per rank.
        """
        share = _multiprocessors(device) // shape.ep_size // 2 * 2
        if share < 2:
            raise ValueError(
                f"{_multiprocessors(device)} SMs cannot hold a 2-SM cluster for each of {shape.ep_size} ranks"
            )
        backends = [cls(shape, config, device, rank=rank, sms=share) for rank in range(shape.ep_size)]
        sizes = backends[0].sizes(max_tokens)
        for backend, workspace in zip(backends, Workspace.local(sizes, device), strict=True):
            backend._adopt(workspace)
        return backends

    def sizes(self, max_tokens: int) -> Sizes:
        """Sizes of a workspace for up to ``max_tokens`` tokens per rank."""
        rows = self.config.ring_rows
        if rows is None:
            rows = memory.default_ring_rows(self.shape, max_tokens)
        rows = max(BLOCK_ROWS, -(-rows // BLOCK_ROWS) * BLOCK_ROWS)
        return Sizes(shape=self.shape, max_tokens=max_tokens, ring_rows=rows)

    def reserve(self, max_tokens: int) -> None:
        """Allocate for up to ``max_tokens`` tokens per rank, the same number on every rank. Collective over the group.

        Raises ValueError when the group does not lie in one NVLink domain, and when its workspace exists and is too
        small: peers hold its addresses.
        """
        if self.workspace is not None and self.workspace.sizes.max_tokens >= max_tokens:
            return
        if self.workspace is not None and self.shape.ep_size > 1:
            raise ValueError(
                f"{max_tokens} tokens exceed the {self.workspace.sizes.max_tokens} that the workspace of the "
                f"expert-parallel group was made for: {_SAY_MOST}"
            )
        sizes = self.sizes(max_tokens)
        if self._group is None:
            self._adopt(Workspace.local(sizes, self.device)[0])
        else:
            preflight.require_one_domain(self._group, self.device)
            self._adopt(Workspace.symmetric(sizes, self._group, self.device))
        _announce(memory.describe_workspace(self.shape, max_tokens, sizes.ring_rows))

    def build_schedule(self, x: Tensor, probs: Tensor, routing_map: Tensor, *, layer: int) -> Schedule:
        """See ``Backend.build_schedule``. The row tables, of the capacity's length, are filled by ``forward``."""
        tokens, top_k = probs.shape[0], self.shape.top_k
        if self.shape.ep_size == 1:
            self.reserve(tokens)
        elif self.workspace is None and self._group is not None:
            self.reserve(_agree_on_tokens(tokens, self._group, self.device))
        check_operand("x", x, (tokens, self.shape.hidden), self.device, layer)
        capacity = self._capacity(tokens)
        probs = probs if probs.stride(1) == 1 else probs.contiguous()
        routing_map = routing_map.contiguous()
        slots = torch.empty(3, tokens, top_k, dtype=torch.int32, device=self.device)
        rows = torch.empty(2, capacity, dtype=torch.int32, device=self.device)
        schedule = Schedule(
            experts=slots[0],
            weights=torch.empty(tokens, top_k, dtype=torch.float32, device=self.device),
            slot_dst_rank=slots[1],
            slot_dst_row=slots[2],
            row_src_rank=rows[0],
            row_src_slot=rows[1],
            expert_first_row=torch.empty(self.shape.experts_per_rank + 1, dtype=torch.int32, device=self.device),
            block_rows=BLOCK_ROWS,
        )
        params = self._schedule_params
        self._open_call(params.call, tokens, capacity, layer)
        params.probs = probs.data_ptr()
        params.routing_map = routing_map.data_ptr()
        params.x = x.data_ptr()
        params.probs_stride = probs.stride(0)
        params.probs_type = PROBS_TYPES[probs.dtype]
        params.out_experts = schedule.experts.data_ptr()
        params.out_weights = schedule.weights.data_ptr()
        params.out_slot_dst_rank = schedule.slot_dst_rank.data_ptr()
        params.out_slot_dst_row = schedule.slot_dst_row.data_ptr()
        params.out_expert_first_row = schedule.expert_first_row.data_ptr()
        self._launch(params)
        return schedule

    def forward(
        self, x: Tensor, schedule: Schedule, w1: Sequence[Tensor], w2: Sequence[Tensor], *, save: bool, layer: int
    ) -> tuple[Tensor, Saved | None]:
        """See ``Backend.forward``. Keeps buffers of the capacity's length: the host never learns the row count."""
        tokens, capacity = x.shape[0], schedule.row_src_rank.shape[0]
        check_operand("x", x, (schedule.experts.shape[0], self.shape.hidden), self.device, layer)
        maps = self.prepare(w1, w2, layer)
        keep_gate_up = save and not self.config.recompute
        keep_rows = keep_gate_up and self.config.save_x
        gate_up = x.new_empty(capacity, 2 * self.shape.intermediate) if keep_gate_up else None
        x_rows = x.new_empty(capacity, self.shape.hidden) if keep_rows else None
        y = torch.empty_like(x)
        params = self._forward_params
        self._open_call(params.call, tokens, capacity, layer)
        params.x = x.data_ptr()
        params.experts = schedule.experts.data_ptr()
        params.weights = schedule.weights.data_ptr()
        params.slot_dst_rank = schedule.slot_dst_rank.data_ptr()
        params.slot_dst_row = schedule.slot_dst_row.data_ptr()
        params.expert_first_row = schedule.expert_first_row.data_ptr()
        params.w1_maps, params.w2_maps = maps.w1_forward, maps.w2_forward
        params.x_rows = self._space().scratch["x_rows"] if x_rows is None else x_rows.data_ptr()
        params.gate_up = None if gate_up is None else gate_up.data_ptr()
        params.row_src_rank = schedule.row_src_rank.data_ptr()
        params.row_src_slot = schedule.row_src_slot.data_ptr()
        params.y = y.data_ptr()
        params.rebuild = 0
        params.lag = self._lag(tokens, FC1_TILE_COLUMNS)
        self._launch(params)
        return y, Saved(schedule=schedule, x=x, gate_up=gate_up, x_rows=x_rows) if save else None

    def prepare(self, w1: Sequence[Tensor], w2: Sequence[Tensor], layer: int = 0) -> Maps:
        """Tensor maps of the weights where they are now. ``forward`` does this by itself.

        Done before, it spares the first call of a virtual rank an allocation, which would wait for its peers' kernels.
        """
        return self._weight_maps.of(w1, w2, layer)

    def backward(
        self,
        dy: Tensor,
        saved: Saved,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        grads: WeightGrads,
        *,
        needs_dx: bool,
        layer: int,
    ) -> tuple[Tensor | None, Tensor]:
        """See ``Backend.backward``. What forward did not keep is rebuilt first, by its own kernel."""
        schedule, inner, hidden = saved.schedule, self.shape.intermediate, self.shape.hidden
        check_operand("dy", dy, (schedule.experts.shape[0], hidden), self.device, layer)
        grad_type = grad_type_of(grads, (2 * inner, hidden), (hidden, inner), layer)
        maps = self.prepare(w1, w2, layer)
        x_rows, gate_up = saved.x_rows, saved.gate_up
        if x_rows is None or gate_up is None:
            x_rows, gate_up = self._rebuild(saved, maps, layer)
        self._reopen(dy, schedule, layer)
        dx = torch.empty_like(dy) if needs_dx else None
        d_weights = torch.empty_like(schedule.weights)
        params = self._backward_params
        self._open_call(params.call, dy.shape[0], schedule.row_src_rank.shape[0], layer)
        params.dy = dy.data_ptr()
        params.weights = schedule.weights.data_ptr()
        params.slot_dst_rank = schedule.slot_dst_rank.data_ptr()
        params.slot_dst_row = schedule.slot_dst_row.data_ptr()
        params.row_src_rank = schedule.row_src_rank.data_ptr()
        params.row_src_slot = schedule.row_src_slot.data_ptr()
        params.expert_first_row = schedule.expert_first_row.data_ptr()
        params.w1_maps, params.w2_maps = maps.w1_backward, maps.w2_backward
        params.x_rows = x_rows.data_ptr()
        params.gate_up = gate_up.data_ptr()
        params.w1_grads = self._grad_tables.of(grads.w1)
        params.w2_grads = self._grad_tables.of(grads.w2)
        params.dx = None if dx is None else dx.data_ptr()
        params.d_weights = d_weights.data_ptr()
        params.lag = self._lag(dy.shape[0], memory.BACKWARD_TILE_COLUMNS)
        params.grad_type, params.accumulate, params.wants_dx = grad_type, grads.accumulate, needs_dx
        self._launch(params)
        return dx, d_weights

    def close(self) -> None:
        """Free the workspace. Idempotent."""
        if self.workspace is not None:
            torch.cuda.synchronize(self.device)
            failures.forget(self.workspace)
            self.workspace = None
        self._weight_maps.clear()
        self._grad_tables.clear()

    def _reopen(self, tokens: Tensor, schedule: Schedule, layer: int) -> None:
        """Open a call on an earlier schedule: publish ``tokens [T, H]`` to the peers and clear the counters."""
        params = self._reopen_params
        self._open_call(params.call, tokens.shape[0], schedule.row_src_rank.shape[0], layer)
        params.tokens = tokens.data_ptr()
        params.weights = schedule.weights.data_ptr()
        params.slot_dst_rank = schedule.slot_dst_rank.data_ptr()
        params.slot_dst_row = schedule.slot_dst_row.data_ptr()
        params.expert_first_row = schedule.expert_first_row.data_ptr()
        self._launch(params)

    def _rebuild(self, saved: Saved, maps: Maps, layer: int) -> tuple[Tensor, Tensor]:
        """``x_rows [C, H]`` and ``gate_up [C, 2I]`` as forward had them, in every bit."""
        schedule, capacity = saved.schedule, saved.schedule.row_src_rank.shape[0]
        self._reopen(saved.x, schedule, layer)
        x_rows = saved.x.new_empty(capacity, self.shape.hidden)
        gate_up = saved.gate_up
        params = self._forward_params
        self._open_call(params.call, saved.x.shape[0], capacity, layer)
        params.x = saved.x.data_ptr()
        params.expert_first_row = schedule.expert_first_row.data_ptr()
        params.w1_maps, params.w2_maps = maps.w1_forward, maps.w2_forward
        params.x_rows = x_rows.data_ptr()
        params.gate_up = None
        if gate_up is None:
            gate_up = saved.x.new_empty(capacity, 2 * self.shape.intermediate)
            params.gate_up = gate_up.data_ptr()
        params.row_src_rank = schedule.row_src_rank.data_ptr()
        params.row_src_slot = schedule.row_src_slot.data_ptr()
        params.y = None
        params.rebuild = 1
        params.lag = 1
        self._launch(params)
        return x_rows, gate_up

    def _adopt(self, workspace: Workspace) -> None:
        """Point all launches at ``workspace``."""
        if self.workspace is not None:
            failures.forget(self.workspace)
        self.workspace = workspace
        shape, scratch, activation = self.shape, workspace.scratch, self.shape.activation
        call = CallParams(
            peers=workspace.peers.data_ptr(),
            local=workspace.base,
            layout=workspace.layout,
            epoch=scratch["epoch"],
            fail=workspace.record.data_ptr(),
            spin_limit=int(self.config.time_limit_s * 1e9),
            rank=self.rank,
            world=shape.ep_size,
            top_k=shape.top_k,
            experts=shape.num_experts,
            hidden=shape.hidden,
        )
        tables = {name: scratch[name] for name in ("tile_table", "counters")}
        routing = ("token_order", "block_counts", "route_base", "last_counts", "last_next")
        launch = {
            "intermediate": shape.intermediate,
            "sms": self.sms,
            "comm_sms": min(self.config.comm_sms or self.sms, self.sms),
            "clamp": math.inf if activation.clamp is None else activation.clamp,
            "linear_offset": activation.linear_offset,
        }
        self._schedule_params = ScheduleParams(call=call, **tables, **{name: scratch[name] for name in routing})
        self._forward_params = ForwardParams(
            call=call, **tables, **launch, token_order=scratch["token_order"], h=scratch["h"]
        )
        self._reopen_params = ReopenParams(call=call, **tables, sms=self.sms)
        self._backward_params = BackwardParams(
            call=call,
            **tables,
            **launch,
            dy_rows=scratch["x_rows"],
            d_gate_up=scratch["d_gate_up"],
            h_rows=scratch["h"],
            row_weights=scratch["row_weights"],
        )
        failures.watch(workspace)

    def _space(self) -> Workspace:
        if self.workspace is None:
            raise RuntimeError("the backend has no workspace: call reserve(max_tokens) at model build")
        return self.workspace

    def _capacity(self, tokens: int) -> int:
        """Rows of this call's buffers: the workspace's, or fewer where a single rank's own tokens bound them."""
        sizes = self._space().sizes
        if tokens > sizes.max_tokens:
            raise ValueError(
                f"this call has {tokens} tokens but the workspace was made for {sizes.max_tokens}: {_SAY_MOST}"
            )
        if self.shape.ep_size > 1:
            return sizes.ring_rows
        worst = memory.worst_case_rows(self.shape, tokens)
        return min(sizes.ring_rows, max(BLOCK_ROWS, worst))

    def _launch(self, params: ctypes.Structure) -> None:
        """Launch on the tensors' device, whatever the current one is, and on its current stream."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if torch.cuda.current_device() == self.device.index:
            self.library.launch(params, stream)
        else:
            with torch.cuda.device(self.device):
                self.library.launch(params, stream)

    def _lag(self, tokens: int, tile_columns: int) -> int:
        """Experts between the two GEMMs of one; ``tile_columns`` of I are one tile of the first."""
        shape = self.shape
        return fc2_lag(
            tokens * shape.ep_size * shape.top_k / shape.num_experts,
            fc1_columns=-(-shape.intermediate // tile_columns),
            clusters=self.sms // 2,
            experts=shape.experts_per_rank,
        )

    def _open_call(self, call: CallParams, tokens: int, capacity: int, layer: int) -> None:
        """What changes between calls; ``_adopt`` has set the rest. Raises RuntimeError when a kernel has failed."""
        failures.check(layer)
        call.tokens, call.capacity, call.layer = tokens, capacity, layer


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _agree_on_tokens(tokens: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The most that any rank of the group has in this call, for lack of a better number. Collective, one host sync."""
    most = torch.tensor(tokens, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    agreed = int(most)
    if group.rank() == 0:
        _logger.warning(
            "mok_megatron: the most tokens per rank are not known from Megatron's arguments; the workspace is made for "
            "%d, the most of this first call. A later call with more ends the run: %s",
            agreed,
            _SAY_MOST,
        )
    return agreed


def _announce(line: str) -> None:
    """Print, as Megatron does, on the job's first rank: a log at INFO is not shown by default."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"mok_megatron: {line}", flush=True)  # noqa: T201
