"""A store at the other end of a real link (namespaces, a veth pair) that is cut, or on which
everything gets lost and nobody is told, while requests run. Needs root; skipped without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.disagg.netns import Link, Network, why_not
from e2e.exactness.rig import engine_rig
from e2e.exactness.subjects import TINY_LLAMA
from e2e.stores.test_faults import (
    OPTIONS,
    ask,
    asked_until_it_opens,
    counters,
    from_the_store,
    meanwhile,
)
from quire.types import Tier
from store_servers import Valkey

BREAKS: dict[str, tuple[Callable[[Link], None], Callable[[Link], None]]] = {
    "cut": (Link.cut, Link.mend),
    "lost": (Link.stall, Link.go_on),
}


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Link, str]]:
    """The link to a server in another network, and its URL; the test itself is at the other end."""
    if reason := why_not():
        pytest.skip(reason)
    with Network() as here, Network() as there:
        link = Link(here, there)
        with there.inside():
            server = Valkey(tmp_path, bind="0.0.0.0", protected_mode="no")
        try:
            with here.inside():
                yield link, f"redis://{link.right}:{server.port}"
        finally:
            server.stop()


@pytest.mark.long
@pytest.mark.parametrize("how", BREAKS)
def test_a_link_that_breaks_costs_hits_and_nothing_else_c18(
    far: tuple[Link, str], how: str
) -> None:
    link, url = far
    harm, mend = BREAKS[how]
    with engine_rig(TINY_LLAMA, store=url, **OPTIONS) as rig:
        ask(rig, "before")
        assert from_the_store(rig)
        meanwhile(lambda: harm(link), lambda: ask(rig, f"while it is {how}"))
        rig.flush(Tier.DEVICE, Tier.HOST)
        asked_until_it_opens(rig)
        mend(link)
        assert any(from_the_store(rig) for _ in range(60)), counters(rig)
        assert not counters(rig)["breaker_is_open"]
        rig.settle()
