"""One request through router, decode and prefill servers is one trace (`quire pd --otlp`), and its
hand-over one line of the log on either side."""

import json
import re
from pathlib import Path

import httpx

from collector import collecting
from e2e.disagg.fleet import SUBJECT, prompt
from e2e.disagg.servers import MODEL, TIMEOUT_S, Program, model_of, words
from e2e.exactness.subjects import PAGE

REQUEST = "POST /v1/chat/completions"
TRACE, ASKED = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_request_its_hand_over_and_who_gave_the_pages_are_one_trace(tmp_path: Path) -> None:
    mine = prompt(200)
    arguments = ["--model", str(model_of(SUBJECT)), "--port", "0", "--store", "none"]
    arguments += ["--device-memory", "8MiB", "--host-memory", "16MiB"]
    with (
        collecting() as collector,
        Program(tmp_path / "pd", "pd", *arguments, "--otlp", collector.url) as pd,
    ):
        answer = httpx.post(
            f"{pd.url}/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": words(mine)}],
                "max_tokens": 4,
            },
            headers={"traceparent": f"00-{TRACE}-{ASKED}-01"},
            timeout=TIMEOUT_S,
        )
        assert answer.status_code == 200, answer.text
        by_role = {each.resource["quire.role"]: each for each in collector.named(REQUEST, 2)}
        (generated,), (received,), (gave,) = (
            collector.named(name) for name in ("generate", "receive pages", "give pages")
        )
    router, decode = by_role["router"], by_role["decode"]
    assert (router.parent, decode.parent) == (ASKED, router.id)
    assert generated.parent == decode.id
    assert {received.parent, gave.parent} == {generated.id}
    assert gave.resource["quire.role"] == "prefill"
    assert received.about["quire.handover.received"] == len(mine) // PAGE
    everything = [router, decode, generated, received, gave]
    assert {span.trace for span in everything} == {TRACE}
    lines = [json.loads(line) for line in pd.log.splitlines() if '"event": "hand' in line]
    (line,) = [line for line in lines if line["event"] == "handover"]
    num_pages, name = received.about["quire.handover.received"], re.escape(line["id"])
    assert re.fullmatch(
        rf"hand-over of {line['request']} from tcp://[\d.:]+ as {name}: {line['stage']}; "
        rf"0 pages brought back here, {num_pages} received, in {line['seconds']} s",
        line["message"],
    )
    (other,) = [line for line in lines if line["event"] == "handout"]
    assert (line["server"], other["server"]) == ("decode", "prefill")
    assert other["id"] == line["id"]
    assert re.fullmatch(
        rf"hand-over to [\w-]+ as {name}: pages 0 to {num_pages}, all given, "
        rf"in {other['seconds']} s",
        other["message"],
    )
