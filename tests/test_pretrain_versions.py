"""The same script trains with ``mok`` under the older releases of megatron-core, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_cpu.client import PretrainServer
from tests.megatron_versions import environment, megatron_versions
from tests.pretrain import Pretrain, assert_same


@pytest.mark.parametrize("version", megatron_versions()[:-1])
def test_equals_alltoall(corpus: Path, tmp_path: Path, version: str) -> None:
    server = PretrainServer(tmp_path, environment(version))
    try:
        pretrain = Pretrain(server, corpus)
        mok, alltoall = (pretrain.run("ep2-edp2-overlap", dispatcher) for dispatcher in ("mok", "alltoall"))
    finally:
        server.close()
    assert mok[0].megatron.startswith(version)
    assert_same(mok, alltoall, 2e-6)
