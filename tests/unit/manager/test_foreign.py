"""An engine that owns its device pages: what it saves is found, what it loads is what was saved."""

import random
from collections.abc import Sequence

import pytest

from quire.errors import ConfigError, LeaseError
from quire.keys import PrefixKey
from quire.manager import EnginePages, ForeignState, Lease
from quire.messages import Backup, Load, WorkerLost, Write
from quire.types import PageIds, PageStatus, Tier, page_array, page_ids
from support import FAILED, OK, PAGE, Rig, tokens_for

HOST = Tier.HOST


def saved(rig: Rig, key: PrefixKey, device: int = 100) -> None:
    """A request computes a prefix in the engine's pages from `device` on, and ends."""
    lease = rig.acquire(key)
    rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(device, key.num_pages))])
    rig.run()
    rig.manager.release(lease)
    rig.run()


def ids(first: int, count: int) -> PageIds:
    return page_ids(list(range(first, first + count)))


def test_what_was_saved_is_found_and_loaded_from_where_it_was_put() -> None:
    rig = Rig()
    key = rig.doc(6, seed=1)
    lease = rig.acquire(key)
    [copy] = rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(100, 6))])
    rig.step()
    backup = rig.take(Backup)
    assert backup.device == ids(100, 6)
    assert rig.matched(key) == (0, 0), "it is not there before its bytes are"
    rig.answer(backup)
    rig.manager.release(lease)
    assert copy.state is ForeignState.DONE
    assert rig.matched(key) == (0, 6)

    reader = rig.acquire(key)
    load = rig.manager.foreign.load_into(reader, [EnginePages(2, ids(7, 4))])
    rig.step()
    command = rig.take(Load)
    assert command.host == PageIds(backup.host[2 * 4 :])
    assert command.device == ids(7, 4)
    assert load.state is ForeignState.COPYING
    rig.answer(command)
    assert load.state is ForeignState.DONE
    rig.manager.release(reader)
    rig.run()


def test_it_goes_on_to_the_store_and_comes_back_from_there() -> None:
    rig = Rig()
    key = rig.doc(4, seed=1)
    saved(rig, key)
    assert rig.in_store(key)
    rig.manager.flush(HOST)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.run()
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == 4
    rig.manager.foreign.load_into(lease, [EnginePages(0, ids(0, 4))])
    rig.run()
    rig.manager.release(lease)


def test_pages_computed_chunk_by_chunk_enter_in_their_order() -> None:
    rig = Rig()
    key = rig.doc(6, seed=1)
    lease = rig.acquire(key[:2])
    foreign = rig.manager.foreign
    foreign.save_from(lease, key[:2], [EnginePages(0, ids(10, 2))])
    rig.step()
    first = rig.take(Backup)
    foreign.save_from(lease, key, [EnginePages(2, ids(12, 4))])
    rig.step()
    second = rig.take(Backup)
    assert foreign.saved_pages(lease) == 6
    rig.answer(second)
    assert rig.matched(key) == (0, 0), "what lies in front is still on its way"
    rig.answer(first)
    assert rig.matched(key) == (0, 6)
    assert lease.num_host == 6
    rig.manager.release(lease)
    rig.run()


def test_behind_a_page_that_failed_nothing_enters_and_all_host_pages_come_back() -> None:
    rig = Rig(store=False)
    key = rig.doc(6, seed=1)
    lease = rig.acquire(key)
    foreign = rig.manager.foreign
    [copy] = foreign.save_from(lease, key[:4], [EnginePages(0, ids(10, 4))])
    [behind] = foreign.save_from(lease, key, [EnginePages(4, ids(14, 2))])
    rig.step()
    first, second = rig.take_all(Backup)
    rig.answer(first, statuses=[OK, OK, FAILED, OK])
    assert copy.state is ForeignState.FAILED
    assert copy.failed == page_ids([12])
    assert rig.matched(key) == (0, 2)
    assert foreign.saved_pages(lease) == 2, "it may be tried again from there"
    assert behind.state is ForeignState.COPYING, "the engine's pages are still read"
    rig.answer(second)
    assert behind.state is ForeignState.DONE, "and nobody waits for ever"
    assert rig.free(HOST) == 64 - 2
    rig.manager.release(lease)
    rig.run()


def test_a_failed_load_names_the_engines_pages() -> None:
    rig = Rig(ranks=2)
    key = rig.doc(4, seed=1)
    saved(rig, key)
    lease = rig.acquire(key)
    load = rig.manager.foreign.load_into(lease, [EnginePages(0, ids(40, 4))])
    rig.step()
    command = rig.take(Load)
    rig.answer(command, ranks=[0])
    assert load.state is ForeignState.COPYING, "one rank is not all of them"
    rig.answer(command, ranks=[1], statuses=[OK, FAILED, OK, FAILED])
    assert load.state is ForeignState.FAILED
    assert page_array(load.failed).tolist() == [41, 43]
    rig.manager.release(lease)
    rig.run()


def test_what_is_loaded_stays_until_the_workers_are_done_although_the_lease_has_ended() -> None:
    rig = Rig(host=4, store=False)
    key = rig.doc(4, seed=1)
    saved(rig, key)
    lease = rig.acquire(key)
    rig.manager.foreign.load_into(lease, [EnginePages(0, ids(0, 4))])
    rig.step()
    rig.manager.release(lease)
    assert rig.manager.flush(HOST) == 0
    rig.run()
    assert rig.manager.flush(HOST) == 4


def test_a_save_that_outlives_its_lease_is_given_up_and_its_pages_come_back() -> None:
    rig = Rig()
    key = rig.doc(4, seed=1)
    lease = rig.acquire(key)
    rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(0, 4))])
    rig.step()
    rig.manager.release(lease)
    rig.manager.check_invariants()
    assert rig.free(HOST) == 60, "a worker may still write there"
    rig.run()
    assert rig.free(HOST) == 64
    assert rig.matched(key) == (0, 0)


def test_two_requests_that_save_the_same_keep_one_copy() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    leases = [rig.acquire(key) for _ in range(2)]
    for at, lease in enumerate(leases):
        rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(10 * at, 4))])
    rig.run()
    assert rig.free(HOST) == 60
    third = rig.acquire(rig.doc(0, seed=1))
    assert rig.manager.foreign.save_from(third, key, [EnginePages(0, ids(30, 4))]) == [], (
        "it is there"
    )
    for lease in [*leases, third]:
        rig.manager.release(lease)
    rig.run()


def test_a_full_host_saves_what_fits_and_keeps_what_is_in_use() -> None:
    rig = Rig(host=8, store=False)
    old, key = rig.doc(4, seed=1), rig.doc(12, seed=2)
    saved(rig, old)
    holder = rig.acquire(old)
    lease = rig.acquire(key)
    [copy] = rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(0, 12))])
    rig.run()
    assert copy.last == 4
    assert rig.matched(old) == (0, 4)
    assert rig.matched(key) == (0, 4)
    assert rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(0, 12))]) == []
    rig.manager.release(holder)
    assert rig.manager.foreign.save_from(lease, key, [EnginePages(0, ids(0, 12))])
    rig.run()
    rig.manager.release(lease)
    assert rig.matched(key) == (0, 8)


def test_misuse_is_refused_and_changes_nothing() -> None:
    rig = Rig()
    key = rig.doc(4, seed=1)
    saved(rig, key)
    lease = rig.acquire(key)
    foreign = rig.manager.foreign
    with pytest.raises(LeaseError, match="of the 4 that it has"):
        foreign.load_into(lease, [EnginePages(2, ids(0, 3))])
    with pytest.raises(LeaseError, match="another prefix"):
        foreign.save_from(lease, rig.doc(8, seed=2), [EnginePages(4, ids(0, 4))])
    longer = lease.key.extend(tokens_for(4, seed=3))
    with pytest.raises(LeaseError, match="page 4 comes first"):
        foreign.save_from(lease, longer, [EnginePages(6, ids(0, 2))])
    rig.step()
    rig.manager.release(lease)
    hybrid = Rig(mix="full+recurrent")
    key = hybrid.doc(2, seed=1)
    lease = hybrid.acquire(key)
    with pytest.raises(ConfigError, match="recurrent state needs"):
        hybrid.manager.foreign.save_from(lease, key, [EnginePages(0, ids(0, 2))] * 2)


@pytest.mark.parametrize(
    "named",
    [
        [],
        [EnginePages(0, ids(0, 4))],
        [EnginePages(0, ids(0, 4)), EnginePages(0, ids(10, 7), width=2)],
        [EnginePages(0, ids(0, 4)), EnginePages(0, ids(10, 8), width=0)],
        [EnginePages(0, ids(0, 4)), EnginePages(0, ids(10, 8)), EnginePages(0, ids(20, 8))],
    ],
)
def test_pages_that_are_not_named_by_component_are_refused(named: list[EnginePages]) -> None:
    rig = Rig(mix="full+window")
    key = rig.doc(4, seed=1)
    lease = rig.acquire(key[:0])
    foreign, before = rig.manager.foreign, lease.key
    for act in (
        lambda: foreign.save_from(lease, key, named),
        lambda: foreign.load_into(lease, named),
    ):
        with pytest.raises(LeaseError, match="of each of full, window"):
            act()
    assert lease.key is before
    rig.manager.release(lease)


def test_a_lost_rank_ends_what_is_under_way_and_nothing_new_begins() -> None:
    rig = Rig(ranks=2)
    key, other = rig.doc(4, seed=1), rig.doc(4, seed=2)
    saved(rig, key)
    lease, writer = rig.acquire(key), rig.acquire(other)
    load = rig.manager.foreign.load_into(lease, [EnginePages(0, ids(0, 4))])
    [save] = rig.manager.foreign.save_from(writer, other, [EnginePages(0, ids(4, 4))])
    rig.step()
    for command in [*rig.take_all(Load), *rig.take_all(Backup)]:
        rig.answer(command, ranks=[0])
    rig.step([WorkerLost(1, "gone")])
    assert load.state is ForeignState.FAILED
    assert save.state is ForeignState.FAILED
    again = rig.manager.foreign.load_into(lease, [EnginePages(0, ids(0, 4))])
    assert again.state is ForeignState.FAILED
    assert rig.manager.foreign.save_from(writer, other, [EnginePages(0, ids(4, 4))]) == []
    for each in (lease, writer):
        rig.manager.release(each)
    rig.step()
    assert rig.matched(other) == (0, 0)


def window(first: int, device: int, count: int) -> EnginePages:
    """Window pages from page `first` on, each in two of the engine's, as those of two groups."""
    pages = [page for at in range(device, device + count) for page in (at, 500 + at)]
    return EnginePages(first, page_ids(pages), width=2)


def test_with_windows_a_save_goes_with_the_window_behind_its_end() -> None:
    rig = Rig(mix="full+window")
    foreign, key = rig.manager.foreign, rig.doc(6, seed=1)
    lease = rig.acquire(key)
    # The engine has let go of what lay before the window.
    [copy] = foreign.save_from(lease, key, [EnginePages(0, ids(10, 6)), window(4, 30, 2)])
    rig.step()
    full, windows = rig.take(Backup), rig.take(Backup, "window")
    assert (len(full.host), len(windows.host)) == (6 * 4, 2 * 4)
    assert page_array(windows.device).tolist() == [30, 530, 31, 531]
    rig.answer(full)
    assert rig.matched(key) == (0, 0), "of no use without its window"
    rig.answer(windows)
    assert copy.state is ForeignState.DONE
    rig.manager.release(lease)
    rig.run()
    assert rig.in_store(key)
    assert rig.matched(key) == (0, 6)
    assert rig.matched(key[:4]) == (0, 0)

    reader = rig.acquire(key)
    to = [EnginePages(5, ids(7, 1)), window(5, 40, 1)]
    foreign.load_into(reader, to)
    rig.step()
    assert rig.take(Load).host == full.host[5 * 4 :]
    assert rig.take(Load, "window").host == windows.host[4:], "what lies before, the engine has"
    with pytest.raises(LeaseError, match="no place for what page 6 needs"):
        foreign.load_into(reader, [EnginePages(0, ids(7, 6)), window(5, 40, 1)])
    rig.manager.release(reader)
    rig.pending.clear()


def test_a_save_whose_window_the_engine_has_let_go_of_waits_for_the_next() -> None:
    rig = Rig(mix="full+window")
    foreign, key = rig.manager.foreign, rig.doc(8, seed=1)
    lease = rig.acquire(key)
    assert foreign.save_from(lease, key[:6], [EnginePages(0, ids(0, 6)), window(5, 30, 1)]) == []
    assert foreign.save_from(lease, key, [EnginePages(0, ids(0, 8)), window(5, 30, 3)])
    rig.run()
    assert lease.num_host == 8
    rig.manager.release(lease)
    rig.run()


def test_where_others_had_branched_off_one_can_go_on_the_next_time() -> None:
    """A system prompt that three requests share: the second one sees that it is shared."""
    rig = Rig(mix="full+window")
    foreign = rig.manager.foreign
    common = tokens_for(4, seed=1)
    for number, expected in enumerate((0, 0, 4)):
        key = rig.key([*common, *tokens_for(5, seed=10 + number)])
        lease = rig.acquire(key)
        assert lease.num_host == expected
        foreign.save_from(
            lease, key, [EnginePages(0, ids(20 * number, 9)), window(0, 20 * number, 9)]
        )
        rig.run()
        rig.manager.release(lease)
        rig.run()


def test_a_prompt_is_found_although_its_request_went_far_beyond() -> None:
    rig = Rig(mix="full+window")
    foreign, key = rig.manager.foreign, rig.doc(5, seed=1)
    lease = rig.acquire(key)
    for last in (5, 8, 14):
        longer = key.extend(tokens_for(9, seed=2))[:last]
        have = [EnginePages(0, ids(0, last)), window(max(0, last - 4), 100, min(4, last))]
        foreign.save_from(lease, longer, have)
        rig.run()
    rig.manager.release(lease)
    rig.run()
    assert rig.matched(key) == (0, 5)
    assert rig.matched(longer) == (0, 14)
    assert rig.matched(longer[:9]) == (0, 5), "no point: its window has gone"
    assert rig.free(HOST, "window") == 64 - 2 * 2, "two windows"


def test_a_window_that_fails_takes_its_pages_with_it_and_the_next_save_begins_there() -> None:
    rig = Rig(mix="full+window", store=False)
    foreign, key = rig.manager.foreign, rig.doc(6, seed=1)
    lease = rig.acquire(key)
    have = [EnginePages(0, ids(0, 6)), window(0, 30, 6)]
    [copy] = foreign.save_from(lease, key, have)
    rig.step()
    rig.answer(rig.take(Backup))
    rig.answer(rig.take(Backup, "window"), statuses=[OK, FAILED])
    assert page_array(copy.failed).tolist() == [35, 535]
    assert (rig.free(HOST), rig.free(HOST, "window")) == (64, 64)
    assert foreign.saved_pages(lease) == 0
    assert foreign.save_from(lease, key, have)
    rig.run()
    rig.manager.release(lease)
    assert rig.matched(key) == (0, 6)


class _Engine:
    """Engines' pages and host pages with what they hold, as names of pages. Answers commands in
    any order, some of them badly."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig, self.rng = rig, rng
        self.device: dict[int, bytes] = {}
        self.host: dict[tuple[str, int], list[bytes]] = {}

    def compute(self, first: int, key: PrefixKey) -> list[EnginePages]:
        """All of it, in the engine's pages from `first` on; of windows what is left of them."""
        has = []
        for component in self.rig.parts:
            names, width = _names(key, key.num_pages), 1 if component == "full" else 2
            begin = 0 if width == 1 else self.rng.randint(0, max(0, len(names) - 2))
            pages = []
            for at in range(begin, len(names)):
                for part in range(width):
                    pages.append(first + 100 * len(has) + 40 * part + at)
                    self.device[pages[-1]] = _content(component, part, names[at])
            has.append(EnginePages(begin, page_ids(pages), width))
        return has

    def answer_some(self) -> None:
        self.rng.shuffle(self.rig.pending)
        count = self.rng.randint(0, len(self.rig.pending))
        commands, self.rig.pending = self.rig.pending[:count], self.rig.pending[count:]
        for command in commands:
            statuses = None
            if isinstance(command, Backup | Load):
                bad = self.rng.random() < 0.2
                statuses = [
                    FAILED if bad and self.rng.random() < 0.5 else OK for _ in _pairs(command)
                ]
                for (device, host), status in zip(_pairs(command), statuses, strict=True):
                    self._copy(command, device, (command.component, host), status)
            elif isinstance(command, Write):
                keys, _ = command.keys_and_parents()
                for page, key in zip(page_array(command.host).tolist(), keys, strict=True):
                    held = self.host[command.component, page]
                    expected = [_content(command.component, i, key) for i in range(len(held))]
                    assert held == expected, "the store is given another page"
            self.rig.answer(command, statuses=statuses)

    def _copy(
        self, command: Backup | Load, device: list[int], host: tuple[str, int], status: PageStatus
    ) -> None:
        if isinstance(command, Backup):
            self.host[host] = [self.device[page] if status is OK else b"" for page in device]
        else:
            held = self.host[host] if status is OK else [b""] * len(device)
            self.device.update(zip(device, held, strict=True))


def _content(component: str, part: int, name: bytes) -> bytes:
    return name if component == "full" else b"%d %s" % (part, name)


def _pairs(command: Backup | Load) -> list[tuple[list[int], int]]:
    host = page_array(command.host).tolist()
    device = page_array(command.device).reshape(len(host), -1).tolist()
    return list(zip(device, host, strict=True))


@pytest.mark.parametrize("mix", ["full", "full+window"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_loads_bring_what_was_computed_and_nothing_leaks(
    seed: int, mix: str
) -> None:
    rng = random.Random(seed)
    rig = Rig(host=24, store=rng.random() < 0.5, mix=mix)
    engine, foreign = _Engine(rig, rng), rig.manager.foreign
    running: list[tuple[Lease, int]] = []
    prompts = [tokens_for(rng.randint(1, 10), seed=s) for s in range(6)]
    next_page, num_loaded = 0, 0
    for _ in range(250):
        action = rng.random()
        if action < 0.35 and len(running) < 4:
            tokens = rng.choice(prompts)[: PAGE * rng.randint(1, 10)]
            lease = rig.acquire(rig.key(tokens))
            if lease.num_host:
                to = engine.compute(next_page, lease.key[: lease.num_host])
                before = {page: engine.device.pop(page) for page in _pages_of(to)}
                load = foreign.load_into(lease, to)
                while load.state is ForeignState.COPYING:
                    rig.step()
                    engine.answer_some()
                failed = page_array(load.failed).tolist()
                for page in set(_pages_of(load.device)) - set(failed):
                    assert engine.device[page] == before[page]
                    num_loaded += 1
            running.append((lease, next_page))
            next_page += 300
        elif action < 0.7 and running:
            lease, first = rng.choice(running)
            key = lease.key
            if rng.random() < 0.5:
                key = key.extend(tokens_for(rng.randint(1, 2), seed=rng.randrange(3)))
            foreign.save_from(lease, key, engine.compute(first, key))
        elif action < 0.8 and running:
            lease, _ = running.pop(rng.randrange(len(running)))
            rig.manager.release(lease)
        rig.step()
        engine.answer_some()
    for lease, _ in running:
        rig.manager.release(lease)
    rig.run()
    rig.manager.flush(HOST)
    assert all(rig.free(HOST, part) == 24 for part in rig.parts)
    assert num_loaded


def _pages_of(has: Sequence[EnginePages]) -> list[int]:
    return [page for each in has for page in page_array(each.pages).tolist()]


def _names(key: PrefixKey, count: int) -> list[bytes]:
    keys = key.page_keys(0, count)
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]
