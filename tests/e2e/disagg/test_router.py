"""Servers that die and clients that go away, behind a router: real processes, real signals (C28).

Every answer must be the one that nobody disturbed, or a clear error; and `fleet` sees to it that
all that live have given back everything.
"""

import functools
import http.client
import select
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from e2e.disagg.fleet import LONG, SUBJECT, Fleet, catch, is_right, is_seen, prompt
from e2e.disagg.servers import (
    MODEL,
    TIMEOUT_S,
    Node,
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
    before = [moved(fleet, node) for node in fleet.nodes]
    for _ in range(8):  # who is chosen depends on who has told its load; nobody is left out
        prompts = [prompt(120 + 40 * i) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            waiting = [
                pool.submit(stream if i % 2 else complete, fleet.http, each, NUM_TOKENS)
                for i, each in enumerate(prompts)
            ]
        for each, reply in zip(prompts, waiting, strict=True):
            is_right(each, reply.result())
        now = [moved(fleet, node) for node in fleet.nodes]
        if all(then < pages for then, pages in zip(before, now, strict=True)):
            for node in fleet.nodes:
                wait_until(functools.partial(has_told, fleet, node), "how long it took is told")
            return
    pytest.fail(f"a server was never used: {before} pages moved before, {now} after")


def has_told(fleet: Fleet, node: Node) -> bool:
    """How long its part of hand-overs took."""
    stage = "gave" if node in fleet.prefills else "moved"
    with node.client() as http:
        lines = http.get("/metrics").text.splitlines()
    name = f'quire_handover_stage_seconds_count{{stage="{stage}"}}'
    return any(line.startswith(name) and float(line.split()[-1]) > 0 for line in lines)


def moved(fleet: Fleet, node: Node) -> int:
    """Pages that it has sent, or received."""
    way = "sent" if node in fleet.prefills else "received"
    return int(node.handover()[f"{way}_pages"])


# ---- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", ["transferring", "computing", "running"])
def test_client_goes_away_c28(fleet: Fleet, state: str, is_stream: bool) -> None:
    nodes = fleet.prefills if state == "computing" else fleet.decodes
    seen = None
    while seen is None:
        mine, num_tokens = (prompt(200), 1500) if state == "running" else (prompt(), 300)
        connection = post(fleet.router.url, mine, num_tokens, stream=is_stream)
        # A stream begins to answer when it runs; everything else is over when there is an answer.
        is_over = functools.partial(_has_answer, connection)
        try:
            seen = is_seen(nodes, state, _never if state == "running" and is_stream else is_over)
        finally:
            connection.close()
        fleet.settle()
    # Nobody has finished it behind the client's back, and what was computed is of use.
    reply = complete(fleet.http, mine, NUM_TOKENS)
    is_right(mine, reply)


def _has_answer(connection: http.client.HTTPConnection) -> bool:
    return bool(select.select([connection.sock], [], [], 0)[0])


def _never() -> bool:
    return False


# ---- servers -------------------------------------------------------------------------------------


def test_prefill_servers_killed_during_before_and_after_a_transfer_c28(fleet: Fleet) -> None:
    # During: a stream and a whole answer, one of them at least from the one that dies.
    prompts: list[Prompt] = []
    with ThreadPoolExecutor(2) as pool:

        def start() -> list[Future[Reply]]:
            prompts[:] = [prompt(), prompt()]
            return [
                pool.submit(ask, fleet.http, each, NUM_TOKENS)
                for ask, each in zip((complete, stream), prompts, strict=True)
            ]

        before = {node: dict(node.handover()["repairs"]) for node in fleet.decodes}
        decode, dead, waiting = catch(fleet.decodes, fleet.prefills, start)
        dead.kill_all()
        for each, answer in zip(prompts, waiting, strict=True):
            is_right(each, answer.result())
    # What had come was not sent again: the other was asked for the rest. Whether it was the end of
    # the line that was noticed first, or the silence, is all the same.
    repairs = decode.handover()["repairs"]
    lost = [repairs.get(why, 0) - before[decode].get(why, 0) for why in ("link", "silent")]
    assert 0 < sum(lost) < 2 * (LONG // PAGE)
    (other,) = (node for node in fleet.prefills if node is not dead)

    with decode.client() as http:
        # Before: it is the first to be asked, and is no more.
        mine = prompt(200)
        is_right(mine, complete(http, mine, NUM_TOKENS, prefill=[dead.peer, other.peer]))
        # And nobody else is named: then it computes by itself.
        for ask in (complete, stream):
            is_right(mine := prompt(200), ask(http, mine, NUM_TOKENS, prefill=[dead.peer]))
        assert decode.handover()["local"]["no_peer"] >= 2
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
    # With no prefill server at all decode computes: slower, and right.
    is_right(mine := prompt(200), complete(fleet.http, mine, NUM_TOKENS))
    fleet.settle()

    # Both live again, with nothing in their memory, and are used again.
    fleet.mend()

    def are_used() -> bool:
        is_right(mine := prompt(200), stream(fleet.http, mine, NUM_TOKENS))
        return all(node.handover()["sent_pages"] > 0 for node in fleet.prefills)

    wait_until(are_used, "both are used again")


def test_decode_killed_in_the_middle_of_answers_c28(fleet: Fleet) -> None:
    """Streams go on where they were, with the same text; whole answers come from the other."""
    resumed = fleet.metric(RESUMED)
    dead = fleet.decodes[0]
    with ThreadPoolExecutor(4) as pool:
        while (caught := _catch_answering(fleet, dead, pool)) is None:
            pass
        dead.kill_all()
        prompts, waiting = caught
        for each, reply in zip(prompts[1:], waiting[1:], strict=True):
            is_right(each, reply.result())
            assert len(reply.result().names) == MANY_TOKENS
    # One goes on after the tokens that were told: none is doubled, none is missing.
    went_on = waiting[0].result()
    assert len(went_on.ids) == went_on.usage["completion_tokens"] == MANY_TOKENS
    assert went_on.text == complete(fleet.http, prompts[0], MANY_TOKENS).text
    assert fleet.metric(RESUMED) > resumed
    fleet.settle()  # prefill too: what it held for the dead one
    fleet.mend()
    is_right(mine := prompt(200), dead.ask(mine, NUM_TOKENS, prefill=fleet.peers))


def _catch_answering(
    fleet: Fleet, dead: Node, pool: ThreadPoolExecutor
) -> tuple[list[Prompt], list[Future[Reply]]] | None:
    """Two streams, one at each server, and two whole answers, all of them unfinished, and one
    server that stands still in the middle of them. None: they were too fast, and are over."""
    prompts = [prompt(100 + 20 * i) for i in range(4)]
    begun: list[set[int]] = [set(), set()]
    told: list[dict[str, Any]] = [{"logprobs": None, "return_token_ids": True}, {}]
    waiting = [
        pool.submit(stream, fleet.http, each, MANY_TOKENS, on_piece=_marks(mark), **options)
        for each, mark, options in zip(prompts[:2], begun, told, strict=True)
    ]

    def is_over() -> bool:
        return any(each.done() for each in waiting)

    wait_until(lambda: is_over() or all(map(len, begun)), "both streams have begun")
    waiting += [pool.submit(complete, fleet.http, each, MANY_TOKENS) for each in prompts[2:]]
    wait_until(lambda: is_over() or len(dead.requests()) > 1, "it has a stream and a whole answer")
    dead.stop_engine()
    if not is_over() and all(max(mark) < MANY_TOKENS for mark in begun):
        return prompts, waiting
    dead.resume_engine()
    for each in waiting:
        each.result()
    return None


def _marks(mark: set[int]) -> Callable[[Reply], None]:
    return lambda reply: mark.add(len(reply.names) or len(reply.ids))


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
        _, alive = psutil.wait_procs(family, timeout=TIMEOUT_S)
        assert not alive
        assert "Traceback" not in pd.log
