"""/ui in a real browser: it draws what there is, follows it, and survives a server that goes away.

The engine is scripted; e2e/test_ui.py looks at a real one.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from msgspec.structs import replace as replaced

from browser import HOW_TO, Browser, find
from quire.engine.messages import (
    CountedTime,
    GetOutline,
    GetRequests,
    GetStatus,
    HandoverStatus,
    Outline,
    OutlineRun,
    Requests,
    TierStatus,
)
from quire.errors import EngineError
from quire.server.config import ServerConfig
from quire.web.connections import GuardedConfig
from quire.web.listening import Server, bind, url_of
from unit.router.fakes import rig as routing
from unit.server.scripted import ADMIN_KEY, MODEL, Rig, ScriptedEngine, status

needs_browser = pytest.mark.skipif(find() is None, reason=HOW_TO)


@contextlib.contextmanager
def serving(port: int = 0, app=None, engine: ScriptedEngine | None = None) -> Iterator[str]:
    """A server in a thread of its own; the browser is another process."""
    config = replace(ServerConfig(port=port, admin_key=ADMIN_KEY), shutdown_grace_s=0.0)
    rig = Rig(engine or ScriptedEngine(), config)
    counted = {"error:TimeoutError": 4, "written:failed": 198, "read:miss": 7}
    counted |= {"breaker_opened": 1, "declined:breaker_open": 6}
    rig.engine.answers[GetStatus] = replaced(
        status(), store=replaced(status().store, counters=counted)
    )
    rig.engine.answers[GetRequests] = Requests([])
    runs = [OutlineRun(-1, "alice", 0, 4, True, True, False, 3, 0)]
    runs += [OutlineRun(-1, "", 0, 9, False, True, True, 1, 5)]
    rig.engine.answers[GetOutline] = Outline(runs)
    listener = bind(config)
    listener.listen()
    server = Server(GuardedConfig(app or rig.app, config))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield url_of(config, listener)
    finally:
        server.force_exit = server.should_exit = True
        thread.join()
        listener.close()


def test_the_page_needs_no_key_and_nothing_from_elsewhere():
    rig = Rig()
    page = rig.request("GET", "/ui", headers={"authorization": ""})
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for path in ("/ui/app.js", "/ui/draw.js", "/ui/style.css"):
        part = rig.request("GET", path)
        assert part.status_code == 200
        assert path in page.text
        # The namespace of SVG is a name, and is not visited.
        assert "//" not in part.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert "http" not in page.text
    assert rig.request("GET", "/ui/../app.py").status_code == 404


def test_the_tree_is_for_the_admin():
    rig = Rig()
    answer = rig.request("GET", "/admin/tree", headers={"authorization": "Bearer x"})
    assert answer.status_code in (401, 403)


@needs_browser
def test_it_renders_follows_and_survives_a_restart():
    with Browser(width=390, height=800, dark=True) as page:
        with serving() as url:
            page.open(f"{url}/ui")
            page.until("document.getElementById('state').textContent === 'serving'")
            page.until("Number(document.body.dataset.looks) >= 2")
            assert page.run("document.querySelectorAll('#tiers .bar').length") == 3
            empty = "document.getElementById('tree').getBoundingClientRect().height"
            assert page.run(empty) == 0
            page.run(f"document.getElementById('admin-key').value = {ADMIN_KEY!r}")
            page.until("document.querySelectorAll('#tree rect').length === 2")
            # As the list of requests says, not the figures, which are of another moment.
            assert page.run("document.getElementById('flight').textContent") == "none"
            named = (
                "[...document.querySelectorAll('#tree .tenant')].map((each) => each.textContent)"
            )
            assert page.run(f"{named}.join()") == "alice,no tenant"
            used = "[...document.querySelectorAll('#tree .on')].map((each) => each.textContent)"
            assert page.run(f"{used}.join()") == "3×,1×"
            page.run("document.querySelector('#tree rect').dispatchEvent(new Event('click'))")
            assert "used 3 times" in page.run("document.getElementById('run').textContent")
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            store = page.run("document.getElementById('store').innerText")
            assert "Calls that failed: 4 TimeoutError" in store
            assert "Pages not written: 198 failed" in store
            assert "Breaker: opened 1 time so far" in store
            assert "Calls not made: 6 breaker open" in store
            assert "miss" not in store
            asked = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
            assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 200
            said = "document.getElementById('ttft-text').textContent"
            page.until(f"{said}.includes('With the cache')")
            # The engine says of nothing that it was computed here: there is nothing to reckon by.
            assert "nobody knows" in page.run(said)
            line = "document.querySelector('#ttft .{}').getAttribute('points')"
            assert len(page.run(line.format("with")).split()) == 2  # of one point nothing is seen
            assert not page.run(line.format("without"))
            dark = page.run("getComputedStyle(document.body).backgroundColor")
            assert page.errors == []
            page.run("document.getElementById('admin-key').value = 'another'")
            page.until("document.getElementById('flight').textContent.includes('not taken')")
        page.until("document.getElementById('state').textContent === 'gone'")
        assert not page.run("document.getElementById('trouble').hidden")
        port = int(url.rpartition(":")[2])
        page.run(f"document.getElementById('admin-key').value = {ADMIN_KEY!r}")
        page.errors.clear()
        with serving(port):
            page.until("document.getElementById('state').textContent === 'serving'")
            page.until("document.getElementById('trouble').hidden")
            page.until("document.querySelectorAll('#tree rect').length === 2")
            # A browser says of itself that nobody answered; the page has nothing to say.
            assert [said for said in page.errors if "ERR_CONNECTION_REFUSED" not in said] == []
        media = [{"name": "prefers-color-scheme", "value": "light"}]
        page.call("Emulation.setEmulatedMedia", {"features": media})
        assert page.run("getComputedStyle(document.body).backgroundColor") != dark


@needs_browser
def test_it_follows_what_the_engine_says():
    """Every kind of hit, a tier that fills, hand-overs that begin."""
    engine = ScriptedEngine()
    with Browser() as page, serving(engine=engine) as url:
        page.open(f"{url}/ui")
        page.until("document.querySelectorAll('#tiers .device').length === 1")
        width = "document.querySelector('#tiers .device').style.width"
        assert page.run(width) == "40%"
        handed = "document.getElementById('handovers').innerText"
        assert page.run(handed) == "none: this server works alone"
        found = HandoverStatus(
            open=2,
            received_bytes=3 << 20,
            sent_bytes=5 << 10,
            transfers=CountedTime(4, 0.2),
            local={"refused": 1},
            links={"tcp://10.0.0.5:7000": "up"},
        )
        full = TierStatus("device", 1024, 100, 75, 10)
        engine.answers[GetStatus] = status(tiers=[full], handover=found)
        page.until(f"{width} === '75%'")
        assert page.run(handed).splitlines() == [
            "2 under way, 4 received, 50 ms each",
            "3.0 MiB in, 5.0 KiB out",
            "1 came to nothing: computed here instead",
            "Peer tcp://10.0.0.5:7000: up",
        ]
        # 60 tokens, of which the engine says where it had 30.
        asked = {"model": MODEL, "prompt": "z" * 60, "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 200
        page.until("document.querySelectorAll('#hits rect').length === 5")
        heights = page.run(
            "[...document.querySelectorAll('#hits rect')].map((each) =>"
            " [each.getAttribute('class'), Number(each.getAttribute('height'))])"
        )
        assert [kind for kind, _ in heights] == ["device", "host", "store", "peer", "computed"]
        whole = sum(height for _, height in heights)
        shares = [60 * height / whole for _, height in heights]
        assert shares == pytest.approx([16, 8, 4, 2, 30])
        assert page.errors == []


@needs_browser
def test_an_engine_that_is_slow_to_tell_is_not_taken_for_a_wrong_key():
    """While it computes, it answers questions between two steps, which may take seconds."""
    engine = ScriptedEngine()
    with Browser() as page, serving(engine=engine) as url:
        page.open(f"{url}/ui")
        page.until("document.getElementById('state').textContent === 'serving'")
        page.run(f"document.getElementById('admin-key').value = {ADMIN_KEY!r}")
        page.until("document.querySelectorAll('#tree rect').length === 2")
        slow = EngineError("the engine did not answer within 1 s")
        engine.answers[GetRequests] = engine.answers[GetOutline] = slow
        looks = page.run("Number(document.body.dataset.looks)")
        page.until(f"Number(document.body.dataset.looks) >= {looks + 3}")
        said = page.run("document.body.innerText")
        assert "not taken" not in said
        assert "2 runs of pages" in said
        assert page.run("document.getElementById('flight').textContent") == "none"


@needs_browser
def test_a_routers_page_counts_what_clients_asked_and_not_who_looks():
    def looked(url: str) -> str:
        with Browser(width=390, height=800) as page:
            page.open(f"{url}/ui")
            page.until("Number(document.body.dataset.looks) >= 3")
            assert page.run("document.querySelectorAll('#members a').length") == 2
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            assert page.errors == []
            return page.run("document.getElementById('routed').innerText")

    async def main() -> str:
        async with routing() as router:
            assert (await router.complete()).status_code == 200
            return await asyncio.to_thread(looked, str(router.client.base_url).rstrip("/"))

    assert "0 under way, 1 answered, 0 of them failed" in asyncio.run(main())
