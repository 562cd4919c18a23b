"""Pretrain a tiny DeepSeek-style model through Megatron's pretrain(): with ``alltoall``, with ``mok``, and resumed.

Runs with what the machine has: two or more GPUs (EP 2, NCCL), one GPU (EP 1), or two CPU processes (EP 2, gloo).
Exit code 0 when both loss curves agree and ``mok`` continues the checkpoint of ``alltoall``; 1 when they do not, or a
run failed; 130 when interrupted. docs/quickstart.md tells what to expect.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts import curves, prepare_corpus

ROOT = Path(__file__).parents[1]
CONFIG = "tiny-deepseek"
RUN_LIMIT_S = 1200.0

LIMITS = {
    "fp32": curves.Limits(first=1e-5, window=2e-2),
    "bf16": curves.Limits(first=5e-3, window=2e-2),
}
"""At first two right runs differ by rounding alone: below 1e-6 in fp32, around 1e-3 in bf16; a wrong output or gradient
shows at once. Later, training amplifies rounding: a token whose two best experts are nearly tied goes to the other one,
an expert's bias is then moved the other way. The losses go different ways around the same curve, which means show.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the runs use: the config's layout and the launch that goes with it."""

    what: str
    layout: str
    processes: int
    precision: str
    module: list[str]
    args: list[str]


def find_machine() -> Machine:
    """GPUs where there are some, else the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        return Machine(
            what="two CPU processes, EP 2",
            layout="ep2",
            processes=2,
            precision="fp32",
            module=["-m", "tests.megatron_cpu"],  # lets Megatron run without a GPU
            args=["--distributed-backend", "gloo"],
        )
    processes = min(gpus, 2)
    return Machine(
        what=f"{torch.cuda.get_device_name(0)} x {processes}, EP {processes}",
        layout="ep2" if processes == 2 else "single",
        processes=processes,
        precision="bf16",
        module=[],
        args=["--bf16"],
    )


def common_args(machine: Machine, corpus: Path, iterations: int) -> list[str]:
    """Megatron's arguments that all runs share."""
    from mok_megatron import megatron_args, model_config

    config = model_config.load_model_config(CONFIG)
    # The dispatcher is each run's own, last argument.
    model = megatron_args.command_line(
        config, machine.layout, version=megatron_args.installed_version(), dispatcher="alltoall"
    ).argv()
    schedule = ["--train-iters", str(iterations), "--lr-warmup-iters", str(iterations // 10)]
    data = [*prepare_corpus.training_args(corpus), "--split", "98,1,1", "--num-workers", "0", "--seed", "1234"]
    log = ["--log-interval", "1", "--eval-iters", "0", "--eval-interval", str(iterations)]
    return [*model, *schedule, *data, *log, *machine.args]


_ERROR = re.compile(r"^(\[rank\d+\]: )?(?!.*ChildFailedError)(\w+\.)*\w*(Error|Exception): |^\S+: error: ")
"""The last line of a traceback, with torchrun's prefix or without, or a refused command line."""


class RunFailedError(Exception):
    """A training ended with an error; the message says where its log is."""


def train(name: str, machine: Machine, folder: Path, args: list[str]) -> dict[int, curves.Point]:
    """Run Megatron to its end, show its progress, and return its curve. Raises RunFailedError."""
    log = folder / f"{name.replace(' ', '-')}.log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(machine.processes)]
    command = [sys.executable, *launcher, *machine.module, "examples/pretrain_gpt.py", *args]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than these runs
    }
    print(f"\n{name}: log in {log}", flush=True)
    points: dict[int, curves.Point] = {}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(shlex.join(command) + "\n")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        watchdog = signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.alarm(int(RUN_LIMIT_S))
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if (iteration := curves.add_line(points, line)) is not None:
                    _show(name, iteration, points)
            code = process.wait()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, watchdog)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0 or not points:
        raise RunFailedError(_failure(name, code, log, time.monotonic() - started))
    print(f"{name}: {len(points)} iterations in {time.monotonic() - started:.0f} s, start included", flush=True)
    return points


def _show(name: str, iteration: int, points: dict[int, curves.Point]) -> None:
    if iteration % 10 == 0 or len(points) == 1:
        point = points[iteration]
        print(
            f"  {name}  iteration {iteration:4d}  loss {point.loss:.4f}  gradient norm {point.grad_norm:6.2f}  "
            f"{point.ms:5.0f} ms",
            flush=True,
        )


def _failure(name: str, code: int, log: Path, seconds: float) -> str:
    """What to tell about a failed run: the first error in its log with what led to it, or the log's end."""
    lines = log.read_text(encoding="utf-8").splitlines()
    error = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 1)
    shown = "\n".join(f"  | {line}" for line in lines[max(error - 12, 0) : error + 3])
    limit = f" (limit {RUN_LIMIT_S:.0f} s)" if seconds >= RUN_LIMIT_S else ""
    return f"the run '{name}' ended with code {code} after {seconds:.0f} s{limit}; from its log {log}:\n{shown}"


def run_all(machine: Machine, folder: Path, args: list[str], iterations: int) -> dict[str, dict[int, curves.Point]]:
    """The three trainings; the last one starts from the first one's checkpoint of half way."""
    half = iterations // 2
    checkpoint = folder / "checkpoint"
    save = ["--save", str(checkpoint), "--save-interval", str(half)]
    load = ["--load", str(checkpoint), "--ckpt-step", str(half)]
    mok, alltoall = (["--moe-token-dispatcher-type", kind] for kind in ("mok", "alltoall"))
    return {
        "alltoall": train("alltoall", machine, folder, [*args, *save, *alltoall]),
        "mok": train("mok", machine, folder, [*args, *mok]),
        "resumed with mok": train("resumed with mok", machine, folder, [*args, *load, *mok]),
    }


def report(machine: Machine, folder: Path, runs: dict[str, dict[int, curves.Point]], iterations: int) -> bool:
    """Write curves and table, print the verdict; True when everything agrees."""
    comparisons = [
        curves.compare(f"{name} / alltoall", runs[name], runs["alltoall"], LIMITS[machine.precision])
        for name in runs
        if name != "alltoall"
    ]
    curves.write_csv(folder / "curves.csv", runs)
    curves.write_markdown(folder / "curves.md", runs, comparisons, every=max(iterations // 12, 1))
    curves.draw(folder / "curves.png", runs, "alltoall", f"{CONFIG}, {machine.what}, {machine.precision}")
    print()
    for item in comparisons:
        print(
            f"{'agrees ' if item.agrees else 'DIFFERS'}  {item.name}, {item.iterations} iterations: "
            f"first {curves.WINDOW} losses within {item.first:.1e} (limit {item.limits.first:.0e}), "
            f"means over {curves.WINDOW} within {item.window:.1e} (limit {item.limits.window:.0e})"
        )
    losses = {name: curve[max(curve)].loss for name, curve in runs.items()}
    print("last losses: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    print(f"picture {folder / 'curves.png'}, table {folder / 'curves.md'}, all numbers {folder / 'curves.csv'}")
    return all(item.agrees for item in comparisons)


@contextlib.contextmanager
def _without_import_warnings() -> Iterator[None]:
    """Megatron's imports warn of each optional package that is absent; none of them is needed here."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a tiny model with alltoall and with mok, and compare.")
    parser.add_argument("--iterations", type=int, default=120, help="of each run; even (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "quickstart", help="default: %(default)s")
    options = parser.parse_args()
    if options.iterations < 2 or options.iterations % 2:
        parser.error(f"--iterations must be even and at least 2, got {options.iterations}")
    return options


def main() -> int:
    options = parse_args()
    try:
        return quickstart(options.folder.resolve(), options.iterations)
    except (RunFailedError, OSError, ValueError) as failure:
        print(f"\nquickstart: FAILED: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted", file=sys.stderr)
        return 130


def quickstart(folder: Path, iterations: int) -> int:
    """Everything, with results in ``folder``; returns the exit code. Raises RunFailedError, OSError or ValueError."""
    started = time.monotonic()
    machine = find_machine()
    print(f"quickstart on {machine.what}, {machine.precision}, {iterations} iterations a run")
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # of an earlier quickstart
    corpus = folder / "corpus"
    with _without_import_warnings():
        facts = prepare_corpus.prepare(corpus)
    print(f"corpus: {facts['documents']} documents, {facts['tokens']} bytes of Python {facts['python']}'s own text")
    runs = run_all(machine, folder, common_args(machine, corpus, iterations), iterations)
    passed = report(machine, folder, runs, iterations)
    print(f"quickstart: {'PASSED' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
