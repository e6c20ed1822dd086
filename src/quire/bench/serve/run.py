"""`quire bench serve`: sessions of several turns against a running OpenAI-compatible server.

Arrival is a closed loop: `concurrency` clients, each taking the session that has waited longest,
making its next request, and putting it back. So sessions alternate as people's do, and what one of
them left in the cache is under pressure from the others before it comes back.

The result is a plain dict, the shape of `--json`; tables and pictures are made from it elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import httpx

from quire.bench import Json, Result
from quire.bench.prose import Prose
from quire.bench.serve import figures
from quire.bench.serve.chatting import ChatAnswer, Verdict, stream
from quire.bench.serve.conversations import (
    ChatSession,
    ChatTurn,
    ChatWorkload,
    Shape,
    recorded,
    synthetic,
    text_of,
)
from quire.bench.serve.reuse import Reuse
from quire.errors import ConfigError, EngineError
from quire.progress import Count

CHAT = "/v1/chat/completions"
_CALIBRATION_CHARS = 4000
_FEWEST_CHARS = 2
"""Of a token, taken together: so much of a context is not too long for it."""
_TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around the messages."""
_MARGIN = 1.1
"""Recorded text differs from place to place in how many characters make a token."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """Whom to ask, and how."""

    url: str
    """With or without /v1 at the end."""
    model: str | None = None
    """None: the first that the server lists."""
    api_key: str | None = None
    context: int | None = None
    """Tokens; None: what the server says, if it does."""
    timeout_s: float = 600.0
    ignore_eos: bool = False
    """Ask for answers of full length; not every server knows how."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What to ask."""

    workload: ChatWorkload = ChatWorkload.SYNTHETIC
    shape: Shape = field(default_factory=Shape)
    concurrency: int = 4
    seed: int = 0
    sessions: Path | None = None
    """Recorded ones, unless they are made up: a file, or a directory of such."""


@dataclass(slots=True)
class _Talk:
    """A session under way."""

    session: ChatSession
    messages: list[Json]
    next_turn: int = 0
    known_tokens: int = 0
    """Of the history, as far as the server has told."""
    cut_turns: int = 0
    """Left out, as they might not fit into the context."""

    def leave_out(self, turn: ChatTurn) -> None:
        """It, and what would have to go on from it."""
        count = 1 if turn.is_whole_history else len(self.session.turns) - self.next_turn
        self.cut_turns += count
        self.next_turn += count


def run(
    target: ServerTarget, load: OfferedLoad, progress: Count = lambda done, total: None
) -> Result:
    """Raises ConfigError, and EngineError when the server cannot be talked to at all."""
    return asyncio.run(_run(target, load, progress))


async def _run(target: ServerTarget, load: OfferedLoad, progress: Count) -> Result:
    is_made_up = load.workload is ChatWorkload.SYNTHETIC
    sessions = [] if is_made_up else recorded(load.workload, load.sessions, load.shape)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency)
    base = _base_of(target.url)
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits) as client:
        model, context = await _look_up(client, target)
        context = target.context or context
        reuse = Reuse() if load.workload is ChatWorkload.AGENT else None
        client_run = _Run(client, target, model, context, reuse)
        ratio = await client_run.calibrate(_typical_text(load, sessions))
        sessions = sessions or synthetic(load.shape, ratio, load.seed)
        talks = [_Talk(session, list(session.opening)) for session in sessions]
        duration_s = await client_run.talk(talks, load.concurrency, progress)
    if not client_run.samples:
        raise ConfigError(
            f"nothing of it fits into {context} tokens: use a model with a longer context"
        )
    about = {
        "url": target.url,
        "model": model,
        "context": context,
        "workload": load.workload.value,
        "concurrency": load.concurrency,
        "seed": load.seed,
        "chars_per_token": round(ratio, 3),
        **asdict(load.shape),
        "num_sessions": sum(talk.next_turn > talk.cut_turns for talk in talks),
        "cut": {
            "turns": sum(talk.cut_turns for talk in talks),
            "sessions": sum(talk.cut_turns > 0 for talk in talks),
        },
    }
    found = figures.result(about, client_run.samples, duration_s)
    return found | ({} if reuse is None else {"reuse": reuse.result()})


def _typical_text(load: OfferedLoad, sessions: Sequence[ChatSession]) -> str:
    """Such as the workload says, and the beginning of nothing that it says."""
    if load.workload is ChatWorkload.AGENT:  # the end of a session: code, what commands printed
        return f"{load.seed}: {text_of(sessions[0].turns[-1])[-_CALIBRATION_CHARS:]}"
    return Prose(~load.seed & 0xFFFF).passage(_CALIBRATION_CHARS)


def _base_of(url: str) -> httpx.URL:
    try:
        return httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"{url!r} is not a URL ({error}): write it as http://127.0.0.1:8000"
        ) from None


async def _look_up(client: httpx.AsyncClient, target: ServerTarget) -> tuple[str, int | None]:
    """The model's name and its context, as far as the server says."""
    try:
        response = await client.get("/v1/models", timeout=30.0)
        response.raise_for_status()
        listed = response.json()["data"]
        models = {str(item["id"]): item.get("max_model_len") for item in listed}
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        is_shut = status in (401, 403)
        hint = "set QUIRE_API_KEY" if is_shut else "is it an OpenAI-compatible server?"
        raise EngineError(f"{target.url} answers {status} to GET /v1/models: {hint}") from error
    except httpx.HTTPError as error:
        raise EngineError(
            f"{target.url} cannot be reached ({error}): start a server, such as `quire serve`, or "
            "check the URL"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{target.url} does not list its models as OpenAI-compatible servers do: check the URL"
        ) from error
    if not models:
        raise EngineError(f"{target.url} serves no model: load one there first")
    name = target.model or next(iter(models))
    if name not in models:
        raise ConfigError(f"--model {name!r} is not served there: use {' or '.join(models)}")
    context = models[name]
    return name, context if isinstance(context, int) else None


@dataclass(slots=True)
class _Run:
    """One run: makes the requests and keeps what came of them."""

    client: httpx.AsyncClient
    target: ServerTarget
    model: str
    context: int | None
    reuse: Reuse | None
    """Who is told of every prompt's tokens, for which the server is asked."""
    samples: list[figures.Sample] = field(default_factory=list)
    chars_per_token: float = 4.0

    async def calibrate(self, content: str) -> float:
        """Characters per token of such text, asked of the server by a prompt of its own."""
        if self.context is not None:
            content = content[: _FEWEST_CHARS * self.context]
        answer = await self._ask([{"role": "user", "content": content}], 1)
        if answer.verdict is not Verdict.GOOD:
            raise EngineError(f"{self.target.url} does not answer as it should: {answer.problem}")
        if answer.prompt_tokens:
            self.chars_per_token = len(content) / answer.prompt_tokens
        return self.chars_per_token

    async def talk(self, talks: Sequence[_Talk], concurrency: int, progress: Count) -> float:
        """All of them to their end; seconds it took."""
        waiting = deque(talks)
        total = sum(len(talk.session.turns) for talk in talks)
        start = perf_counter()

        async def client() -> None:
            # Every other client holds one session at most, and takes it up again itself: nothing
            # waiting means nothing left to do for this one.
            while waiting:
                talk = waiting.popleft()
                turn = talk.session.turns[talk.next_turn]
                if self._fits(talk, turn):
                    await self._turn(talk, turn, start)
                else:
                    talk.leave_out(turn)
                if talk.next_turn < len(talk.session.turns):
                    waiting.append(talk)
                progress(sum(each.next_turn for each in talks), total)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(talks))):
                group.create_task(client())
        return perf_counter() - start

    def _fits(self, talk: _Talk, turn: ChatTurn) -> bool:
        if self.context is None:
            return True
        if turn.is_whole_history:
            known_tokens, new_chars = 0, _MARGIN * len(text_of(turn))
        else:
            known_tokens = talk.known_tokens
            new = turn.messages if known_tokens else [*talk.messages, *turn.messages]
            new_chars = sum(len(message["content"]) for message in new)
        new_tokens = new_chars / self.chars_per_token + _TEMPLATE_TOKENS
        return known_tokens + new_tokens + turn.max_tokens <= self.context

    async def _turn(self, talk: _Talk, turn: ChatTurn, start: float) -> None:
        if turn.is_whole_history:
            talk.messages = []
        talk.messages += turn.messages
        started_s = round(perf_counter() - start, 4)
        num_before = 0 if self.reuse is None else self.reuse.num_computed
        answer = await self._ask(talk.messages, turn.max_tokens, turn.tools)
        if self.reuse is not None and answer.prompt_ids:
            self.reuse.add(talk.session.name, talk.messages, turn.tools, answer, num_before)
        talk.next_turn += 1
        self.samples.append(figures.Sample(talk.session.name, talk.next_turn, started_s, answer))
        talk.messages.append({"role": "assistant", "content": answer.text})
        talk.known_tokens = (answer.prompt_tokens or 0) + (answer.output_tokens or 0)

    async def _ask(
        self, messages: list[Json], max_tokens: int, tools: Sequence[Json] = ()
    ) -> ChatAnswer:
        body: Json = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if tools:
            body["tools"] = list(tools)
        if self.reuse is not None:
            body["return_token_ids"] = True
        if self.target.ignore_eos:
            body["ignore_eos"] = True
        return await stream(self.client, CHAT, body, timeout_s=self.target.timeout_s)
