"""Python's mirrors of the kernels' structs and constants, against the kernels' sources.

Loading a library compares sizes and a few offsets; that two fields of one type are not swapped, and that both sides
count with the same numbers, is seen here.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from mok_megatron import memory, tile_order
from mok_megatron.backends import abi, failures, grad_tables, workspace
from mok_megatron.config import MAX_TOP_K
from tests.megatron_versions import ROOT

KERNELS = ROOT / "kernels"
SOURCES = {
    path.name: re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    for path in sorted(KERNELS.rglob("*"))
    if path.suffix in (".h", ".cuh", ".cu")
}
TYPES = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    **abi._STRUCTS,
}


def fields(struct: str) -> list[tuple[str, type]]:
    found = re.search(rf"struct {struct} {{(.*?)}};", SOURCES["params.h"], re.DOTALL)
    assert found is not None, struct
    declared = [text.split() for text in found[1].split(";") if text.strip()]
    return [(words[-1], ctypes.c_void_p if "*" in " ".join(words) else TYPES[words[0]]) for words in declared]


def enumerators(name: str) -> dict[str, int]:
    found = re.search(rf"enum (?:class )?{name} : \w+ {{(.*?)}};", SOURCES["params.h"], re.DOTALL)
    assert found is not None, name
    return {text.split("=")[0].strip(): int(text.split("=")[1]) for text in found[1].split(",") if text.strip()}


def constant(file: str, name: str) -> int:
    (value,) = re.findall(rf"\b{name} = (\d+)\b", SOURCES[file])
    return int(value)


@pytest.mark.parametrize("struct", abi._STRUCTS)
def test_structs_have_the_same_fields_in_the_same_order(struct: str) -> None:
    assert fields(struct) == [tuple(field) for field in abi._STRUCTS[struct]._fields_]


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("params.h", "kBlockRows", tile_order.BLOCK_ROWS),
        ("params.h", "kFc1Columns", tile_order.FC1_TILE_COLUMNS),
        ("params.h", "kFc2Columns", tile_order.FC2_TILE_COLUMNS),
        ("params.h", "kTokensPerBlock", memory.TOKENS_PER_BLOCK),
        ("params.h", "kMaxTopK", MAX_TOP_K),
        ("params.h", "kMaxLocalExperts", abi.MAX_LOCAL_EXPERTS),
        ("params.h", "kMaxExperts", abi.MAX_EXPERTS),
        ("params.h", "kCounterWords", memory.COUNTER_WORDS),
        ("params.h", "kBackwardCounters", memory.COUNTERS_PER_BLOCK),
        ("tile_order.h", "kBandPairs", tile_order.BAND_PAIRS),
        ("tile_order.h", "kMostLag", tile_order.MOST_BACKWARD_LAG),
        ("mainloop.cuh", "kTileColumns", memory.BACKWARD_TILE_COLUMNS),
        ("mainloop.cuh", "kWeightRows", abi.WEIGHT_BOX_ROWS),
        ("mainloop.cuh", "kBoxRows", abi.BOX_ROWS),
    ],
)
def test_constants_are_the_same(file: str, name: str, value: int) -> None:
    assert constant(file, name) == value


def test_numbers_that_stand_for_something() -> None:
    assert enumerators("ProbsType") == {"kFloat32": 0, "kBfloat16": 1, "kFloat64": 2}
    assert {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2} == abi.PROBS_TYPES
    assert enumerators("GradType") == {"kFloat32": 0, "kBfloat16": 1}
    assert {torch.float32: 0, torch.bfloat16: 1} == grad_tables.GRAD_TYPES
    phases = enumerators("Phase")
    assert list(phases.values()) == list(range(len(failures._PHASES)))
    assert failures._PHASES[phases["kOpen"]] == "opening" and failures._PHASES[phases["kRing"]] == "ring"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("kTimeout", "waited longer than the time limit for rank 1"),
        ("kPeerFailed", "rank 1 failed and said so"),
        ("kTooManyRoutes", "token 4 is routed to 3 experts, more than top_k=2"),
    ],
)
def test_messages_belong_to_their_codes(code: str, message: str) -> None:
    record = abi.FailRecord(code=enumerators("FailCode")[code], peer=1, want=2, seen=3, where=4)
    assert message in failures.describe(record)


def test_row_blocks_fit_the_tile_tables_words() -> None:
    pairs = 1 << (32 - constant("tile_order.h", "kOddBits"))
    assert pairs * 2 * tile_order.BLOCK_ROWS == workspace._MOST_ROWS
