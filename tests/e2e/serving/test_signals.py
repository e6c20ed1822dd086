"""Ctrl-C in a terminal, which every process of the group receives. SIGTERM: see test_load."""

from e2e.serving.chats import PLACES, first_turn
from e2e.serving.client import client_of, reading
from e2e.serving.server import Server, wait_until
from e2e.serving.stores import strangers, unfinished, url_of, verify

OPTIONS = {"device_memory": "48MiB", "host_memory": "48MiB"}


def test_ctrl_c_ends_it_with_0_and_leaves_nothing(tmp_path, store):
    with (
        Server(tmp_path, store=url_of(store), **OPTIONS) as server,
        client_of(server) as client,
    ):
        with reading(client, map(first_turn, PLACES[:3])) as streams:
            server.press_ctrl_c()
        assert server.wait() == 0
        assert all("shutting down" in str(stream.error) for stream in streams)
        server.wait_gone()
        assert "Traceback" not in server.log
        assert server.leftovers() == []
        assert unfinished(store) == []
    assert verify(store)["clean"]
    assert strangers(store) == []


def test_ctrl_c_while_it_starts(tmp_path, store):
    server = Server(tmp_path, store=url_of(store), **OPTIONS)
    try:
        wait_until(lambda: "loading the model" in server.log or server.ended, "it has begun")
        server.press_ctrl_c()
        assert server.wait() == 0
        server.wait_gone()
        assert "Traceback" not in server.log
        assert server.leftovers() == []
    finally:
        server.__exit__()
