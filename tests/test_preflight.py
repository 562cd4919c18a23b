"""One NVLink domain per expert-parallel group: the check on faked machines, and NVML on a stand-in library."""

# ruff: noqa: N802  (the stand-in library has the names of the C functions)

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mok_megatron.nvml import normal_bus_id, probe_node
from mok_megatron.preflight import (
    FabricState,
    GpuFabric,
    Link,
    NodeFabric,
    RankPlace,
    check_groups,
    fabric_problem,
    ranges,
)
from tests.distributed import run_ranks

CLUSTER, OTHER_CLUSTER = "aa" * 16, "bb" * 16


def node(
    host: str,
    first_rank: int,
    gpus: int = 8,
    *,
    state: FabricState = "completed",
    cluster: str = "",
    clique: int = 0,
    link: Link = "nvlink",
    channels: tuple[str, ...] = (),
) -> list[RankPlace]:
    """Ranks of one node, one GPU each, all linked alike."""
    names = [f"0000:{index:02x}:00.0" for index in range(gpus)]
    return [
        RankPlace(
            rank=first_rank + index,
            host=host,
            gpu=GpuFabric(
                bus_id=name,
                state=state,
                cluster=cluster,
                clique=clique,
                links={other: link for other in names if other != name},
            ),
            imex_channels=channels,
        )
        for index, name in enumerate(names)
    ]


def rack(trays: int = 16, **changes: Any) -> list[RankPlace]:
    """Trays of four GPUs of an NVL72 rack."""
    options = {"cluster": CLUSTER, "clique": 1, "channels": ("channel0",), **changes}
    return [place for tray in range(trays) for place in node(f"tray{tray:02}", 4 * tray, 4, **options)]


def message(places: list[RankPlace], *groups: range) -> str:
    with pytest.raises(ValueError) as caught:
        check_groups(places, groups)
    return str(caught.value)


def test_one_node_is_one_domain() -> None:
    check_groups(node("a", 0), [range(8)])
    check_groups(node("a", 0), [range(4), range(4, 8)])


def test_two_nodes_of_one_clique_are_one_domain() -> None:
    check_groups(rack(2), [range(8)])
    check_groups(rack(16), [range(64)])


def test_two_groups_on_two_nodes_that_are_not_linked() -> None:
    places = [*node("a", 0), *node("b", 8)]
    check_groups(places, [range(8), range(8, 16)])


def test_a_group_over_two_hopper_nodes_names_hosts_and_ranks() -> None:
    text = message([*node("a", 0), *node("b", 8)], range(16))
    assert "expert-parallel group of ranks 0-15 is not inside one NVLink domain" in text
    assert "a (ranks 0-7) in the NVLink of a only; b (ranks 8-15) in the NVLink of b only" in text
    assert "--expert-model-parallel-size" in text


@pytest.mark.parametrize(
    ("second", "domain"),
    [({"clique": 2}, f"{CLUSTER} clique 2"), ({"cluster": OTHER_CLUSTER}, f"{OTHER_CLUSTER} clique 1")],
)
def test_different_cliques_or_clusters_are_different_domains(second: dict[str, Any], domain: str) -> None:
    fabric: dict[str, Any] = {"cluster": CLUSTER, "clique": 1, "channels": ("channel0",)}
    places = [*node("a", 0, 4, **fabric), *node("b", 4, 4, **{**fabric, **second})]
    text = message(places, range(8))
    assert f"a (ranks 0-3) in NVLink cluster {CLUSTER} clique 1; b (ranks 4-7) in NVLink cluster {domain}" in text
    check_groups(places, [range(4), range(4, 8)])


def test_partial_p2p_names_the_pair() -> None:
    places = node("a", 0, 4, state="not supported")
    first, last = places[0], places[3]
    assert first.gpu is not None and last.gpu is not None
    broken = dataclasses.replace(first.gpu, links={**first.gpu.links, last.gpu.bus_id: "other"})
    places[0] = dataclasses.replace(first, gpu=broken)
    text = message(places, range(4))
    assert "on a, ranks 0 and 3 (GPUs 0000:00:00.0 and 0000:03:00.0) do not reach each other over NVLink." in text
    assert "nvidia-smi topo -m" in text
    check_groups(places, [range(2), range(2, 4)])


def test_links_must_hold_both_ways_and_pcie_is_not_nvlink() -> None:
    assert "and 27 more pairs" in message(node("a", 0, link="other"), range(8))
    places = node("a", 0, 2)
    assert places[1].gpu is not None
    places[1] = dataclasses.replace(places[1], gpu=dataclasses.replace(places[1].gpu, links={}))
    assert "ranks 0 and 1" in message(places, range(2))


def test_a_clique_links_gpus_of_one_node_that_see_no_peer_access() -> None:
    places = node("a", 0, 2, cluster=CLUSTER, clique=1, link="none")
    check_groups(places, [range(2)])
    assert places[1].gpu is not None
    places[1] = dataclasses.replace(places[1], gpu=dataclasses.replace(places[1].gpu, clique=2))
    assert "ranks 0 and 1" in message(places, range(2))


@pytest.mark.parametrize("state", ["not started", "in progress"])
def test_no_fabric_manager(state: FabricState) -> None:
    text = message([*node("a", 0, 4), *node("b", 4, 4, state=state)], range(4), range(4, 8))
    assert f"the NVLink fabric is {state} on b (ranks 4-7): no fabric manager has set it up" in text
    assert "nvidia-fabricmanager" in text


def test_imex_missing_on_one_tray() -> None:
    places = rack(3)
    places[4:8] = [dataclasses.replace(place, imex_channels=()) for place in places[4:8]]
    text = message(places, range(12))
    assert "no IMEX channel to share memory through on tray01 (ranks 4-7)" in text
    assert "nvidia-imex" in text
    check_groups(places, [range(4), range(4, 8), range(8, 12)])  # inside a tray none is needed


def test_nothing_known_about_a_rank() -> None:
    places = node("a", 0, 2)
    places[1] = RankPlace(rank=1, host="a", gpu=None, error="libnvidia-ml.so.1 not found")
    text = message(places, range(2))
    assert "nothing is known about a (rank 1) (libnvidia-ml.so.1 not found)" in text
    assert "NVIDIA_DRIVER_CAPABILITIES" in text
    check_groups(places, [range(1), range(1, 2)])  # a rank alone needs no NVLink


def test_many_broken_groups_make_one_error() -> None:
    places = [place for index in range(12) for place in node(f"n{index}", 8 * index)]
    text = message(places, *(range(16 * index, 16 * index + 16) for index in range(6)))
    assert text.count("Remedy") == 1
    assert "(so do 5 more groups: ranks 16-31, 32-47, 48-63, ...)" in text


def test_a_long_list_of_nodes_is_cut() -> None:
    assert "tray07 (ranks 28-31), and 8 more nodes" in message(rack(16, channels=()), range(64))


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2, 5"


def test_one_node_alone() -> None:
    good = NodeFabric(gpus=tuple(place.gpu for place in node("a", 0) if place.gpu is not None))
    assert fabric_problem(good) is None and fabric_problem(NodeFabric()) is None
    broken = NodeFabric(gpus=(dataclasses.replace(good.gpus[0], state="not started"), *good.gpus[1:]))
    assert "not started on 1 of 8 GPUs" in (fabric_problem(broken) or "")


class FakeNvml:
    """Two GPUs of an NVL72 tray, as the C functions of NVML tell it."""

    def __init__(self, *, state: int = 3, status: int = 0, fabric_code: int = 0, p2p: int = 0, init: int = 0) -> None:
        self.state, self.status, self.fabric_code, self.p2p, self.init = state, status, fabric_code, p2p, init
        self.open = False

    def nvmlInit_v2(self) -> int:
        self.open = self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 0x1000 + index
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: ctypes.c_void_p, info: Any) -> int:
        info._obj.bus_id = f"00000000:{(handle.value or 0) - 0x1000 + 0xA:02X}:00.0".encode()
        return 0

    def nvmlDeviceGetGpuFabricInfoV(self, handle: ctypes.c_void_p, info: Any) -> int:
        assert info._obj.version == 0x02000024  # version 2 of a struct of 36 bytes
        info._obj.cluster_uuid[:] = list(range(16))
        info._obj.clique_id, info._obj.state, info._obj.status = 7, self.state, self.status
        return self.fabric_code

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, capability: int, status: Any) -> int:
        status._obj.value = 0 if capability in (0, 2) and self.p2p == 0 else 5
        return 0


def test_nvml_is_read(tmp_path: Path) -> None:
    (tmp_path / "channel0").touch()
    (tmp_path / "other").touch()
    nvml = FakeNvml()
    found = probe_node(nvml, tmp_path)
    assert found.error is None and not nvml.open
    assert [gpu.bus_id for gpu in found.gpus] == ["0000:0a:00.0", "0000:0b:00.0"]
    assert found.gpus[0].cluster == "000102030405060708090a0b0c0d0e0f"
    assert (found.gpus[0].state, found.gpus[0].clique) == ("completed", 7)
    assert found.gpus[0].links == {"0000:0b:00.0": "nvlink"}
    assert found.imex_channels == ("channel0",)


@pytest.mark.parametrize(
    ("fake", "state"),
    [
        ({"state": 0}, "not supported"),
        ({"state": 1}, "not started"),
        ({"state": 2}, "in progress"),
        ({"state": 3, "status": 999}, "in progress"),
        ({"fabric_code": 3}, "not supported"),
    ],
)
def test_nvml_fabric_states(fake: dict[str, int], state: str, tmp_path: Path) -> None:
    assert probe_node(FakeNvml(**fake), tmp_path).gpus[0].state == state


def test_nvml_without_links_channels_or_the_library(tmp_path: Path) -> None:
    found = probe_node(FakeNvml(p2p=1), tmp_path / "missing")
    assert found.gpus[0].links == {"0000:0b:00.0": "none"} and found.imex_channels == ()
    assert probe_node(FakeNvml(init=9)).error == "the NVML call nvmlInit_v2 failed with code 9"
    assert probe_node("libno-such-nvml.so.1").error == "libno-such-nvml.so.1 not found"


def test_bus_ids_of_nvml_and_cuda_are_the_same() -> None:
    assert normal_bus_id("00000000:1B:00.0") == normal_bus_id("0000:1b:00.0") == "0000:1b:00.0"
    assert normal_bus_id("00000008:01:00.0") == "0008:01:00.0"


def gathered_error(rank: int, world_size: int) -> str:
    """Every rank on a node of its own, with NVLink that ends there."""
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist

    from mok_megatron import preflight

    preflight.this_place = lambda rank, device: node(f"host{rank}", rank, 1)[0]
    assert dist.group.WORLD is not None
    torch.cuda.device = nullcontext  # type: ignore[misc, assignment]
    try:
        preflight.require_one_domain(dist.group.WORLD, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def test_all_ranks_raise_the_same_error() -> None:
    errors = run_ranks(2, gathered_error, timeout_s=120)
    assert len(set(errors)) == 1
    assert "host0 (rank 0) in the NVLink of host0 only; host1 (rank 1)" in errors[0]
