"""How near the cache comes to an ideal one under pressure, on chats that share 20 system prompts.

In the user's words: what I cached and used lately is still found, whatever happens on the device.
The real traces are for `quire replay`; these are small enough for every run of the tests.
"""

import pytest

from quire.config import WritePolicy
from quire.replay.bounds import IdealLru, hits_of
from quire.replay.occupancy import Occupancy
from quire.replay.run import ReplayOptions, replay
from quire.replay.synthetic import Chats, chats

TRACE = chats(Chats(20, requests=3000, active=120))
DEVICE = 1200
HOSTS = (1200, 2400, 3600)
policies = pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
hosts = pytest.mark.parametrize("host_pages", HOSTS)


def of_ideal(host_pages: int, policy: WritePolicy, occupancy: Occupancy) -> float:
    options = ReplayOptions(
        device_pages=DEVICE, host_pages=host_pages, write_policy=policy, occupancy=occupancy
    )
    found = sum(each.num_pages for each in replay(TRACE, options).found)
    return found / hits_of(IdealLru(), TRACE, options.room)


@policies
@hosts
@pytest.mark.parametrize("in_use", [0.0, 0.3])
def test_with_a_device_that_has_room(host_pages, policy, in_use):
    assert of_ideal(host_pages, policy, Occupancy(in_use)) >= 0.98


@policies
@hosts
def test_with_a_burst_that_takes_the_device_c35(host_pages, policy):
    assert of_ideal(host_pages, policy, Occupancy(0.3, 0.97)) >= 0.95


@policies
@hosts
def test_with_a_device_that_is_nearly_all_in_use_c35(host_pages, policy):
    assert of_ideal(host_pages, policy, Occupancy(0.97)) >= 0.98
