"""What becomes of a failed kernel: one message that says who waited for whom, then the end of the process.

A kernel that gives up writes a record into pinned host memory and traps, so no result of it can be used. Training code
is then usually inside some unrelated synchronisation whose error names nothing; a watcher thread therefore prints the
message within a second and ends the process, as NCCL's watchdog does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from weakref import ref

from mok_megatron.backends.abi import FailRecord
from mok_megatron.backends.workspace import Workspace

EXIT_CODE = 70
_POLL_S = 0.05
"""Well below the time that a failed kernel waits before it traps (kernels/common/sync.cuh)."""
_GRACE_S = 2.0
"""Time for the training code to meet the CUDA error itself and say where it was."""

_PHASES = ("routing", "opening", "tables", "FC1", "FC2", "combine", "weight gradients", "ring")

_watched: list[ref[Workspace]] = []
"""Weak: a model that goes takes its workspaces along."""
_lock = threading.Lock()
_thread: threading.Thread | None = None
_said = False


def describe(record: FailRecord) -> str:
    """The message of a record."""
    phase = _PHASES[record.phase]
    where = f"layer {record.layer}, phase {phase}, rank {record.rank} of the expert-parallel group"
    if record.code == 1:
        whom = f"for rank {record.peer}" if record.peer >= 0 else "for its own kernels"
        return (
            f"{where}: waited longer than the time limit {whom} (item {record.where}, wanted {record.want}, seen "
            f"{record.seen}). A rank died or is late: look at its log; raise time_limit_s (--mok-time-limit-s) if "
            f"it is only slow"
        )
    if record.code == 2:
        return f"{where}: rank {record.peer} failed and said so; its message has the cause"
    return f"{where}: token {record.where} is routed to {record.seen} experts, more than top_k={record.want}"


def check(layer: int) -> None:
    """Raise RuntimeError when a kernel of this process has failed. Reads host memory only."""
    for record in _reports():
        if record is not None:
            raise RuntimeError(f"mok_megatron: {describe(record)} (found at the next call, layer {layer})")


def watch(workspace: Workspace) -> None:
    """Look after a workspace's kernels until ``forget``."""
    global _thread  # noqa: PLW0603
    with _lock:
        _watched.append(ref(workspace))
        if _thread is None:
            _thread = threading.Thread(target=_run, name="mok_megatron-watcher", daemon=True)
            _thread.start()
            # Registered late, so run before what frees memory at exit, which after a failed kernel may abort.
            atexit.register(_report_at_exit)


def forget(workspace: Workspace) -> None:
    """Stop looking after it, whose last word has been said."""
    _say()
    with _lock:
        _watched[:] = [kept for kept in _watched if kept() not in (None, workspace)]


def _reports() -> list[FailRecord | None]:
    """Of every workspace that is watched."""
    return [workspace.failure() for kept in list(_watched) if (workspace := kept()) is not None]


def _say() -> bool:
    """Print the message of the first failure, once. Whether there has been one."""
    global _said  # noqa: PLW0603
    with _lock:
        failed = next((record for record in _reports() if record is not None), None)
        if failed is not None and not _said:
            sys.stderr.write(f"mok_megatron: {describe(failed)}\n")
            sys.stderr.flush()
            _said = True
        return _said


def _report_at_exit() -> None:
    """The training code met the CUDA error and ends before the watcher has looked."""
    if _say():
        sys.stdout.flush()
        os._exit(EXIT_CODE)


def _run() -> None:
    while not _say():
        time.sleep(_POLL_S)
    time.sleep(_GRACE_S)
    os._exit(EXIT_CODE)
