"""What is asked of `quire bench gpu`, beside what it found."""

from __future__ import annotations

from typing import Any

from gpu_asked import asked_table, judge
from unit.bench.shown import shown


def met(result: dict[str, Any]) -> dict[str, bool]:
    return {figure["name"]: figure["met"] for figure in judge(result)}


def test_more_is_asked_of_many_requests_than_of_one() -> None:
    rows = [
        {"batch": batch, "context": 1024, "share_of_floor": 0.72, "greedy_ms": 1, "drawn_ms": 1.08}
        for batch in (1, 64)
    ]
    found = met({"decode": rows})
    assert found["1 × 1,024: of the floor"]
    assert not found["64 × 1,024: of the floor"]
    assert found["1 × 1,024: drawn ÷ greedy"]


def test_prompts_are_asked_for_a_share_or_for_seconds() -> None:
    common = {"share_of_floor": 0.69, "ms": 1450.0}
    rows = [
        {"tokens": tokens, "chunk": chunk} | common
        for tokens, chunk in ((8192, 8192), (32768, 8192), (32768, 2048))
    ]
    assert list(met({"prefill": rows}).values()) == [False, False, True]


def test_a_hit_on_the_host_is_asked_for_at_one_length_and_where_it_was_measured() -> None:
    more = {"device_ms": 15.0, "more_tokens": 63, "more_ms": 15.0}
    hit = more | {"host_ms": 124.0, "floor_ms": 100.0, "computed_ms": 1230.0}
    late = more | {"device_ms": 16.0}
    rows = [{"tokens": 1024} | hit, {"tokens": 32768} | hit, {"tokens": 130816} | late]
    assert met({"hits": rows}) == {
        "1,024 on the device": True,
        "1,024 on the device and 63 more": True,
        "32,768 on the device": True,
        "32,768 on the device and 63 more": True,
        "32,768 on the host: ÷ floor": True,
        "32,768 on the host: computed ÷ it": False,
        "130,816 on the device": False,
        "130,816 on the device and 63 more": True,
    }


def test_sets_that_do_not_fit_are_asked_for_throughput_or_for_time() -> None:
    def row(tiers: str, times: float, ttft_s: float, requests_s: float) -> dict[str, Any]:
        one = {"ttft_s": ttft_s, "requests_s": requests_s}
        return {"tiers": tiers, "times_device": times, "rounds": [one, one]}

    rows = [
        row("L1", 4.0, 1.0, 1.0),
        row("L1+L2", 4.0, 0.19, 3.0),
        row("L1+half L2", 4.0, 0.5, 1.0),
        row("L1+half L2+L3", 4.0, 0.5, 6.5),
        row("L1", 0.8, 1.0, 1.0),
        row("L1+L2", 0.8, 1.0, 1.0),
    ]
    assert met({"sets": rows}) == {
        "4.0 × the device, L1+L2: first token": True,
        "4.0 × the device, L1+half L2+L3: throughput": True,
    }


def test_what_was_not_measured_is_not_judged() -> None:
    assert judge({"shape": "tiny", "failed": {"hits": "no tokens today"}}) == []


def test_the_table_says_how_many_are_met() -> None:
    row = {"batch": 1, "context": 9, "share_of_floor": 0.72, "greedy_ms": 1, "drawn_ms": 1.09}
    said = shown([asked_table({"shape": "tiny", "decode": [row]})])
    assert "1 of 2 met" in said
    assert "≥ 70.0%" in said
    assert "1.09 ×" in said
