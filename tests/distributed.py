"""Multi-rank tests as ordinary pytest functions: ``run_ranks`` spawns the ranks and collects what they return."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_GRACE_S = 2.0
"""After one rank failed, the others get this long to write their own traceback before they are killed."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` spawned processes joined by one gloo group.

    ``fn`` must be importable (a module's top level); ``args`` and the return values must be picklable. The default
    process group exists while ``fn`` runs and is destroyed after it (``fn`` may destroy it itself). Each rank has one
    torch thread. Ranks start in rank order; environment RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them.

    Returns the return values by rank. Raises RuntimeError with the traceback of the rank that failed first, or with
    the ranks that were still running when ``timeout_s`` had passed. No process outlives the call.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mok-ranks-") as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, timeout_s, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, deadline=time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
        _raise_first_failure(processes, Path(folder), timeout_s)
        return [pickle.loads(_result_path(folder, rank).read_bytes()) for rank in range(world_size)]


def init_group(
    rank: int, world_size: int, backend: str, rendezvous: str, timeout_s: float, device: torch.device | None = None
) -> None:
    """This process as ``rank`` of the default group, with torchrun's environment; NCCL wants its ``device``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


def _rank_main(
    rank: int, world_size: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)
        init_group(rank, world_size, "gloo", f"{folder}/rendezvous", timeout_s)
        result = fn(rank, world_size, *args)
        _result_path(folder, rank).write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        partial = Path(folder, f"error-{rank}.part")
        partial.write_text(traceback.format_exc(), encoding="utf-8")
        partial.rename(_error_path(folder, rank))
        raise SystemExit(1) from None


def _join(processes: list[Any], deadline: float) -> None:
    """Wait until all have ended, the deadline has passed, or one has failed and the grace time is over."""
    running = {process.sentinel: process for process in processes}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + _GRACE_S)


def _raise_first_failure(processes: list[Any], folder: Path, timeout_s: float) -> None:
    errors = list(folder.glob("error-*.txt"))
    if errors:
        first = min(errors, key=lambda path: path.stat().st_mtime_ns)
        raise RuntimeError(f"rank {first.stem.removeprefix('error-')} failed:\n{first.read_text(encoding='utf-8')}")
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    if failed:
        codes = [processes[rank].exitcode for rank in failed]
        raise RuntimeError(f"ranks {failed} ended without a result within {timeout_s} s (exit codes {codes})")


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder, f"result-{rank}.pkl")


def _error_path(folder: str, rank: int) -> Path:
    return Path(folder, f"error-{rank}.txt")
