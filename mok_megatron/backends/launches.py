"""The launches of one rank: their parameter structs, filled for each call, on the right device and stream."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from mok_megatron import memory
from mok_megatron.backends import failures
from mok_megatron.backends.abi import (
    PROBS_TYPES,
    BackwardParams,
    CallParams,
    ForwardParams,
    Library,
    ReopenParams,
    ScheduleParams,
)
from mok_megatron.backends.grad_tables import GradTargets
from mok_megatron.backends.streams import Calling
from mok_megatron.backends.weight_maps import Maps
from mok_megatron.backends.workspace import Workspace
from mok_megatron.config import MoeShape, MokConfig
from mok_megatron.schedule import Schedule
from mok_megatron.tile_order import FC1_TILE_COLUMNS, fc2_lag


class Launches:
    """Launches on ``device`` with ``sms`` SMs, in the calls that ``begin`` gives.

    All of them work in one workspace, so a call on another stream than the one before waits for that one.

    Attributes:
        captured: a graph holds addresses of the workspace.
    """

    def __init__(
        self, library: Library, shape: MoeShape, config: MokConfig, device: torch.device, *, rank: int, sms: int
    ) -> None:
        self._library, self._shape, self._config, self._device = library, shape, config, device
        self._rank, self._sms = rank, sms
        self._workspace: Workspace | None = None
        self._stream: torch.cuda.Stream | None = None
        self._handle: int | None = None
        self.captured = False
        self._lags: dict[tuple[int, int], int] = {}
        self._schedule = ScheduleParams()
        self._forward = ForwardParams()
        self._reopen = ReopenParams()
        self._backward = BackwardParams()

    def adopt(self, workspace: Workspace | None) -> None:
        """Point all launches at ``workspace``; None: there is none any more."""
        self._workspace, self.captured = workspace, False
        if workspace is None:
            return
        shape, scratch, activation = self._shape, workspace.scratch, self._shape.activation
        call = CallParams(
            peers=workspace.peers.data_ptr(),
            local=workspace.base,
            layout=workspace.layout,
            epoch=scratch["epoch"],
            fail=workspace.record.data_ptr(),
            spin_limit=int(self._config.time_limit_s * 1e9),
            rank=self._rank,
            world=shape.ep_size,
            top_k=shape.top_k,
            experts=shape.num_experts,
            hidden=shape.hidden,
        )
        tables = {name: scratch[name] for name in ("tile_table", "counters")}
        routing = ("token_order", "block_counts", "route_base", "last_counts", "last_next")
        launch = {
            "intermediate": shape.intermediate,
            "sms": self._sms,
            "comm_sms": min(self._config.comm_sms or self._sms, self._sms),
            "clamp": math.inf if activation.clamp is None else activation.clamp,
            "linear_offset": activation.linear_offset,
        }
        self._schedule = ScheduleParams(call=call, **tables, **{name: scratch[name] for name in routing})
        self._forward = ForwardParams(
            call=call,
            **tables,
            **launch,
            token_order=scratch["token_order"],
            x_ring=scratch["x_rows"],
            h=scratch["h"],
        )
        self._reopen = ReopenParams(call=call, **tables, sms=self._sms)
        self._backward = BackwardParams(
            call=call,
            **tables,
            **launch,
            dy_rows=scratch["x_rows"],
            d_gate_up=scratch["d_gate_up"],
            h_rows=scratch["h"],
            row_weights=scratch["row_weights"],
            partials=scratch["partials"],
        )

    def workspace(self, layer: int) -> Workspace:
        """The workspace in use. Raises RuntimeError, for a call of ``layer``, when there is none."""
        if self._workspace is None:
            raise RuntimeError(
                f"layer {layer}: the backend has no workspace: call reserve(max_tokens) at model build, and close() "
                f"only after the last backward"
            )
        return self._workspace

    def begin(self, layer: int) -> Calling:
        """A call of ``layer``: its launches come after those of all earlier calls.

        Raises RuntimeError when a kernel of this process has failed.
        """
        failures.check(layer)
        calling = Calling.on(self._device, layer)
        if calling.captured:
            self.captured = True
        elif calling.stream != self._handle:
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._handle = stream, calling.stream
        return calling

    def schedule(
        self, x: Tensor, probs: Tensor, routing_map: Tensor, out: Schedule, *, capacity: int, calling: Calling
    ) -> None:
        """Fill all of ``out`` but the row tables; open the call that ``forward`` ends."""
        params = self._schedule
        self._open(params.call, out, calling, capacity)
        params.probs = probs.data_ptr()
        params.routing_map = routing_map.data_ptr()
        params.x = x.data_ptr()
        params.probs_stride = probs.stride(0)
        params.probs_type = PROBS_TYPES[probs.dtype]
        params.out_experts, params.out_slot_dst_rank, params.out_slot_dst_row = _parts(out.slots)
        params.out_weights = out.weights.data_ptr()
        params.out_expert_first_row = out.expert_first_row.data_ptr()
        self._launch(params, calling)

    def forward(
        self,
        x: Tensor,
        schedule: Schedule,
        maps: Maps,
        *,
        capacity: int,
        x_rows: Tensor | None,
        gate_up: Tensor | None,
        y: Tensor,
        calling: Calling,
    ) -> None:
        """``y [T, H]``, the row tables of ``schedule`` and, where wanted, ``x_rows [C, H]`` and ``gate_up [C, 2I]``."""
        params = self._forward
        scratch = self._open(params.call, schedule, calling, capacity).scratch
        params.x = x.data_ptr()
        _set_slot_tables(params, schedule)
        params.w1_maps, params.w2_maps = maps.w1_forward, maps.w2_forward
        params.x_rows = scratch["x_rows"] if x_rows is None else x_rows.data_ptr()
        params.gate_up = None if gate_up is None else gate_up.data_ptr()
        params.row_src_rank, params.row_src_slot = _parts(schedule.rows)
        params.y = y.data_ptr()
        params.lag = self._lag(x.shape[0], FC1_TILE_COLUMNS)
        self._launch(params, calling)

    def reopen(self, dy: Tensor, x: Tensor, schedule: Schedule, *, capacity: int, kept: bool, calling: Calling) -> None:
        """Open a backward call: publish ``dy [T, H]`` and, where a rank replays rows, ``x``; clear the counters.

        ``kept``: forward kept gate, up and x of the first ``capacity`` rows.
        """
        params = self._reopen
        self._open(params.call, schedule, calling, capacity)
        params.dy, params.x = dy.data_ptr(), x.data_ptr()
        params.kept = kept
        _set_slot_tables(params, schedule)
        self._launch(params, calling)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        schedule: Schedule,
        maps: Maps,
        *,
        capacity: int,
        x_rows: Tensor | None,
        gate_up: Tensor | None,
        grads: GradTargets,
        dx: Tensor | None,
        dprobs: Tensor | None,
        calling: Calling,
    ) -> None:
        """``dx [T, H]``, ``dprobs [T, E]`` and the weight gradients, in the call that ``reopen`` opened."""
        params = self._backward
        self._open(params.call, schedule, calling, capacity)
        params.dy, params.x = dy.data_ptr(), x.data_ptr()
        _set_slot_tables(params, schedule)
        params.row_src_rank, params.row_src_slot = _parts(schedule.rows)
        params.w1_maps, params.w2_maps = maps.w1_backward, maps.w2_backward
        params.w1_forward_maps = maps.w1_forward
        params.x_rows = None if x_rows is None else x_rows.data_ptr()
        params.gate_up = None if gate_up is None else gate_up.data_ptr()
        params.w1_grads, params.w2_grads = grads.w1, grads.w2
        params.w1_grad_maps, params.w2_grad_maps = grads.w1_maps, grads.w2_maps
        params.grad_type, params.accumulate = grads.type, grads.accumulate
        params.dx = None if dx is None else dx.data_ptr()
        params.wants_dx = dx is not None
        params.experts = schedule.slots.data_ptr()
        params.d_probs = None if dprobs is None else dprobs.data_ptr()
        params.probs_type = 0 if dprobs is None else PROBS_TYPES[dprobs.dtype]
        params.lag = self._lag(dy.shape[0], memory.BACKWARD_TILE_COLUMNS)
        self._launch(params, calling)

    def _open(self, call: CallParams, schedule: Schedule, calling: Calling, capacity: int) -> Workspace:
        """What changes between calls; ``adopt`` has set the rest."""
        workspace = self.workspace(calling.layer)
        call.tokens, call.layer = schedule.slots.shape[1], calling.layer
        call.capacity, call.max_rows = capacity, schedule.rows.shape[1]
        return workspace

    def _launch(self, params: ctypes.Structure, calling: Calling) -> None:
        """Launch on the tensors' device, whatever the current one is."""
        if calling.here:
            self._library.launch(params, calling.stream)
        else:
            with torch.cuda.device(self._device):
                self._library.launch(params, calling.stream)

    def _lag(self, tokens: int, tile_columns: int) -> int:
        """Experts between the two GEMMs of one; ``tile_columns`` of I are one tile of the first."""
        lag = self._lags.get((tokens, tile_columns))
        if lag is None:
            shape = self._shape
            lag = self._lags[tokens, tile_columns] = fc2_lag(
                tokens * shape.ep_size * shape.top_k / shape.num_experts,
                fc1_columns=-(-shape.intermediate // tile_columns),
                clusters=self._sms // 2,
                experts=shape.experts_per_rank,
            )
        return lag


def _set_slot_tables(params: ForwardParams | ReopenParams | BackwardParams, schedule: Schedule) -> None:
    params.weights = schedule.weights.data_ptr()
    _, params.slot_dst_rank, params.slot_dst_row = _parts(schedule.slots)
    params.expert_first_row = schedule.expert_first_row.data_ptr()


def _parts(tables: Tensor) -> list[int]:
    """Address of each ``tables[i]``, which is contiguous."""
    count, first = tables.shape[0], tables.data_ptr()
    part = tables.nbytes // count
    return [first + part * index for index in range(count)]
