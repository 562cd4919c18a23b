"""Run a Megatron script and write down what it did: every loss and gradient norm unrounded, times, memory, digests.

``record_run.py [--time A:B] [--profile A:B] [--digests N,N] [--noise SEED] REPORT.json SCRIPT [ARGUMENT ...]``, under
torchrun, behaves as SCRIPT does; the report is rank 0's. ``--time`` measures the MoE layers' share of the steps A to
B by CUDA events, ``--profile`` by torch's profiler, ``--digests`` hashes all ranks' weights after those steps,
``--noise SEED`` adds rounding noise to the MoE layers (scripts/rounding_noise.py). The report is written at the end,
and now and then before, so that a run that is cut short leaves one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.moe_marks import MoeMarks, read_trace
from scripts.rounding_noise import add_noise

WRITE_EVERY = 100


class Recorder:
    """What is known of the run so far. Steps are Megatron's iterations, counted from 1."""

    def __init__(self, options: argparse.Namespace) -> None:
        """``options`` as parsed by ``main``."""
        self._path: Path = options.report.absolute()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._timed, self._profiled, self._digest_after = options.time, options.profile, options.digests
        self._marks = MoeMarks()
        self._models: list[torch.nn.Module] = []
        self._steps: list[int] = []
        self._losses: list[dict[str, Any]] = []
        self._grad_norms: list[float] = []
        self._seconds: list[float] = []
        self._found: dict[str, Any] = {"arguments": options.arguments, "digests": {}}
        self._profiler: Any = None

    def install(self) -> None:
        """Watch Megatron's training loop and its MoE layers."""
        from megatron.training import training

        if self._timed or self._profiled:
            self._marks.install()
        log, setup = training.training_log, training.setup_model_and_optimizer
        parameters = inspect.signature(log)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            call = parameters.bind(*args, **kwargs).arguments
            self._after_step(call["iteration"], call["loss_dict"], call["grad_norm"])
            return log(*args, **kwargs)

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            self._models = list(result[0])
            self._found |= describe(self._models)
            return result

        training.training_log = training_log
        training.setup_model_and_optimizer = setup_model_and_optimizer

    def _after_step(self, step: int, losses: dict[str, Any], grad_norm: float) -> None:
        self._seconds.append(time.perf_counter())
        self._steps.append(step)
        # Read at the end: reading now would make the host wait for the GPU.
        self._losses.append({name: torch.as_tensor(value).detach().clone() for name, value in losses.items()})
        self._grad_norms.append(grad_norm)
        if step in self._digest_after:
            self._found["digests"][str(step)] = digest_of_all(self._models)
        if self._timed and step == self._timed[-1]:
            self._marks.timing = False
            per_step = {part: ms / len(self._timed) for part, ms in self._marks.take_ms().items()}
            self._found["moe_ms"] = {"steps": [self._timed[0], self._timed[-1]], **per_step}
        self._marks.timing = self._marks.timing or step + 1 in self._timed
        if self._profiler is not None and step == self._profiled[-1]:
            self._end_profile()
        if self._profiled and step + 1 == self._profiled[0]:
            self.write()
            self._begin_profile()
        if step % WRITE_EVERY == 0:
            self.write()

    def _begin_profile(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities)
        self._marks.naming = True
        self._profiler.start()

    def _end_profile(self) -> None:
        torch.cuda.synchronize()
        self._profiler.stop()
        self._marks.naming = False
        trace = self._path.with_suffix(".trace.json")
        self._profiler.export_chrome_trace(str(trace))
        self._profiler = None
        self._found["profile"] = read_trace(trace, len(self._profiled))
        trace.unlink()

    def write(self) -> None:
        """Write the report, whole or not at all; nothing before the first step, and on other ranks than the first."""
        if int(os.environ.get("RANK", "0")) > 0 or not self._steps:
            return
        report = {
            **self._found,
            "steps": self._steps,
            "losses": {name: [float(loss[name]) for loss in self._losses] for name in (self._losses or [{}])[-1]},
            "grad_norms": [float(norm) for norm in self._grad_norms],
            # From the end of one step to the end of the next; the first one includes what comes before training.
            "step_ms": [1000 * (end - begin) for begin, end in zip(self._seconds, self._seconds[1:], strict=False)],
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": _device_bytes(),
        }
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(report), encoding="utf-8")
        unfinished.replace(self._path)


def describe(models: list[torch.nn.Module]) -> dict[str, Any]:
    """Parameters of the whole model, dispatchers and backends; tokens per step; ranks, versions and device."""
    from megatron.training import get_args

    args = get_args()
    modules: list[Any] = [module for model in models for module in model.modules()]
    return {
        "parameters": sum(
            parameter.numel() * (1 if getattr(parameter, "allreduce", True) else args.expert_model_parallel_size)
            for model in models
            for parameter in model.parameters()
        ),
        "tokens_per_step": args.global_batch_size * args.seq_length,
        "ranks": dist.get_world_size(),
        "dispatchers": sorted({type(m.token_dispatcher).__name__ for m in modules if hasattr(m, "token_dispatcher")}),
        "backends": sorted({m.fused_experts.backend.name for m in modules if hasattr(m, "fused_experts")}),
        "experts": sorted({type(m.experts).__name__ for m in modules if hasattr(m, "token_dispatcher")}),
        "device": torch.cuda.get_device_name(),
        "versions": {name: _version(name) for name in ("torch", "megatron-core", "transformer-engine")},
    }


def _device_bytes() -> int:
    """What is taken on the device now, by every process and by the driver."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package.replace("-", "_")), "__version__", "unknown"))


def digest(models: list[torch.nn.Module]) -> str:
    """A hash of all weights' names and bits, summed up where the weights are: equal only for equal bits, in practice.

    Of each weight two sums of its 16-bit words, plain and weighted by position, both modulo 2**64.
    """
    names, sums = [], []
    for model in models:
        for name, parameter in sorted(model.named_parameters()):
            words = parameter.detach().contiguous().view(-1).view(torch.int16).long()
            position = torch.arange(words.numel(), device=words.device) % 2_147_483_647 + 1
            names.append(name)
            sums.append(torch.stack([words.sum(), (words * position).sum()]))
    values = torch.stack(sums).cpu().numpy()
    return hashlib.sha256("\n".join(names).encode() + values.tobytes()).hexdigest()


def digest_of_all(models: list[torch.nn.Module]) -> str:
    """One digest for all ranks' weights. Collective."""
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(models))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def steps_of(text: str) -> range:
    """``A:B`` -> the steps A to B, both included. Raises ValueError unless 1 < A <= B."""
    first, last = map(int, text.split(":"))
    if not 1 < first <= last:
        raise ValueError(f"expected A:B with 1 < A <= B, got {text!r}")
    return range(first, last + 1)


def recorder_parser() -> argparse.ArgumentParser:
    """Of this script's command line."""
    parser = argparse.ArgumentParser(description="Run a Megatron script and record what it did.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--time", type=steps_of, default=range(0), metavar="A:B")
    parser.add_argument("--profile", type=steps_of, default=range(0), metavar="A:B")
    parser.add_argument("--digests", type=lambda text: {int(n) for n in text.split(",")}, default=set(), metavar="N,N")
    parser.add_argument("--noise", type=int, metavar="SEED")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def main() -> None:
    options = recorder_parser().parse_args()
    importlib.import_module("mok_megatron")
    recorder = Recorder(options)
    sys.argv = [options.script, *options.arguments]
    recorder.install()
    if options.noise is not None:
        add_noise(options.noise)
    sys.path.insert(0, str(Path(options.script).absolute().parent))
    try:
        runpy.run_path(options.script, run_name="__main__")
    finally:
        recorder.write()


if __name__ == "__main__":
    main()
