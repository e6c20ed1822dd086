from collections.abc import Iterator

import pytest

from e2e.disagg.fleet import Fleet, starting
from e2e.disagg.transports import CHOSEN, skip_unless_installed


@pytest.fixture(autouse=True, scope="session")
def installed() -> None:
    skip_unless_installed(CHOSEN)


@pytest.fixture(scope="session")
def whole_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with starting(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(whole_fleet: Fleet) -> Iterator[Fleet]:
    """Two prefill and two decode servers behind a router, all of them up. Whatever a test does to
    them, those that live hold nothing afterwards."""
    whole_fleet.mend()
    yield whole_fleet
    whole_fleet.settle()
