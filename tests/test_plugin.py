"""How the plugin gets into Megatron: autoload, launcher, import; off switches; what it does where it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_versions import import_path, megatron_versions

ROOT = Path(__file__).parent.parent
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
DISABLED = {"MOK_MEGATRON_DISABLE": "1"}


def _python(
    code: str, *arguments: str, path: tuple[Path, ...] = (), env: dict[str, str] | None = None, expect: int = 0
) -> str:
    """Run code in a fresh process with the repository (and ``path`` before it) importable; its output."""
    return _run(["-c", textwrap.dedent(code), *arguments], path=path, env=env, expect=expect)


def _run(command: list[str], *, path: tuple[Path, ...] = (), env: dict[str, str] | None = None, expect: int = 0) -> str:
    search = os.pathsep.join(map(str, (*path, ROOT)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MOK_", "TORCH_DEVICE_BACKEND"))}
    environment.update({"PYTHONPATH": search, "OMP_NUM_THREADS": "1", **(env or {})})
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == expect, output
    return output


def _last_json(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


# What importing costs.


def test_importing_the_package_is_cheap_and_imports_nothing() -> None:
    seconds = float(
        _python(
            """
            import sys, time
            start = time.perf_counter()
            import mok_megatron.autoload
            mok_megatron.autoload.activate()
            spent = time.perf_counter() - start
            heavy = {"torch", "megatron", "yaml", "numpy"} & set(sys.modules)
            assert not heavy, heavy
            print(spent)
            """
        )
    )
    assert seconds < 0.25  # milliseconds on an idle machine


def test_import_torch_loads_the_plugin_and_creates_no_context() -> None:
    _python(
        """
        import sys, torch
        from mok_megatron import hooks
        assert any(isinstance(f, hooks._PostImportFinder) for f in sys.meta_path)
        assert not torch.cuda.is_initialized()
        assert not [name for name in sys.modules if name.startswith("megatron.")]
        assert "mok_megatron.plugin" not in sys.modules
        """
    )


_HAS_MOK = """
import typing
from megatron.core.transformer.transformer_config import TransformerConfig
kind = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"].type
print("HAS MOK", typing.get_args(kind).count("mok"))
"""


@pytest.mark.parametrize(
    ("before", "env", "count"),
    [
        ("import torch", {}, 1),
        ("import torch", NO_AUTOLOAD, 0),
        ("import torch", DISABLED, 0),
        ("import mok_megatron", NO_AUTOLOAD, 1),
        ("import mok_megatron", DISABLED, 0),
        # Whatever comes first, and however often.
        ("import megatron.core.transformer.moe.moe_layer, mok_megatron", NO_AUTOLOAD, 1),
        ("import megatron.core.transformer.transformer_config, mok_megatron", NO_AUTOLOAD, 1),
        ("import mok_megatron.hooks as hooks; hooks.install(); hooks.install()", NO_AUTOLOAD, 1),
    ],
)
def test_switches_and_orders(before: str, env: dict[str, str], count: int, tmp_path: Path) -> None:
    assert f"HAS MOK {count}" in _python(before + _HAS_MOK, path=(_fake_megatron(tmp_path),), env=env)


def test_what_the_patches_leave_as_it_was() -> None:
    _python(
        """
        import importlib, inspect, sys, typing
        import mok_megatron
        from mok_megatron import hooks
        from megatron.core.transformer import transformer_config as config
        from megatron.core.transformer.moe import moe_layer as layer
        for module in (config, layer):
            assert type(module.__loader__).__name__ == "SourceFileLoader", module.__loader__
            assert module.__spec__.loader is module.__loader__
        assert "moe_token_dispatcher_type" in inspect.getsource(config.TransformerConfig)
        post_init, new = config.TransformerConfig.__post_init__, layer.MoELayer.__new__
        hooks.install()
        assert config.TransformerConfig.__post_init__ is post_init and layer.MoELayer.__new__ is new
        importlib.reload(config)
        kind = config.TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"].type
        assert typing.get_args(kind).count("mok") == 1
        assert config.TransformerConfig.__post_init__ is not post_init

        # A subclass of MoELayer cannot be replaced; a copy or a pickle keeps our class.
        from types import SimpleNamespace
        MoELayer = layer.MoELayer
        class Mine(MoELayer): pass
        mok, other = (SimpleNamespace(moe_token_dispatcher_type=name) for name in ("mok", "alltoall"))
        assert type(MoELayer.__new__(MoELayer, config=mok)).__name__ == "MokMoELayer"
        assert type(MoELayer.__new__(MoELayer, mok)).__name__ == "MokMoELayer"
        assert type(MoELayer.__new__(MoELayer, other)) is MoELayer
        assert type(Mine.__new__(Mine, other)) is Mine
        ours = type(MoELayer.__new__(MoELayer, mok))
        assert type(ours.__new__(ours)) is ours  # as copy and pickle do
        try:
            Mine.__new__(Mine, mok)
        except ValueError as error:
            assert "cannot replace its subclass __main__.Mine" in str(error)
        else:
            raise AssertionError("accepted")
        """
    )


# Where it does not fit.

_FAKE_CONFIG = """
from dataclasses import dataclass
from typing import Literal, Optional
@dataclass
class TransformerConfig:
    num_moe_experts: Optional[int] = None
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    def __post_init__(self):
        self.built = True
"""
_FAKE_LAYER = """
class MoETokenDispatcher:
    def dispatch_preprocess(self, tokens, routing_map, probs): ...
    def token_dispatch(self, hidden_states, probs): ...
    def token_combine(self, hidden_states): ...
    def combine_postprocess(self, hidden_states): ...
def get_default_pg_collection(): ...
class MoELayer:
    def __init__(self, config, submodules=None, pg_collection=None): ...
    def preprocess(self, hidden_states, probs, routing_map): ...
    def dispatch(self, hidden_states, probs): ...
    def routed_experts_compute(self, hidden_states, probs): ...
    def combine(self, output): ...
    def postprocess(self, output, shared_expert_output): ...
    def set_layer_number(self, layer_number): ...
"""


def _fake_megatron(folder: Path, config: str = _FAKE_CONFIG, layer: str = _FAKE_LAYER, number: str = "0.99.0") -> Path:
    moe = folder / "megatron" / "core" / "transformer" / "moe"
    moe.mkdir(parents=True)
    for package in (moe, moe.parent, moe.parent.parent):
        (package / "__init__.py").write_text("")
    (moe.parent.parent / "__init__.py").write_text(f'__version__ = "{number}"\n')
    (moe.parent / "transformer_config.py").write_text(config)
    (moe / "moe_layer.py").write_text(layer)
    return folder


_ASK_FOR_MOK = """
import mok_megatron
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.moe import moe_layer
assert TransformerConfig(moe_token_dispatcher_type="alltoall").built
moe_layer.MoELayer(config=TransformerConfig())
try:
    TransformerConfig(moe_token_dispatcher_type="mok")
    print("ACCEPTED")
except Exception as error:
    print("REFUSED", type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "ACCEPTED"),
        ({"number": "0.16.1"}, "megatron-core 0.16.1 is older than 0.17"),
        ({"config": _FAKE_CONFIG.replace('Literal["allgather", "alltoall"]', "str")}, "expected a Literal"),
        ({"layer": _FAKE_LAYER.replace("routed_experts_compute", "experts_compute")}, "MoELayer has no routed_experts"),
        (
            {"layer": _FAKE_LAYER.replace("def combine(self, output)", "def combine(self, output, bias)")},
            "MoELayer.combine takes (self, output, bias), expected (self, output)",
        ),
        ({"layer": _FAKE_LAYER.replace("class MoELayer", "class MoE")}, "has no MoELayer"),
        (
            {"layer": _FAKE_LAYER + "    def __new__(cls, *a, **k): return object.__new__(cls)\n"},
            "MoELayer has a __new__ of its own",
        ),
    ],
)
def test_on_an_unfit_megatron_only_mok_fails_and_says_why(changes: dict[str, str], reason: str, tmp_path: Path) -> None:
    code = _ASK_FOR_MOK
    if "class MoE:" in changes.get("layer", ""):
        code = code.replace("moe_layer.MoELayer", "moe_layer.MoE")
    output = _python(code, path=(_fake_megatron(tmp_path, **changes),), env=NO_AUTOLOAD)
    assert reason in output
    if reason != "ACCEPTED":
        refused = next(line for line in output.splitlines() if line.startswith("REFUSED"))
        assert refused.startswith("REFUSED RuntimeError moe_token_dispatcher_type='mok' is not available")
        assert reason in refused
        assert f"megatron-core {changes.get('number', '0.99.0')}, torch " in refused
        assert "mok_megatron: cannot patch megatron.core" in output  # a warning, once, where it happened
    else:
        assert "cannot patch" not in output


def test_without_post_init_megatron_still_works(tmp_path: Path) -> None:
    config = _FAKE_CONFIG.split("    def __post_init__", maxsplit=1)[0] + "    built: bool = True\n"
    output = _python(_ASK_FOR_MOK, path=(_fake_megatron(tmp_path, config=config),), env=NO_AUTOLOAD)
    assert "TransformerConfig is not a dataclass with its own __post_init__" in output


def test_a_broken_plugin_breaks_neither_torch_nor_megatron(tmp_path: Path) -> None:
    output = _python(
        """
        import sys
        sys.modules["yaml"] = None  # the plugin's options need it
        import torch
        from megatron.core.transformer.transformer_config import TransformerConfig
        assert TransformerConfig().built
        print("FINE")
        """,
        path=(_fake_megatron(tmp_path),),
    )
    assert "FINE" in output
    assert "cannot patch megatron.core.transformer.transformer_config: ModuleNotFoundError: import of yaml" in output


# The launcher.


def _script(folder: Path) -> Path:
    (folder / "beside.py").write_text("VALUE = 7\n")
    script = folder / "pretrain.py"
    script.write_text(
        "import json, os, sys, beside\n"
        f"{_HAS_MOK}"
        "print('RESULT ' + json.dumps({'name': __name__, 'argv': sys.argv[1:], 'file': __file__,\n"
        "    'beside': beside.VALUE, 'rank': os.environ.get('RANK')}))\n"
    )
    return script


def test_the_launcher_runs_a_script_as_python_would(tmp_path: Path) -> None:
    script, megatron = _script(tmp_path), _fake_megatron(tmp_path / "fake")
    output = _run(["-m", "mok_megatron.launch", str(script), "--lr", "1"], path=(megatron,), env=NO_AUTOLOAD)
    assert "HAS MOK 1" in output
    expected = {"name": "__main__", "argv": ["--lr", "1"], "file": str(script), "beside": 7, "rank": None}
    assert _last_json(output) == expected


def test_the_launcher_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "mok_megatron.launch"]
    megatron = _fake_megatron(tmp_path / "fake")
    output = _run([*torchrun, str(_script(tmp_path)), "--lr", "1"], path=(megatron,), env=NO_AUTOLOAD)
    assert "HAS MOK 1" in output
    assert _last_json(output)["rank"] == "0"


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ([], {}, "usage: python -m mok_megatron.launch SCRIPT"),
        (["nowhere.py"], {}, "no such script: nowhere.py"),
        ([__file__], DISABLED, "MOK_MEGATRON_DISABLE=1 switches the plugin off"),
    ],
)
def test_the_launcher_says_what_is_wrong(arguments: list[str], env: dict[str, str], message: str) -> None:
    assert message in _run(["-m", "mok_megatron.launch", *arguments], env=env, expect=1)


# Real releases.


@pytest.mark.parametrize("number", megatron_versions())
def test_real_megatron_parses_the_flags_and_runs_the_layer(number: str) -> None:
    found = _last_json(_run(["-m", "tests.wheel_check"], path=import_path(number)))
    assert found["version"] == number
    assert found["classes"] == {"alltoall": "MoELayer", "mok": "MokMoELayer"}
    assert found["config"] == found["experts' config"] == "mok"
    assert all(error < 1e-6 for error in found["errors"].values()), found["errors"]
    assert found["undecided"] == []
    assert found["dispatcher"] == "mok"
    assert found["options"] == ["reference", 4]
    for choices in found["choices"].values():
        assert choices == ["allgather", "alltoall", "flex", "mok"]
