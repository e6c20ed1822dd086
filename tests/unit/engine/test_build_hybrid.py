"""A model that fails its self-check is served without reuse, loudly."""

import msgspec
import numpy as np
import pytest

from hybrid_models import TINY
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.messages import CachedTokens, Generate, Outputs, SamplingParams
from quire.engine.recurrent_states import RecurrentStates
from quire.types import NO_SLOT, RequestId

PROMPT = list(range(3, 100))


def answer(engine, name: str) -> tuple[list[int], CachedTokens]:
    tokens = np.array(PROMPT, dtype="<i4").tobytes()
    params = SamplingParams(max_tokens=6, temperature=0)
    engine.handle(Generate(RequestId(name), tokens, params))
    found, cached = [], CachedTokens()
    while True:
        engine.step()
        for message in engine.take_messages():
            for output in message.outputs if isinstance(message, Outputs) else []:
                assert not output.error
                found += output.tokens
                cached = output.cached or cached
                if output.finish is not None:
                    return found, cached


def build(directory):
    return build_engine(
        EngineConfig(
            model=str(directory), name="m", device_bytes=4 << 20, host_bytes=4 << 20, threads=1
        )
    )


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return TINY["falcon_h1"](tmp_path / "model")


def test_reuse_is_off_and_said_to_be_when_a_state_is_not_restored(
    directory, tmp_path, monkeypatch, capsys
):
    engine = build(directory)
    try:
        assert engine.info.no_reuse == ""
        right, _ = answer(engine, "a")
        assert answer(engine, "b")[1].device > 0
    finally:
        engine.close()
    assert list((tmp_path / "cache" / "usage").glob("*.json"))
    assert "REUSE IS OFF" not in capsys.readouterr().err

    plan = RecurrentStates._plan

    def forgetful(self, segments):
        return plan(self, [msgspec.structs.replace(s, restore=NO_SLOT) for s in segments])

    monkeypatch.setattr(RecurrentStates, "_plan", forgetful)
    engine = build(directory)
    try:
        assert "REUSE IS OFF" in capsys.readouterr().err
        assert engine.info.no_reuse
        assert not engine.status().reuse
        for name in ("c", "d"):
            assert answer(engine, name) == (right, CachedTokens())
    finally:
        engine.close()
