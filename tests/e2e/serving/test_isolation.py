"""Pages are shared by nobody who should not: other tenants, other weights. In no tier."""

import json
import os
import shutil
import struct

from e2e.serving.client import client_of
from e2e.serving.oracle import Oracle, check_same
from e2e.serving.server import MODEL, Server
from e2e.serving.stores import keys_in, listed, url_of, verify
from quire.models import embedded_model

NUM_TOKENS = 8
TEXT = (
    "The harbour lies at the end of a long bay. Every morning the boats leave before dawn and come "
    "back when the tide allows it. On the quay there are three sheds, a crane that nobody uses any "
    "more, and a small house where the harbour master keeps the books: which boat came, what it "
    "carried, and how much was paid for it. "
)
CHAT = [{"role": "user", "content": TEXT + "Who keeps the books?"}]
OPTIONS = {
    "device_memory": "48MiB",
    "host_memory": "48MiB",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold": 16,
}
NOTHING = {"device": 0, "host": 0, "store": 0, "peer": 0}


def test_tenants_share_no_page_and_changed_weights_reuse_none(tmp_path, store, oracle):
    """One store, and two servers on it at once: the model as it is and a changed copy of it."""
    expected = oracle.chat(CHAT, NUM_TOKENS)
    with (
        Server(tmp_path / "original", store=url_of(store), **OPTIONS) as server,
        client_of(server) as client,
    ):
        keys = check_tenants(client, store, expected)
        check_changed_weights(tmp_path, store, expected)
        # The original is not disturbed by the other's pages, and still finds its own.
        client.flush("device", "host")
        again = client.chat(CHAT, num_tokens=NUM_TOKENS, salt="a")
        assert again.cached["store"] >= 64
        assert check_same(again.text, expected)
        assert keys <= keys_in(store)
        client.wait_idle()
        client.status(check=True)
    assert listed(store) == keys_in(store)
    report = verify(store)
    assert report["clean"]
    assert len(report["fingerprints"]) == 2


def check_tenants(client, store, expected):
    """Returns the keys of all pages."""

    def ask(salt):
        answer = client.chat(CHAT, num_tokens=NUM_TOKENS, salt=salt)
        assert check_same(answer.text, expected)
        return answer.cached

    assert ask("a") == NOTHING
    client.wait_idle()
    of_a = keys_in(store)
    assert ask("b") == NOTHING, "b found a's pages on the device"
    client.wait_idle()
    of_b = keys_in(store) - of_a
    # The same tokens on both sides, and not one page in common.
    assert len(of_b) == len(of_a) >= 4
    reusable = ask("a")["device"]
    assert reusable >= 64

    # Each further tier is asked by somebody new: whoever asks leaves pages of their own behind.
    client.flush("device")
    assert ask("c") == NOTHING, "c found others' pages on the host"
    assert ask("a")["host"] == reusable
    client.flush("device", "host")
    assert ask("d") == NOTHING, "d found others' pages in the store"
    assert ask(None) == NOTHING, "a request without a salt found others' pages in the store"
    assert ask("a")["store"] == reusable
    client.wait_idle()
    keys = keys_in(store)
    assert len(keys) == 5 * len(of_a)
    return keys


def check_changed_weights(tmp_path, store, expected):
    changed = tmp_path / MODEL
    change_one_weight(changed)
    truth = Oracle(changed).chat(CHAT, NUM_TOKENS)
    assert truth.text != expected.text, "the change must show, or nothing is tested"
    seen = keys_in(store)
    with (
        Server(tmp_path / "changed", store=url_of(store), model=changed, **OPTIONS) as server,
        client_of(server) as client,
    ):
        first = client.chat(CHAT, num_tokens=NUM_TOKENS, salt="a")
        assert first.cached == NOTHING
        assert check_same(first.text, truth)
        client.flush("device", "host")
        second = client.chat(CHAT, num_tokens=NUM_TOKENS, salt="a")
        assert second.cached["store"] >= 64, "it does not find its own pages"
        assert check_same(second.text, truth)
        client.wait_idle()
        assert len(keys_in(store) - seen) >= 4


def change_one_weight(directory):
    """A copy of the model in which four bytes are others. Sizes, names and dates stay."""
    shutil.copytree(embedded_model(), directory)
    path = directory / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        tensor = header["model.layers.10.input_layernorm.weight"]
        assert tensor["dtype"] == "F32"
        file.seek(8 + header_bytes + tensor["data_offsets"][0])
        file.write(struct.pack("<f", 3.0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
