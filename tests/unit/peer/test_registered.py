"""Pages by NIXL: what it refuses, and what becomes of a read that is given up.

NIXL itself is played here, by something that copies within the process or hangs; with the real one
test_pages.py and test_faults.py run, where it is installed.
"""

import ctypes
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from quire.errors import ConfigError
from quire.memory.host import HostPool
from quire.peer.client import ClientLimits, PageClient
from quire.peer.connection_pool import PoolLimits
from quire.peer.errors import PeerError, ReadCancelled
from quire.peer.handshake import chosen_way, ways_of
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.region import Region
from quire.types import PageStatus, page_ids
from unit.peer.rig import (
    GRANT,
    LAYOUT,
    NUM_PAGES,
    SECRET,
    WAIT_S,
    filled,
    identity_of,
    pages_of,
    serve,
    source,
)


class FakeNixl:
    """What of NIXL's agent is used. `state` is what transfers come to."""

    def __init__(self, name, _config):
        self.name = name.encode()
        self.state = "DONE"
        self.num_registered = 0
        self.known = []
        self.released = 0

    def register_memory(self, spans, _kind):
        self.num_registered += len(spans)
        return spans

    def deregister_memory(self, spans):
        self.num_registered -= len(spans)

    def get_agent_metadata(self):
        return self.name

    def add_remote_agent(self, metadata):
        if metadata == b"rubbish":
            raise ValueError("no metadata")
        assert metadata not in self.known, "met again, it loses what is under way"
        self.known.append(metadata)
        return metadata

    def remove_remote_agent(self, name):
        self.known.remove(name.encode())

    def get_xfer_descs(self, spans, _kind):
        return spans

    def initialize_xfer(self, _what, ours, theirs, _name):
        return SimpleNamespace(ours=ours, theirs=theirs)

    def transfer(self, handle):
        if self.state == "DONE":
            for (ours, size, _), (theirs, _, _) in zip(handle.ours, handle.theirs, strict=True):
                ctypes.memmove(ours, theirs, size)
        return self.state

    def check_xfer_state(self, _handle):
        return self.state

    def release_xfer_handle(self, _handle):
        self.released += 1


@pytest.fixture
def played(monkeypatch):
    module = ModuleType("nixl._api")
    module.nixl_agent = FakeNixl
    module.nixl_agent_config = lambda **options: options
    module.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)


@pytest.fixture
def pair(played):
    """A page server and a client that both have NIXL, and the client's errors."""
    there, here = NixlAgent(), NixlAgent()
    held, own = filled(), HostPool(LAYOUT, NUM_PAGES)
    server = serve(Region(held, 0, 2), kind=TransportKind.NIXL, nixl=there)
    server.grant(GRANT, "full", page_ids(range(NUM_PAGES)))
    errors = []
    client = reader(here, errors)
    yield SimpleNamespace(
        server=server, client=client, errors=errors, held=held, own=own, there=there, here=here
    )
    client.close()
    assert server.close()
    assert server.close(), "twice is no matter"
    assert not there._agent.num_registered


def reader(nixl, errors, **limits):
    return PageClient(
        identity_of(),
        SECRET,
        kind=TransportKind.NIXL,
        limits=ClientLimits(**limits),
        pool_limits=PoolLimits(pause_s=0.0),
        on_error=errors.append,
        nixl=nixl,
    )


def read(pair, *, timeout_s=WAIT_S, cancelled=lambda: False):
    where = source((pair.server.address, 0, 2))
    region = Region(pair.own, 0, 2)
    pages = range(NUM_PAGES)
    return pair.client.read(where, region, pages, timeout_s=timeout_s, cancelled=cancelled)


def test_pages_are_read_by_it_and_by_nothing_else(pair):
    assert read(pair) == [PageStatus.OK] * NUM_PAGES
    assert pages_of(pair.own) == pages_of(pair.held)
    received = pair.client.counters()
    assert received["peer_received_bytes_nixl"] == NUM_PAGES * LAYOUT.page_bytes
    assert received["peer_received_bytes"] == received["peer_received_bytes_nixl"]


def test_a_reader_by_tcp_is_served_beside_those_who_have_it(pair):
    region = Region(pair.own, 0, 2)
    client = PageClient(identity_of(), SECRET, kind=TransportKind.TCP)
    where = source((pair.server.address, 0, 2))
    found = client.read(where, region, range(NUM_PAGES), timeout_s=WAIT_S)
    client.close()
    assert found == [PageStatus.OK] * NUM_PAGES
    assert pages_of(pair.own) == pages_of(pair.held)


def test_a_page_server_without_it_is_not_read_from_and_the_reason_is_said(played):
    server = serve(Region(filled(), 0, 2), kind=TransportKind.TCP)
    server.grant(GRANT, "full", page_ids(range(NUM_PAGES)))
    errors = []
    client = reader(NixlAgent(), errors, streams=1)
    own = HostPool(LAYOUT, NUM_PAGES)
    where = source((server.address, 0, 2))
    found = client.read(where, Region(own, 0, 2), [0, 1], timeout_s=WAIT_S)
    client.close()
    assert server.close()
    assert found == [PageStatus.FAILED] * 2
    assert "does not give pages by NIXL: set peer_transport" in str(errors[0])


def test_a_read_that_hangs_ends_in_time_and_its_buffer_is_not_used_until_it_has_ended(pair):
    agent = pair.here._agent
    agent.state = "PROC"
    before = pages_of(pair.own)
    assert set(read(pair, timeout_s=0.1)) == {PageStatus.TIMEOUT}
    assert pages_of(pair.own) == before
    kept = [buffer.ctypes.data for _, buffer in pair.here._given_up]
    assert kept
    other = pair.here.borrow(16)
    assert other.ctypes.data not in kept
    agent.state = "DONE"
    pair.here.borrow(16)
    assert not pair.here._given_up
    assert agent.released == len(kept)
    assert read(pair) == [PageStatus.OK] * NUM_PAGES


def test_a_read_can_be_cancelled(pair):
    pair.here._agent.state = "PROC"
    ends = time.monotonic() + 0.05
    found = read(pair, cancelled=lambda: time.monotonic() > ends)
    assert set(found) == {PageStatus.CANCELLED}


def test_a_read_that_fails_costs_its_pages(pair):
    pair.here._agent.state = "ERR"
    assert set(read(pair)) == {PageStatus.FAILED}
    assert "reading by NIXL failed (ERR)" in str(pair.errors[0])


def test_an_agent_is_met_once_and_forgotten_with_the_last_who_met_it(played):
    agent = NixlAgent()
    agent.meet("other", b"other")
    agent.meet("other", b"other")
    agent.forget("other")
    assert agent._agent.known == [b"other"]
    agent.forget("other")
    assert not agent._agent.known


def test_what_is_no_agent_is_refused(played):
    agent = NixlAgent()
    with pytest.raises(PeerError, match="cannot be reached by NIXL"):
        agent.meet("other", b"rubbish")
    with pytest.raises(PeerError, match="protocol"):
        agent.meet("other", b"another")


def test_memory_that_cannot_be_registered_is_refused_with_what_to_do(played, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no more locked memory")

    agent = NixlAgent()
    monkeypatch.setattr(agent._agent, "register_memory", refuse)
    with pytest.raises(ConfigError, match=r"no more locked memory.*peer_transport to tcp"):
        serve(Region(filled(), 0, 2), kind=TransportKind.NIXL, nixl=agent)


def test_what_a_check_raises_while_waiting_comes_through(played):
    agent = NixlAgent()
    agent._agent.state = "PROC"

    def check():
        raise ReadCancelled("cancelled")

    buffer = agent.borrow(16)
    with pytest.raises(ReadCancelled):
        agent.read("other", [(1, 16)], buffer, [(buffer.ctypes.data, 16)], check)


def test_where_it_is_not_installed_that_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"NIXL cannot be loaded .*: install quire\[nixl\]"):
        NixlAgent()


def test_the_dialers_best_of_what_both_have_is_chosen():
    assert chosen_way(["nixl", "tcp"], ["tcp", "nixl"]) == "nixl"
    assert chosen_way(["nixl"], ["tcp"]) == ""
    assert chosen_way([], ["tcp"]) == ""
    with pytest.raises(PeerError):
        ways_of(b"\xc1")
