#!/usr/bin/env python3
"""Write the tables of docs/flags.md from the cases that the tests try: which options of Megatron work with ``mok``.

Usage: scripts/update_flags_doc.py [--check | --seen WHERE_AND_WHEN RESULTS.xml...]

--seen first notes in tests/data/flags_seen.json which trials on a GPU passed: WHERE_AND_WHEN is what the page says of
them ("H200, 2026-11-30"), the files are pytest's --junitxml of tests/test_cuda_flags.py. What failed is no longer seen.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
SEEN = ROOT / "tests" / "data" / "flags_seen.json"
"""Test of tests/test_cuda_flags.py -> where and when it was last seen to pass."""
sys.path.insert(0, str(ROOT))

from mok_megatron.refusals import REFUSALS, flag_of  # noqa: E402
from scripts.update_options_doc import fill_blocks, table, update  # noqa: E402
from tests.flag_cases import CASES, FlagCase, Layout  # noqa: E402
from tests.flag_fields import OUTSIDE  # noqa: E402
from tests.flag_refusals import ELSEWHERE, NOT_YET_IN_A_RELEASE, TRIGGERS  # noqa: E402
from tests.pretrain import CASES as TRAININGS  # noqa: E402

FLAGS = {
    "num_moe_experts": "--num-experts",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    **{refusal.field: refusal.flag for refusal in REFUSALS if refusal.flag.startswith("--")},
}
"""Flags that are named otherwise than their field."""

NO_FLAG = {
    *("moe_router_topk_limited_devices", "variable_seq_lengths", "params_dtype", "gated_linear_unit"),
    *("activation_func", "add_bias_linear", "bias_activation_fusion", "quant_recipe", "use_kitchen", "cpu_offloading"),
    *(refusal.field for refusal in REFUSALS if refusal.flag and not refusal.flag.startswith("--")),
}
"""Fields that no flag sets to the value that is tried."""


def case_flags(case: FlagCase) -> str:
    """The options of a case, as Markdown."""
    if case.options:
        return case.options
    if case.changes:
        return _flags(case.changes)
    arguments = f"{case.model} {case.gpu_training or ''}".strip()
    if not arguments and case.training:
        arguments = TRAININGS[case.training][1]
    return f"`{arguments}`" if arguments else ""


def _flags(changes: Mapping[str, Any]) -> str:
    return " ".join(f"`{_flag(name, value)}`" for name, value in changes.items())


def _flag(name: str, value: Any) -> str:
    if name in NO_FLAG:
        return f"{name}={_shown(value)}"
    flag = FLAGS.get(name, flag_of(name))
    if value is True:
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join([flag, *map(str, values)])


def _shown(value: Any) -> str:
    if type(value) is object:
        return "..."
    return getattr(value, "__name__", None) or repr(value)


def gpu_tests(case: FlagCase) -> dict[str, str]:
    """What a trial on a GPU says -> the test of tests/test_cuda_flags.py."""
    name, tests = f"{case.group}: {case.title}", {}
    if case.te:
        tests["TE layer"] = f"test_layers_with_transformer_engine[{case.title}]"
    if case.gpu_training is not None:
        tests["TE training"] = f"test_trainings_are_those_of_alltoall[{name}]"
    if case.gpu_training:
        tests["TE bits"] = f"test_what_saves_memory_or_launches_changes_no_bit[{name}]"
    return tests


def note_seen(label: str, results: Iterable[Path]) -> None:
    """Bring ``SEEN`` up to date with pytest's results. Raises ValueError for a test that no case has."""
    seen = json.loads(SEEN.read_text(encoding="utf-8"))
    tests = {test for case in CASES for test in gpu_tests(case).values()}
    for path in results:
        for result in ElementTree.parse(path).iter("testcase"):
            test = result.get("name", "")
            if test not in tests and "[" in test:
                raise ValueError(f"{path}: no case of tests/flag_cases.py has the test {test}")
            seen.pop(test, None)
            if test in tests and not len(result):  # failures, errors and skips are children
                seen[test] = label
    SEEN.write_text(json.dumps(dict(sorted(seen.items())), indent=1) + "\n", encoding="utf-8")


def _trials(case: FlagCase, seen: Mapping[str, str]) -> str:
    trials = []
    if case.layer:
        layouts = "" if case.layouts == FlagCase.layouts else f" ({', '.join(map(_layout, case.layouts))})"
        trials.append(f"layer{layouts}")
    if case.training:
        trials.append(f"training `{case.training}`")
    trials += [f"{trial} ({seen.get(test, 'not yet seen')})" for trial, test in gpu_tests(case).items()]
    return "; ".join([*trials, *(f"`tests/{test}`" for test in case.tests)])


def _layout(layout: Layout) -> str:
    parts = [("TP", layout.tensor), ("CP", layout.context), ("EP", layout.world)]
    return " ".join(f"{name} {size}" for name, size in parts if size > 1)


def _works() -> str:
    sections, seen = [], json.loads(SEEN.read_text(encoding="utf-8"))
    for group in dict.fromkeys(case.group for case in CASES):
        rows = [
            (case.title, case_flags(case), _trials(case, seen), case.note) for case in CASES if case.group == group
        ]  # fmt: skip
        sections.append(f"### {group}\n\n{table(('What', 'Options', 'Tried by', ''), rows)}")
    return "\n\n".join(sections)


def _refused() -> Iterable[tuple[str, str]]:
    seen: dict[str, int] = {}
    for refusal in REFUSALS:
        number = seen.get(refusal.field, 0)
        seen[refusal.field] = number + 1
        changes = TRIGGERS[refusal.field][number]
        value = changes.get(refusal.field, 2)
        message = refusal.message("..." if type(value) is object else value)
        newer = " (in no release of Megatron yet)" if refusal.field in NOT_YET_IN_A_RELEASE else ""
        yield _flags(changes) + newer, message.removeprefix("moe_token_dispatcher_type='mok' ")


def render(page: str) -> str:
    """The page with its tables as the cases say. Raises ValueError for a table that has no place in the page."""
    outside = ((why, ", ".join(f"`{name}`" for name in names.split())) for why, names in OUTSIDE.items())
    elsewhere = ((what, f"... {message}", f"`tests/{test.partition('::')[0]}`") for what, message, test in ELSEWHERE)
    blocks = {
        "works": _works(),
        "refused": table(("Options", "Message"), _refused()),
        "elsewhere": table(("What", "Message", "Tried by"), elsewhere),
        "outside": table(("Why", "Fields"), outside),
    }
    return fill_blocks(page, blocks, PAGE)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--seen"]:
        note_seen(arguments[1], map(Path, arguments[2:]))
    check = arguments == ["--check"]
    return update(PAGE, render, check=check, source="the cases say", script="scripts/update_flags_doc.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
