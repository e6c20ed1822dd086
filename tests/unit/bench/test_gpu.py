"""`quire bench gpu` on a tiny model without a GPU: what it counts, and that it runs to its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.bench.gpu.floors import Machine, Needs
from quire.bench.gpu.model import SHAPES, write_model
from quire.errors import ConfigError
from unit.cli_support import command


def spec(name: str) -> SimpleNamespace:
    shape = SHAPES[name]
    return SimpleNamespace(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        mlp_size=shape["intermediate_size"],
        num_q_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
    )


def test_floors_of_the_real_shape_are_those_counted_by_hand() -> None:
    """8.19 billion parameters, 0.62 of them in the embedding, which no step reads whole."""
    needs = Needs.of(spec("qwen3-8b"))  # type: ignore[arg-type]
    assert needs.weight_bytes == pytest.approx(2 * (8.19e9 - 0.62e9), rel=0.01)
    assert needs.kv_bytes == 36 * 2 * 8 * 128 * 2
    machine = Machine("", 4.3e12, 790e12, 55e9)
    assert needs.decode_s(machine, 1, 1000) == pytest.approx(3.55e-3, rel=0.02)
    assert needs.decode_s(machine, 64, 3500) == pytest.approx(11.2e-3, rel=0.02)
    assert needs.prompt_ops(32768) == pytest.approx(772e12, rel=0.03)


def test_an_unknown_shape_is_refused(tmp_path) -> None:
    import torch

    with pytest.raises(ConfigError, match="tiny"):
        write_model(tmp_path / "m", "huge", device=torch.device("cpu"))


def test_it_measures_everything_beside_its_floor(tmp_path, capsys, monkeypatch) -> None:
    quire = command(capsys, monkeypatch)
    options = ["--shape", "tiny", "--device", "cpu", "--device-memory", "64MiB"]
    options += ["--host-memory", "64MiB", "--page-size", "16", "--keep", str(tmp_path / "model")]
    result = quire("bench", "gpu", *options, "--json").json
    assert [row["batch"] for row in result["decode"]] == [1, 4]
    for row in result["decode"] + result["prompts"]:
        assert row["floor_ms"] > 0
    hits = result["hits"][-1]
    assert (hits["device_tokens"], hits["host_tokens"]) == (496, 496)
    assert "from token to token" in quire("bench", "gpu", *options).out
