"""Proxy: one request from the client's side to a server's and back, and on to another if need be.

    read → page keys, if there is a choice → choose → try ─┬─ answered: the client's
                       ▲                                    └─ lost ─┐
                       └────── servers and retries are left ─────────┘

A stream whose server is lost on the way is sent again, with the seed that every request gets here
if it has none and the tokens that were told, and the client gets what it has not got: see
transcript.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import msgspec

from quire.decoders import json_decoder
from quire.router.choose import (
    KEYED_REQUESTS,
    REQUEST_TOKENS,
    By,
    Candidate,
    favoured,
    rank,
)
from quire.router.fleet import Fleet, Member, MemberSide, one_line
from quire.router.homes import Homes
from quire.router.metrics import RouterMetrics
from quire.router.passage import Passage, name_of
from quire.router.sieve import error_of
from quire.router.transcript import Diverged, Failed, Transcript
from quire.router.upstream import (
    Endpoint,
    Inquiry,
    Lost,
    Reply,
    Upstream,
    Why,
    lost_by,
)
from quire.web.errors import (
    RETRY_AFTER_S,
    ApiError,
    model_not_found,
    shutting_down,
    unexpected,
)
from quire.web.guards import REQUEST_ID_HEADER, serving
from quire.web.routes import RouterNote, signed

if TYPE_CHECKING:
    from quire.web.traced import Tracer

_CLIENTS_KEY = "authorization"
_PASSED_ON = (_CLIENTS_KEY, "content-type", "accept", "traceparent", "tracestate")
"""Of the client's headers. Not those that say where it comes from: servers would take the router
for a proxy in front of anybody."""
_MAX_SEED = 1 << 31
_MAX_KEY_CHARS = 256
_DRAIN_LOOK_S = 0.05
_NOT_COUNTED = (Endpoint.MODELS, Endpoint.TOKENIZE, Endpoint.DETOKENIZE)
"""Of choices: nothing is generated."""

logger = logging.getLogger("quire.router")


_BYTES_PER_TOKEN = 4
"""Of a body, where nobody has counted its tokens."""


class Route(NamedTuple):
    target: Member
    prefill: list[Member]
    """Best first; empty: the target needs none."""
    lacks: Callable[[Member], int]
    """How many tokens of the prompt it has not cached."""


class Prospect(NamedTuple):
    """What is known of a prompt before it is sent."""

    num_tokens: int
    matched: Mapping[str, int]
    """Server → how many of them it has cached, from the first on."""

    def lacks(self, member: Member) -> int:
        return max(self.num_tokens - self.matched.get(member.url, 0), 0)


class Proxy:
    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        metrics: RouterMetrics,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self.fleet = fleet
        self.metrics = metrics
        self.tracer = tracer
        self.clock = clock
        self.draining = False
        """The router is to stop: what is admitted may finish, no more is."""
        self.is_stopped = False
        """What is lost now is not tried again."""
        self._num_open = 0
        self._homes = Homes()
        self._upstream = upstream
        self._turns = {side: itertools.count() for side in MemberSide}

    async def whole(self, inquiry: Inquiry) -> Reply:
        """Raises ApiError."""
        with self._admitted():
            tour = await self._tour(inquiry)
            while True:
                route = tour.next()
                try:
                    with contextlib.ExitStack() as busy:
                        for member in (route.target, *route.prefill[:1]):
                            busy.enter_context(member.busy(route.lacks(member)))
                        headers = self._headers(route, inquiry)
                        reply = await self._upstream.whole(route.target, inquiry, headers)
                        if inquiry.endpoint is Endpoint.RESPONSES:
                            found = msgspec.json.decode(reply.content)
                            self._homes.keep(name_of(found), route.target.url)
                        return reply
                except Lost as lost:
                    tour.lost(route, lost)

    async def events(self, inquiry: Inquiry) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises ApiError."""
        with self._admitted():
            tour = await self._tour(inquiry)
            transcript: Transcript | Passage = Transcript(shows_ids=inquiry.shows_ids)
            if inquiry.endpoint is Endpoint.RESPONSES:
                transcript = Passage()
            while True:
                route = tour.next(is_failover=transcript.is_begun)
                rest = inquiry.after(transcript.said)
                transcript.replay()
                try:
                    async with contextlib.aclosing(self._try(route, rest, transcript)) as events:
                        async for event in events:
                            yield event
                except Lost as lost:
                    tour.lost(route, lost)
                else:
                    return

    async def drain(self) -> None:
        """Returns when all that was taken is answered."""
        self.draining = True
        while self._num_open:
            await asyncio.sleep(_DRAIN_LOOK_S)

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.draining:
            raise shutting_down()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def failed_unexpectedly(self, error: BaseException, request_id: str) -> ApiError:
        """A bug here: logged, counted, and this one request's."""
        self.metrics.unexpected_errors.inc()
        logger.error("request %s failed", request_id, exc_info=error)
        return unexpected(request_id)

    # ---- one try --------------------------------------------------------------------------------

    async def _try(
        self, route: Route, inquiry: Inquiry, transcript: Transcript | Passage
    ) -> AsyncGenerator[bytes, None]:
        """What is new to the client. Raises Lost, ApiError."""
        is_failover = transcript.is_begun
        target = route.target
        with target.busy(route.lacks(target)) as told, contextlib.ExitStack() as busy:
            # Until the first word: then the prompt is computed.
            if route.prefill:
                first = route.prefill[0]
                busy.enter_context(first.busy(route.lacks(first)))
            busy.callback(told)
            headers = self._headers(route, inquiry)
            source = self._upstream.events(route.target, inquiry, headers)
            async with contextlib.aclosing(source) as pieces:
                async for piece in pieces:
                    busy.close()
                    news, error = self._take_all(transcript, piece)
                    if news and is_failover:
                        is_failover = False
                        self.metrics.failovers.labels("resumed").inc()
                    if isinstance(transcript, Passage):
                        self._homes.keep(transcript.name, route.target.url)
                    if news:
                        yield news
                    if error is not None:
                        raise error
                    if transcript.is_done:
                        return
        raise Lost(Why.BROKEN)  # without [DONE]

    def _take_all(
        self, transcript: Transcript | Passage, piece: list[bytes]
    ) -> tuple[bytes, Lost | ApiError | None]:
        """Of events that came together, what is new to the client; and how they end, if not well:
        what was told before counts all the same."""
        news: list[bytes] = []
        for data in piece:
            try:
                event = self._take(transcript, data)
            except (Lost, ApiError) as error:
                return b"".join(news), error
            if event is not None:
                news.append(event)
            if transcript.is_done:
                break
        return b"".join(news), None

    def _take(self, transcript: Transcript | Passage, data: bytes) -> bytes | None:
        """Raises Lost, ApiError."""
        try:
            return transcript.take(data)
        except Failed as failed:
            raise lost_by(failed.error) or error_of(500, failed.error) from None
        except Diverged:
            self.metrics.failovers.labels("diverged").inc()
            raise ApiError(
                503,
                "the server was lost, and another one's answer begins differently: send the "
                "request again",
                code="replay_diverged",
            ) from None
        except msgspec.DecodeError:
            raise Lost(Why.BROKEN) from None

    def _headers(self, route: Route, inquiry: Inquiry) -> dict[str, str]:
        """What we say of a request, if the server knows us."""
        said = RouterNote(",".join(member.peer for member in route.prefill), inquiry.is_vouched)
        key = route.target.key
        if key is None or said == RouterNote():
            return {}
        return signed(said, key, self._now())

    # ---- whom to try ----------------------------------------------------------------------------

    async def _tour(self, inquiry: Inquiry) -> _Tour:
        prospect = await self._prospect(inquiry)
        liked = self._favouring(inquiry, prospect)

        def route(tried: set[str]) -> Route | None:
            return self._route(inquiry, tried, prospect, liked)

        return _Tour(self, route)

    async def _prospect(self, inquiry: Inquiry) -> Prospect:
        """How long the prompt is, and who has how much of it; a guess, and nobody, if no server can
        say."""
        if inquiry.endpoint in _NOT_COUNTED:
            return Prospect(0, {})
        guess = Prospect(len(inquiry.body) // _BYTES_PER_TOKEN, {})
        has_prompt = inquiry.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)
        if not has_prompt or inquiry.model is None or not len(self.fleet.index):
            return guess
        targets = self.fleet.usable(inquiry.model)
        prefill = {each.url for target in targets for each in self.fleet.prefill_for(target)}
        if len(targets) < 2 and len(prefill) < 2:
            return guess
        able = [member for member in targets if member.lets_us_in]
        if not able:
            return guess
        try:
            asked, client = min(able, key=lambda each: each.load), inquiry.headers.get(_CLIENTS_KEY)
            prompt = await self.fleet.keys(asked, inquiry.body, client)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            self.metrics.keys_failures.inc()
            logger.info("no page keys: %r", error)
            return guess
        pages = self.fleet.index.matched(prompt.keys)
        matched = {url: count * prompt.page_size for url, count in pages.items()}
        return Prospect(max(prompt.num_tokens, *matched.values(), 0), matched)

    def _favouring(self, inquiry: Inquiry, prospect: Prospect) -> Mapping[str, int]:
        """Server → tokens of the prompt there, for the choice: that of the request's key counts as
        if it had more."""
        matched = prospect.matched
        if not inquiry.cache_key:
            return matched
        targets = self.fleet.usable(inquiry.model)
        sides = [targets, [each for target in targets for each in self.fleet.prefill_for(target)]]
        bonus = KEYED_REQUESTS * (REQUEST_TOKENS + prospect.num_tokens)
        liked = {favoured([m.url for m in side], inquiry.cache_key) for side in sides if side}
        return {**matched, **{url: matched.get(url, 0) + bonus for url in liked}}

    def _route(
        self, inquiry: Inquiry, tried: set[str], prospect: Prospect, liked: Mapping[str, int]
    ) -> Route | None:
        targets = [each for each in self.fleet.usable(inquiry.model) if each.url not in tried]
        if not targets:
            return None
        home = self._homes.of(inquiry.goes_on)
        targets = [each for each in targets if each.url == home] or targets
        is_counted = inquiry.endpoint not in _NOT_COUNTED
        num_tokens = prospect.num_tokens
        target, *_ = self._ranked(targets, liked, num_tokens, is_counted)
        prefill = self.fleet.prefill_for(target)
        if prefill:
            prefill = self._ranked(prefill, liked, num_tokens, is_counted)
        return Route(target, prefill, prospect.lacks)

    def _ranked(
        self, members: list[Member], liked: Mapping[str, int], num_tokens: int, is_counted: bool
    ) -> list[Member]:
        by_url = {member.url: member for member in members}
        candidates = [Candidate(url, each.load, liked.get(url, 0)) for url, each in by_url.items()]
        ranked = rank(candidates, num_tokens, next(self._turns[members[0].side]))
        first = by_url[ranked.names[0]]
        if is_counted:
            self.metrics.choices.labels(first.side, ranked.by).inc()
        if ranked.by is not By.ONLY:
            logger.debug("%s by %s among %s", first.url, ranked.by, candidates)
        return [by_url[name] for name in ranked.names]


class _Tour:
    """The servers tried for one request."""

    def __init__(self, proxy: Proxy, route: Callable[[set[str]], Route | None]) -> None:
        self._proxy = proxy
        self._route = route
        self._tried: set[str] = set()
        self._losses: list[Lost] = []

    def next(self, *, is_failover: bool = False) -> Route:
        """Raises ApiError when there is nobody left to try."""
        route = None
        if len(self._losses) <= self._proxy.fleet.config.retries and not self._proxy.is_stopped:
            route = self._route(self._tried)
        if route is not None:
            self._tried.add(route.target.url)
            return route
        if is_failover:
            self._proxy.metrics.failovers.labels("failed").inc()
        raise self._error(is_failover=is_failover)

    def lost(self, route: Route, lost: Lost) -> None:
        self._losses.append(lost)
        self._proxy.metrics.retries.labels(lost.why).inc()
        if lost.why.is_servers_fault:
            route.target.suspect(f"a request failed there: {lost.why}")

    def _error(self, *, is_failover: bool) -> ApiError:
        if self._proxy.is_stopped:
            return shutting_down()
        if not self._losses:
            fleet = self._proxy.fleet
            how = ", ".join(
                f"{side} {one_line(members)}"
                for side in MemberSide
                if (members := [each for each in fleet.members if each.side is side])
            )
            return _unavailable(f"no server can take requests now ({how} are up): try again later")
        own = self._losses[-1].error
        if own is not None and not is_failover:
            return own
        reasons = ", ".join(dict.fromkeys(lost.why.value for lost in self._losses))
        what = (
            "the server that was answering was lost, and no other could go on"
            if is_failover
            else f"{len(self._losses)} server(s) were tried and none answered"
        )
        return _unavailable(f"{what} ({reasons}): send the request again")


def read_inquiry(
    endpoint: Endpoint, headers: Mapping[str, str], content: bytes, *, is_vouched: bool = False
) -> Inquiry:
    """A client's request for an answer. What is wrong with it is for a server to say. `is_vouched`:
    its key was looked at, and goes no further."""
    kept = _kept(headers, is_vouched=is_vouched)
    try:
        body: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        return Inquiry(endpoint, content, kept, is_vouched=is_vouched)
    shows_ids = body.get("return_token_ids") is True or body.get("return_answer_ids") is True
    can_go_on = _can_go_on(endpoint, body)
    if can_go_on:
        body["return_answer_ids"] = True
    if body.get("seed") is None and endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        body["seed"] = secrets.randbelow(_MAX_SEED)
    model = body.get("model")
    return Inquiry(
        endpoint,
        msgspec.json.encode(body),
        kept,
        model if isinstance(model, str) else None,
        body.get("stream") is True,
        is_vouched,
        body if can_go_on else None,
        shows_ids,
        str(body.get("previous_response_id") or "") if endpoint is Endpoint.RESPONSES else "",
        str(body.get("prompt_cache_key") or "")[:_MAX_KEY_CHARS],
    )


def _can_go_on(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether another server can take its stream up after the tokens that were told: it is one
    answer, of which no more is told than can be told again."""
    prompt = body.get("prompt")
    is_one = endpoint is Endpoint.CHAT
    if endpoint is Endpoint.COMPLETIONS:
        is_one = isinstance(prompt, str)
    if endpoint is Endpoint.COMPLETIONS and isinstance(prompt, list):
        is_one = all(type(token) is int for token in prompt)
    scored = body.get("logprobs") not in (None, False) or body.get("top_logprobs") is not None
    is_new = body.get("continue_token_ids") is None
    is_single = body.get("n") in (None, 1)
    return body.get("stream") is True and is_one and is_single and is_new and not scored


def read_question(
    headers: Mapping[str, str], model: str | None = None, *, is_vouched: bool = False
) -> Inquiry:
    """A client's question which models there are, to a server that has `model` if one has."""
    kept = _kept(headers, is_vouched=is_vouched)
    return Inquiry(Endpoint.MODELS, b"", kept, model, is_vouched=is_vouched)


def pick_model(reply: Reply, model: str) -> Reply:
    """Of a server's list of models, one. Raises ApiError."""
    try:
        listed = json_decoder(_Models).decode(reply.content).data
    except msgspec.DecodeError:
        raise ApiError(
            502, "the server's list of models cannot be read", code="bad_server"
        ) from None
    for each in listed:
        if each.get("id") == model:
            return Reply(msgspec.json.encode(each))
    raise model_not_found(model, ", ".join(str(each.get("id")) for each in listed))


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


def _kept(headers: Mapping[str, str], *, is_vouched: bool) -> dict[str, str]:
    """And the request's id, as the client is told it: the server's log has the same."""
    names = [name for name in _PASSED_ON if name in headers]
    kept = {name: headers[name] for name in names if not (is_vouched and name == _CLIENTS_KEY)}
    return kept | {REQUEST_ID_HEADER.decode(): serving.get()} if serving.get() else kept


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="no_server", headers={"Retry-After": str(RETRY_AFTER_S)})
