"""What the server and the engine process say to each other: typed, msgpack, nothing else.

    server → engine   Generate, AbortRequest, PutQuestion, Shutdown
    engine → server   Starting*, then Started or StartFailed; then Outputs, Handed, Answer, Report

Token ids travel as little-endian int32 bytes. Every Generate ends with exactly one Output whose
`finish` is set, unless it was aborted: after AbortRequest nothing more need come, and what does is
stale.
Every PutQuestion gets exactly one Answer.
"""

from __future__ import annotations

import enum

import msgspec

from quire.decoders import msgpack_decoder
from quire.keys import Namespace, UnitKind
from quire.store.account import StoreHealth
from quire.types import RequestId


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


# ---- requests ------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is picked. Stop strings and the meaning of EOS are the server's business:
    it puts the ids of EOS among `stop_ids` unless the client said ignore_eos."""

    max_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    """The draw at each position depends on this and the position alone."""
    stop_ids: list[int] = []
    """Generation ends with one of these; it is the last token of the output."""
    logprobs: int | None = None
    """None: none; k: of the sampled token and of the k likeliest."""
    grammar: str = ""
    """What the answer must follow, in llguidance's Lark; it ends with a stop id where it may."""
    told: list[int] = []
    """What the answer begins with, whatever the model would draw: for their log probabilities.
    Not with a grammar."""


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed, by where they were found: in a tier of this engine, at
    a peer, or, for what a prefill server handed over, in a tier of that server."""

    device: int = 0
    host: int = 0
    store: int = 0
    peer: int = 0
    prefill_device: int = 0
    prefill_host: int = 0
    prefill_store: int = 0
    store_left: int = 0
    """Not among them: the store had these too, and they were computed."""

    @property
    def total(self) -> int:
        found: int = sum(getattr(self, field) for field in self.__struct_fields__)
        return found - self.store_left

    def fetched(self, count: int) -> CachedTokens:
        """So many more of those that the store had were fetched after all."""
        left = max(0, self.store_left - count)
        return msgspec.structs.replace(self, store=self.store + count, store_left=left)


class TokenLogprobs(msgspec.Struct, frozen=True):
    logprob: float
    """Of the sampled token."""
    top_ids: list[int]
    top_logprobs: list[float]


class Finish(enum.StrEnum):
    STOP = "stop"
    """A stop id was sampled."""
    LENGTH = "length"
    """max_tokens, or the end of the context."""
    INVALID = "invalid"
    """Its grammar cannot be followed; `error` says why."""
    TIMEOUT = "timeout"
    REJECTED = "rejected"
    """Too busy; `error` says what is full."""
    ERROR = "error"


class CacheWish(msgspec.Struct, frozen=True):
    """What is to be done with the pages of a prompt once its request has ended."""

    retain_s: float = 0.0
    level: int = 0
    """−1: they go first; 0: as any; 1, 2: they go last, while `retain_s` is not over."""
    num_tokens: int | None = None
    """Up to that token; None: to the end of the prompt."""
    device: bool = True
    host: bool = True
    """Where that goes for."""
    store: bool = True
    """May the store have them?"""
    then: CacheWish | None = None
    """Of the pages behind those."""


class Generate(_Message, frozen=True, tag="generate"):
    id: RequestId
    tokens: bytes
    params: SamplingParams
    salt: str = ""
    priority: int = 0
    timeout_s: float = 600.0
    prefill: list[str] = []
    """Decode servers: prefill servers to ask, in this order; empty: those of the configuration."""
    cache: CacheWish | None = None
    said: bytes = b""
    """Tokens of the answer that there are already: it goes on after them."""
    trace: str = ""
    """The `traceparent` of its span; empty: nobody wants to hear of its hand-overs."""


class AbortRequest(_Message, frozen=True, tag="abort"):
    id: RequestId


class Output(msgspec.Struct, frozen=True):
    """What one step added to one request."""

    id: RequestId
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []
    """One per token, if asked for."""
    finish: Finish | None = None
    error: str = ""
    """For a person, when `finish` is INVALID, TIMEOUT, REJECTED or ERROR."""
    cached: CachedTokens | None = None
    """Set in the first output that has a token."""
    accepted: int = 0
    """So many of the tokens had been proposed …"""
    rejected: int = 0
    """… and so many others had been too."""


class Outputs(_Message, frozen=True, tag="outputs"):
    outputs: list[Output]


class Handed(_Message, frozen=True, tag="handed"):
    """A hand-over that has ended, of a request here or at the peer that asked."""

    trace: str
    """Empty: the request is not traced."""
    is_giver: bool
    began_s: float
    ended_s: float
    """By this machine's monotonic clock."""
    about: dict[str, str | int | float]


# ---- questions -----------------------------------------------------------------------------------


class _Question(msgspec.Struct, frozen=True, tag_field="q"):
    pass


class GetStatus(_Question, frozen=True, tag="status"):
    """Answered by EngineStatus."""

    check: bool = False
    """Check every invariant as well; a violation is an error of the Answer."""


class Flush(_Question, frozen=True, tag="flush"):
    """Evict all that nobody uses. Answered by Flushed. Flushing the store clears it."""

    tiers: list[str]
    """Of "device", "host", "store"."""


class Attach(_Question, frozen=True, tag="attach"):
    """Answered by StoreStatus."""

    url: str


class Detach(_Question, frozen=True, tag="detach"):
    """Answered by StoreStatus."""


class Warm(_Question, frozen=True, tag="warm"):
    """Bring a prompt's pages from the store to the host. Answered by Warmed."""

    tokens: bytes
    salt: str = ""


class Drain(_Question, frozen=True, tag="drain"):
    """Take no more prompts of other engines. The answer is an EngineStatus."""


class GetRequests(_Question, frozen=True, tag="requests"):
    """Answered by Requests."""


class GetTenants(_Question, frozen=True, tag="tenants"):
    """Answered by Tenants."""


class GetEvents(_Question, frozen=True, tag="events"):
    """What has come into the tiers and gone from them. Answered by Events."""

    since: int
    """Number of the last event that who asks knows; 0: none."""
    cursor: int = 0
    """Of the last answer."""


class GetKeys(_Question, frozen=True, tag="keys"):
    """The page keys of a prompt. Answered by Keys."""

    tokens: bytes
    salt: str = ""


class GetOutline(_Question, frozen=True, tag="outline"):
    """The prefix tree, for a person to look at. Answered by Outline."""

    limit: int


Question = (
    GetStatus
    | Drain
    | Flush
    | Attach
    | Detach
    | Warm
    | GetRequests
    | GetTenants
    | GetEvents
    | GetKeys
    | GetOutline
)


class TierStatus(msgspec.Struct, frozen=True):
    name: str
    """"device" or "host"."""
    page_bytes: int
    """All ranks together."""
    num_pages: int
    used_pages: int
    """Neither free nor only cached by eviction's grace: num_pages - free."""
    locked_pages: int
    """Used by requests or operations right now: cannot be evicted."""
    component: str = "full"


class StoreStatus(msgspec.Struct, frozen=True):
    state: str
    """"attached", "changing" or "detached"."""
    url: str = ""
    counters: dict[str, int] = {}
    """What the clients of all ranks have counted."""
    stores: list[StoreHealth] = []
    """How each stands, over all ranks."""


class CountedTime(msgspec.Struct, frozen=True):
    """Operations of one kind that have ended, and their time from start to last report."""

    count: int
    seconds: float


class HandoverStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What has gone between this engine and its peers."""

    open: int = 0
    """Hand-overs under way, asked for and served."""
    sent_pages: int = 0
    sent_bytes: int = 0
    received_pages: int = 0
    received_bytes: int = 0
    received_by: dict[str, int] = {}
    """The same, by transport."""
    transfers: CountedTime = CountedTime(0, 0.0)
    """Hand-overs received in full, from the first word to the last page."""
    restores: dict[str, CountedTime] = {}
    """Own parts brought back from host and store: by outcome, ready or failed."""
    promised_pages: int = 0
    """Pages a prefill server was told it need not send."""
    restored_pages: int = 0
    """Those of them that were then really there."""
    repairs: dict[str, int] = {}
    """Pages asked for again, by reason."""
    local: dict[str, int] = {}
    """Hand-overs that came to nothing, so that this engine computed the prompt: by reason."""
    strangers: int = 0
    """Connections that did not get through the handshake."""
    links: dict[str, str] = {}
    """Peers connected to, by address: how that stands."""
    transports: dict[str, str] = {}
    """By which the pages of those that are there are read: shm, nixl or tcp."""


class EngineStatus(msgspec.Struct, frozen=True):
    tiers: list[TierStatus]
    store: StoreStatus
    waiting: int
    running: int
    waiting_tokens: int
    """Of requests that wait."""
    operations: dict[str, int]
    """In flight, by kind: backup, load, write, fetch, probe, store."""
    waiting_writes: int
    """Parts of prompts that the store is to take and that are not on their way there yet."""
    ended: dict[str, CountedTime]
    """By the same kinds."""
    leases: int
    counters: dict[str, int]
    """CacheManager's counters and the engine's own, by name."""
    seconds: dict[str, float]
    """Time spent, by what: step, model, cache, idle."""
    reuse: bool = True
    """False: the model failed its check when it was loaded, and every prompt is computed."""
    handover: HandoverStatus | None = None
    """None: this engine has no page server and no peers."""
    drafts: DraftStatus | None = None
    """None: nothing is proposed ahead."""
    running_tokens: int = 0
    """Of requests that run: prompts, and what was answered."""


class DraftStatus(msgspec.Struct, frozen=True):
    """Tokens proposed ahead, by their position in a draft, from the first on."""

    proposed: list[int]
    accepted: list[int]
    num_drafts: int
    """Steps of a request that had any."""


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request in flight."""

    id: RequestId
    state: str
    """waiting, restoring, transferring, running; on a prefill server also computing, holding."""
    side: str
    """unified, decode, or prefill."""
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    age_s: float
    cached: CachedTokens | None = None
    handover: dict[str, str | int | float] = {}
    """Where its hand-over stands: peer, promised, restored, received, wanted, tries, …"""


class Requests(msgspec.Struct, frozen=True):
    requests: list[RequestStatus]


class TenantStatus(msgspec.Struct, frozen=True):
    """Those who share a salt."""

    name: str
    """The salt; empty: those who have none."""
    running: int
    waiting: int
    device_pages: int
    """Cached, of full attention."""
    host_pages: int
    written_pages: int = 0
    """To the store, where quotas are kept."""
    refused_pages: int = 0
    """Which the store would not take."""


class Tenants(msgspec.Struct, frozen=True):
    tenants: list[TenantStatus]
    device_quota_pages: int
    """Of each that has a salt."""
    host_quota_pages: int
    share: float = 1.0
    """Of each tier."""


class Event(msgspec.Struct, frozen=True):
    kind: str
    """stored or removed."""
    tier: str
    """device, host or store."""
    keys: bytes
    """Page keys of `full` pages, 32 bytes each, in the order of the prefix."""


class Events(msgspec.Struct, frozen=True):
    last: int
    """Number of the last event that who asks knows now."""
    events: list[Event]
    complete: bool
    """False: some after `since` are forgotten already; start over from what comes, which is what
    is present now."""
    more: bool = False
    """There are more already."""
    cursor: int = 0
    """From where to go on with what is present; 0: with the events after `last`."""


class Keys(msgspec.Struct, frozen=True):
    page_size: int
    num_tokens: int
    keys: bytes
    """32 bytes each: of every page but the one of the last token."""


class OutlineRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of pages of the tree: see manager/outline.py."""

    parent: int
    tenant: str
    first: int
    last: int
    device: bool
    host: bool
    store: bool
    hits: int
    age: int


class Outline(msgspec.Struct, frozen=True):
    runs: list[OutlineRun]


class Flushed(msgspec.Struct, frozen=True):
    pages: dict[str, int]
    """Freed, by tier; for the store None is known, so it is not here."""
    left_alone: list[str] = []
    """Stores that were not cleared, since they are only read."""


class Warmed(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cached: CachedTokens
    """Where the prompt's pages are now: device, host; `store` counts those just fetched."""


class PutQuestion(_Message, frozen=True, tag="question"):
    id: int
    question: Question


class Answer(_Message, frozen=True, tag="answer"):
    id: int
    result: bytes = b""
    """msgpack of the type that the question names; empty when there is an error."""
    error: str = ""


class StopEngine(_Message, frozen=True, tag="shutdown"):
    pass


# ---- start and state -----------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine is, once started."""

    name: str
    fingerprint: str
    device: str
    dtype: str
    tp: int
    page_size: int
    vocab_size: int
    max_context: int
    """Prompt and answer together: the least of the model's, the option's and the device pool's."""
    tiers: list[TierStatus]
    store: str
    """URL, or empty."""
    no_reuse: str = ""
    """Why nothing is reused although the engine runs; empty: all is well."""
    role: str = "unified"
    peer: str = ""
    """Address of the page server, as peers are given it; empty: there is none."""
    forward: str = "transformers"
    """What computes the model."""
    no_dense: str = ""
    """Why that is not our own decoder although nobody asked for another."""
    unit: UnitKind = UnitKind.TOKEN
    """Of its prefixes: pairs, where a draft head keeps its state beside the model's."""

    def namespace(self, salt: str = "") -> Namespace:
        """Of its prefixes; whoever has another `salt` shares none of them."""
        return Namespace(self.fingerprint, self.dtype, self.page_size, self.unit, salt=salt)


class Starting(_Message, frozen=True, tag="starting"):
    """Progress of the start, for a person."""

    what: str
    done: float
    """0..1"""


class Started(_Message, frozen=True, tag="started"):
    info: EngineInfo


class EngineStartFailed(_Message, frozen=True, tag="start_failed"):
    error: str


class EngineReport(_Message, frozen=True, tag="report"):
    """Sent now and then while it runs: a sign of life, and figures for the metrics."""

    status: EngineStatus


ToEngine = Generate | AbortRequest | PutQuestion | StopEngine
ToServer = Starting | Started | EngineStartFailed | Outputs | Handed | Answer | EngineReport

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgpack_decoder(ToEngine)
_to_server = msgpack_decoder(ToServer)


def encode(message: ToEngine | ToServer) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError."""
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_to_server(data: bytes) -> ToServer:
    """Raises msgspec.DecodeError."""
    message: ToServer = _to_server.decode(data)
    return message
