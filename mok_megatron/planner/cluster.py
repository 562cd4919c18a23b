"""Machines and ranks: which GPUs of which NVLink domain a job uses, and where each rank lands.

Megatron numbers ranks in the order tp-cp-ep-dp-pp, the first changing fastest; for the experts tp is the expert
tensor-parallel size, 1 here. Hence an EP group is a run of consecutive ranks that starts at a multiple of the EP size,
and pipeline stages are the outermost blocks of ranks. Slurm fills nodes with consecutive ranks. So EP groups stay in
one NVLink domain exactly if every domain contributes a multiple of the EP size: of the 72 GPUs of an NVL72 rack, 64
for EP 64. ``--segment`` makes Slurm take that many nodes from each rack. The nodes left over are not part of the job:
they stand by for a failed tray of their rack (a tray of another rack would leave the NVLink domain), or run jobs that
need no wide EP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from mok_megatron.hardware import GpuSpec


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the user has: ``domains`` NVLink domains (racks of an NVL72, nodes of an HGX machine)."""

    gpu: GpuSpec
    domains: int

    @classmethod
    def of(cls, gpu: GpuSpec, *, racks: int | None = None, nodes: int | None = None) -> Cluster:
        """From racks or nodes as the user counts them. Raises ValueError, with the numbers, for what does not fit."""
        if (racks is None) == (nodes is None):
            raise ValueError("give either --racks or --nodes")
        count = racks if racks is not None else nodes
        assert count is not None
        if count < 1:
            raise ValueError(
                f"the number of {'racks' if racks is not None else 'nodes'} must be at least 1, got {count}"
            )
        if not gpu.is_rack:
            if racks is not None:
                raise ValueError(f"{gpu.title} comes in nodes of {gpu.node_gpus} GPUs, not in racks: use --nodes")
            return cls(gpu=gpu, domains=count)
        if racks is not None:
            return cls(gpu=gpu, domains=count)
        if count % gpu.nodes_per_domain:
            whole = max(1, round(count / gpu.nodes_per_domain))
            raise ValueError(
                f"{count} {gpu.title} trays are not whole racks of {gpu.nodes_per_domain}; nearest is --racks {whole} "
                f"({whole * gpu.nodes_per_domain} trays); for part of each rack add --gpus-per-domain"
            )
        return cls(gpu=gpu, domains=count // gpu.nodes_per_domain)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.domains * self.gpu.domain_gpus

    def usable_per_domain(self, ep: int) -> list[int]:
        """GPUs per domain that whole nodes and whole EP groups allow: the most, and the largest power of two.

        The power of two (64 of 72) leaves two trays in reserve and a world size that divides most batch sizes.
        """
        if ep > self.gpu.domain_gpus:
            return []
        step = lcm(ep, self.gpu.node_gpus)
        if step > self.gpu.domain_gpus:
            return []
        most = self.gpu.domain_gpus // step * step
        power = 1 << (self.gpu.domain_gpus.bit_length() - 1)
        return [most] if power % step or power == most else [power, most]

    @property
    def noun(self) -> str:
        """What a domain is called."""
        return "rack" if self.gpu.is_rack else "node"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Ranks on machines: ``used`` GPUs of each of ``cluster.domains`` domains."""

    cluster: Cluster
    used: int

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.cluster.domains * self.used

    @property
    def nodes_per_domain(self) -> int:
        """Nodes per domain that run ranks; Slurm's ``--segment``."""
        return self.used // self.cluster.gpu.node_gpus

    @property
    def spare_gpus(self) -> int:
        """GPUs per domain that run no rank."""
        return self.cluster.gpu.domain_gpus - self.used

    def domain_of(self, rank: int) -> int:
        """NVLink domain of a rank."""
        return rank // self.used

    def spare_note(self) -> str:
        """What the GPUs without a rank are for, or an empty text."""
        if not self.spare_gpus:
            return ""
        trays = self.spare_gpus // self.cluster.gpu.node_gpus
        return (
            f"{self.spare_gpus} of {self.cluster.gpu.domain_gpus} GPUs per {self.cluster.noun} run no rank "
            f"({trays} trays): reserve for a failed tray of the same {self.cluster.noun}, or other jobs"
        )


def ep_groups(world: int, ep: int) -> list[range]:
    """Ranks of every EP group."""
    return [range(first, first + ep) for first in range(0, world - ep + 1, ep)]


def spanning_groups(placement: Placement, ep: int) -> list[range]:
    """EP groups that do not lie in one NVLink domain; empty for a sound placement."""
    return [
        group
        for group in ep_groups(placement.world, ep)
        if placement.domain_of(group[0]) != placement.domain_of(group[-1])
    ]
