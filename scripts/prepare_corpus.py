"""Make a text corpus that every machine has: the running Python's help topics and standard library source.

``prepare_corpus.py FOLDER`` writes into the folder:

- ``tokenizer/bytes.json``: a byte-level vocabulary for Megatron's ``TikTokenizer``: one token per byte, 8 special ones;
- ``corpus.bin`` and ``corpus.idx``: the documents, tokenized by that tokenizer, in Megatron's indexed format;
- ``corpus.json``: what went in, written last; a folder that has it is complete and is left as it is.

The result depends on nothing but the Python version and the options. Train on it with ``training_args(FOLDER)``.
"""

from __future__ import annotations

import argparse
import base64
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_SPECIAL_TOKENS = 8
VOCAB_SIZE = NUM_SPECIAL_TOKENS + 256
DEFAULT_MEBIBYTES = 4.0
MAX_DOCUMENT_CHARS = 20_000
"""Longer documents are cut, so that no single module fills a small corpus."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}


def tokenizer_options(folder: Path) -> dict[str, Any]:
    """Megatron's options for the tokenizer in ``folder``: the one statement for preparing and for training."""
    return {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": str(folder / "tokenizer" / "bytes.json"),
        "tiktoken_pattern": "v2",
        "tiktoken_num_special_tokens": NUM_SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
    }


def training_args(folder: Path) -> list[str]:
    """Megatron's command line arguments to train on the corpus in ``folder``."""
    args = ["--data-path", str(folder / "corpus"), "--data-cache-path", str(folder / "cache")]
    for name, value in tokenizer_options(folder).items():
        args += [f"--{name.replace('_', '-')}", str(value)]
    return args


def documents() -> Iterator[str]:
    """The texts in a fixed order: help topics by name, then library modules by path."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not _NOT_LIBRARY.intersection(path.relative_to(library).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def prepare(folder: Path, mebibytes: float = DEFAULT_MEBIBYTES) -> dict[str, Any]:
    """Write the corpus, of at most ``mebibytes``, unless it is there; returns what ``corpus.json`` holds.

    Raises ValueError for a size that is not positive.
    """
    if not mebibytes > 0:
        raise ValueError(f"the size of the corpus must be positive, got {mebibytes} MiB")
    facts_path = folder / "corpus.json"
    source = {"python": platform.python_version(), "mebibytes": mebibytes}
    if facts_path.exists():
        facts: dict[str, Any] = json.loads(facts_path.read_text(encoding="utf-8"))
        if {key: facts.get(key) for key in source} == source:
            return facts
        facts_path.unlink()
    _write_vocabulary(folder / "tokenizer" / "bytes.json")
    facts = source | _write_documents(folder, max_tokens=int(mebibytes * 2**20))
    facts_path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def _write_vocabulary(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": chr(byte)}
        for byte in range(256)
    ]
    path.write_text(json.dumps(tokens), encoding="utf-8")


def _write_documents(folder: Path, max_tokens: int) -> dict[str, int]:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    unset = {"special_tokens": None, "chat_template": None, "metadata_path": None, "pad_vocab_size": False}
    tokenizer = build_tokenizer(SimpleNamespace(**tokenizer_options(folder), **unset))
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=DType.optimal_dtype(VOCAB_SIZE))
    lengths: list[int] = []
    for text in documents():
        ids = torch.tensor([*tokenizer.tokenize(text[:MAX_DOCUMENT_CHARS]), tokenizer.eod])
        if sum(lengths) + len(ids) > max_tokens:
            break
        builder.add_item(ids)
        builder.end_document()
        lengths.append(len(ids))
    builder.finalize(str(folder / "corpus.idx"))
    return {"documents": len(lengths), "tokens": sum(lengths)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a text corpus from the running Python's own library.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mebibytes", type=float, default=DEFAULT_MEBIBYTES, help="size limit (default: %(default)s)")
    options = parser.parse_args()
    facts = prepare(options.folder, options.mebibytes)
    print(f"{options.folder}: {facts['documents']} documents, {facts['tokens']} tokens")
    print("train with:", *training_args(options.folder))


if __name__ == "__main__":
    main()
