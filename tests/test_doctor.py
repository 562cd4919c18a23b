"""The doctor on machines that are not here: facts are made up, findings, verdict and exit code are checked."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mok_megatron.cli import main
from mok_megatron.doctor import probes
from mok_megatron.doctor.checks import cuda_backend_obstacle, run_checks
from mok_megatron.doctor.driver import probe_driver
from mok_megatron.doctor.facts import Cache, Compiler, Driver, Facts, Gpu, Package, PeerLink, Plugin
from mok_megatron.doctor.report import as_json, as_text, training_possible
from mok_megatron.preflight import GpuFabric, NodeFabric

HOPPER = Gpu(index=0, name="NVIDIA H200", capability=(9, 0), sms=132, memory_bytes=140 << 30)
BLACKWELL = Gpu(index=0, name="NVIDIA GB300", capability=(10, 3), sms=148, memory_bytes=270 << 30)
AMPERE = Gpu(index=0, name="NVIDIA A100", capability=(8, 0), sms=108, memory_bytes=80 << 30)


def driver(gpu: Gpu, count: int = 1, link: PeerLink = "nvlink") -> Driver:
    """A machine with ``count`` GPUs, all pairs linked alike."""
    return Driver(
        release="580.65.06",
        cuda=(13, 0),
        gpus=tuple(dataclasses.replace(gpu, index=index) for index in range(count)),
        peer_access=tuple(tuple("self" if a == b else link for b in range(count)) for a in range(count)),
    )


NO_GPU = Driver(error="no NVIDIA driver here (libcuda.so.1 not found)")
GOOD = Facts(
    python=(3, 12, 1),
    mok_megatron="0.1.0",
    torch=Package(version="2.13.0"),
    torch_cuda="13.0",
    megatron=Package(version="0.19.2"),
    transformer_engine="2.20.2",
    plugin=Plugin(),
    driver=driver(HOPPER, 8),
    compiler=Compiler(path="/usr/local/cuda/bin/nvcc", version=(13, 0)),
    cache=Cache(path="/home/user/.cache/mok_megatron", writable=True, libraries=("sm90a",)),
    kernel_architectures=("sm90a", "sm100a", "sm103a"),
)


def facts(**changes: Any) -> Facts:
    return dataclasses.replace(GOOD, **changes)


def statuses(found: Facts) -> dict[str, set[str]]:
    """Check -> the statuses of its findings other than ok."""
    bad = [finding for finding in run_checks(found) if finding.status != "ok"]
    return {finding.check: {other.status for other in bad if other.check == finding.check} for finding in bad}


def test_a_good_machine_has_nothing_but_ok() -> None:
    assert statuses(GOOD) == {}
    assert cuda_backend_obstacle(GOOD) is None
    assert "with the CUDA backend" in as_text(GOOD, run_checks(GOOD))


@pytest.mark.parametrize(
    ("changes", "expected", "obstacle"),
    [
        pytest.param({"driver": NO_GPU}, {"gpus", "backend"}, "no NVIDIA driver", id="no-gpu"),
        pytest.param({"driver": driver(AMPERE)}, {"gpus", "backend"}, "neither Hopper nor Blackwell", id="ampere"),
        pytest.param({"driver": driver(BLACKWELL, 4)}, set(), None, id="blackwell"),
        pytest.param(
            {"driver": driver(BLACKWELL), "kernel_architectures": ("sm90a",)},
            {"backend"},
            "no kernels for sm103a in this version (it has kernels for: sm90a)",
            id="blackwell-without-kernels",
        ),
        pytest.param({"compiler": None}, set(), None, id="no-nvcc-but-compiled-library"),
        pytest.param(
            {"compiler": None, "cache": Cache(path="/c", writable=True)},
            {"nvcc", "backend"},
            "there is no nvcc",
            id="no-nvcc",
        ),
        pytest.param(
            {"compiler": None, "driver": driver(BLACKWELL)},
            {"nvcc", "backend"},
            "the kernels for sm103a are not compiled, and there is no nvcc",
            id="no-nvcc-and-a-library-for-another-gpu",
        ),
        pytest.param({"compiler": Compiler(path="/n", version=None)}, {"nvcc"}, None, id="broken-nvcc"),
        pytest.param({"compiler": Compiler(path="/n", version=(12, 7))}, {"nvcc"}, None, id="old-nvcc-hopper"),
        pytest.param(
            {"compiler": Compiler(path="/n", version=(12, 8)), "driver": driver(BLACKWELL)},
            {"nvcc"},
            None,
            id="old-nvcc-gb300",
        ),
        pytest.param({"driver": driver(HOPPER, 2, "none")}, {"peer access"}, None, id="no-peer-access"),
        pytest.param({"driver": driver(HOPPER, 2, "pcie")}, {"peer access"}, None, id="pcie-only"),
        pytest.param(
            {"cache": Cache(path="/c", writable=False, libraries=("sm90a",))}, {"kernel cache"}, None, id="cache"
        ),
        pytest.param({"torch_cuda": None}, {"torch"}, None, id="cpu-torch-on-gpu-machine"),
        pytest.param(
            {"driver": dataclasses.replace(driver(HOPPER), cuda=(12, 4))}, {"torch"}, None, id="driver-older-than-torch"
        ),
        pytest.param({"plugin": Plugin(autoload_disabled=True)}, {"plugin"}, None, id="autoload-off"),
    ],
)
def test_warnings_leave_training_possible(changes: dict[str, Any], expected: set[str], obstacle: str | None) -> None:
    found = facts(**changes)
    assert statuses(found) == {check: {"warning"} for check in expected}
    assert training_possible(run_checks(found))
    reason = cuda_backend_obstacle(found)
    assert (reason is None) == (obstacle is None)
    assert obstacle is None or obstacle in str(reason)


@pytest.mark.parametrize(
    ("changes", "check", "remedy"),
    [
        ({"python": (3, 11, 7)}, "python", "newer Python"),
        ({"torch": Package(error="not installed")}, "torch", "pip install 'torch>=2.10'"),
        ({"torch": Package(version="2.9.1+cu128")}, "torch", "pip install -U 'torch>=2.10'"),
        ({"megatron": Package(error="not installed")}, "megatron-core", "pip install 'megatron-core>=0.17'"),
        ({"megatron": Package(version="0.16.1")}, "megatron-core", "pip install -U 'megatron-core>=0.17'"),
        ({"plugin": Plugin(disabled_by="MOK_MEGATRON_DISABLE=1")}, "plugin", "unset MOK_MEGATRON_DISABLE"),
        ({"plugin": Plugin(misfit="no MoELayer")}, "plugin", "0.17 to 0.19"),
    ],
)
def test_problems_make_training_impossible(changes: dict[str, Any], check: str, remedy: str) -> None:
    findings = run_checks(facts(**changes))
    assert not training_possible(findings)
    problem = next(finding for finding in findings if finding.status == "problem")
    assert problem.check == check
    assert remedy in str(problem.remedy)
    assert "not possible" in as_text(facts(**changes), findings)


@pytest.mark.parametrize("changes", [{}, {"driver": NO_GPU, "compiler": None}, {"torch": Package(error="gone")}])
def test_every_finding_that_is_not_ok_has_a_remedy(changes: dict[str, Any]) -> None:
    assert all(finding.remedy for finding in run_checks(facts(**changes)) if finding.status != "ok")


@pytest.mark.parametrize(
    ("version", "shown"), [((13, 0), "/n 13.0"), ((12, 8), "/n 12.8 (the kernels are tested with 13.0)")]
)
def test_a_compiler_that_nobody_tested_says_so(version: tuple[int, int], shown: str) -> None:
    (finding,) = [f for f in run_checks(facts(compiler=Compiler(path="/n", version=version))) if f.check == "nvcc"]
    assert (finding.status, finding.message) == ("ok", shown)


def test_peer_access_names_the_pairs_and_shows_the_matrix() -> None:
    found = facts(driver=driver(HOPPER, 3, "none"))
    text = as_text(found, run_checks(found))
    assert "GPUs 0-1, 0-2, 1-2 cannot reach each other's memory" in text
    assert sum(line.startswith("GPU ") for line in text.splitlines()) == 3


TRAY = NodeFabric(
    gpus=tuple(
        GpuFabric(bus_id=f"0000:0{index}:00.0", state="completed", cluster="ab" * 16, clique=3) for index in range(4)
    ),
    imex_channels=("channel0",),
)


@pytest.mark.parametrize(
    ("fabric", "status", "message"),
    [
        (NodeFabric(), "ok", "NVLink ends at this node"),
        (TRAY, "ok", f"cluster {'ab' * 16} clique 3, IMEX channel0"),
        (dataclasses.replace(TRAY, imex_channels=()), "warning", "no IMEX channel"),
        (NodeFabric(gpus=(GpuFabric(bus_id="x", state="not started"),)), "warning", "not started on 1 of 1 GPUs"),
        (NodeFabric(error="libnvidia-ml.so.1 not found"), "warning", "unknown: libnvidia-ml.so.1 not found"),
    ],
)
def test_nvlink_fabric(fabric: NodeFabric, status: str, message: str) -> None:
    found = [finding for finding in run_checks(facts(fabric=fabric)) if finding.check == "nvlink fabric"]
    assert [finding.status for finding in found] == [status]
    assert message in found[0].message and (found[0].remedy is None) == (status == "ok")


def test_json_keys_are_stable() -> None:
    """Scripts and bug reports rely on these names: adding is fine, taking one away raises report.SCHEMA."""
    report = json.loads(json.dumps(as_json(GOOD, run_checks(GOOD))))
    assert {"schema", "training_possible", "backends", "findings", "facts"} <= set(report)
    assert report["schema"] == 1
    assert report["backends"] == {
        "cuda": {"usable": True, "obstacle": None},
        "reference": {"usable": True, "obstacle": None},
    }
    assert {"python", "torch", "megatron", "transformer_engine", "plugin", "driver", "compiler", "cache"} <= set(
        report["facts"]
    )
    assert set(report["findings"][0]) == {"check", "status", "message", "remedy"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"driver": NO_GPU}, 0), ({"megatron": Package(error="not installed")}, 1)],
)
def test_exit_code_of_the_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr(probes, "collect_facts", lambda: facts(**changes))
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["training_possible"] is (code == 0)


def test_on_this_machine_with_nothing_faked() -> None:
    command = [sys.executable, "-m", "mok_megatron.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]
    assert report["facts"]["torch"]["version"].startswith("2.")
    assert report["facts"]["megatron"]["error"] is None


def test_switched_off_plugin_is_seen() -> None:
    command = [sys.executable, "-m", "mok_megatron.cli", "doctor"]
    environment = {**os.environ, "MOK_MEGATRON_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 1
    assert "switched off by MOK_MEGATRON_DISABLE=1" in done.stdout


def test_secrets_stay_out_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    shown = {key for key in os.environ if probes.SHOWN_VARIABLES.match(key)}
    assert "CUDA_HOME" in shown
    assert "HF_TOKEN" not in shown


def test_a_missing_driver_is_a_fact_and_no_error() -> None:
    assert probe_driver("libnosuchcuda.so.1").error == "no NVIDIA driver here (libnosuchcuda.so.1 not found)"


def test_compiler_is_found_and_its_version_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert probes.find_compiler() == Compiler(path=str(nvcc), version=(12, 9))
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    assert probes.find_compiler() == Compiler(path=str(nvcc), version=None)


FAKE_DRIVER = r"""
#include <string.h>
/* Two H200 in one NVLink domain and one A100 that nobody reaches. */
static const int kMajor[] = {9, 9, 8}, kMinor[] = {0, 0, 0};
int cuInit(unsigned f) { return f ? 1 : INIT_CODE; }
int cuDriverGetVersion(int* v) { *v = 12080; return 0; }
int cuDeviceGetCount(int* n) { *n = 3; return 0; }
int cuDeviceGetName(char* s, int n, int d) { strncpy(s, d < 2 ? "NVIDIA H200" : "NVIDIA A100", n); return 0; }
int cuDeviceTotalMem_v2(unsigned long* m, int d) { *m = 140ul << 30; return d > 2; }
int cuDeviceGetAttribute(int* v, int a, int d) {
  *v = a == 75 ? kMajor[d] : a == 76 ? kMinor[d] : a == 16 ? 132 : -1;
  return 0;
}
int cuDeviceCanAccessPeer(int* v, int a, int b) { *v = a < 2 && b < 2; return 0; }
int cuDeviceGetP2PAttribute(int* v, int t, int a, int b) { *v = t == 3 && a < 2 && b < 2; return 0; }
int cuGetErrorString(int e, const char** s) { *s = "something broke"; return 0; }
"""


@pytest.fixture
def fake_driver(tmp_path: Path) -> Any:
    """Builds a libcuda stand-in whose cuInit returns the given code."""

    def build(init_code: int) -> str:
        source, library = tmp_path / "cuda.c", tmp_path / f"libcuda-{init_code}.so"
        source.write_text(FAKE_DRIVER.replace("INIT_CODE", str(init_code)))
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
        except FileNotFoundError:
            pytest.skip("no C compiler here")
        return str(library)

    return build


def test_driver_calls_against_a_stand_in(fake_driver: Any) -> None:
    found = probe_driver(fake_driver(0))
    assert (found.error, found.cuda) == (None, (12, 8))
    assert [(gpu.name, gpu.architecture, gpu.sms) for gpu in found.gpus] == [
        ("NVIDIA H200", "sm90a", 132),
        ("NVIDIA H200", "sm90a", 132),
        ("NVIDIA A100", None, 132),
    ]
    assert found.gpus[0].memory_bytes == 140 << 30
    assert found.peer_access == (("self", "nvlink", "none"), ("nvlink", "self", "none"), ("none", "none", "self"))


def test_driver_errors_are_facts(fake_driver: Any) -> None:
    assert probe_driver(fake_driver(100)).error == "the driver sees no GPU"
    assert probe_driver(fake_driver(803)).error == "the driver call cuInit failed: something broke (error 803)"
