"""GPU and node facts that the planner and the performance model reason with.

A figure is one of three kinds, and ``GpuSpec`` says which: published (its source stands in the comment), measured by
this project (H200 only), or assumed (scaled from H200 by the fraction of the published peak that H200 reached).
Units: bytes, bytes/s, FLOP/s, seconds. GB means 1e9 bytes, as vendors count; bandwidths are per direction.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
TERA = 1e12

# Measured on 2x H200 (NVLink NV18, BF16), see docs/performance-model.md:
H200_GEMM_FLOPS = 777 * TERA  # cuBLAS, 8192 x 8192 x 8192
H200_NVLINK_BOTH_WAYS = 332 * GB  # random 14 KB rows pulled, both directions at once, 16 SMs
H200_COPY_PER_SM = 44 * GB  # the same at 4 SMs (176 GB/s), where NVLink is not yet the limit
H200_FLAG_ROUND_TRIP = 2.7e-6

GEMM_FRACTION = H200_GEMM_FLOPS / (989 * TERA)
NVLINK_FRACTION = H200_NVLINK_BOTH_WAYS / (450 * GB)


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU model and the machine that it comes in.

    Attributes:
        memory_bytes: memory of one GPU that a process can hope for (as the driver reports it, where known).
        bf16_peak_flops: published dense BF16 rate.
        gemm_flops: rate of a large BF16 GEMM; measured where ``measured``, else ``GEMM_FRACTION`` of the peak.
        hbm_bandwidth, nvlink_bandwidth: published; NVLink per direction.
        nvlink_achievable: rows moved in both directions at once, per direction.
        copy_per_sm: what one SM's copying warps move before NVLink is the limit.
        network_bandwidth: scale-out network per GPU and direction.
        domain_gpus: GPUs in one NVLink domain (8 on HGX, 72 in an NVL72 rack).
        node_gpus: GPUs per node: one HGX board, or one NVL72 compute tray.
        arch: nvcc architecture of the backend's library.
        measured: whether the achievable rates were measured on this GPU by this project.
    """

    name: str
    title: str
    memory_bytes: float
    bf16_peak_flops: float
    gemm_flops: float
    hbm_bandwidth: float
    nvlink_bandwidth: float
    nvlink_achievable: float
    copy_per_sm: float
    network_bandwidth: float
    flag_latency_s: float
    sms: int
    domain_gpus: int
    node_gpus: int
    arch: str
    measured: bool

    @property
    def nodes_per_domain(self) -> int:
        """Nodes (trays) in one NVLink domain: 1 on HGX, 18 in an NVL72 rack."""
        return self.domain_gpus // self.node_gpus

    @property
    def is_rack(self) -> bool:
        """Whether one NVLink domain spans several nodes."""
        return self.nodes_per_domain > 1

    @property
    def basis(self) -> str:
        """One clause that says where the achievable rates come from."""
        if self.measured:
            return f"GEMM and NVLink rates measured on {self.title}"
        return (
            f"not measured on {self.title}: published peaks x the fractions that H200 reached "
            f"({GEMM_FRACTION:.0%} of BF16, {NVLINK_FRACTION:.0%} of NVLink)"
        )


def _spec(
    *,
    name: str,
    title: str,
    memory_gb: float,
    bf16_tflops: float,
    hbm_tb_s: float,
    nvlink_gb_s: float,
    network_gb_s: float,
    sms: int,
    domain_gpus: int,
    node_gpus: int,
    arch: str,
    measured: bool = False,
) -> GpuSpec:
    """Published figures in vendors' units -> a spec whose achievable rates are H200's fractions of them."""
    return GpuSpec(
        name=name,
        title=title,
        memory_bytes=memory_gb * GB,
        bf16_peak_flops=bf16_tflops * TERA,
        gemm_flops=bf16_tflops * TERA * GEMM_FRACTION,
        hbm_bandwidth=hbm_tb_s * TERA,
        nvlink_bandwidth=nvlink_gb_s * GB,
        nvlink_achievable=nvlink_gb_s * GB * NVLINK_FRACTION,
        copy_per_sm=H200_COPY_PER_SM,
        network_bandwidth=network_gb_s * GB,
        flag_latency_s=H200_FLAG_ROUND_TRIP / 2,
        sms=sms,
        domain_gpus=domain_gpus,
        node_gpus=node_gpus,
        arch=arch,
        measured=measured,
    )


GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        # H100 SXM datasheet (resources.nvidia.com/en-us-tensor-core): 80 GB, 3.35 TB/s, 1979 TFLOP/s BF16 with
        # sparsity, NVLink 900 GB/s both ways. 132 SMs: "NVIDIA Hopper Architecture In-Depth", developer.nvidia.com.
        # Network: DGX H100 user guide, one 400 Gb/s ConnectX-7 per GPU.
        _spec(
            name="h100",
            title="H100 SXM",
            memory_gb=80,
            bf16_tflops=989,
            hbm_tb_s=3.35,
            nvlink_gb_s=450,
            network_gb_s=50,
            sms=132,
            domain_gpus=8,
            node_gpus=8,
            arch="sm90a",
        ),
        # H200 datasheet (nvidia.com/en-us/data-center/h200): 141 GB, 4.8 TB/s, other figures as H100.
        _spec(
            name="h200",
            title="H200 SXM",
            memory_gb=141,
            bf16_tflops=989,
            hbm_tb_s=4.8,
            nvlink_gb_s=450,
            network_gb_s=50,
            sms=132,
            domain_gpus=8,
            node_gpus=8,
            arch="sm90a",
            measured=True,
        ),
        # DGX B200 datasheet (nvidia.com/en-us/data-center/dgx-b200): 1440 GB and 64 TB/s per 8 GPUs, 4.5 PFLOP/s BF16
        # with sparsity per GPU, NVLink 14.4 TB/s per 8 GPUs both ways. 148 SMs: as the device reports.
        _spec(
            name="b200",
            title="B200 (HGX)",
            memory_gb=180,
            bf16_tflops=2250,
            hbm_tb_s=8.0,
            nvlink_gb_s=900,
            network_gb_s=50,
            sms=148,
            domain_gpus=8,
            node_gpus=8,
            arch="sm100a",
        ),
        # GB200 NVL72 (nvidia.com/en-us/data-center/gb200-nvl72): 360 PFLOP/s BF16 with sparsity, 13.4 TB, 576 TB/s and
        # NVLink 130 TB/s both ways per 72 GPUs; 18 compute trays of 4 GPUs, ConnectX-7 400 Gb/s per GPU (DGX GB200 user
        # guide, docs.nvidia.com/dgx/dgxgb200-user-guide). 152 SMs: as the device reports.
        _spec(
            name="gb200",
            title="GB200 NVL72",
            memory_gb=186,
            bf16_tflops=2500,
            hbm_tb_s=8.0,
            nvlink_gb_s=900,
            network_gb_s=50,
            sms=152,
            domain_gpus=72,
            node_gpus=4,
            arch="sm100a",
        ),
        # GB300 NVL72 (nvidia.com/en-us/data-center/gb300-nvl72): 360 PFLOP/s BF16 with sparsity, 20 TB and 576 TB/s per
        # 72 GPUs, NVLink as GB200; ConnectX-8 800 Gb/s per GPU. The device reports about 278 GB. 152 SMs likewise.
        _spec(
            name="gb300",
            title="GB300 NVL72",
            memory_gb=278,
            bf16_tflops=2500,
            hbm_tb_s=8.0,
            nvlink_gb_s=900,
            network_gb_s=100,
            sms=152,
            domain_gpus=72,
            node_gpus=4,
            arch="sm103a",
        ),
    )
}


def gpu(name: str) -> GpuSpec:
    """Look a GPU up by its short name, in any case. Raises ValueError that lists the known ones."""
    spec = GPUS.get(name.lower())
    if spec is None:
        raise ValueError(f"unknown GPU {name!r}; known GPUs are {', '.join(GPUS)}")
    return spec
