import pytest

from unit.server.scripted import Rig, ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def rig(engine: ScriptedEngine) -> Rig:
    return Rig(engine)
