"""The audit: a page damaged behind every check is found in each tier, goes from all of them, and
answers are right again; right pages stay, and nobody who asks waits for it."""

import logging
import random
import threading

import pytest

from engine_support import PAGE, TinyEngine, oracle
from quire.config import WritePolicy
from quire.engine.config import EngineConfig
from quire.errors import ConfigError
from quire.keys import PrefixKey
from quire.store.memory import MemoryStore
from quire.types import page_array

PROMPT = [(7 * i + 3) % 50 for i in range(40)]
TIERS = ("device", "host", "store")


def engine(**options) -> TinyEngine:
    return TinyEngine(audit=1.0, store="memory://?max=1MiB", **options)


def key_of(tiny: TinyEngine, page: int) -> PrefixKey:
    return PrefixKey(tiny.engine.namespace_of(""), PROMPT)[: page + 1]


def node_of(tiny: TinyEngine, page: int):
    """The node that has a page, and where in it."""
    walk = tiny.manager._core.tree.walk(key_of(tiny, page))
    assert walk.num_pages == page + 1
    return walk.nodes[-1], page - walk.nodes[-1].start


def page_in(tiny: TinyEngine, tier: int, page: int) -> int:
    node, at = node_of(tiny, page)
    return int(page_array(node.held[tier].pages)[at])


def damage(tiny: TinyEngine, tier: str, page: int) -> None:
    """Other bytes than the right ones, with all that a check looks at as it should be."""
    worker = tiny.model.worker
    pools = worker.components["full"]
    if tier == "device":
        pools.device.v(1)[page_in(tiny, 0, page)] += 9999.0
        return
    if tier == "host":
        pools.host.page_view(page_in(tiny, 1, page))[:8] = b"\x00\x00\x80\x40" * 2
        return
    lease = worker._attachment.borrow()
    part, key = worker._parts["full"], key_of(tiny, page).page_keys(page, page + 1)
    wrong = bytearray(part.page_bytes)
    lease.store.disown(part, [key])()
    assert not any(lease.store.put(part, [key], [memoryview(wrong)], deadline=tiny.clock() + 9))
    lease.release()


def wrong(tiny: TinyEngine) -> dict[str, int]:
    faults = tiny.manager.counters.faults
    return {name: count for name, count in faults.items() if name.startswith("audit:")}


def audited(tiny: TinyEngine, until) -> None:
    for _ in range(20_000):
        if until():
            return
        tiny.step()
    raise AssertionError(f"not found after {tiny.manager.counters.audited_pages} audits")


@pytest.mark.parametrize("page", [0, 3, 8])
@pytest.mark.parametrize("tier", TIERS)
def test_a_page_damaged_behind_the_checks_is_found_and_evicted_everywhere(tier, page, caplog):
    with engine() as tiny:
        assert tiny.answer(PROMPT, 4) == oracle(PROMPT, 4)
        right = pages_of(tiny)
        damage(tiny, tier, page)
        audited(tiny, lambda: wrong(tiny))
        # In the device's page those below it are computed: they are wrong too, and may come first.
        assert wrong(tiny).keys() & {f"audit:wrong_{tier}"}
        if tier != "device":
            assert tiny.manager.match(key_of(tiny, 8)).num_pages == page
        assert any("is not what the model computes" in each.message for each in caplog.records)
        audited(tiny, lambda: all(right[page] == found for page, found in pages_of(tiny).items()))
        assert tiny.answer(PROMPT, 4) == oracle(PROMPT, 4)
        tiny.run()
        assert not _store_differs(tiny)


def test_from_a_page_that_stands_on_a_wrong_one_it_goes_straight_to_that(monkeypatch):
    """What it sees first is a right page that is computed on a wrong one: else a request would be
    given the wrong one for as long as chance does not come by it."""
    with engine() as tiny:
        tiny.answer(PROMPT, 4)
        damage(tiny, "device", 1)
        never_there = random.Random()  # the first page of the last run, whatever is left
        monkeypatch.setattr(never_there, "randrange", lambda count: 0)
        monkeypatch.setattr(tiny.engine._auditor, "_random", never_there)
        audited(tiny, lambda: tiny.manager.match(key_of(tiny, 8)).num_pages == 1)
        assert tiny.manager.counters.audited_pages <= 6, "of ten pages, and not one by one"
        assert tiny.answer(PROMPT, 4) == oracle(PROMPT, 4)


def test_the_search_ends_where_what_it_looks_for_has_gone_by_itself():
    with engine() as tiny:
        tiny.answer(PROMPT, 4)
        damage(tiny, "device", 0)
        audited(tiny, lambda: wrong(tiny))
        for tier in (1, 0):
            tiny.manager.flush(tier)
        tiny.answer(PROMPT[::-1], 4)
        before = tiny.manager.counters.audited_pages
        audited(tiny, lambda: tiny.manager.counters.audited_pages > before + 3)


def test_a_request_that_comes_before_the_store_has_let_go_of_a_wrong_page_does_not_get_it(
    monkeypatch,
):
    let_go, taken_out = threading.Event(), MemoryStore.quarantine

    def held(store, name):
        assert let_go.wait(120)
        return taken_out(store, name)

    with engine() as tiny:
        tiny.answer(PROMPT, 4)
        damage(tiny, "store", 0)
        monkeypatch.setattr(MemoryStore, "quarantine", held)
        audited(tiny, lambda: wrong(tiny))
        request = tiny.ask(PROMPT, 4)
        while len(tiny.scheduler):
            tiny.step()
        let_go.set()
        assert tiny.tokens(request) == oracle(PROMPT, 4)
        assert tiny.cached(request).store == 0


def pages_of(tiny: TinyEngine) -> dict[int, list[float]]:
    """What the device holds of the prompt, page by page."""
    found = {}
    for page in range(tiny.manager.match(key_of(tiny, 8)).num_device):
        found[page] = tiny.model.pools["full"].v(1)[page_in(tiny, 0, page)].flatten().tolist()
    return found


def _store_differs(tiny: TinyEngine) -> bool:
    """Is anything that the store gives out wrong? Asked for as a request does."""
    for tier in (1, 0):
        tiny.manager.flush(tier)
    request = tiny.ask(PROMPT, 4)
    tiny.run()
    return tiny.tokens(request) != oracle(PROMPT, 4) or tiny.cached(request).store == 0


def last_uses(tiny: TinyEngine) -> list[int]:
    return [node.last_use for node in tiny.manager._core.tree.nodes()]


def test_pages_that_are_right_stay_and_grow_no_warmer():
    with engine(write=WritePolicy.WRITE_THROUGH) as tiny:
        tiny.answer(PROMPT, 4)
        tiny.answer(PROMPT[::-1], 4, salt="b")
        tiny.run()
        uses, before = last_uses(tiny), tiny.manager.match(key_of(tiny, 8))
        audited(tiny, lambda: tiny.manager.counters.audited_pages >= 60)
        assert not wrong(tiny)
        assert last_uses(tiny) == uses
        assert tiny.manager.match(key_of(tiny, 8)).num_pages == before.num_pages
        assert not tiny.manager.leases


def test_what_only_the_host_has_is_looked_at_too():
    with engine() as tiny:
        tiny.answer(PROMPT, 4)
        assert tiny.manager.flush(0) > 0
        damage(tiny, "host", 8)
        audited(tiny, lambda: wrong(tiny))
        assert wrong(tiny).keys() == {"audit:wrong_host"}
        assert tiny.answer(PROMPT, 4) == oracle(PROMPT, 4)


def test_with_somebody_there_nothing_is_audited():
    with engine() as tiny:
        tiny.answer(PROMPT, 4)
        audited(tiny, lambda: tiny.manager.counters.audited_pages)
        asked = tiny.ask(PROMPT[5:], 100)
        computed, count = tiny.model.num_computed, tiny.manager.counters.audited_pages
        while len(tiny.scheduler) and len(tiny.tokens(asked)) < 99:
            tiny.step()
            assert tiny.manager.counters.audited_pages == count
        assert tiny.model.num_computed - computed <= len(PROMPT) - 5 + 100
        tiny.run()
        assert tiny.tokens(asked) == oracle(PROMPT[5:], 100)


def test_it_takes_no_page_that_somebody_could_want():
    """All is used: it looks at nothing, and nothing goes for it."""
    with engine(device_pages=12, host_pages=16) as tiny:
        tiny.answer(PROMPT, 4)
        used = tiny.manager.pools()
        evicted = tiny.manager.counters.evicted_device_pages
        for _ in range(300):
            tiny.clock.ahead_s += 1
            tiny.step()
        assert tiny.manager.counters.evicted_device_pages == evicted
        assert [pool.used_pages for pool in tiny.manager.pools()] == [p.used_pages for p in used]


def test_models_that_keep_other_state_are_left_alone():
    with engine(mix="full+window") as tiny:
        tiny.answer(PROMPT, 4)
        tiny.step(200)
        assert tiny.manager.counters.audited_pages == 0


def test_several_ranks_are_refused_with_a_reason():
    with pytest.raises(ConfigError, match="audit is 5 and tp is 2"):
        EngineConfig(model="m", name="m", device_bytes=1 << 20, audit=5, tp=2)


def test_one_bit_that_hardly_matters_is_found_beside_the_other_copy(caplog):
    """The lowest bit of one number: far below what the order of sums may change."""
    with engine() as tiny:
        tiny.answer(PROMPT, 4)
        page = tiny.model.worker.components["full"].host.page_view(page_in(tiny, 1, 5))
        page[0] ^= 1
        audited(tiny, lambda: wrong(tiny))
        assert wrong(tiny).keys() == {"audit:copies_differ"}
        assert tiny.manager.match(key_of(tiny, 8)).num_pages == 5
        assert any("not the same on device and host" in each.message for each in caplog.records)
        assert tiny.answer(PROMPT, 4) == oracle(PROMPT, 4)
        tiny.run()
        assert not _store_differs(tiny)


def test_the_log_is_an_error_that_names_the_page(caplog):
    with engine() as tiny, caplog.at_level(logging.ERROR, "quire.audit"):
        tiny.answer(PROMPT, 4)
        damage(tiny, "host", 2)
        audited(tiny, lambda: wrong(tiny))
    (record,) = caplog.records
    assert record.fields["page"] == 2
    assert record.fields["off"].keys() == {"host"}
    assert len(record.fields["key"]) == 64
    assert len(PROMPT) > PAGE * 2
