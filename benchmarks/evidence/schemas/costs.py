"""What following a schema costs those who do, and those beside them.

    cost       milliseconds per token, held to a schema and plain, in turns in one run
    stall      the longest wait for a token of a plain answer: alone, and while schemas made to be
               hard are asked for beside it

Answers are of one length; what they say does not matter. Knows an engine, not who started it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.engine.client import EngineClient
from quire.engine.messages import SamplingParams

_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    num_tokens: int = 64
    """Of an answer."""
    together: tuple[int, ...] = (1, 8)
    """Answers at a time."""
    rounds: int = 3


def hostile() -> dict[str, dict[str, Any]]:
    """Schemas that take long to compile, or to follow."""
    text = {"type": "string"}
    many = {f"k{i}": text for i in range(3000)}
    return {
        "3,000 properties": {"type": "object", "properties": many, "required": ["k2999"]},
        "a product of choices": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": text}} for j in range(6)]} for i in range(8)
            ]
        },
        "patterns in patterns": {**text, "pattern": ".*" + "(.*a.{20})" * 5},
        "repeated repetition": {**text, "pattern": "(a|aa)*(b|bb)*(c{1,1000}){1,1000}"},
        "2,000 choices": {
            "anyOf": [
                {"type": "object", "properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]}
                for i in range(2000)
            ]
        },
        "a million characters": {**text, "maxLength": 1_000_000},
        "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, text]}}},
    }


async def measure(engine: EngineClient, plan: Plan) -> dict[str, Any]:
    await _answer(engine, plan, 0, _lark(_NUMBERS))  # reads the vocabulary, warms up
    costs = {str(count): await _cost(engine, plan, count) for count in plan.together}
    alone = max(await _gaps(engine, plan, 1))
    beside = {name: await _beside(engine, plan, schema) for name, schema in hostile().items()}
    return {"cost": costs, "stall_ms": {"alone": _ms(alone)} | beside}


async def _cost(engine: EngineClient, plan: Plan, count: int) -> dict[str, Any]:
    """Milliseconds per token of one answer; the ratio is the median over rounds."""
    seconds: dict[str, list[float]] = {"plain": [], "held": []}
    for number in range(plan.rounds):
        for name, grammar in (("plain", ""), ("held", _lark(_NUMBERS))):
            began = time.perf_counter()
            first = 1000 * number
            await asyncio.gather(*(_answer(engine, plan, first + i, grammar) for i in range(count)))
            seconds[name].append((time.perf_counter() - began) / plan.num_tokens)
    ratios = [h / p for h, p in zip(seconds["held"], seconds["plain"], strict=True)]
    found = {name: _ms(statistics.median(each)) for name, each in seconds.items()}
    return found | {"ratio": round(statistics.median(ratios), 3)}


async def _beside(engine: EngineClient, plan: Plan, schema: dict[str, Any]) -> dict[str, Any]:
    plain = asyncio.create_task(_gaps(engine, plan, 2))
    began = time.perf_counter()
    error = await _answer(engine, plan, 3, _lark(schema))
    taken = time.perf_counter() - began
    longest = max(await plain)
    return {"longest_ms": _ms(longest), "answer_s": round(taken, 2), "refused": error[:80]}


async def _gaps(engine: EngineClient, plan: Plan, seed: int) -> list[float]:
    """Seconds between the tokens of a plain answer."""
    times: list[float] = []
    async with engine.generate(_prompt(seed), _params(plan, seed, ""), timeout_s=_TIMEOUT_S) as out:
        async for output in out:
            times += [time.perf_counter()] * len(output.tokens)
    return [b - a for a, b in itertools.pairwise(times)]


async def _answer(engine: EngineClient, plan: Plan, seed: int, grammar: str) -> str:
    """Why it was refused, if it was."""
    params = _params(plan, seed, grammar)
    async with engine.generate(_prompt(seed), params, timeout_s=_TIMEOUT_S) as outputs:
        async for output in outputs:
            last = output
    return last.error


def _params(plan: Plan, seed: int, grammar: str) -> SamplingParams:
    return SamplingParams(max_tokens=plan.num_tokens, seed=seed, grammar=grammar)


def _prompt(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(10, 1000, 32).astype("<i4").tobytes()


def _lark(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}\n"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
