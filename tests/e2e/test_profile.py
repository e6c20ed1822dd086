"""`quire profile` on a real engine: every tier is measured, and hits cost less than computing."""

import asyncio
from pathlib import Path

from e2e.disagg.servers import model_of
from e2e.exactness.subjects import PAGE, TINY_LLAMA
from quire.engine.config import EngineConfig
from quire.replay.measure import measure


def test_a_machine_is_measured_by_its_own_engine(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(model_of(TINY_LLAMA)),
        name="tiny",
        page_size=PAGE,
        device_bytes=16 << 20,
        host_bytes=32 << 20,
        store=f"file://{tmp_path}/store?max=256MiB",
        prefetch_threshold=PAGE,
        threads=1,
    )
    told: list[tuple[str, int, int]] = []
    found = asyncio.run(measure(config, repeats=1, progress=lambda *what: told.append(what)))
    assert (found.model, found.device, found.dtype) == ("tiny", "cpu", "float32")
    assert found.bytes_per_token > 0
    assert found.s_per_token > 0
    assert told[-1][1:] == (1, 1)
    assert len({what for what, _, _ in told}) == 3
