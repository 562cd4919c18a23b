"""Links between the documents and what the documents say about the command line hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mok_megatron import cli
from mok_megatron.model_config import load_model_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_at_something(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?:\./)?scripts/[\w./-]+\.(?:sh|py)", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_readme_lists_every_verb() -> None:
    actions: Any = cli.build_parser()._subparsers
    verbs = set(actions._group_actions[0].choices)
    listed = set(re.findall(r"^\| `mok-megatron (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == verbs


def test_the_config_in_the_docs_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configs.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert block is not None
    path = tmp_path / "example.yaml"
    path.write_text(block[1])
    total, active = load_model_config(path).num_params()
    assert (round(total / 1e9), round(active / 1e9)) == (671, 37)
    assert isinstance(yaml.safe_load(block[1]), dict)
