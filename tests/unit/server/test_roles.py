"""Servers of the roles prefill and decode: whom they answer, whom they ask, and how they fail."""

import time

import pytest

from quire.engine.messages import EngineStatus, HandoverStatus
from quire.server.config import ServerConfig
from quire.web.routes import RouterNote, router_key, signed
from unit.server.scripted import ADMIN_KEY, Rig, error_of, of_role, status

NAMED = {"x-quire-prefill": "tcp://10.0.0.5:7000, tcp://[::1]:7001"}


def prefill() -> dict[str, str]:
    """As a router says it now."""
    return signed(RouterNote(NAMED["x-quire-prefill"]), router_key(ADMIN_KEY), time.time())


def test_a_prefill_server_generates_for_nobody():
    engine = of_role("prefill")
    rig = Rig(engine)
    for response in (rig.chat(), rig.chat(stream=True), rig.complete()):
        assert response.status_code == 400
        assert error_of(response)["code"] == "wrong_role"
        assert "router" in error_of(response)["message"]
    assert not engine.calls
    assert rig.request("GET", "/v1/models").status_code == 200


def test_a_router_says_which_prefill_servers_to_ask():
    engine = of_role("decode")
    assert Rig(engine).chat(headers=prefill()).status_code == 200
    assert Rig(engine).chat().status_code == 200
    assert engine.calls[0].prefill == ("tcp://10.0.0.5:7000", "tcp://[::1]:7001")
    assert engine.calls[1].prefill == ()


@pytest.mark.parametrize("config", [ServerConfig(), ServerConfig(admin_key="other")])
def test_nobody_else_may_say_it_from_this_machine_neither_c49(config):
    engine = of_role("decode")
    for headers in (NAMED, prefill()):
        response = Rig(engine, config).chat(headers=headers)
        assert response.status_code == 403
        assert error_of(response)["code"] == "prefill_forbidden"
        assert "admin_key" in error_of(response)["message"]
    assert not engine.calls


def test_with_a_key_the_key_counts_beside_the_clients_own():
    engine = of_role("decode")
    rig = Rig(engine, ServerConfig(api_key="client", admin_key="root"))
    key, said, now = router_key("root"), RouterNote(NAMED["x-quire-prefill"]), time.time()
    body = {"model": "tiny", "prompt": "hi"}
    client = {"Authorization": "Bearer client"}
    for headers, expected in (
        (client | NAMED, 403),
        (client | signed(said, "root", now), 403),
        (client | signed(said, key, now - 1000), 403),
        (client | signed(said, key, now) | {"x-quire-prefill": "tcp://evil:1"}, 403),
        (signed(said, key, now), 401),
        (client | signed(said, key, now), 200),
        (client, 200),
        (signed(said._replace(vouches=True), key, now), 200),
        (signed(RouterNote(vouches=True), "root", now), 401),
    ):
        response = rig.request(
            "POST", "/v1/completions", json=body, headers=headers, peer="10.0.0.1"
        )
        assert response.status_code == expected
        assert "root" not in response.text


@pytest.mark.parametrize("address", ["", "10.0.0.5:7000", "tcp://a:1,tcp://a:1", "tcp://u:p@a:1"])
def test_a_wrong_address_is_said(address):
    engine = of_role("decode")
    headers = signed(RouterNote(address), router_key(ADMIN_KEY), time.time())
    response = Rig(engine).chat(headers=headers | {"x-quire-prefill": address})
    assert response.status_code == 400
    assert "x-quire-prefill" in error_of(response)["message"]
    assert not engine.calls


THERE = ["tcp://10.0.0.5:7000", "tcp://10.0.0.6:7000", "tcp://[fd00::7]:7000"]


def connected() -> EngineStatus:
    """With one peer that is not there."""
    links = {**dict.fromkeys(THERE, "connected"), "tcp://10.0.0.8:7000": "dialled"}
    return status(handover=HandoverStatus(links=links, transports=dict.fromkeys(THERE, "tcp")))


@pytest.mark.parametrize(
    ("hint", "asked"),
    [
        ("10.0.0.6:7000", ("tcp://10.0.0.6:7000", "tcp://10.0.0.5:7000", "tcp://[fd00::7]:7000")),
        ("[FD00::7]:7000", ("tcp://[fd00::7]:7000", "tcp://10.0.0.5:7000", "tcp://10.0.0.6:7000")),
        ("10.0.0.6:7001", ()),
        ("10.0.0.9:7000", ()),
        ("10.0.0.8:7000", ()),
        ("10.0.0.6", ()),
        ("10.0.0.6:7000,10.0.0.9:7000", ()),
        ("u@10.0.0.6:7000", ()),
        ("tcp://10.0.0.6:7000", ()),
        ("", ()),
    ],
)
def test_anybody_may_say_who_of_the_known_prefill_servers_is_asked_first(hint, asked):
    """As llm-d's sidecar does. One that is not known, or not there, is not asked: what nobody has
    signed makes no server dial."""
    engine = of_role("decode")
    engine.status = connected()
    assert Rig(engine).chat(headers={"x-prefiller-host-port": hint}).status_code == 200
    assert engine.calls[0].prefill == asked


def test_a_hint_changes_nothing_of_what_a_router_has_signed_nor_of_a_server_without_peers():
    engine = of_role("decode")
    hint = {"x-prefiller-host-port": "10.0.0.6:7000"}
    assert Rig(engine).chat(headers=hint).status_code == 200
    engine.status = connected()
    assert Rig(engine).chat(headers=prefill() | hint).status_code == 200
    assert [call.prefill for call in engine.calls] == [
        (),
        ("tcp://10.0.0.5:7000", "tcp://[::1]:7001"),
    ]
    unified = of_role("unified")
    unified.status = connected()
    assert Rig(unified).chat(headers=hint).status_code == 200
    assert unified.calls[0].prefill == ()


def test_others_do_not_take_it(rig, engine):
    response = rig.chat(headers=prefill())
    assert response.status_code == 400
    assert error_of(response)["code"] == "wrong_role"
    assert not engine.calls


def test_a_routers_key_opens_what_a_router_asks_and_nothing_else():
    rig = Rig(of_role("decode"), ServerConfig(admin_key="root"))
    router = {"Authorization": f"Bearer {router_key('root')}"}
    assert rig.request("GET", "/admin/info", headers=router).status_code == 200
    for method, path in (
        ("GET", "/admin/cache"),
        ("POST", "/admin/drain"),
        ("PUT", "/admin/store"),
    ):
        assert rig.request(method, path, headers=router).status_code == 401
