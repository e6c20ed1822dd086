"""The router in front of fake servers: passing on, retries, failover, disconnects."""

import asyncio
import contextlib
import json
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from certificates import certificate
from collector import collecting
from quire.web.routes import read_note
from unit.router.fakes import FakeServer, chunks, eventually, rig, said, texts, words


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


def error_of(response: httpx.Response) -> dict:
    return response.json()["error"]


def last_event(response: httpx.Response) -> dict:
    """Of a stream that ended with an error."""
    assert "[DONE]" not in response.text
    return json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]


# ---- passing on ----------------------------------------------------------------------------------


def test_an_answer_and_a_stream_are_those_of_the_decode_server():
    async def main():
        async with rig() as router:
            whole = await router.complete(seed=5)
            assert whole.json() == {"choices": [{"text": said({"prompt": "p", "seed": 5})}]}
            stream = await router.chat(seed=5, stream=True)
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert texts(stream) == {0: said({"prompt": "p", "seed": 5})}
            assert (await router.client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            assert not router.prefill[0].seen

    run(main)


def test_a_request_has_one_id_for_the_client_the_router_and_the_server():
    async def main():
        async with rig() as router:
            own = await router.complete(headers={"x-request-id": "mine-1"})
            other = await router.complete()
            stream = await router.chat(stream=True)
            told = [each.headers["x-request-id"] for each in (own, other, stream)]
            assert told[0] == "mine-1"
            assert len(set(told)) == 3
            assert [seen.headers["x-request-id"] for seen in router.decode[0].seen] == told

    run(main)


@contextlib.asynccontextmanager
async def behind_tls(server: FakeServer, identity: Path):
    """Its address for those who speak TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity)

    async def carry(reader, writer):
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def pass_on(near, answer):
        far, ask = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
        await asyncio.gather(carry(near, ask), carry(far, answer))

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context) as door:
        yield f"https://localhost:{door.sockets[0].getsockname()[1]}"


def test_whom_to_trust_is_read_once_and_is_the_same_for_answers_and_streams(tmp_path, monkeypatch):
    identity = certificate(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(identity))

    async def main():
        server = await FakeServer("unified").start()
        async with (
            behind_tls(server, identity) as url,
            rig(prefill=0, decode=0, names=[url]) as router,
        ):
            identity.unlink()
            assert (await router.complete(seed=5)).status_code == 200
            assert texts(await router.chat(seed=5, stream=True)) == {
                0: said({"prompt": "p", "seed": 5})
            }
        await server.stop()

    run(main)


def test_a_router_with_the_clients_key_looks_at_it_and_passes_no_key_on():
    async def main():
        async with rig(admin_key="root", api_key="client") as router:
            for headers, status in (({}, 401), ({"Authorization": "Bearer other"}, 401)):
                assert (await router.complete(headers=headers)).status_code == status
            assert not router.decode[0].seen
            headers = {"Authorization": "Bearer client"}
            assert (await router.complete(headers=headers)).status_code == 200
            (seen,) = router.decode[0].seen
            assert "authorization" not in seen.headers
            said = read_note(seen.headers, "root", time.time())
            assert said is not None
            assert said.vouches

    run(main)


def test_the_decode_server_is_told_whom_to_ask_and_only_that():
    async def main():
        async with rig(prefill=2, admin_key="root") as router:
            headers = {
                "Authorization": "Bearer client",
                "X-Forwarded-For": "1.2.3.4",
                "Origin": "https://evil.example",
                "X-Quire-Prefill": "tcp://evil:1",
                "X-Quire-Route": "1.1.guess",
            }
            await router.complete(headers=headers)
            (seen,) = router.decode[0].seen
            assert seen.headers["authorization"] == "Bearer client"
            assert not [value for value in seen.headers.values() if "root" in value]
            said = read_note(seen.headers, "root", time.time())
            assert said is not None
            assert said.prefill == seen.headers["x-quire-prefill"]
            assert not said.vouches
            assert {*seen.headers["x-quire-prefill"].split(",")} == {
                fake.peer for fake in router.prefill
            }
            assert not {"x-forwarded-for", "origin"} & seen.headers.keys()

    run(main)


def test_every_request_has_a_seed_and_a_given_one_is_kept():
    async def main():
        async with rig() as router:
            await router.complete()
            await router.complete(seed=None)
            await router.complete(seed=7)
            seeds = [seen.body["seed"] for seen in router.decode[0].seen]
            assert seeds[2] == 7
            assert all(isinstance(seed, int) for seed in seeds)
            assert seeds[0] != seeds[1]

    run(main)


def test_what_is_wrong_with_a_request_is_for_the_server_to_say():
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.refusal = (400, "unknown_field")
            response = await router.complete(stream=True)
            assert response.status_code == 400
            assert error_of(response)["code"] == "unknown_field"
            assert sum(len(fake.seen) for fake in router.decode) == 1
            assert (await router.client.post("/v1/embeddings")).status_code == 404

    run(main)


def test_unified_servers_need_no_prefill_server():
    async def main():
        servers = [FakeServer("unified"), FakeServer("unified")]
        async with rig(0, 0, unified=servers) as router:
            for _ in range(4):
                assert (await router.complete()).status_code == 200
            assert [len(fake.seen) for fake in servers] == [2, 2]  # by turns
            assert "x-quire-prefill" not in servers[0].seen[0].headers

    run(main)


# ---- retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_cannot_is_followed_by_one_that_can(stream):
    async def main():
        async with rig(decode=2) as router:
            for refusal, reason in (
                ((429, "queue_full"), "overloaded"),
                ((503, "engine_unavailable"), "unavailable"),
                ((502, "whatever"), "unavailable"),
            ):
                router.decode[0].refusal = refusal
                await router.until(router.decode[0].url, "up")
                for _ in range(2):  # by turns, so that each of them comes first once
                    assert (await router.complete(stream=stream)).status_code == 200
                assert await router.metric("quire_router_retries_total", reason=reason) >= 1

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_gone_is_followed_by_one_that_is_not(stream):
    async def main():
        async with rig(decode=2, check_interval_s=60) as router:
            router.decode[0].kill()
            for _ in range(4):
                assert (await router.complete(stream=stream)).status_code == 200
            assert await router.metric("quire_router_retries_total") == 1  # then it is known
            assert await router.metric("quire_router_failovers_total") == 0

    run(main)


def test_a_server_that_dies_before_the_first_word_is_no_failover():
    async def main():
        async with rig(decode=2, check_interval_s=60) as router:
            router.decode[0].die_after = router.decode[1].die_after = 0
            response = await router.complete(stream=True)
            assert response.status_code == 503
            assert error_of(response)["code"] == "no_server"
            assert "2 server(s) were tried" in error_of(response)["message"]
            assert await router.metric("quire_router_retries_total", reason="broken") == 2

    run(main)


def test_when_nobody_can_the_last_ones_words_are_the_answer():
    async def main():
        async with rig(decode=3, retries=1) as router:
            for fake in router.decode:
                fake.refusal = (429, "queue_full")
            response = await router.complete()
            assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
            assert sum(len(fake.seen) for fake in router.decode) == 2  # retries=1

    run(main)


def test_without_a_prefill_server_decode_answers_alone():
    async def main():
        async with rig(check_interval_s=60) as router:
            router.prefill[0].kill()
            for member in router.fleet.members:
                member.wake.set()
            await router.until(router.prefill[0].url, "down")
            assert (await router.complete()).status_code == 200
            assert "x-quire-prefill" not in router.decode[0].seen[-1].headers

    run(main)


def test_without_anybody_to_answer_there_is_one_clear_error():
    async def main():
        async with rig(check_interval_s=60) as router:
            router.decode[0].kill()
            for member in router.fleet.members:
                member.wake.set()
            await router.until(router.decode[0].url, "down")
            response = await router.complete()
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert error_of(response)["code"] == "no_server"
            assert "prefill 1 of 1, decode 0 of 1" in error_of(response)["message"]

    run(main)


# ---- responses, tokens ---------------------------------------------------------------------------


def kinds_of(response: httpx.Response) -> list[str]:
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    found = [(head.removeprefix("event: "), json.loads(data[6:])) for head, data in blocks]
    assert all(kind == event["type"] for kind, event in found)
    return [kind.removeprefix("response.") for kind, _ in found]


def test_requests_of_one_cache_key_meet_on_one_server():
    async def main():
        async with rig(decode=4) as router:
            for key in ("ann", "bob", "cid"):
                before = [len(fake.seen) for fake in router.decode]
                for i in range(4):
                    answer = await router.complete(f"prompt {i} of {key}", prompt_cache_key=key)
                    assert answer.status_code == 200
                counts = [len(f.seen) - b for f, b in zip(router.decode, before, strict=True)]
                assert sorted(counts) == [0, 0, 0, 4]

    run(main)


def test_responses_pass_and_whoever_goes_on_with_one_is_sent_where_it_is():
    async def main():
        async with rig(decode=3) as router:
            post = router.client.post
            whole = (await post("/v1/responses", json={"model": "tiny", "input": "a"})).json()
            asked = {"model": "tiny", "input": "b", "stream": True}
            stream = await post("/v1/responses", json=asked)
            deltas = ["output_text.delta"] * 2
            assert kinds_of(stream) == ["created", *deltas, "completed"]
            name = json.loads(stream.text.split("data: ")[1].split("\n")[0])["response"]["id"]
            for before in (whole["id"], name):
                home = next(fake for fake in router.decode if str(fake._port) in before)
                count = len(home.seen)
                for _ in range(3):
                    body = {"model": "tiny", "input": "c", "previous_response_id": before}
                    assert (await post("/v1/responses", json=body)).status_code == 200
                assert len(home.seen) == count + 3
                assert "seed" not in home.seen[-1].body

    run(main)


def test_a_response_whose_server_dies_is_an_error_once_it_has_begun():
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.die_after = 2
            body = {"model": "tiny", "input": "b", "stream": True}
            response = await router.client.post("/v1/responses", json=body)
            assert last_event(response)["code"] == "stream_lost"
            assert sum(len(fake.seen) for fake in router.decode) == 1

    run(main)


def test_tokens_are_counted_by_any_server():
    async def main():
        async with rig(decode=2) as router:
            for path in ("/tokenize", "/detokenize"):
                body = {"model": "tiny", "prompt": "a", "tokens": [1]}
                answer = (await router.client.post(path, json=body)).json()
                assert answer == {"path": path, "asked": body}

    run(main)


# ---- failover ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "die_after"), [("complete", 1), ("complete", 9), ("chat", 1), ("chat", 5), ("chat", 9)]
)
def test_a_stream_goes_on_where_its_server_died(kind, die_after):
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.die_after = die_after
            asked = asyncio.create_task(getattr(router, kind)(stream=True))
            await eventually(lambda: any(fake.seen for fake in router.decode))
            (other,) = [fake for fake in router.decode if not fake.seen]
            other.die_after = None
            response = await asked
            (seen,) = other.seen
            # It is told which tokens there are already, and the client sees none of them.
            num_told = min(8, die_after - (kind == "chat"))
            told = [1000 + i for i in range(num_told)] or None
            assert seen.body.get("continue_token_ids") == told
            assert b"token_ids" not in response.content
            assert texts(response) == {0: said({"prompt": "p", "seed": seen.body["seed"]})}
            assert await router.metric("quire_router_failovers_total", outcome="resumed") == 1
            opened = [c for c in chunks(response) if "role" in c["choices"][0].get("delta", {})]
            assert len(opened) == (kind == "chat")

    run(main)


def test_choices_logprobs_and_usage_come_once():
    async def main():
        async with rig(decode=2) as router:
            fields = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
            for fake in router.decode:
                fake.die_after = 14  # the second choice has begun
            for kind in (router.chat, router.complete):
                asked = asyncio.create_task(kind(stream=True, seed=3, **fields))
                await eventually(lambda: any(fake.seen for fake in router.decode))
                first = next(fake for fake in router.decode if fake.seen)
                next(fake for fake in router.decode if not fake.seen).die_after = None
                response = await asked
                assert texts(response) == {i: said({"prompt": "p", "seed": 3}, i) for i in (0, 1)}
                scored = {0: 0, 1: 0}
                for choice in (c for chunk in chunks(response) for c in chunk["choices"]):
                    found = choice.get("logprobs") or {}
                    entries = found.get("content") or found.get("tokens") or []
                    scored[choice["index"]] += len(entries)
                assert scored == {0: 8, 1: 8}
                assert [c for c in chunks(response) if c.get("usage")] == [chunks(response)[-1]]
                await first.stop()
                await first.start()
                await router.until(first.url, "up")
                for fake in router.decode:
                    fake.seen.clear()
                    fake.die_after = 14

    run(main)


@pytest.mark.parametrize("code", ["engine_unavailable", "shutting_down"])
def test_a_stream_that_its_server_gives_up_goes_on_elsewhere(code):
    async def main():
        async with rig(decode=2) as router:
            router.decode[0].error_after = (3, code)
            for _ in range(4):
                response = await router.complete(stream=True, seed=1)
                assert texts(response) == {0: said({"prompt": "p", "seed": 1})}

    run(main)


def test_an_error_that_another_server_would_have_too_ends_the_stream():
    async def main():
        async with rig() as router:
            router.decode[0].error_after = (3, "timeout")
            response = await router.complete(stream=True)
            assert last_event(response)["code"] == "timeout"
            assert len(router.decode[0].seen) == 1

    run(main)


def test_what_came_in_one_piece_with_an_error_is_told_before_it():
    async def main():
        async with rig() as router:
            router.decode[0].tells_together = True
            whole = await router.complete(stream=True, seed=1)
            assert texts(whole) == {0: said({"prompt": "p", "seed": 1})}
            assert whole.text.endswith("data: [DONE]\n\n")
            router.decode[0].error_after = (3, "timeout")
            response = await router.complete(stream=True, seed=1)
            events = response.text.split("\n\n")[:-2]  # less the error
            told = [
                json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in events
            ]
            assert told == words({"prompt": "p", "seed": 1})[:3]
            assert last_event(response)["code"] == "timeout"

    run(main)


def test_what_came_in_one_piece_with_an_end_elsewhere_is_told_once():
    async def main():
        async with rig(decode=2) as router:
            router.decode[0].tells_together = True
            router.decode[0].error_after = (3, "shutting_down")
            for _ in range(4):
                response = await router.complete(stream=True, seed=1)
                assert texts(response) == {0: said({"prompt": "p", "seed": 1})}

    run(main)


def test_a_replay_that_says_something_else_ends_the_stream():
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.die_after = 3
            asked = asyncio.create_task(router.complete(stream=True))
            await eventually(lambda: any(fake.seen for fake in router.decode))
            (other,) = [fake for fake in router.decode if not fake.seen]
            other.die_after, other.lies = None, True
            response = await asked
            assert last_event(response)["code"] == "replay_diverged"
            assert "LIE" not in response.text
            assert await router.metric("quire_router_failovers_total", outcome="diverged") == 1

    run(main)


def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error():
    async def main():
        async with rig() as router:
            router.decode[0].die_after = 3
            response = await router.complete(stream=True)
            assert response.status_code == 200
            assert last_event(response)["code"] == "no_server"
            assert await router.metric("quire_router_failovers_total", outcome="failed") == 1

    run(main)


def test_a_server_that_falls_silent_is_left_when_its_health_says_so():
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.hold_after = 3
            asked = asyncio.create_task(router.complete(stream=True, seed=1))
            await eventually(lambda: any(fake.held.is_set() for fake in router.decode))
            stuck, other = sorted(router.decode, key=lambda fake: not fake.seen)
            other.hold_after = None
            stuck.health_refusal = 503
            assert texts(await asked) == {0: said({"prompt": "p", "seed": 1})}

    run(main)


# ---- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_when_the_client_goes_the_server_is_told_at_once(stream):
    async def main():
        async with rig() as router:
            (fake,) = router.decode
            fake.hold_after = 2
            asked = asyncio.create_task(router.complete(stream=stream))
            await fake.held.wait()
            asked.cancel()
            await asyncio.wait_for(fake.left.wait(), 10)
            await eventually(lambda: not any(each.in_flight for each in router.fleet.members))
            assert await router.metric("quire_router_aborts_total", reason="disconnect") == 1
            assert len(fake.seen) == 1  # nobody was asked in its place

    run(main)


def test_events_come_as_they_are_made():
    async def main():
        async with rig() as router:
            router.decode[0].hold_after = 2
            body = {"model": "tiny", "prompt": "p", "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                assert not router.decode[0].left.is_set()

    run(main)


def test_a_router_that_is_to_stop_finishes_what_it_has():
    async def main():
        async with rig() as router:
            router.decode[0].pause_after = 2
            body = {"model": "tiny", "prompt": "p", "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                router.stop.set()
                while (await router.client.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.005)
                turned_away = await router.complete()
                assert error_of(turned_away)["code"] == "shutting_down"
                router.decode[0].go_on.set()
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"

    run(main)


def test_a_router_that_is_stopped_tells_those_who_wait():
    async def main():
        async with rig() as router:
            router.decode[0].hold_after = 2
            body = {"model": "tiny", "prompt": "p", "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                router.stop.set(soon=True)
                rest = [line async for line in lines if line]
            assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"

    run(main)


# ---- traces --------------------------------------------------------------------------------------


def test_whose_trace_a_request_belongs_to_is_passed_on():
    header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    async def main():
        async with rig() as router:
            await router.complete(headers={"traceparent": header, "tracestate": "a=1"})
            (seen,) = router.decode[0].seen
            assert (seen.headers["traceparent"], seen.headers["tracestate"]) == (header, "a=1")

    run(main)


def test_a_router_with_otlp_tells_of_requests_and_servers_tell_within_that():
    async def main():
        with collecting() as collector:
            async with rig(otlp=collector.url) as router:
                await router.chat(seed=5, stream=True)
                (seen,) = router.decode[0].seen
            (span,) = collector.named("POST /v1/chat/completions")
            assert seen.headers["traceparent"] == f"00-{span.trace}-{span.id}-01"
            assert span.resource["quire.role"] == "router"

    run(main)
