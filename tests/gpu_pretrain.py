"""One rank of a whole ``pretrain()`` run on the GPU, nothing replaced: ``python -m tests.gpu_pretrain JOB REPORT``.

Reads a Job and writes its RankReport, both JSON. ``run_jobs`` runs several at once.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tests.megatron_cpu.job import Job, RankReport

ROOT = Path(__file__).resolve().parents[1]

_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
"""The line of a traceback that names the exception; warnings and NCCL's own lines may follow it."""


def main() -> None:
    """Run the job of the command line as its only rank."""
    job_path, report_path = map(Path, sys.argv[1:])  # the run puts Megatron's command line there
    job = Job(**json.loads(job_path.read_text(encoding="utf-8")))
    import mok_megatron  # noqa: F401 (installs the hooks, whatever autoload does)
    from tests.megatron_cpu import rank

    report = rank.run(job, rank=0, port=int(os.environ["MASTER_PORT"]))
    report_path.write_text(json.dumps(report), encoding="utf-8")


def keep_affinity() -> None:
    """For ``Job.patch``: Megatron pins a run that offloads to the CPUs near its GPU, which wants pynvml and the right.

    Runs that share a test machine are better left unpinned.
    """
    from megatron.core.pipeline_parallel import utils

    utils.set_ideal_affinity_for_current_gpu = lambda: None


def run_jobs(jobs: dict[str, Job], folder: Path, timeout_s: float) -> dict[str, RankReport]:
    """Run one-rank jobs side by side on the GPU, each in a process of its own; reports by name.

    Raises RuntimeError with the end of the log of a job that failed or was not done after ``timeout_s``.
    """
    reports = {}
    for name, outcome in job_outcomes(jobs, folder, timeout_s).items():
        if isinstance(outcome, RuntimeError):
            raise outcome
        reports[name] = outcome
    return reports


def job_outcomes(
    jobs: dict[str, Job], folder: Path, timeout_s: float, environments: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, RankReport | RuntimeError]:
    """As ``run_jobs``, but a job that failed is answered by its error, and the others by their reports.

    ``environments`` adds variables to those of the jobs that it names.
    """
    extra = environments or {}
    running = {name: _start(job, folder / name, extra.get(name, {})) for name, job in jobs.items()}
    deadline = time.monotonic() + timeout_s
    try:
        for process in running.values():
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    outcomes: dict[str, RankReport | RuntimeError] = {}
    for name, process in running.items():
        if process.returncode == 0:
            report = json.loads((folder / name / "report.json").read_text(encoding="utf-8"))
            outcomes[name] = RankReport(**report)
        else:
            outcomes[name] = _failure(name, process.returncode, (folder / name / "log.txt").read_text(errors="replace"))
    return outcomes


def _failure(name: str, code: int, log: str) -> RuntimeError:
    """What was wrong in the first line; a job out of time has been killed and has code -9."""
    exceptions = _EXCEPTION.findall(log)
    what = exceptions[-1] if exceptions else "no exception in its log"
    return RuntimeError(f"{name} ended with code {code}: {what}\nThe end of its log:\n{log[-4000:]}")


def _start(job: Job, folder: Path, extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MASTER_PORT": str(_free_port()),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than these runs
        **extra,
    }
    command = [sys.executable, "-m", "tests.gpu_pretrain", str(folder / "job.json"), str(folder / "report.json")]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
