"""One rank of a job: runs the script in this process and reports what Megatron logged, unrounded."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.megatron_cpu.job import Job, RankReport

_SCRIPT = "examples.pretrain_gpt"


def load_megatron() -> None:
    """Import everything that a rank needs, so that processes forked from this one start at once."""
    from tests.megatron_cpu.shim import install

    install()
    importlib.import_module("mok_megatron")
    importlib.import_module("mok_megatron.layer")
    importlib.import_module(_SCRIPT)


def run(job: Job, rank: int, port: int) -> dict[str, Any]:
    """Run ``job`` as ``rank``, with its rendezvous at ``port``; returns the fields of a RankReport."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_DEVICE_MAX_CONNECTIONS="1")
    script = importlib.import_module(_SCRIPT)
    sys.argv = [str(Path(inspect.getfile(script))), *job.args]
    _poison_memory()
    report = RankReport()
    models = _watch(report)
    _count(report.counts)
    if job.patch is not None:
        module, function = job.patch.split(":")
        getattr(importlib.import_module(module), function)()
    try:
        script.main()
    except SystemExit as end:  # --exit-interval ends so
        if end.code:
            raise
    digest = hashlib.sha256()
    for model in models:
        for name, parameter in sorted(model.named_parameters()):
            digest.update(name.encode() + parameter.detach().cpu().contiguous().view(-1).float().numpy().tobytes())
        for module in model.modules():
            if hasattr(module, "token_dispatcher"):
                report.dispatchers.append(type(module.token_dispatcher).__name__)
            if hasattr(module, "fused_experts"):
                report.backends.append(module.fused_experts.backend.name)
    version = importlib.import_module("megatron.core").__version__
    return {**asdict(report), "weights": digest.hexdigest(), "megatron": version}


def _poison_memory() -> None:
    """Fill new memory with NaN: what reads a buffer that nobody wrote does not look right by chance."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def _count(counts: dict[str, int]) -> None:
    """Count what options of recomputation, CUDA graphs and offloading are for."""
    import torch
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    counts.update({"module calls": 0, "graph replays": 0, "offloaded": 0})

    def counted(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    torch.nn.modules.module.register_module_forward_pre_hook(counted("module calls", lambda _module, _args: None))
    graph: Any = torch.cuda.CUDAGraph
    graph.replay = counted("graph replays", graph.replay)
    handler: Any = offload.ChunkOffloadHandler
    handler.offload = counted("offloaded", handler.offload)


def _watch(report: RankReport) -> list[Any]:
    """Record each iteration's losses and gradient norm into ``report``; returns the list that will hold the model."""
    from megatron.training import training

    log, setup, models = training.training_log, training.setup_model_and_optimizer, []
    parameters = inspect.signature(log)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs).arguments
        report.losses.append({name: float(value) for name, value in call["loss_dict"].items()})
        report.grad_norms.append(float(call["grad_norm"]))
        return log(*args, **kwargs)

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        models.extend(result[0])
        return result

    training.training_log = training_log
    training.setup_model_and_optimizer = setup_model_and_optimizer
    return models
