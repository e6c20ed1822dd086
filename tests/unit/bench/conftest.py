import pytest

from unit.bench.fake_server import Fake, serving


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def url(fake):
    with serving(fake) as address:
        yield address
