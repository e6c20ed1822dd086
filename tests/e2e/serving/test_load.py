"""64 clients, some of them rude, on a server with little memory.

For some seconds; `scripts/soak` does the same for minutes.
"""

import asyncio
import os
import time

from e2e.serving.client import client_of, reading
from e2e.serving.load import MAX_TOKENS, NUM_CLIENTS, End, load, prompts, sample
from e2e.serving.oracle import Expected, check_same
from e2e.serving.server import Server, is_moving, wait_until
from e2e.serving.stores import strangers, unfinished, url_of, verify

SECONDS = float(os.environ.get("QUIRE_SOAK_S", "6"))
NUM_COMPARED = 2 if SECONDS < 60 else len(prompts())
"""Prompts whose answers under load are compared with those of the idle server."""
OPTIONS = {
    "device_memory": "40MiB",
    "host_memory": "24MiB",
    "max_waiting": 24,
    "max_context": 512,
    "prefetch_threshold": 32,
    "debug": "true",
}
COUNTERS = (
    "requests_admitted",
    "requests_finished",
    "requests_aborted",
    "requests_timed_out",
    "requests_preempted",
    "requests_restarted",
    "requests_shared_waits",
    "prompt_tokens",
    "generated_tokens",
    "evicted_device_pages",
    "evicted_host_pages",
    "backed_up_pages",
    "loaded_pages",
    "written_pages",
    "fetched_pages",
)
MIB = 1 << 20


def test_64_impatient_clients_on_little_memory(tmp_path, store):
    with (
        Server(tmp_path, store=url_of(store, "120MB"), **OPTIONS) as server,
        client_of(server) as client,
    ):
        began = time.monotonic()
        outcome = asyncio.run(load(server, SECONDS))
        took_s = time.monotonic() - began
        wait_until(lambda: is_idle(client.status()), "the server is idle")
        status = client.status(check=True)
        num_noise = compare(client, outcome)
        client.flush("device", "host")
        wait_until(
            lambda: has_closed(outcome.samples, sample(server)), "no file is open for nobody"
        )
        last = sample(server)
        report(outcome, status, last, took_s, num_noise)

        assert client.used_pages() == {"device": 0, "host": 0}
        assert status["leases"] == 0
        problems = [result.problem for result in outcome.results if result.end is End.PROBLEM]
        assert not problems
        assert outcome.count(End.CUT) > 0
        assert outcome.refusals[429] > 0, "the queue was never full"
        check_flat(outcome.samples, last)
        check_counters(status["counters"])
        with reading(client, prompts()[:2], num_tokens=360) as streams:
            server.process.terminate()
        assert server.wait() == 0
        assert not [stream.error for stream in streams if stream.error is not None]
        server.wait_gone()
        assert "Traceback" not in server.log
        assert server.leftovers() == []
        assert unfinished(store) == []
    assert verify(store)["clean"]
    assert strangers(store) == []


def is_idle(status):
    return not (status["running"] or status["waiting"] or is_moving(status))


def compare(client, outcome):
    """Greedy answers made under load against the idle server's, which shares no page with them.
    How many differ by fp32 noise."""
    num_noise = num_compared = 0
    answered = {r.ask.prompt for r in outcome.results if r.end is End.COMPLETE and r.ask.is_greedy}
    for prompt in sorted(answered)[:: max(1, len(answered) // NUM_COMPARED)]:
        whole = ask_idle(client, prompts()[prompt])
        for result in outcome.results:
            if result.end is End.COMPLETE and result.ask.is_greedy and result.ask.prompt == prompt:
                num_compared += 1
                num_noise += not check_same(result.text, cut(whole, result.ask.body["max_tokens"]))
    print(f"{num_compared} greedy answers compared, {num_noise} differ by fp32 noise")
    assert num_compared > 0
    return num_noise


def ask_idle(client, messages):
    answer = client.api.chat.completions.create(
        model=client.model,
        messages=messages,
        max_tokens=MAX_TOKENS,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"cache_salt": "nobody-else"},
    )
    tokens = answer.choices[0].logprobs.content
    pieces = [bytes(token.bytes) for token in tokens]
    texts = [b"".join(pieces[:i]).decode(errors="replace") for i in range(len(pieces) + 1)]
    gaps = [token.top_logprobs[0].logprob - token.top_logprobs[1].logprob for token in tokens]
    assert texts[-1] == answer.choices[0].message.content
    return Expected(texts[-1], answer.usage.prompt_tokens, texts[:-1], gaps)


def cut(expected, num_tokens):
    """As if so many tokens had been asked for."""
    if num_tokens >= len(expected.prefixes):
        return expected
    kept = expected.prefixes[:num_tokens]
    return Expected(
        expected.prefixes[num_tokens], expected.prompt_tokens, kept, expected.gaps[:num_tokens]
    )


def has_closed(samples, now):
    warm = samples[len(samples) // 3]
    return all(now[process].num_fds <= warm[process].num_fds for process in now)


def check_flat(samples, last):
    """After a third of the time everything has been used once: what grows then, leaks."""
    warm = samples[len(samples) // 3]
    for process, now in last.items():
        then = warm[process]
        assert now.rss_bytes < 1.1 * then.rss_bytes + 50 * MIB, process
        assert now.num_threads <= then.num_threads + 8, process


def check_counters(counters):
    """The little memory was really too little: every path was taken."""
    for name in ("requests_aborted", "evicted_device_pages", "evicted_host_pages", "loaded_pages"):
        assert counters.get(name, 0) > 0, name
    assert counters["written_pages"] > 0
    assert counters.get("requests_failed", 0) == 0


def report(outcome, status, last, took_s, num_noise):
    print(f"\n{NUM_CLIENTS} clients for {took_s:.0f} s")
    print(f"{'requests':<24}{len(outcome.results):>8}")
    for end in End:
        print(f"  {end.value:<22}{outcome.count(end):>8}")
    for code, count in sorted(outcome.refusals.items()):
        print(f"    {code:<20}{count:>8}")
    print(f"{'noise':<24}{num_noise:>8}")
    samples = outcome.samples
    rows = (samples[0], samples[len(samples) // 3], samples[len(samples) // 2], samples[-1], last)
    heads = ("start", "third", "middle", "end", "idle")
    print(f"{'':<24}" + "".join(f"{head:>8}" for head in heads))
    for process in ("server", "engine"):
        for what, of in (
            ("RSS MiB", lambda s: s.rss_bytes // MIB),
            ("files", lambda s: s.num_fds),
            ("threads", lambda s: s.num_threads),
        ):
            line = "".join(f"{of(row[process]):>8}" for row in rows)
            print(f"{process + ' ' + what:<24}{line}")
    for name in COUNTERS:
        print(f"{name:<24}{status['counters'].get(name, 0):>8}")
    model_s, step_s = status["seconds"]["model"], status["seconds"]["step"]
    print(f"{'seconds in steps':<24}{step_s:>8.1f}\n{'  in the model':<24}{model_s:>8.1f}")
