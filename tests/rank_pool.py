"""Rank processes that stay: starting one, with CUDA and its groups, takes longer than most tests."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed import init_group

_GRACE_S = 3.0
"""After one rank failed, the others get this long to say something before all are killed."""
_GROUP_TIME_LIMIT_S = 60.0


class RankPool:
    """``world_size`` processes in one group of ``backend``, started by the first ``run``; see ``join_group``.

    They run one job after the other. After a job that failed they are replaced by new ones.
    """

    def __init__(self, world_size: int, backend: str) -> None:
        self._world_size, self._backend = world_size, backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``job(rank, world_size, *args)`` on every rank; what they return, by rank.

        ``job`` is importable, arguments and results are picklable and no tensors. Raises RuntimeError with the
        traceback of the rank that failed first, or with the ranks that were not done after ``timeout_s``.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline, first = time.monotonic() + timeout_s, ""
        while len(answers) < self._world_size and (left := deadline - time.monotonic()) > 0:
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for ready in wait(list(waiting), timeout=left):
                rank = waiting[ready]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join(_GRACE_S)
                    answers[rank] = (False, f"it ended with exit code {self._processes[rank].exitcode}")
                if not answers[rank][0]:
                    first = first or f"rank {rank} failed:\n{answers[rank][1]}"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if first or len(answers) < self._world_size:
            self._kill()
            late = sorted(set(range(self._world_size)) - set(answers))
            raise RuntimeError(first or f"ranks {late} were not done after {timeout_s} s")
        return [answers[rank][1] for rank in range(self._world_size)]

    def close(self, timeout_s: float = 20.0) -> list[int | None]:
        """End all processes; their exit codes, None for one that had to be killed."""
        for pipe in self._pipes:
            pipe.send(None)
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        self._kill()
        return codes

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="mok-ranks-")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._world_size, self._backend, self._folder.name, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def group_backend(world_size: int) -> str:
    """``nccl`` where each rank has a GPU of its own; NCCL refuses ranks that share one, so there it is ``gloo``."""
    return "nccl" if torch.cuda.device_count() >= world_size else "gloo"


def join_group(rank: int, world_size: int, backend: str, rendezvous: str) -> None:
    """This process as ``rank`` of the default group; GPU ``rank``, counted modulo those there are, is current."""
    if torch.cuda.device_count() > 0:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    init_group(rank, world_size, backend, rendezvous, _GROUP_TIME_LIMIT_S, device)


def _serve(rank: int, world_size: int, backend: str, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    joined = False
    while (job := pipe.recv()) is not None:
        try:
            if not joined:
                join_group(rank, world_size, backend, f"{folder}/rendezvous")
                joined = True
            function, args = job
            answer = (True, function(rank, world_size, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    if joined:
        dist.destroy_process_group()
