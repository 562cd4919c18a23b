"""Before anything is allocated: does every expert-parallel group lie in one NVLink domain?

The check is a pure function of what every rank says about its node (``NodeFabric``, filled by nvml.py). Two GPUs of one
node are connected where NVML says that they reach each other over NVLink. GPUs that are members of the same clique of
the same NVLink cluster are connected, also between nodes, provided that the fabric is up and every node has an IMEX
channel, through which memory is shared between nodes.

``require_one_domain`` is the collective form, for the moment when the model is built.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

FabricState = Literal["not supported", "not started", "in progress", "completed"]
Link = Literal["nvlink", "other", "none"]

START_FABRIC_MANAGER = (
    "start it on that node (systemctl status nvidia-fabricmanager) and look for NVLink errors in its log"
)
CREATE_CHANNEL = (
    "start nvidia-imex on every node of the domain and create a channel that the job may open "
    "(nvidia-modprobe -c 0; containers need the device, too)"
)
ONE_DOMAIN = (
    "choose an --expert-model-parallel-size that divides the GPUs used per NVLink domain, and place consecutive ranks "
    "in one domain (mok-megatron plan writes the Slurm script with --segment)"
)


@dataclass(frozen=True, kw_only=True)
class GpuFabric:
    """One GPU as NVML sees it.

    Attributes:
        bus_id: PCI bus id, the name under which ``links`` of other GPUs know it.
        state: of its registration with the NVLink fabric; ``not supported`` where there is no NVSwitch.
        cluster: UUID of the NVLink cluster as hexadecimal digits; empty on a node whose NVLink ends at the node.
        clique: the part of the cluster that it may talk to.
        links: bus id -> how it reaches that GPU of its own node.
    """

    bus_id: str
    state: FabricState = "not supported"
    cluster: str = ""
    clique: int = 0
    links: Mapping[str, Link] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeFabric:
    """All GPUs of a node, whichever of them a process may use; ``error`` says why nothing is known."""

    gpus: tuple[GpuFabric, ...] = ()
    imex_channels: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    host: str
    gpu: GpuFabric | None
    imex_channels: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a group is not in one NVLink domain: ``message`` names hosts and ranks, ``remedy`` says what to do."""

    message: str
    remedy: str


def check_groups(places: Sequence[RankPlace], groups: Iterable[Sequence[int]]) -> None:
    """Raise one ValueError that names hosts and ranks for all groups that do not lie in one NVLink domain.

    ``places`` holds every rank of every group. Groups of one rank are always fine.
    """
    by_rank = {place.rank: place for place in places}
    broken: list[tuple[Sequence[int], Problem]] = []
    for group in groups:
        members = [by_rank[rank] for rank in group]
        problem = group_problem(members) if len(members) > 1 else None
        if problem is not None:
            broken.append((group, problem))
    if not broken:
        return
    group, problem = broken[0]
    others = ""
    if len(broken) > 1:
        listed = ", ".join(ranges(other) for other, _ in broken[1:4])
        others = f" (so do {len(broken) - 1} more groups: ranks {listed}{', ...' if len(broken) > 4 else ''})"
    raise ValueError(
        f"the expert-parallel group of ranks {ranges(group)} is not inside one NVLink domain{others}: "
        f"{problem.message}. Remedy: {problem.remedy}"
    )


def group_problem(members: Sequence[RankPlace]) -> Problem | None:
    """The first reason why the GPUs of these ranks do not all reach each other over NVLink."""
    return (
        _unknown(members) or _fabric_down(members) or _nodes_apart(members) or _unlinked(members) or _no_imex(members)
    )


def require_one_domain(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise the same ValueError on every rank of ``group`` unless its GPUs lie in one NVLink domain. Collective."""
    import torch
    import torch.distributed as dist

    places: list[RankPlace | None] = [None] * dist.get_world_size(group)
    with torch.cuda.device(device):  # NCCL gathers objects through the current device
        dist.all_gather_object(places, this_place(dist.get_rank(), device), group=group)
    found = [place for place in places if place is not None]
    check_groups(found, [[place.rank for place in found]])


def this_place(rank: int, device: torch.device) -> RankPlace:
    """Where this process runs: its host, and its GPU as NVML knows it."""
    import torch

    from mok_megatron.nvml import probe_node

    node = probe_node()
    properties: Any = torch.cuda.get_device_properties(device)
    bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    gpu = next((gpu for gpu in node.gpus if gpu.bus_id == bus_id), None)
    return RankPlace(rank=rank, host=socket.gethostname(), gpu=gpu, imex_channels=node.imex_channels, error=node.error)


def fabric_problem(node: NodeFabric) -> str | None:
    """Why the NVLink fabric of one node cannot be used, or None; START_FABRIC_MANAGER is the remedy."""
    down = [gpu for gpu in node.gpus if gpu.state in ("not started", "in progress")]
    if not down:
        return None
    states = " or ".join(sorted({gpu.state for gpu in down}))
    return f"the NVLink fabric is {states} on {len(down)} of {len(node.gpus)} GPUs: no fabric manager has set it up"


def _unknown(members: Sequence[RankPlace]) -> Problem | None:
    unknown = [place for place in members if place.gpu is None]
    if not unknown:
        return None
    reasons = sorted({place.error or "the GPU is not among those that NVML lists" for place in unknown})
    return Problem(
        message=f"nothing is known about {_where(unknown)} ({'; '.join(reasons)})",
        remedy="make the NVIDIA driver's NVML (libnvidia-ml.so.1) visible to the job; containers need the utility "
        "capability (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
    )


def _fabric_down(members: Sequence[RankPlace]) -> Problem | None:
    down = [place for place in members if place.gpu and place.gpu.state in ("not started", "in progress")]
    if not down:
        return None
    states = sorted({place.gpu.state for place in down if place.gpu})
    return Problem(
        message=f"the NVLink fabric is {' or '.join(states)} on {_where(down)}: no fabric manager has set it up",
        remedy=START_FABRIC_MANAGER,
    )


def _nodes_apart(members: Sequence[RankPlace]) -> Problem | None:
    if len({place.host for place in members}) < 2:
        return None
    domains: dict[str, list[RankPlace]] = {}
    for place in members:
        domains.setdefault(_domain(place), []).append(place)
    if len(domains) == 1:
        return None
    parts = [f"{_where(places)} {domain}" for domain, places in domains.items()]
    return Problem(message="; ".join(parts), remedy=ONE_DOMAIN)


def _domain(place: RankPlace) -> str:
    """The NVLink domain of a rank whose fabric is up, in words; equal words are one domain."""
    gpu = place.gpu
    assert gpu is not None
    if gpu.cluster:
        return f"in NVLink cluster {gpu.cluster} clique {gpu.clique}"
    return f"in the NVLink of {place.host} only"


def _unlinked(members: Sequence[RankPlace]) -> Problem | None:
    """Pairs on one node that do not reach each other over NVLink."""
    apart = []
    for index, a in enumerate(members):
        for b in members[index + 1 :]:
            if a.gpu is None or b.gpu is None or a.host != b.host or a.gpu.bus_id == b.gpu.bus_id:
                continue
            if not _linked(a.gpu, b.gpu):
                apart.append((a, b))
    if not apart:
        return None
    a, b = apart[0]
    assert a.gpu is not None and b.gpu is not None
    more = f", and {len(apart) - 1} more pairs" if len(apart) > 1 else ""
    return Problem(
        message=f"on {a.host}, ranks {a.rank} and {b.rank} (GPUs {a.gpu.bus_id} and {b.gpu.bus_id}) do not reach each "
        f"other over NVLink{more}",
        remedy="use GPUs that nvidia-smi topo -m connects with NV links, or an expert-parallel size within such a set",
    )


def _linked(a: GpuFabric, b: GpuFabric) -> bool:
    """Whether two GPUs of one node reach each other over NVLink, both ways."""
    if a.cluster and (a.cluster, a.clique) == (b.cluster, b.clique):
        return True
    return a.links.get(b.bus_id) == "nvlink" and b.links.get(a.bus_id) == "nvlink"


def _no_imex(members: Sequence[RankPlace]) -> Problem | None:
    if len({place.host for place in members}) < 2:
        return None
    without = [place for place in members if not place.imex_channels]
    if not without:
        return None
    return Problem(
        message=f"the group spans nodes, and there is no IMEX channel to share memory through on {_where(without)}",
        remedy=CREATE_CHANNEL,
    )


def _where(places: Sequence[RankPlace]) -> str:
    """``node-a (ranks 0-3), node-b (rank 4)``; long lists are cut."""
    hosts: dict[str, list[int]] = {}
    for place in places:
        hosts.setdefault(place.host, []).append(place.rank)
    texts = [f"{host} (rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)})" for host, ranks in hosts.items()]
    return ", ".join(texts[:8]) + (f", and {len(texts) - 8} more nodes" if len(texts) > 8 else "")


def ranges(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
