"""The CUDA backend: three small schedule kernels and one persistent megakernel per direction, without a host sync.

A launch knows its peers as an array of base addresses and its SMs as a number. So one process can hold W *virtual*
ranks on one GPU (``virtual_ranks``), each on a stream of its own with its share of the SMs; everything except NVLink
itself is then the same as on W GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import memory, preflight
from mok_megatron.backends import failures
from mok_megatron.backends.base import Saved, WeightGrads
from mok_megatron.backends.build import architecture_of
from mok_megatron.backends.grad_tables import GradTables
from mok_megatron.backends.launches import Launches
from mok_megatron.backends.library import cuda_unavailable_reason, load_library
from mok_megatron.backends.streams import Calling
from mok_megatron.backends.weight_maps import WeightMaps, check_operand
from mok_megatron.backends.workspace import Sizes, Workspace
from mok_megatron.config import MoeShape, MokConfig
from mok_megatron.schedule import Schedule
from mok_megatron.tile_order import BLOCK_ROWS

__all__ = ["CudaBackend", "cuda_unavailable_reason"]

_SAY_MOST = "give the largest number of tokens per rank as max_tokens (--mok-max-tokens)"

_logger = logging.getLogger(__name__)


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
        assert architecture is not None  # cuda_unavailable_reason has been asked
        library = load_library(architecture)
        self.workspace: Workspace | None = None
        self._retired: list[Workspace] = []
        self._group: dist.ProcessGroup | None = None
        self._rows_by_tokens: dict[int, tuple[int, int]] = {}
        self._launches = Launches(library, shape, config, self.device, rank=rank, sms=sms)
        self._weight_maps = WeightMaps(library, shape, self.device)
        self._grad_tables = GradTables(library, shape, self.device)

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
        replays = self.config.recompute or not self.config.save_x
        return Sizes(shape=self.shape, max_tokens=max_tokens, ring_rows=rows, replays=replays)

    def reserve(self, max_tokens: int) -> None:
        """Allocate for up to ``max_tokens`` tokens per rank, the same number on every rank. Collective over the group.

        Raises ValueError when the group does not lie in one NVLink domain, during a graph's capture, and when the
        group's workspace exists and is too small: peers hold its addresses.
        """
        if self.workspace is not None and self.workspace.sizes.max_tokens >= max_tokens:
            return
        if self.workspace is not None and self.shape.ep_size > 1:
            raise ValueError(
                f"{max_tokens} tokens exceed the {self.workspace.sizes.max_tokens} that the workspace of the "
                f"expert-parallel group was made for: {_SAY_MOST}"
            )
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"a workspace for {max_tokens} tokens cannot be made while a graph is captured: {_SAY_MOST}"
            )
        sizes = self.sizes(max_tokens)
        if self._group is None:
            self._adopt(Workspace.local(sizes, self.device)[0])
        else:
            preflight.require_one_domain(self._group, self.device)
            self._adopt(Workspace.symmetric(sizes, self._group, self.device))
        _announce(memory.describe_workspace(self.shape, max_tokens, sizes.ring_rows, replays=sizes.replays))

    def build_schedule(self, x: Tensor, probs: Tensor, routing_map: Tensor, *, layer: int) -> Schedule:
        """See ``Backend.build_schedule``. ``forward`` fills the row tables; rows behind those in use are undefined."""
        tokens, top_k = probs.shape[0], self.shape.top_k
        if self.shape.ep_size == 1:
            self.reserve(tokens)
        elif self.workspace is None and self._group is not None:
            self.reserve(_agree_on_tokens(tokens, self._group, self.device))
        check_operand("x", x, (tokens, self.shape.hidden), self.device, layer)
        capacity, max_rows = self._rows(tokens, layer)
        probs = probs if probs.stride(1) == 1 else probs.contiguous()
        routing_map = routing_map.contiguous()
        schedule = Schedule(
            slots=torch.empty(3, tokens, top_k, dtype=torch.int32, device=self.device),
            weights=torch.empty(tokens, top_k, dtype=torch.float32, device=self.device),
            rows=torch.empty(2, max_rows, dtype=torch.int32, device=self.device),
            expert_first_row=torch.empty(self.shape.experts_per_rank + 1, dtype=torch.int32, device=self.device),
            block_rows=BLOCK_ROWS,
        )
        calling = self._launches.begin(layer)
        self._launches.schedule(x, probs, routing_map, schedule, capacity=capacity, calling=calling)
        return schedule

    def forward(
        self, x: Tensor, schedule: Schedule, w1: Sequence[Tensor], w2: Sequence[Tensor], *, save: bool, layer: int
    ) -> tuple[Tensor, Saved | None]:
        """See ``Backend.forward``. Keeps the first C rows, C being the capacity: the host never learns their number."""
        capacity = self._rows(x.shape[0], layer)[0]
        check_operand("x", x, (schedule.slots.shape[1], self.shape.hidden), self.device, layer)
        calling = self._launches.begin(layer)
        maps = self._weight_maps.of(w1, w2, calling)
        keep_gate_up = save and not self.config.recompute
        keep_rows = keep_gate_up and self.config.save_x
        gate_up = x.new_empty(capacity, 2 * self.shape.intermediate) if keep_gate_up else None
        x_rows = x.new_empty(capacity, self.shape.hidden) if keep_rows else None
        y = torch.empty_like(x)
        self._launches.forward(
            x, schedule, maps, capacity=capacity, x_rows=x_rows, gate_up=gate_up, y=y, calling=calling
        )
        return y, Saved(schedule=schedule, x=x, gate_up=gate_up, x_rows=x_rows) if save else None

    def prepare(self, w1: Sequence[Tensor], w2: Sequence[Tensor], grads: WeightGrads | None = None) -> None:
        """Make the tables of the weights, and of gradients, where they are now. Calls do this by themselves.

        Done before, it spares the first call of a virtual rank an allocation, which would wait for its peers' kernels.
        """
        calling = Calling.on(self.device, layer=0)
        self._weight_maps.of(w1, w2, calling)
        if grads is not None:
            self._grad_tables.of(grads, calling)

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
        """See ``Backend.backward``. The kernel itself replays rows that forward did not keep."""
        schedule = saved.schedule
        check_operand("dy", dy, (schedule.slots.shape[1], self.shape.hidden), self.device, layer)
        calling = self._launches.begin(layer)
        targets, maps = self._grad_tables.of(grads, calling), self._weight_maps.of(w1, w2, calling)
        x_rows, gate_up = saved.x_rows, saved.gate_up
        capacity = self._rows(dy.shape[0], layer)[0] if gate_up is None else gate_up.shape[0]
        kept = x_rows is not None and gate_up is not None
        self._launches.reopen(dy, saved.x, schedule, capacity=capacity, kept=kept, calling=calling)
        dx = torch.empty_like(dy) if needs_dx else None
        self._launches.backward(
            dy,
            saved.x,
            schedule,
            maps,
            capacity=capacity,
            x_rows=x_rows,
            gate_up=gate_up,
            grads=targets,
            dx=dx,
            dprobs=dprobs,
            calling=calling,
        )
        return dx

    def close(self) -> None:
        """Free the workspace; graphs that hold its addresses must not be replayed any more. Idempotent."""
        workspaces = [space for space in (*self._retired, self.workspace) if space is not None]
        self.workspace = None
        self._rows_by_tokens.clear()
        self._retired.clear()
        self._launches.adopt(None)
        try:
            if workspaces:
                torch.cuda.synchronize(self.device)
        finally:
            for workspace in workspaces:
                failures.forget(workspace)
            self._weight_maps.clear()
            self._grad_tables.clear()

    def _adopt(self, workspace: Workspace) -> None:
        """Work in ``workspace`` from now on; the one before is freed, or stays where a graph holds its addresses."""
        # Launches of any stream may be under way in the one before, and the new one is to be zero for all of them.
        torch.cuda.synchronize(self.device)
        if self.workspace is not None and self._launches.captured:
            self._retired.append(self.workspace)
        elif self.workspace is not None:
            failures.forget(self.workspace)
        self.workspace = workspace
        self._rows_by_tokens.clear()
        self._launches.adopt(workspace)
        failures.watch(workspace)

    def _rows(self, tokens: int, layer: int) -> tuple[int, int]:
        """Rows of this call's buffers and the most that it can have: the workspace's, or those of its own tokens."""
        if (known := self._rows_by_tokens.get(tokens)) is not None:
            return known
        sizes = self._launches.workspace(layer).sizes
        if tokens > sizes.max_tokens:
            raise ValueError(
                f"this call has {tokens} tokens but the workspace was made for {sizes.max_tokens}: {_SAY_MOST}"
            )
        most = sizes.max_rows if self.shape.ep_size > 1 else memory.most_rows(self.shape, tokens)
        return self._rows_by_tokens.setdefault(tokens, (min(sizes.ring_rows, most), most))


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
