"""What a lease protects while others move the same pages."""

from quire.config import CacheConfig, PrefetchConfig
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager
from quire.messages import Backup, Command, Load, Transferred
from quire.types import PageStatus, RequestId, Tier, num_pages


def _answered(commands: list[Command], status: PageStatus = PageStatus.OK) -> list[Transferred]:
    return [
        Transferred(c.op, 0, c.component, 0, bytes([status]) * num_pages(c.host), final=True)
        for c in commands
        if isinstance(c, Backup | Load)
    ]


def test_a_lease_keeps_host_pages_that_another_requests_load_may_fail_to_bring() -> None:
    config = CacheConfig(
        page_size=1, device_pages=8, host_pages=8, prefetch=PrefetchConfig(threshold_tokens=1)
    )
    manager = CacheManager(config, clock=lambda: 0.0)
    key = PrefixKey(Namespace("model", "float32", 1), [1, 2, 3])
    with manager.acquire(manager.match(key), RequestId("first")) as lease:
        manager.extend(lease, 3)
        manager.commit(lease, key)
    manager.step(_answered(manager.step()))
    manager.flush(Tier.DEVICE)
    loading = manager.acquire(manager.match(key), RequestId("loading"))
    manager.load(loading)
    commands = manager.step()
    other = manager.acquire(manager.match(key), RequestId("other"))
    manager.step(_answered(commands, PageStatus.FAILED))
    manager.release(loading)
    assert manager.flush(Tier.HOST) == 0
    manager.check_invariants()
    assert (other.num_device, other.num_host) == (0, 3)
    manager.release(other)
    with manager.acquire(manager.match(key), RequestId("again")) as lease:
        assert manager.load(lease) == 3
        manager.step(_answered(manager.step()))
    manager.check_invariants()
