"""What follows from the facts: findings, each with a remedy, and which backends can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mok_megatron import preflight
from mok_megatron.doctor.facts import CUDA_ARCHITECTURES, Facts

Status = Literal["ok", "warning", "problem"]

OLDEST_PYTHON = (3, 12)
OLDEST_TORCH = (2, 10)
OLDEST_MEGATRON = (0, 17)
OLDEST_COMPILER = {"sm90a": (12, 8), "sm100a": (12, 8), "sm103a": (12, 9)}
"""First CUDA toolkit whose nvcc knows the architecture and ships the PTX wrappers that the kernels use."""
TESTED_COMPILER = (13, 0)
"""The CUDA toolkit that the tests compile the kernels with."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. A ``problem`` means that training with ``mok`` is not possible as things are."""

    check: str
    status: Status
    message: str
    remedy: str | None = None


def _ok(check: str, message: str) -> Finding:
    return Finding(check=check, status="ok", message=message)


def _warning(check: str, message: str, remedy: str | None) -> Finding:
    return Finding(check=check, status="warning", message=message, remedy=remedy)


def _problem(check: str, message: str, remedy: str) -> Finding:
    return Finding(check=check, status="problem", message=message, remedy=remedy)


def run_checks(facts: Facts) -> list[Finding]:
    """All findings, in the order of the report."""
    return [finding for check in CHECKS for finding in check(facts)]


def cuda_backend_obstacle(facts: Facts) -> str | None:
    """Why the CUDA backend cannot run on any GPU here, or None where it can."""
    if not facts.driver.gpus:
        return facts.driver.error or "the driver sees no GPU"
    architectures = {gpu.architecture for gpu in facts.driver.gpus if gpu.architecture is not None}
    if not architectures:
        names = ", ".join(sorted({gpu.name for gpu in facts.driver.gpus}))
        return f"{names} is neither Hopper nor Blackwell"
    supported = architectures & set(facts.kernel_architectures)
    if not supported:
        here, ours = ", ".join(sorted(architectures)), ", ".join(facts.kernel_architectures) or "none"
        return f"there are no kernels for {here} in this version (it has kernels for: {ours})"
    if facts.compiler is None and not supported & set(facts.cache.libraries):
        return f"the kernels for {', '.join(sorted(supported))} are not compiled, and there is no nvcc"
    return None


def _python(facts: Facts) -> Iterator[Finding]:
    found = _dotted(facts.python)
    if facts.python[:2] < OLDEST_PYTHON:
        remedy = "make an environment with a newer Python"
        yield _problem("python", f"Python {found} is older than {_dotted(OLDEST_PYTHON)}", remedy)
    else:
        yield _ok("python", f"Python {found}")


def _torch(facts: Facts) -> Iterator[Finding]:
    wanted = _dotted(OLDEST_TORCH)
    if facts.torch.error is not None:
        yield _problem("torch", f"torch cannot be imported: {facts.torch.error}", f"pip install 'torch>={wanted}'")
        return
    if _too_old(facts.torch.version, OLDEST_TORCH):
        message = f"torch {facts.torch.version} is older than {wanted}"
        yield _problem("torch", message, f"pip install -U 'torch>={wanted}'")
        return
    yield _ok("torch", f"torch {facts.torch.version}, CUDA {facts.torch_cuda or 'none (CPU build)'}")
    if facts.driver.gpus and facts.torch_cuda is None:
        yield _warning("torch", "there is a GPU, but this torch is a CPU build", "install a CUDA build of torch")
    elif facts.driver.gpus and facts.driver.cuda is not None and facts.torch_cuda is not None:
        major = int(facts.torch_cuda.split(".")[0])
        if major > facts.driver.cuda[0]:
            message = f"torch is built for CUDA {facts.torch_cuda}, the driver runs CUDA {_dotted(facts.driver.cuda)}"
            yield _warning("torch", message, "update the driver, or install a torch built for an older CUDA")


def _megatron(facts: Facts) -> Iterator[Finding]:
    wanted = _dotted(OLDEST_MEGATRON)
    if facts.torch.error is not None:
        yield _problem("megatron-core", "not looked at, because torch cannot be imported", "repair torch first")
    elif _too_old(facts.megatron.version, OLDEST_MEGATRON):
        message = f"megatron-core {facts.megatron.version} is older than {wanted}"
        yield _problem("megatron-core", message, f"pip install -U 'megatron-core>={wanted}'")
    elif facts.megatron.error is not None:
        message = f"megatron-core cannot be imported: {facts.megatron.error}"
        yield _problem("megatron-core", message, f"pip install 'megatron-core>={wanted}'")
    else:
        te = facts.transformer_engine
        yield _ok("megatron-core", f"megatron-core {facts.megatron.version}, TransformerEngine {te or 'not installed'}")


def _plugin(facts: Facts) -> Iterator[Finding]:
    plugin = facts.plugin
    if plugin.disabled_by is not None:
        name = plugin.disabled_by.split("=")[0]
        yield _problem("plugin", f"switched off by {plugin.disabled_by}", f"unset {name}")
        return
    if plugin.misfit is not None:
        yield _problem("plugin", plugin.misfit, "use a megatron-core from 0.17 to 0.19, and report this")
        return
    if plugin.autoload_disabled:
        yield _warning(
            "plugin",
            "torch does not load it by itself (TORCH_DEVICE_BACKEND_AUTOLOAD=0)",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or start with python -m mok_megatron.launch SCRIPT ...",
        )
    elif facts.torch.error is None and facts.megatron.error is None:
        yield _ok("plugin", f"mok-megatron {facts.mok_megatron} fits this Megatron: --moe-token-dispatcher-type mok")


def _gpus(facts: Facts) -> Iterator[Finding]:
    if not facts.driver.gpus:
        message = f"{facts.driver.error or 'no GPU'}: training runs on the CPU with the reference backend, for tests"
        yield _warning("gpus", message, "to train for real, use a machine with Hopper or Blackwell GPUs")
        return
    for gpu in facts.driver.gpus:
        capability = f"compute capability {_dotted(gpu.capability)}"
        text = f"GPU {gpu.index}: {gpu.name}, {capability}, {gpu.sms} SMs, {gpu.memory_bytes / 2**30:.0f} GiB"
        if gpu.architecture is None:
            supported = ", ".join(CUDA_ARCHITECTURES.values())
            remedy = f"the CUDA backend is for {supported}; this GPU can run the reference backend"
            yield _warning("gpus", text, remedy)
        else:
            yield _ok("gpus", f"{text}, {gpu.architecture}")


def _peers(facts: Facts) -> Iterator[Finding]:
    links = facts.driver.peer_access
    if len(links) < 2:
        return
    for kind, text in (("none", "cannot reach each other's memory"), ("pcie", "reach each other over PCIe only")):
        pairs = [f"{a}-{b}" for a in range(len(links)) for b in range(a + 1, len(links)) if links[a][b] == kind]
        if pairs:
            remedy = "keep expert-parallel groups inside one NVLink domain; check nvidia-smi topo -m and fabric manager"
            yield _warning("peer access", f"GPUs {', '.join(pairs)} {text}", remedy)
    if all(link in ("self", "nvlink") for row in links for link in row):
        yield _ok("peer access", f"all {len(links)} GPUs reach each other over NVLink")


def _fabric(facts: Facts) -> Iterator[Finding]:
    """The NVLink fabric of this node; whether an EP group over several nodes lies in one domain is checked at start."""
    node = facts.fabric
    if len(facts.driver.gpus) < 2:
        return
    if node.error is not None:
        yield _warning("nvlink fabric", f"unknown: {node.error}", "make the driver's NVML visible to this process")
        return
    down = preflight.fabric_problem(node)
    if down is not None:
        yield _warning("nvlink fabric", down, preflight.START_FABRIC_MANAGER)
        return
    domains = sorted({(gpu.cluster, gpu.clique) for gpu in node.gpus if gpu.cluster and gpu.state == "completed"})
    if not domains:
        yield _ok("nvlink fabric", "NVLink ends at this node: keep expert-parallel groups inside it")
    elif not node.imex_channels:
        message = "this node is part of an NVLink rack, but has no IMEX channel to share memory with its other nodes"
        yield _warning("nvlink fabric", message, preflight.CREATE_CHANNEL)
    else:
        names = ", ".join(f"cluster {cluster} clique {clique}" for cluster, clique in domains)
        yield _ok("nvlink fabric", f"{names}, IMEX {', '.join(node.imex_channels)}")


def _compiler(facts: Facts) -> Iterator[Finding]:
    architectures = sorted({gpu.architecture for gpu in facts.driver.gpus if gpu.architecture is not None})
    compiler = facts.compiler
    if compiler is None:
        if set(architectures) - set(facts.cache.libraries):
            remedy = "install the CUDA toolkit and set CUDA_HOME, or mok-megatron build elsewhere and copy the cache"
            yield _warning("nvcc", "not found (CUDA_HOME, PATH, /usr/local/cuda): kernels cannot be compiled", remedy)
        return
    if compiler.version is None:
        yield _warning("nvcc", f"{compiler.path} does not tell its version", "repair the CUDA toolkit")
        return
    too_old = [arch for arch in architectures if compiler.version < OLDEST_COMPILER[arch]]
    found, tested = f"{compiler.path} {_dotted(compiler.version)}", f"tested with {_dotted(TESTED_COMPILER)}"
    for arch in too_old:
        remedy = f"install a CUDA toolkit >= {_dotted(OLDEST_COMPILER[arch])} ({tested}), set CUDA_HOME"
        yield _warning("nvcc", f"{found} is too old for {arch}", remedy)
    if not too_old:
        yield _ok("nvcc", found if compiler.version == TESTED_COMPILER else f"{found} (the kernels are {tested})")


def _cache(facts: Facts) -> Iterator[Finding]:
    cache = facts.cache
    if cache.writable:
        built = f"compiled: {', '.join(cache.libraries)}" if cache.libraries else "nothing compiled yet"
        yield _ok("kernel cache", f"{cache.path}, {built}")
    else:
        remedy = "set MOK_MEGATRON_CACHE to a folder that can be written"
        yield _warning("kernel cache", f"{cache.path} cannot be written", remedy)


def _backend(facts: Facts) -> Iterator[Finding]:
    obstacle = cuda_backend_obstacle(facts)
    if obstacle is None:
        yield _ok("backend", "cuda can run here")
    else:
        yield _warning(
            "backend", f"cuda cannot run here: {obstacle}", "backend=auto takes the (slow) reference backend"
        )


CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    _python,
    _torch,
    _megatron,
    _plugin,
    _gpus,
    _peers,
    _fabric,
    _compiler,
    _cache,
    _backend,
)


def _too_old(version: str | None, oldest: tuple[int, int]) -> bool:
    """Whether a version like ``2.13.0+cu130`` is older; one that cannot be read is not judged."""
    parts = (version or "").split(".")[:2]
    return len(parts) == 2 and all(part.isdigit() for part in parts) and tuple(map(int, parts)) < oldest


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
