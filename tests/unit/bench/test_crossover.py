"""The crossover of computing and fetching, on a tiny model without a GPU: that it runs to its end,
and that what is said to be fetched was. How fast is not looked at."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from quire.bench.gpu.crossover import measure
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.random_model import RandomModel, write_outline
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.manager import Way


def test_every_way_is_measured_at_every_speed(tmp_path: Path) -> None:
    spec = write_outline(tmp_path / "model", "tiny")
    model = RandomModel(spec, torch.bfloat16, torch.device("cpu")).make()
    config = EngineConfig(
        model=str(tmp_path / "model"),
        name="tiny",
        dtype="bfloat16",
        page_size=16,
        device_bytes=32 << 20,
        host_bytes=32 << 20,
        chunk_tokens=64,
        threads=1,
    )
    with closing(build_engine(config, model=model)) as engine:
        prompt = np.random.default_rng(1).integers(0, 512, 1025, dtype=np.int32)
        found = measure(Drive(engine), prompt, tmp_path, ratios=(0.5, 2.0), repeats=1)
        assert [row["ratio"] for row in found["rows"]] == [0.5, 2.0]
        for row in found["rows"]:
            assert min(row[f"{way}_ms"] for way in (*Way, "chosen")) > 0
            assert [Way(way) for way in row["chosen"]]
        counters = engine.manager.counters
        assert counters.meetings >= 2
        assert counters.fetched_pages >= 2 * 64
        assert 0 <= found["right_share"] <= 1
