"""The test's side of the server: start it, give it jobs, keep their answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from select import select

from tests.megatron_cpu.job import Job, RankReport

_ROOT = Path(__file__).parents[2]
_MARGIN_S = 60.0
"""On top of a job's own limit, for the server's imports and its clearing up."""


class PretrainServer:
    """Runs jobs one after another; the same job again is answered from memory."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Start the server with its files in ``folder``; the environment says which Megatron it imports."""
        self.folder = folder
        self._reports: dict[Job, list[RankReport]] = {}
        self._count = 0
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        self._log = (folder / "server.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron_cpu.server"],
            cwd=_ROOT,
            env={**environment, **fixed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # so that close() reaches the ranks, too
        )

    def run(self, job: Job, timeout_s: float = 90.0) -> list[RankReport]:
        """Reports by rank. Raises RuntimeError with a failed rank's log, or when the server itself is gone."""
        if job not in self._reports:
            self._reports[job] = self.run_again(job, timeout_s)
        return self._reports[job]

    def run_again(self, job: Job, timeout_s: float = 90.0) -> list[RankReport]:
        """As ``run``, but never from memory."""
        self._count += 1
        request = {"job": asdict(job), "folder": str(self.folder / f"job{self._count}"), "timeout_s": timeout_s}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        ready, _, _ = select([stdout], [], [], timeout_s + _MARGIN_S)
        line = stdout.readline() if ready else ""
        if not line:
            self.close()
            log = (self.folder / "server.log").read_text(errors="replace")
            raise RuntimeError(f"the pretrain server gave no answer; the end of its log:\n{log[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return [RankReport(**report) for report in answer["reports"]]

    def close(self) -> None:
        """Kill the server and the ranks of a job that it was running. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            stream.close()  # type: ignore[union-attr]
