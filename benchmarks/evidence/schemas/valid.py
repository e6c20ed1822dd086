"""An answer to each of many random schemas, drawn at temperature 1: does it end, and follow it?

The grammars are those that the server writes. What is checked is the text, by a check that knows
no grammar. An answer that is cut off counts as not valid. Knows an engine, not who started it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evidence.schemas.cases import follows, random_schema
from quire.engine.client import EngineClient
from quire.engine.messages import Finish, SamplingParams
from quire.progress import Progress
from quire.text.grammars import json_rule

_TIMEOUT_S = 3600.0
_MESSAGES = [{"role": "user", "content": "Make something up, as JSON."}]


@dataclass(frozen=True, slots=True)
class Asked:
    count: int = 500
    seed: int = 20_261
    depth: int = 2
    """How deep schemas are nested, at most."""
    together: int = 32
    """Answers at a time."""
    max_tokens: int = 1500


@dataclass(slots=True)
class _Tally:
    valid: int = 0
    num_tokens: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)


async def check(
    engine: EngineClient, tokenizer: Any, asked: Asked, progress: Progress
) -> dict[str, Any]:
    """`tokenizer`: the model's, with or without a template for chats."""
    rng = random.Random(asked.seed)
    schemas = [random_schema(rng, asked.depth) for _ in range(asked.count)]
    prompt = _prompt(tokenizer)
    tally = _Tally()
    gate = asyncio.Semaphore(asked.together)
    began = time.perf_counter()

    def params(number: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=asked.max_tokens,
            seed=asked.seed + number,
            stop_ids=[tokenizer.eos_token_id],
            grammar=json_rule("start", schemas[number], "schema") + "\n",
        )

    async def one(number: int) -> None:
        async with gate:
            tokens, finish, error = await _answer(engine, prompt, params(number))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        tally.num_tokens += len(tokens)
        if finish is Finish.STOP and _is_valid(text, schemas[number]):
            tally.valid += 1
        else:
            about = {"number": number, "schema": schemas[number], "finish": finish, "error": error}
            tally.wrong.append(about | {"text": text[-200:]})
        progress("random schemas", tally.valid + len(tally.wrong), asked.count)

    await asyncio.gather(*(one(number) for number in range(asked.count)))
    return {
        "asked": asked.count,
        "valid": tally.valid,
        "seed": asked.seed,
        "depth": asked.depth,
        "together": asked.together,
        "tokens": tally.num_tokens,
        "seconds": round(time.perf_counter() - began, 1),
        "wrong": tally.wrong,
    }


async def _answer(
    engine: EngineClient, prompt: bytes, params: SamplingParams
) -> tuple[list[int], Finish | None, str]:
    tokens: list[int] = []
    finish, error = None, ""
    async with engine.generate(prompt, params, timeout_s=_TIMEOUT_S) as outputs:
        async for output in outputs:
            tokens += output.tokens
            finish, error = output.finish, output.error
    return tokens, finish, error


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return follows(json.loads(text), schema)
    except ValueError:
        return False


def _prompt(tokenizer: Any) -> bytes:
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, tokenize=False)
    else:
        text = _MESSAGES[0]["content"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(ids, "<i4").tobytes()
