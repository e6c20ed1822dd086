"""The mixes of components that C9–C18 hold for."""

import pytest

from support import MIXES


@pytest.fixture(params=MIXES)
def mix(request: pytest.FixtureRequest) -> str:
    """What a rig is made of: each test that takes it runs for every mix."""
    return str(request.param)
