"""The corpus: the same bytes every time, readable back through Megatron, complete or made anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scripts import prepare_corpus

SIZE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    prepare_corpus.prepare(folder, SIZE)
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_second_corpus_is_the_same(folder: Path, tmp_path: Path) -> None:
    prepare_corpus.prepare(tmp_path, SIZE)
    assert _files(tmp_path) == _files(folder)


def test_megatron_reads_the_text_back(folder: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    unset = {"special_tokens": None, "chat_template": None, "metadata_path": None, "pad_vocab_size": False}
    tokenizer = build_tokenizer(SimpleNamespace(**prepare_corpus.tokenizer_options(folder), **unset))
    assert tokenizer.vocab_size == prepare_corpus.VOCAB_SIZE
    dataset = IndexedDataset(str(folder / "corpus"))
    first = dataset[0]
    assert first.dtype == np.uint16 and first[-1] == tokenizer.eod
    text = next(prepare_corpus.documents())[: prepare_corpus.MAX_DOCUMENT_CHARS]
    assert tokenizer.detokenize(first[:-1].tolist()) == text
    assert sum(dataset.sequence_lengths) <= SIZE * 2**20


def test_complete_folder_is_left_alone_and_another_size_is_not(folder: Path, tmp_path: Path) -> None:
    small = prepare_corpus.prepare(tmp_path, SIZE / 2)
    before = (tmp_path / "corpus.bin").stat().st_mtime_ns
    assert prepare_corpus.prepare(tmp_path, SIZE / 2) == small
    assert (tmp_path / "corpus.bin").stat().st_mtime_ns == before
    assert prepare_corpus.prepare(tmp_path, SIZE)["tokens"] > small["tokens"]
    assert (tmp_path / "corpus.bin").read_bytes() == (folder / "corpus.bin").read_bytes()


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_size_without_meaning_is_refused(tmp_path: Path, size: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        prepare_corpus.prepare(tmp_path, size)
