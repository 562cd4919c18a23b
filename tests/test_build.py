"""Building the kernel library: with a compiler that only writes a file, and, where there is one, with nvcc itself."""

from __future__ import annotations

import ctypes
import ctypes.util
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from mok_megatron import cli
from mok_megatron.backends import abi, build, library
from mok_megatron.backends.abi import Library

_COMPILER = """#!/bin/sh
echo "$@" >> {calls}
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo compiled > "$2"; fi
  shift
done
"""


@pytest.fixture(name="calls")
def _calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler under CUDA_HOME that records its calls in the file returned, sources and a cache of our own."""
    calls = tmp_path / "calls"
    _install(tmp_path, _COMPILER.format(calls=calls))
    sources = tmp_path / "kernels"
    (sources / "moe").mkdir(parents=True)
    (sources / "api.cu").write_text("one")
    (sources / "moe" / "tiles.cuh").write_text("two")
    monkeypatch.setattr(build, "kernels_dir", lambda: sources)
    monkeypatch.setattr(build, "SOURCES", {"sm90a": ("api.cu",), "sm100a": ("api.cu",)})
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("MOK_MEGATRON_CACHE", str(tmp_path / "cache"))
    return calls


def _install(folder: Path, script: str) -> None:
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(script)
    nvcc.chmod(0o755)


def _lines(calls: Path) -> list[str]:
    return calls.read_text().splitlines() if calls.exists() else []


def _left(calls: Path) -> list[str]:
    return sorted(path.name for path in (calls.parent / "cache").iterdir())


def test_compiled_once_for_the_architecture(calls: Path) -> None:
    first = build.build("sm90a")
    assert first.read_text() == "compiled\n" and first == build.library_path("sm90a")
    assert build.build("sm90a") == first
    (line,) = _lines(calls)
    assert "-gencode=arch=compute_90a,code=sm_90a" in line and "-Werror all-warnings" in line
    assert line.endswith(str(calls.parent / "kernels" / "api.cu"))
    assert _left(calls) == [first.parent.name]


def _change_a_source(calls: Path) -> None:
    (calls.parent / "kernels" / "moe" / "tiles.cuh").write_text("three")


def _add_a_header(calls: Path) -> None:
    (calls.parent / "kernels" / "new.h").write_text("")


def _rename_a_header(calls: Path) -> None:
    (calls.parent / "kernels" / "moe" / "tiles.cuh").rename(calls.parent / "kernels" / "moe" / "tile.cuh")


@pytest.mark.parametrize("change", [_change_a_source, _add_a_header, _rename_a_header])
def test_other_sources_are_compiled_again(change: Any, calls: Path) -> None:
    before = build.build("sm90a")
    change(calls)
    assert build.build("sm90a") != before
    assert len(_lines(calls)) == 2 and before.exists()


def test_other_flags_and_architectures_have_libraries_of_their_own(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {build.build("sm90a"), build.build("sm100a")}
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    paths.add(build.build("sm90a"))
    assert len(paths) == len(_lines(calls)) == 3


def test_files_that_are_no_sources_change_nothing(calls: Path) -> None:
    before = build.build("sm90a")
    (calls.parent / "kernels" / "notes.md").write_text("")
    assert build.build("sm90a") == before


def test_a_deleted_library_is_compiled_again(calls: Path) -> None:
    """As the message about a library of other sources says; its folder is still there."""
    build.build("sm90a").unlink()
    assert build.build("sm90a").exists()
    assert len(_lines(calls)) == 2


def _build_at(barrier: Any, results: Any) -> None:
    barrier.wait(30)
    results.put(str(build.build("sm90a")))


def test_processes_that_build_at_once_get_one_library(calls: Path) -> None:
    _install(calls.parent, _COMPILER.format(calls=calls).replace("while", "sleep 0.5\nwhile", 1))
    context = multiprocessing.get_context("fork")  # they inherit the patched sources
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_build_at, args=(barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    paths = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert paths == {str(build.library_path("sm90a"))}
    assert Path(paths.pop()).read_text() == "compiled\n"
    assert len(_lines(calls)) == 4, "none of them found it made: the test tests nothing"
    assert len(_left(calls)) == 1


def test_a_failed_rename_is_no_success(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_self: Path, _target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="disk full"):
        build.build("sm90a")


def test_a_failed_compilation_shows_what_the_compiler_said(calls: Path) -> None:
    _install(calls.parent, "#!/bin/sh\necho 'api.cu(3): error: no such thing' >&2\nexit 2\n")
    with pytest.raises(build.BuildError, match=r"nvcc failed with exit code 2(.|\n)*api.cu\(3\): error: no such"):
        build.build("sm90a")
    assert _left(calls) == []


def test_a_compiler_that_does_not_start(calls: Path) -> None:
    _install(calls.parent, "#!/no/such/interpreter\n")
    with pytest.raises(build.BuildError, match="nvcc could not be started: "):
        build.build("sm90a")
    assert _left(calls) == []


def test_a_compiler_that_does_not_end(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(calls.parent, "#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(build, "_TIME_LIMIT_S", 0.3)
    with pytest.raises(build.BuildError, match=r"nvcc took more than 0\.3 s"):
        build.build("sm90a")
    assert _left(calls) == []


def test_without_a_compiler_the_message_says_what_to_do(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(build.BuildError, match=r"no nvcc .* sm90a: install the CUDA 13 toolkit or set CUDA_HOME"):
        build.build("sm90a")
    assert not (calls.parent / "cache").exists()


def test_the_compiler_of_cuda_home_comes_first(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(calls.parent / "cuda" / "bin" / "nvcc")
    assert build.find_nvcc() == mine
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(Path(mine).parent))
    assert build.find_nvcc() == mine


@pytest.mark.parametrize("function", [build.build, build.library_path, build.check_architecture])
def test_an_architecture_without_kernels(function: Any) -> None:
    with pytest.raises(ValueError, match=r"no kernels for 'sm80'; there are kernels for .*sm90a"):
        function("sm80")


def test_the_verb_builds_each_architecture(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "--arch", "sm90a,sm100a"]) == 0
    paths = [build.library_path(architecture) for architecture in ("sm90a", "sm100a")]
    assert capsys.readouterr().out == f"sm90a: {paths[0]}\nsm100a: {paths[1]}\n"
    assert all(path.exists() for path in paths)


def test_the_verb_builds_nothing_when_one_architecture_is_unknown(
    calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", "--arch", "sm90a,sm80"]) == cli.EXIT_USER_ERROR
    assert "no kernels for 'sm80'" in capsys.readouterr().err
    assert _lines(calls) == []


def test_the_verb_says_why_it_failed(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _install(calls.parent, "#!/bin/sh\necho broken\nexit 1\n")
    assert cli.main(["build"]) == cli.EXIT_USER_ERROR
    assert "nvcc failed with exit code 1" in capsys.readouterr().err


def test_a_file_that_is_no_library(calls: Path) -> None:
    with pytest.raises(OSError, match=r"file too short|invalid ELF header"):
        Library(build.build("sm90a"))


def test_a_library_of_something_else() -> None:
    other = ctypes.util.find_library("c")
    assert other is not None
    with pytest.raises(RuntimeError, match="is not a mok_megatron kernel library: it has no mok_abi"):
        Library(Path(other))


@pytest.fixture(scope="module", name="compiled")
def _compiled() -> Path:
    """The library of the sources as they are; cached from run to run."""
    if build.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    return build.build("sm90a")


@pytest.mark.slow
def test_nvcc_builds_a_library_that_fits(compiled: Path) -> None:
    assert Library(compiled).path == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("struct", "changed", "message"),
    [
        ("CallParams", (*abi.CallParams._fields_, ("more", ctypes.c_int64)), "size of CallParams is"),
        (
            "ReopenParams",
            tuple(("counters", ctypes.c_void_p) if name == "dy" else ("dy", ctypes.c_void_p)
                  if name == "counters" else (name, kind) for name, kind in abi.ReopenParams._fields_),
            "offset of ReopenParams.counters is",
        ),
    ],
)  # fmt: skip
def test_a_mirror_that_differs_is_refused(
    struct: str, changed: Any, message: str, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = type(struct, (ctypes.Structure,), {"_fields_": changed})
    monkeypatch.setitem(abi._STRUCTS, struct, mirror)
    with pytest.raises(RuntimeError, match=rf"built from other sources: {message} \d+ there and \d+ here; delete"):
        Library(compiled)


@pytest.mark.slow
def test_without_a_gpu_the_library_says_so(compiled: Path) -> None:
    import torch

    if torch.cuda.device_count() > 0:
        pytest.skip("there is a GPU")
    reason = Library(compiled).load_kernels()
    assert reason is not None and reason.startswith(f"{compiled}: route kernel: ")


def test_a_cache_that_cannot_be_written_is_a_reason(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an exception: the ranks of a group decide together, so each has to hear of it."""
    import torch

    from mok_megatron.config import MoeShape

    (calls.parent / "cache").write_text("a file")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    shape = MoeShape(hidden=64, intermediate=64, num_experts=2, top_k=1)
    reason = library.cuda_unavailable_reason(torch.device("cuda", 0), shape, torch.bfloat16)
    assert reason is not None and str(calls.parent / "cache") in reason
