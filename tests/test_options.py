"""Options of the backend: flags, configure(), YAML file, precedence, refusals."""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import mok_megatron
from mok_megatron import options
from mok_megatron.config import MokConfig

SAMPLE: dict[str, tuple[Any, list[str]]] = {
    "backend": ("reference", ["--mok-backend", "reference"]),
    "comm_sms": (16, ["--mok-comm-sms", "16"]),
    "ring_rows": (4096, ["--mok-ring-rows", "4096"]),
    "recompute": (True, ["--mok-recompute"]),
    "save_x": (False, ["--no-mok-save-x"]),
    "time_limit_s": (2.5, ["--mok-time-limit-s", "2.5"]),
    "max_tokens": (8192, ["--mok-max-tokens", "8192"]),
}


@pytest.fixture(autouse=True)
def _fresh_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(options, "_sources", options._Sources())
    monkeypatch.delenv(options.CONFIG_VARIABLE, raising=False)
    yield


def _parse(*arguments: str) -> argparse.Namespace:
    return options.add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(arguments)


def _file(folder: Path, text: str) -> str:
    path = folder / "mok.yaml"
    path.write_text(text)
    return str(path)


def test_every_option_of_the_config_is_in_this_table() -> None:
    assert set(SAMPLE) == {field.name for field in fields(MokConfig)}


@pytest.mark.parametrize("name", SAMPLE)
def test_each_flag_reaches_the_config_and_the_namespace(name: str) -> None:
    value, arguments = SAMPLE[name]
    namespace = _parse(*arguments)
    assert getattr(namespace, f"mok_{name}") == value
    assert options.current() == replace(MokConfig(), **{name: value})


def test_nothing_given_is_the_default() -> None:
    _parse()
    assert options.current() == MokConfig()


def test_precedence_flag_python_file_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.CONFIG_VARIABLE, _file(tmp_path, "comm_sms: 1\nring_rows: 1\ntime_limit_s: 1.0\n"))
    assert options.current() == MokConfig(comm_sms=1, ring_rows=1, time_limit_s=1.0)
    mok_megatron.configure(comm_sms=2, ring_rows=2)
    assert options.current() == MokConfig(comm_sms=2, ring_rows=2, time_limit_s=1.0)
    _parse("--mok-comm-sms", "3")
    assert options.current() == MokConfig(comm_sms=3, ring_rows=2, time_limit_s=1.0)


def test_the_file_of_the_flag_wins_over_that_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.CONFIG_VARIABLE, str(tmp_path / "missing.yaml"))
    with pytest.raises(OSError, match=r"missing\.yaml"):
        options.current()
    _parse("--mok-config", _file(tmp_path, "backend: reference"))
    assert options.current() == MokConfig(backend="reference")


def test_a_new_parser_forgets_the_flags_of_the_last() -> None:
    _parse("--mok-comm-sms", "3")
    _parse()
    assert options.current() == MokConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mok-comm-sms", "0"], "--mok-comm-sms: comm_sms must be an integer >= 1, got 0"),
        (["--mok-comm-sms", "many"], "--mok-comm-sms: invalid int value: 'many'"),
        (["--mok-backend", "cpu"], "--mok-backend: invalid choice: 'cpu'"),
        (["--mok-time-limit-s", "-1"], "--mok-time-limit-s: time_limit_s must be a positive number"),
        (["--mok-max-tokens", "0"], "--mok-max-tokens: max_tokens must be an integer >= 1, got 0"),
        (["--mok-comm-sm", "3"], "unrecognized arguments: --mok-comm-sm 3"),
        (["--mok-config", "/nowhere/mok.yaml"], "/nowhere/mok.yaml"),
    ],
)
def test_bad_flags_end_the_parse(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(*arguments)
    assert message in capsys.readouterr().err
    assert options.current() == MokConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("comm_smss: 3", "unknown option(s) comm_smss; known options are backend, comm_sms"),
        ("comm_sms: three", "comm_sms must be an integer >= 1, got 'three'"),
        ("- comm_sms", "expected a mapping of options, got list"),
        ("comm_sms: [", "not valid YAML"),
    ],
)
def test_bad_files_end_the_parse(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(SystemExit):
        _parse("--mok-config", path)
    assert message in capsys.readouterr().err
    monkeypatch.setenv(options.CONFIG_VARIABLE, path)
    with pytest.raises(ValueError, match=re.escape(message)):
        options.current()


def test_configure_refuses_and_then_changes_nothing() -> None:
    mok_megatron.configure(comm_sms=2)
    for bad, message in (({"comm_sms": 0}, "comm_sms must be"), ({"sms": 3}, "unknown option")):
        with pytest.raises(ValueError, match=message):
            mok_megatron.configure(**bad)
    assert mok_megatron.configure(recompute=True) == MokConfig(comm_sms=2, recompute=True)
    assert mok_megatron.configure() == MokConfig()


def test_flags_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _parse("--mok-comm-sms", "3")
    with caplog.at_level(logging.WARNING):
        options.warn_if_unused()
        options.warn_if_unused()
    assert [record.getMessage() for record in caplog.records] == [
        "mok_megatron: --mok-comm-sms without effect: moe_token_dispatcher_type is not 'mok'"
    ]


def test_every_option_has_a_help_text() -> None:
    assert set(options.descriptions()) == {field.name for field in fields(MokConfig)}


def test_the_page_of_options_shows_what_the_code_says() -> None:
    script = Path(__file__).parent.parent / "scripts" / "update_options_doc.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
