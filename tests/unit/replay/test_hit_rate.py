"""What an ideal LRU as large as device and host together would find is found, but for a little.

The talks are made up as real ones go: turns of very different length, below one system prompt, and
each prompt ends with a page that the next turn does not have. (With shared prompts and no such
ends: tests/sim/test_replay.py. On a real trace: docs/capacity.md.)
"""

from random import Random

import pytest

from quire.config import WritePolicy
from quire.replay.bounds import IdealLru, hits_of
from quire.replay.occupancy import Occupancy
from quire.replay.run import ReplayOptions, replay
from quire.replay.trace import BLOCK_TOKENS, Trace, TraceHeading, TraceLine, trace_of

DEVICE = 1500
SYSTEM = [0, 1]


def talks(seed: int, *, requests: int = 2500, active: int = 200) -> Trace:
    chance, fresh = Random(seed), len(SYSTEM)
    prompts, left = [SYSTEM] * active, [0] * active
    lines = []
    for number in range(requests):
        talk = chance.randrange(active)
        if not left[talk]:
            prompts[talk], left[talk] = SYSTEM, chance.randint(1, 8)
        left[talk] -= 1
        num_new = min(int(2 * chance.paretovariate(1.2)), 16)
        prompts[talk] = [*prompts[talk], *range(fresh, fresh + num_new)]
        ids = [*prompts[talk], fresh + num_new]  # its last page is of this turn only
        fresh += num_new + 1
        lines.append(TraceLine(1000.0 * number, len(ids) * BLOCK_TOKENS, 0, ids))
    return trace_of("talks", lines, TraceHeading(1, BLOCK_TOKENS))


TALKS = talks(seed=1)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize(
    "occupancy",
    [Occupancy(0.3), Occupancy(0.9), Occupancy(0.3, 0.9)],
    ids=["in_use", "nearly_all_in_use", "burst"],
)
@pytest.mark.parametrize("host_pages", [1000, 2400])
def test_what_an_ideal_lru_of_that_size_has_is_found(host_pages, occupancy, policy):
    options = ReplayOptions(
        device_pages=DEVICE, host_pages=host_pages, occupancy=occupancy, write_policy=policy
    )
    outcome = replay(TALKS, options)
    assert outcome.num_cut == 0
    found = sum(each.num_pages for each in outcome.found)
    assert found >= 0.98 * hits_of(IdealLru(), TALKS, options.room)
