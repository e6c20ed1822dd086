"""Servers that die and clients that go away, behind a router: real processes, real signals (C28).

Every answer must be the one that nobody disturbed, or a clear error; and `fleet` sees to it that
all that live have given back everything.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from e2e.disagg.fleet import LONG, SUBJECT, Fleet, is_right, prompt, wait_for
from e2e.disagg.servers import (
    MODEL,
    TIMEOUT_S,
    Program,
    Reply,
    complete,
    model_of,
    post,
    stream,
    words,
)
from e2e.exactness.oracle import reference
from e2e.exactness.subjects import PAGE, Prompt
from e2e.serving.server import wait_until

NUM_TOKENS = 12
MANY_TOKENS = 500
RESUMED = 'quire_router_failovers_total{outcome="resumed"}'


def test_many_at_once_and_all_servers_used_c29(fleet: Fleet) -> None:
    prompts = [prompt(120 + 40 * i) for i in range(8)]
    before = [node.handover() for node in fleet.nodes]
    with ThreadPoolExecutor(8) as pool:
        waiting = [
            pool.submit(stream if i % 2 else complete, fleet.http, each, NUM_TOKENS)
            for i, each in enumerate(prompts)
        ]
    for each, reply in zip(prompts, waiting, strict=True):
        is_right(each, reply.result())
    for node, then in zip(fleet.nodes, before, strict=True):
        now, way = node.handover(), "sent" if node in fleet.prefills else "received"
        assert now[f"{way}_pages"] > then[f"{way}_pages"]


# ---- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", ["transferring", "computing", "running"])
def test_client_goes_away_c28(fleet: Fleet, state: str, is_stream: bool) -> None:
    mine, num_tokens = (prompt(200), 1500) if state == "running" else (prompt(), 300)
    nodes = fleet.prefills if state == "computing" else fleet.decodes
    connection = post(fleet.router.url, mine, num_tokens, stream=is_stream)
    try:
        wait_for(nodes, state)
    finally:
        connection.close()
    fleet.settle()
    # Nobody has finished it behind the client's back, and what was computed is of use.
    reply = complete(fleet.http, mine, NUM_TOKENS)
    is_right(mine, reply)


# ---- servers -------------------------------------------------------------------------------------


def test_prefill_servers_killed_during_before_and_after_a_transfer_c28(fleet: Fleet) -> None:
    # During: a stream and a whole answer, one of them at least from the one that dies.
    prompts = [prompt(), prompt()]
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(ask, fleet.http, each, NUM_TOKENS)
            for ask, each in zip((complete, stream), prompts, strict=True)
        ]
        decode, request = wait_for(fleet.decodes, "transferring", received=1)
        dead = next(node for node in fleet.prefills if node.peer == request["handover"]["peer"])
        dead.kill_all()
        for each, answer in zip(prompts, waiting, strict=True):
            is_right(each, answer.result())
    # What had come was not sent again: the other was asked for the rest.
    assert 0 < decode.handover()["repairs"]["link"] < LONG // PAGE
    (other,) = (node for node in fleet.prefills if node is not dead)

    with decode.client() as http:
        # Before: it is the first to be asked, and is no more.
        mine = prompt(200)
        is_right(mine, complete(http, mine, NUM_TOKENS, prefill=[dead.peer, other.peer]))
        # And nobody else is named: that is said.
        for ask in (complete, stream):
            reply = ask(http, prompt(200), NUM_TOKENS, prefill=[dead.peer])
            assert (reply.status, reply.error["code"]) == (503, "handover_failed")
            assert "no prefill server could be had" in reply.message
            assert dead.peer in reply.message
        decode.wait_clean()

    # After: it is not needed any more.
    killed: list[int] = []

    def kill(so_far: Reply) -> None:
        if not killed:
            killed.append(len(so_far.names))
            other.kill_all()

    reply = stream(fleet.http, mine := prompt(200), MANY_TOKENS, on_piece=kill)
    is_right(mine, reply)
    assert len(reply.names) == MANY_TOKENS > killed[0]
    reply = complete(fleet.http, prompt(200), NUM_TOKENS)
    assert reply.status == 503
    assert reply.message
    fleet.settle()

    # Both live again, with nothing in their memory, and are used again.
    fleet.mend()
    for _ in range(2):
        is_right(mine := prompt(200), stream(fleet.http, mine, NUM_TOKENS))
    for node in fleet.prefills:
        assert node.handover()["sent_pages"] > 0


def test_decode_killed_in_the_middle_of_answers_c28(fleet: Fleet) -> None:
    """Streams go on where they were, with the same text; whole answers come from the other."""
    resumed = fleet.metric(RESUMED)
    prompts = [prompt(100 + 20 * i) for i in range(4)]
    begun: list[set[int]] = [set(), set()]
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(
                stream,
                fleet.http,
                each,
                MANY_TOKENS,
                on_piece=lambda reply, mark=mark: mark.add(len(reply.names)),  # type: ignore[misc]
            )
            for each, mark in zip(prompts[:2], begun, strict=True)  # one at each server
        ]
        wait_until(lambda: all(len(mark) > 2 for mark in begun), "both streams have begun")
        waiting += [pool.submit(complete, fleet.http, each, MANY_TOKENS) for each in prompts[2:]]
        dead = fleet.decodes[0]
        wait_until(lambda: len(dead.requests()) > 1, "it has a stream and a whole answer")
        dead.kill_all()
        for each, reply in zip(prompts, waiting, strict=True):
            is_right(each, reply.result())
            assert len(reply.result().names) == MANY_TOKENS
    assert fleet.metric(RESUMED) > resumed
    fleet.settle()  # prefill too: what it held for the dead one
    fleet.mend()
    is_right(mine := prompt(200), dead.ask(mine, NUM_TOKENS, prefill=fleet.peers))


# ---- all in one command --------------------------------------------------------------------------


def test_quire_pd_answers_a_chat_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    mine: Prompt = prompt(200)
    arguments = ["--model", str(model_of(SUBJECT)), "--port", "0", "--store", "none"]
    arguments += ["--device-memory", "8MiB", "--host-memory", "16MiB"]
    with Program(tmp_path / "pd", "pd", *arguments) as pd:
        family = pd.descendants()
        assert len(family) >= 4  # two servers and their engines
        with openai.OpenAI(
            base_url=f"{pd.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client:
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": words(mine)}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        expected = reference(SUBJECT, mine, NUM_TOKENS).tokens
        assert answer.choices[0].message.content == words(expected).replace(" ", "")
        assert pd.press_ctrl_c() == 0
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
        assert "Traceback" not in pd.log
