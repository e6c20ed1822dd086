"""Request: one sequence from arrival to its last token, and what it holds meanwhile.

    position   0 ········ computed ······ length
               [ in pages )[ to compute  )
               [ prompt      )[ output    )
               ╰ num_prompt ─╯

The last token's key and value are computed only when the token after it is wanted; so `computed`
stays below `length` for as long as the request lives.

Both tell what is known here. Batches under way add to them: `flying` tokens, and as many drawn
ones as `draws` says, which nobody has seen yet.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.disagg.handover import Half, Handover, Stage, describe
from quire.engine.draft.speculation import RequestDraft
from quire.engine.grammar import Compiled, Held, Told
from quire.engine.messages import (
    CachedTokens,
    CacheWish,
    Finish,
    Generate,
    RequestStatus,
    SamplingParams,
)
from quire.engine.sampling import Row, needs_history
from quire.keys import Namespace, PrefixKey
from quire.manager import Lease, Wish
from quire.types import RequestId, num_pages


class State(enum.Enum):
    WAITING = enum.auto()
    """Queued: new, preempted, or begun again after a failed load."""
    RESTORING = enum.auto()
    """Has pages, into which the store's come through the host, in parts."""
    RUNNING = enum.auto()
    """Has pages and takes part in batches."""
    HOLDING = enum.auto()
    """Computed for a peer, which has not taken all of it yet."""


@dataclass(slots=True)
class RequestOrigin:
    """Where the pages of a prompt were when its request arrived: [0, device) on the device,
    [device, there) on the host, [store_first, store_last) in the store. What others put somewhere
    since is told by where it was when the request was admitted: [0, later_device) on the device."""

    device: int
    there: int
    store_first: int = 0
    store_last: int = 0
    later_device: int = 0

    def look(self, lease: Lease | None) -> None:
        """Take in what the store was found to have, the first time that it was."""
        prefetch = lease.prefetch if lease is not None else None
        if prefetch is not None and prefetch.num_hit and not self.store_last:
            self.store_first = prefetch.first
            self.store_last = prefetch.first + prefetch.num_hit

    def cached(self, reused: int, page_size: int, *, but: int = 0) -> CachedTokens:
        """The first `reused` pages by where they were, in tokens, but so many at their end."""
        device, there = min(self.device, reused), min(self.there, reused)
        store = max(0, min(reused, self.store_last) - max(there, self.store_first))
        later = reused - there - store
        on_device = min(later, max(0, self.later_device - max(there, self.store_last)))
        left = self.store_last - max(reused, self.store_first) if self.store_last else 0
        found = {
            "store": store * page_size,
            "host": (there - device + later - on_device) * page_size,
            "device": (device + on_device) * page_size,
        }
        last = next((tier for tier, count in found.items() if count), "device")
        found[last] = max(0, found[last] - but)
        return CachedTokens(**found, store_left=max(0, left) * page_size)


@dataclass(slots=True, eq=False)
class Request:
    id: RequestId
    params: SamplingParams
    priority: int
    arrived_s: float
    deadline_s: float
    tokens: npt.NDArray[np.int32]
    """Room for prompt and output."""
    num_prompt: int
    length: int
    key: PrefixKey
    """Of all tokens but the last, of which one is always left to compute; a last pair has its
    second token there. Longer once more was looked up or shared."""
    order: tuple[int, int] = (0, 0)
    """Place in the queue: (turn, number of arrival)."""
    state: State = State.WAITING
    lease: Lease | None = None
    origin: RequestOrigin | None = None
    """None: it has not looked yet."""
    computed: int = 0
    flying: int = 0
    """Tokens that batches under way compute."""
    draws: int = 0
    """Tokens that they will have drawn."""
    life: int = 0
    """How often it let go of all that it held: what was computed before is not taken in."""
    place: int = -1
    """Of its token among those that the last of them draws."""
    cached: CachedTokens | None = None
    """What was found when it was first admitted; not changed by preemption."""
    reported: bool = False
    """Has the client been told of `cached`?"""
    salt: str = ""
    wish: Wish | None = None
    """What is to be done with its prompt's pages when it has let go of them."""
    prefill: list[str] = field(default_factory=list)
    """Peers that may compute its prompt."""
    trace: str = ""
    """By which its hand-overs are told of; empty: they are not."""
    handover: Handover | None = None
    """Pages that are on their way from a peer."""
    is_counted: bool = False
    """Has what was promised for it been counted? It may look again."""
    for_peer: bool = False
    """It ends with the last page of its prompt, and is answered with pages."""
    settled: bool = False
    """For a peer: all its pages are in the tree."""
    failure: str = ""
    """For a peer: why it will never be computed."""
    draft: RequestDraft | None = None
    """Who proposes tokens for it, once somebody does."""
    grammar: Compiled | None = None
    """What its answer must follow …"""
    held: Held | Told | None = None
    """… and where in that it is, once it is compiled; or in what it was told to say."""

    @classmethod
    def arrive(cls, message: Generate, namespace: Namespace, now: float) -> Request:
        prompt = np.frombuffer(message.tokens, dtype="<i4")
        said = np.frombuffer(message.said, dtype="<i4")
        length = len(prompt) + len(said)
        room = np.empty(len(prompt) + message.params.max_tokens, dtype=np.int32)
        room[: len(prompt)] = prompt
        room[len(prompt) : length] = said
        return cls(
            id=message.id,
            params=message.params,
            priority=message.priority,
            arrived_s=now,
            deadline_s=now + message.timeout_s,
            tokens=room,
            num_prompt=len(prompt),
            length=length,
            key=PrefixKey(namespace, room[: length - 1 + namespace.unit.overlap]),
            salt=message.salt,
            wish=_wish(message.cache, len(prompt), namespace.page_size),
            prefill=message.prefill,
            trace=message.trace,
            held=Told(message.params.told) if message.params.told else None,
        )

    @classmethod
    def of_peer(
        cls, name: str, tokens: bytes, namespace: Namespace, *, priority: int, now: float
    ) -> Request:
        """`tokens`: whole pages; of pairs, with the token after them, which is not computed."""
        prompt = np.frombuffer(tokens, dtype="<i4").astype(np.int32)
        count = len(prompt) - namespace.unit.overlap
        return cls(
            id=RequestId(name),
            params=SamplingParams(max_tokens=1, temperature=0.0),
            priority=priority,
            arrived_s=now,
            deadline_s=math.inf,  # whoever asked decides how long it waits
            tokens=prompt,
            num_prompt=count,
            length=count,
            key=PrefixKey(namespace, prompt),
            for_peer=True,
        )

    @property
    def remaining(self) -> int:
        """Tokens to compute, after those under way, before the next one can be picked. 0: it ends
        with what is under way."""
        if self.draws and (self.for_peer or self.next_position >= self.params.max_tokens):
            return 0
        return self.length + self.draws - self.computed - self.flying

    @property
    def is_coming(self) -> bool:
        """Are pages that it stands on still on their way to the device, and does no batch under
        way wait for them?"""
        return self.lease is not None and bool(self.lease.loads) and not self.flying

    @property
    def next_start(self) -> int:
        """Where the next batch goes on."""
        return self.computed + self.flying

    @property
    def next_position(self) -> int:
        """In the output, of the token that is drawn next."""
        return self.num_output + self.draws

    @property
    def num_output(self) -> int:
        return self.length - self.num_prompt

    def append(self, token: int) -> Finish | None:
        """Take in a token that was drawn. Returns how its answer ends with it; None: it goes on."""
        params = self.params
        self.tokens[self.length] = token
        self.length += 1
        if self.held is not None:
            self.held.advance(token)
        if token in params.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if self.length - self.num_prompt >= params.max_tokens else None

    def hold(self) -> None:
        """Its grammar is compiled: what is in its answer already has been through it."""
        assert self.grammar is not None
        self.held = self.grammar.begin(self.params.stop_ids)
        for token in self.tokens[self.num_prompt : self.length]:
            self.held.advance(int(token))

    @property
    def can_be_proposed(self) -> bool:
        """May several of its tokens be computed in one step while it decodes?"""
        state = self.lease.state if self.lease is not None else None
        return state is None or state.recurrent is None

    def failed(self) -> Finish:
        """How its answer ends when nothing could be drawn."""
        return Finish.INVALID if self.held is not None and self.held.error else Finish.ERROR

    @property
    def num_known(self) -> int:
        """Its tokens, computed or not; for a peer also one that will not be."""
        return len(self.tokens) if self.for_peer else self.length

    def key_of(self, count: int) -> PrefixKey:
        """The key of the first `count` units or more, as far as their tokens are known; hashes
        only what is new."""
        known, count = len(self.key.data) // 4, count + self.key.namespace.unit.overlap
        if known < count:
            self.key = self.key.extend(self.tokens[known : min(count, self.num_known)])
        return self.key

    def lookup_key(self, *, whole: bool = False) -> PrefixKey:
        """What to look for in the cache: everything but the last token, of which one must be
        computed to pick the next; for a peer everything. `whole`: everything, if tokens are what is
        looked up: a pair that begins with the last one is not known."""
        is_whole = whole and not self.key.namespace.unit.overlap
        return self.key_of(self.length if is_whole else self.length - 1)

    @property
    def room_tokens(self) -> int:
        """Tokens for which it needs pages before it may run: its own and the first of an answer."""
        return self.length + (0 if self.for_peer else 1)

    def missing_pages(self, count: int, page_size: int) -> int:
        """Pages it lacks to hold its first `count` tokens."""
        assert self.lease is not None
        held = num_pages(self.lease.tree_pages) + num_pages(self.lease.private_pages)
        return -(-count // page_size) - held

    def row(self) -> Row:
        """How to pick its next token."""
        prompt = output = b""
        allowed = b"" if self.held is None else self.held.allowed()[0]
        if needs_history(self.params):
            prompt = self.tokens[: self.num_prompt].tobytes()
            output = self.tokens[self.num_prompt : self.length].tobytes()
        return Row(self.params, self.next_position, prompt, output, allowed)

    def land(self, num_tokens: int, *, drew: bool) -> None:
        """A batch that it was part of has ended."""
        self.flying -= num_tokens
        self.draws -= drew

    def ground(self) -> None:
        """What is under way will not be taken in."""
        self.flying = self.draws = 0
        self.life += 1


def _wish(asked: CacheWish | None, num_prompt: int, page_size: int) -> Wish | None:
    if asked is None:
        return None
    count = num_prompt if asked.num_tokens is None else min(num_prompt, asked.num_tokens)
    tiers = (asked.device, asked.host)
    then = _wish(asked.then, num_prompt, page_size)
    return Wish(asked.retain_s, asked.level, count // page_size, tiers, asked.store, then)


def request_status(request: Request, role: str, now: float) -> RequestStatus:
    """Where it stands, for a person."""
    handover = request.handover
    state = request.state.name.lower()
    if request.for_peer and request.state is State.RUNNING:
        state = "computing"
    about: dict[str, str | int | float] = {}
    if handover is not None:
        moving = handover.stage is Stage.MOVING
        state = handover.stage.value
        if moving:
            state = "restoring" if handover.transfer is not Half.PENDING else "transferring"
        about = describe(handover, now)
    return RequestStatus(
        id=request.id,
        state=state,
        side="prefill" if request.for_peer else role,
        prompt_tokens=request.num_prompt,
        computed_tokens=request.computed,
        output_tokens=request.num_output,
        age_s=now - request.arrived_s,
        cached=request.cached,
        handover=about,
    )
