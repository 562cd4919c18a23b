"""A process that has imported Megatron once and forks the ranks of one job after another from itself.

``python -m tests.megatron_cpu.server`` reads one JSON object a line from stdin, {"job", "folder", "timeout_s"}, runs
it, and answers with a line {"reports"} or {"error"}. Every rank starts from the same clean state, and nobody pays for
Megatron's imports twice. Ends when stdin does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.megatron_cpu import rank as rank_module
from tests.megatron_cpu.job import Job

_GRACE_S = 2.0
"""After one rank failed, the others get this long to end by themselves."""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Megatron prints; stdout carries answers alone
    rank_module.load_megatron()
    for line in sys.stdin:
        request = json.loads(line)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in request["job"].items()}
        job = Job(**fields)
        try:
            answer: dict[str, Any] = {"reports": run_job(job, Path(request["folder"]), request["timeout_s"])}
        except RuntimeError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def run_job(job: Job, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Fork and join the ranks; returns their reports by rank. Raises RuntimeError with the end of a rank's log."""
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    running: dict[int, int] = {}
    try:
        for rank in job.start_order or range(job.world_size):
            running[_fork_rank(job, rank, port, folder)] = rank
            if job.start_order:
                time.sleep(job.start_gap_s)
        failed = _join(running, time.monotonic() + timeout_s)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if failed:
        code, rank = failed[0]
        tail = (folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"rank {rank} ended with code {code}; the end of its log:\n{tail}")
    if running:
        raise RuntimeError(f"ranks {sorted(running.values())} were still running after {timeout_s} s")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(job.world_size)]


def _join(running: dict[int, int], deadline: float) -> list[tuple[int, int]]:
    """Wait for the ranks, removing those that ended from ``running``; returns (exit code, rank) of the failed ones."""
    failed: list[tuple[int, int]] = []
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = running.pop(pid)
                if (code := os.waitstatus_to_exitcode(status)) != 0:
                    failed.append((code, rank))
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.02)
    return failed


def _fork_rank(job: Job, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        (folder / f"rank{rank}.json").write_text(json.dumps(rank_module.run(job, rank, port)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no interpreter shutdown: the parent's buffers and handlers are not ours


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
