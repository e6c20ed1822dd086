"""Fleet: the servers there are, what each is, whether it lives and how busy it is.

    NEW ──answers──▶ UP ──refuses, or is silent too often──▶ DOWN ──answers──▶ UP
     │               └──says that it will stop──▶ DRAINING ──refuses──▶ DOWN
     └──answers, but is not what it should be──▶ UNFIT ──is now──▶ UP

One that is DRAINING gets no new requests; those it has it finishes.

Each server has a task that asks for its health: regularly while it is up, less and less often while
it is down. A request that fails says so (`suspect`), and the server is asked at once. A server that
has started anew says so by another `instance`, and is asked again what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from quire.decoders import json_decoder
from quire.engine.config import Role
from quire.errors import ConfigError
from quire.peer.address import split_address, with_host
from quire.router.affinity import AffinityIndex
from quire.router.choose import REQUEST_TOKENS, RUNNING_PART, foreign_load
from quire.router.config import RouterConfig, is_name
from quire.router.eventline import EventLine
from quire.router.sieve import shown_name
from quire.web.addresses import is_loopback, parse_peer
from quire.web.keyfile import find_key
from quire.web.routes import CLIENT_HEADER, router_key

logger = logging.getLogger("quire.router")
Answer = TypeVar("Answer", bound=msgspec.Struct)
_SLICE_PAGES = 1024
"""So many change in the index before others have their turn: about a millisecond."""


class MemberSide(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    SERVER = "server"
    """Does everything itself, or knows its prefill servers."""

    @property
    def words(self) -> str:
        return "server" if self is MemberSide.SERVER else f"{self} server"


class MemberState(enum.StrEnum):
    NEW = "new"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    UNFIT = "unfit"


class Health(msgspec.Struct):
    """What a server says of itself to anybody."""

    status: str
    role: str = ""
    model: str = ""
    instance: str = ""
    running: int = 0
    waiting: int = 0
    running_tokens: int = 0
    """Older servers do not say: then requests alone count."""
    waiting_tokens: int = 0
    draining: bool = False


class Info(msgspec.Struct):
    """… and to a router."""

    role: str
    peer: str
    fingerprint: str
    instance: str


class TierEvent(msgspec.Struct):
    kind: str
    tier: str
    keys: list[str]


class TierEvents(msgspec.Struct):
    instance: str
    last: int
    complete: bool
    events: list[TierEvent]
    more: bool = False
    cursor: int = 0
    """What is present is told in pieces: of the next one."""


class PromptKeys(msgspec.Struct):
    keys: list[str]
    page_size: int = 16
    num_tokens: int = 0


class PagedPrompt(NamedTuple):
    keys: list[bytes]
    """Of its full pages."""
    page_size: int
    num_tokens: int


class _Wrong(Exception):
    """A check failed: the sentence's second half, after the server's address."""

    def __init__(self, reason: str, *, is_down: bool = False, is_unfit: bool = False) -> None:
        super().__init__(reason)
        self.is_down = is_down
        """No doubt that nobody is there."""
        self.is_unfit = is_unfit


class Member:
    """One server."""

    def __init__(self, url: str, side: MemberSide, *, is_guest: bool = False) -> None:
        self.url = url
        self.side = side
        self.is_guest = is_guest
        """It has come by itself, and goes so; or when it is down for long."""
        self.seen_s = asyncio.get_running_loop().time() if is_guest else 0.0
        self.state = MemberState.NEW
        self.reason = "not asked yet"
        """Why it is not up."""
        self.model = ""
        self.fingerprint = ""
        """Empty: not known."""
        self.peer = ""
        self.lets_us_in = False
        """Whether /admin answers us."""
        self.key: str | None = None
        """The router's, for this server; None: it does not know us."""
        self.instance = ""
        self.in_flight = 0
        self.reported = Health("")
        self._our_tokens = 0
        """To compute or fetch, and a part of those that were: see choose.py."""
        self._foreign = 0
        """Requests there that are not ours."""
        self._foreign_load = 0
        self.failures = 0
        """Checks in a row without an answer."""
        self.seen_event = 0
        self.cursor = 0
        """Where it goes on telling what is present; 0: all that is told."""
        self.wake = asyncio.Event()
        self._reads: set[asyncio.Timeout] = set()
        self._lines: set[EventLine] = set()

    @property
    def is_up(self) -> bool:
        return self.state is MemberState.UP

    @property
    def num_requests(self) -> int:
        """There: ours at this moment, and those of others as of its last word."""
        return self.in_flight + self._foreign

    @property
    def load(self) -> int:
        """What they are to it, in tokens."""
        return self.in_flight * REQUEST_TOKENS + self._our_tokens + self._foreign_load

    @contextlib.contextmanager
    def busy(self, num_tokens: int = 0) -> Iterator[Callable[[], None]]:
        """Around a request of ours. `num_tokens`: of its prompt, that are not there yet; what this
        yields is called when they are."""
        weight = num_tokens

        def told() -> None:
            nonlocal weight
            self._our_tokens -= weight
            weight = num_tokens // RUNNING_PART
            self._our_tokens += weight

        self.in_flight += 1
        self._our_tokens += weight
        try:
            yield told
        finally:
            self.in_flight -= 1
            self._our_tokens -= weight

    @contextlib.asynccontextmanager
    async def reading(self, timeout_s: float) -> AsyncIterator[None]:
        """Around a wait for this server: TimeoutError when it takes too long, or is lost."""
        async with asyncio.timeout(timeout_s) as read:
            self._reads.add(read)
            try:
                yield
            finally:
                self._reads.discard(read)

    @contextlib.contextmanager
    def following(self, line: EventLine) -> Iterator[EventLine]:
        """A stream of this server's, from its beginning to its end: given up when it is lost."""
        self._lines.add(line)
        try:
            yield line
        finally:
            self._lines.discard(line)
            line.close()

    def report(self, health: Health) -> None:
        self.reported = health
        reported = health.running + health.waiting
        self._foreign = max(reported - self.in_flight, 0)
        self._foreign_load = foreign_load(
            self._foreign, reported, health.running_tokens, health.waiting_tokens
        )

    def cut(self) -> None:
        """Whoever waits for it need not."""
        now = asyncio.get_running_loop().time()
        for read in self._reads:
            read.reschedule(now)
        for line in self._lines:
            line.give_up()

    def suspect(self, reason: str) -> None:
        """A request failed there: not used again before it has answered a check."""
        if self.state is MemberState.UP:
            self.set(MemberState.DOWN, reason)
        self.wake.set()

    def set(self, state: MemberState, reason: str = "") -> None:
        if state is not self.state:
            # A server that is there from the start is no news; one that is back is.
            log = (
                logger.info
                if self.state is MemberState.NEW and state is MemberState.UP
                else logger.warning
            )
            log("%s %s is %s%s", self.side.words, self.url, state, f": {reason}" * bool(reason))
        if state is MemberState.DOWN:
            self.report(Health(""))  # what it had is not there any more
        self.state, self.reason = state, reason

    def as_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "side": self.side,
            "state": self.state,
            "reason": self.reason,
            "model": self.model,
            "running": self.reported.running,
            "waiting": self.reported.waiting,
            "in_flight": self.in_flight,
        }


class Fleet:
    def __init__(self, config: RouterConfig, client: httpx.AsyncClient) -> None:
        self.config = config
        self.index = AffinityIndex(config.max_index_pages)
        self.prefill = [Member(url, MemberSide.PREFILL) for url in _fixed(config.prefill)]
        self.targets = [
            *(Member(url, MemberSide.DECODE) for url in _fixed(config.decode)),
            *(Member(url, MemberSide.SERVER) for url in _fixed(config.servers)),
        ]
        """Those that answer requests."""
        self.members = [*self.prefill, *self.targets]
        self._client = client
        self._watching: dict[Member, asyncio.Task[None]] = {}
        self._following: dict[Member, asyncio.Task[None]] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask each of them once, and then again and again."""
        await asyncio.gather(*(self._check(member) for member in self.members))
        for member in self.members:
            self._watching[member] = asyncio.create_task(self._watch(member))
        self._follow_all()

    async def add(self, url: str, side: MemberSide) -> None:
        """A server that has come by itself. One that is there already is asked how it is."""
        for member in self.members:
            if member.url == url and member.side is side:
                if not member.is_up:
                    member.wake.set()
                return
        self.remove(url)
        member = Member(url, side, is_guest=True)
        (self.prefill if side is MemberSide.PREFILL else self.targets).append(member)
        self.members.append(member)
        await self._check(member)
        if member in self.members:
            self._watching[member] = asyncio.create_task(self._watch(member))
            self._follow_all()

    def remove(self, url: str) -> None:
        """One that came by itself goes; what it is answering it may finish."""
        for member in [each for each in self.members if each.url == url and each.is_guest]:
            for members in (self.members, self.prefill, self.targets):
                if member in members:
                    members.remove(member)
            for tasks in (self._watching, self._following):
                if (task := tasks.pop(member, None)) is not None:
                    task.cancel()
            self._forget(url)
            logger.warning("%s %s has left", member.side.words, url)

    async def close(self) -> None:
        tasks = [*self._watching.values(), *self._following.values()]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow_all(self) -> None:
        for members in (self.prefill, self.targets):
            if len(members) > 1:  # else there is nothing to choose
                for member in members:
                    if member not in self._following:
                        self._following[member] = asyncio.create_task(self._follow(member))

    def usable(self, model: str | None = None) -> list[Member]:
        """Targets that can take a request; for a model that some of them have, those."""
        found = [each for each in self.targets if each.is_up]
        return [each for each in found if each.model == model] or found

    def prefill_for(self, target: Member) -> list[Member]:
        """Prefill servers for a target; with none it computes by itself."""
        if target.side is MemberSide.SERVER:
            return []
        return [each for each in self.prefill if each.is_up and _same_model(each, target)]

    async def keys(self, member: Member, body: bytes, client: str | None) -> PagedPrompt:
        """The page keys of a request's prompt. `client`: how it names itself to the server. Raises
        httpx.HTTPError, TimeoutError, ValueError."""
        headers = _bearer(member.key) | {"content-type": "application/json"}
        if client is not None:
            headers[CLIENT_HEADER] = client
        async with asyncio.timeout(self.config.keys_timeout_s):
            response = await self._client.post(
                f"{member.url}/admin/keys",
                content=body,
                headers=headers,
            )
        if response.status_code != 200:
            raise ValueError(f"{member.url}/admin/keys answered {response.status_code}")
        found = json_decoder(PromptKeys).decode(response.content)
        keys = [bytes.fromhex(key) for key in found.keys]
        return PagedPrompt(keys, found.page_size, max(found.num_tokens, len(keys)))

    # ---- health ---------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(member)):
                    await member.wake.wait()
            member.wake.clear()
            await self._check(member)
            if member.state in (MemberState.UP, MemberState.DRAINING):
                member.seen_s = asyncio.get_running_loop().time()
            elif member.is_guest and self._is_forgotten(member):
                self.remove(member.url)

    def _is_forgotten(self, member: Member) -> bool:
        return asyncio.get_running_loop().time() - member.seen_s > self.config.forget_s

    def _pause_s(self, member: Member) -> float:
        if not member.failures:
            return self.config.check_interval_s
        backoff = self.config.min_backoff_s * 2.0 ** min(member.failures - 1, 16)
        return min(backoff, self.config.max_backoff_s)

    async def _check(self, member: Member) -> None:
        try:
            health = await self._get(member, "/health", Health)
            known = member.state in (MemberState.UP, MemberState.DRAINING)
            if member.instance != health.instance or not known:
                await self._learn(member, health)
        except _Wrong as error:
            self._failed(member, error)
        except Exception as error:  # of this one check: the next may go better
            logger.error("checking %s failed", member.url, exc_info=error)
            self._failed(member, _Wrong("the check itself failed; see the router's log"))
        else:
            member.failures = 0
            member.report(health)
            if health.draining:
                member.set(MemberState.DRAINING, "it is to stop, and finishes what it has")
            else:
                member.set(MemberState.UP)

    def _failed(self, member: Member, error: _Wrong) -> None:
        if error.is_unfit:
            member.failures = 0
            member.set(MemberState.UNFIT, str(error))
            return
        member.failures += 1
        is_known = member.state in (MemberState.UP, MemberState.DRAINING)
        if error.is_down or member.failures >= self.config.max_failures or not is_known:
            member.set(MemberState.DOWN, str(error))
            member.cut()

    async def _learn(self, member: Member, health: Health) -> None:
        """What a server is that we do not know yet. Raises _Wrong."""
        if member.instance != health.instance:
            self._forget(member.url)
            member.seen_event = member.cursor = 0
        member.lets_us_in = False
        member.fingerprint = member.peer = ""
        # Read again: a server that was given none has another after each start.
        admin_key = self.config.admin_key or find_key(member.url, self.config.admin_key_file)
        member.key = router_key(admin_key) if admin_key is not None else None
        _check_role(member.side, health.role)
        try:
            info = await self._get(member, "/admin/info", Info)
        except _Wrong as error:
            if member.side is not MemberSide.SERVER or not error.is_unfit:
                raise
        else:
            member.fingerprint = info.fingerprint
            member.lets_us_in = True
            if member.side is MemberSide.PREFILL:
                member.peer = _reachable(info.peer, member.url)
        member.model = shown_name(health.model)
        member.instance = health.instance

    # ---- events ---------------------------------------------------------------------------------

    async def _follow(self, member: Member) -> None:
        """What comes into its tiers and goes from them."""
        while True:
            more = False
            if member.is_up and member.lets_us_in:
                try:
                    more = await self._take_events(member)
                except _Wrong as error:
                    logger.info("no events from %s: %s", member.url, error)
                except Exception as error:  # of this one question
                    logger.error("events of %s", member.url, exc_info=error)
            if not more:
                await asyncio.sleep(self.config.events_interval_s)

    async def _take_events(self, member: Member) -> bool:
        """Whether there are more. Raises _Wrong."""
        asked = f"/admin/events?since={member.seen_event}"
        if member.cursor:
            asked += f"&cursor={member.cursor}"
        found = await self._get(member, asked, TierEvents)
        if found.instance != member.instance:
            member.wake.set()  # it has started anew: it is asked what it is first
            return False
        if not found.complete:
            self._forget(member.url)
        num_changed = 0
        for event in found.events:
            change = self.index.stored if event.kind == "stored" else self.index.removed
            for at in range(0, len(event.keys), _SLICE_PAGES):
                some = event.keys[at : at + _SLICE_PAGES]
                change(member.url, event.tier, [bytes.fromhex(key) for key in some])
                num_changed += len(some)
                if num_changed >= _SLICE_PAGES:
                    num_changed = 0
                    await asyncio.sleep(0)  # streams go on meanwhile
                    if found.instance != member.instance:
                        return False  # and it is forgotten
        member.seen_event, member.cursor = found.last, found.cursor
        return found.more

    def _forget(self, url: str) -> None:
        """What it had; at once, but freed bit by bit."""
        self.index.forget(url)
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while self.index.sweep(_SLICE_PAGES):
            await asyncio.sleep(0)

    # ---- asking ---------------------------------------------------------------------------------

    async def _get(self, member: Member, path: str, answer: type[Answer]) -> Answer:
        """Raises _Wrong."""
        try:
            async with asyncio.timeout(self.config.check_timeout_s):
                response = await self._client.get(
                    member.url + path,
                    headers=_bearer(member.key) if path.startswith("/admin") else {},
                )
        except httpx.ConnectError:
            raise _Wrong("cannot be connected to", is_down=True) from None
        except (httpx.HTTPError, TimeoutError) as error:
            raise _Wrong(f"did not answer {path} ({type(error).__name__})") from None
        if response.status_code in (401, 403):
            raise _Wrong("does not let this router in: give both the same admin_key", is_unfit=True)
        if response.status_code != 200:
            raise _Wrong(f"answered {path} with {response.status_code}", is_down=True)
        try:
            return json_decoder(answer).decode(response.content)
        except msgspec.DecodeError:
            raise _Wrong("is no Quire server of this version", is_unfit=True) from None


def _fixed(urls: Sequence[str]) -> list[str]:
    """Those of one server each; the others are looked up: names.py."""
    return [url for url in urls if not is_name(url)]


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _same_model(one: Member, other: Member) -> bool:
    return one.fingerprint == other.fingerprint


def _check_role(side: MemberSide, role: str) -> None:
    if side is MemberSide.SERVER:
        if role == Role.PREFILL:
            raise _Wrong("is a prefill server: give it as --prefill", is_unfit=True)
    elif role != side.value:
        raise _Wrong(
            f"has the role {role or 'of an older version'}: start it with --role {side.value}",
            is_unfit=True,
        )


def _reachable(peer: str, url: str) -> str:
    """A prefill server's page server, as a decode server finds it. Raises _Wrong."""
    try:
        peer = parse_peer(peer)
    except ConfigError:
        raise _Wrong("has no page server: start it with --peer-port", is_unfit=True) from None
    here = urlsplit(url).hostname
    assert here is not None
    peer = with_host(peer, here)
    _, there, _ = split_address(peer)
    if is_loopback(there) and not (here == "localhost" or is_loopback(here)):
        raise _Wrong(
            f"has its page server on {there}, where only itself finds it: start it with "
            "--peer-host and its address",
            is_unfit=True,
        )
    return peer


def one_line(members: Sequence[Member]) -> str:
    """How they are, for an error: "2 of 3"."""
    return f"{sum(member.is_up for member in members)} of {len(members)}"
