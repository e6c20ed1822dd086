"""EngineConfig: everything an engine process is started with, small enough to travel there.

Sizes are in bytes here; the engine turns them into pages once it knows what a page weighs. Built
by `quire.settings` from the command line, the environment and a file; validated where it is built.
"""

from __future__ import annotations

import enum

import msgspec

from quire.config import PrefetchPolicy, WritePolicy
from quire.engine.draft.kinds import MAX_DRAFT_TOKENS, DraftChoice, DraftKind, parse_draft
from quire.engine.kvevents.config import Publishing
from quire.errors import ConfigError
from quire.peer.kinds import TransportKind
from quire.transfer.kinds import MoverKind


class Role(enum.StrEnum):
    """What an engine does of a request."""

    UNIFIED = "unified"
    """All of it."""
    PREFILL = "prefill"
    """Computes prompts, for decode servers."""
    DECODE = "decode"
    """Generates, from prompts that prefill servers computed."""


class ForwardKind(enum.StrEnum):
    """What computes a model."""

    AUTO = "auto"
    """DENSE where it can."""
    DENSE = "dense"
    """Our own decoder."""
    TRANSFORMERS = "transformers"


class AttentionKind(enum.StrEnum):
    """What computes attention over the pages."""

    AUTO = "auto"
    """TRITON on CUDA, if it is installed."""
    TORCH = "torch"
    TRITON = "triton"


MIN_SECRET_CHARS = 16
"""Keys follow from the secret: one that can be guessed is none."""


def weak_secret(secret: str) -> str:
    return (
        f"peer_secret has {len(secret)} characters, and must have at least {MIN_SECRET_CHARS}: "
        "take random ones, such as `openssl rand -hex 32` gives"
    )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Directory of a model as transformers saves it: config.json, *.safetensors, tokenizer."""
    name: str
    """What clients call the model."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    dtype: str = "float32"
    forward: ForwardKind = ForwardKind.AUTO
    overlap: bool | None = None
    """Choose and launch a batch before the one ahead of it has ended; None: on an accelerator."""
    attention: AttentionKind = AttentionKind.AUTO
    cuda_graphs: bool = True
    """On CUDA with one rank and our own decoder: steps that only decode are replayed, not
    launched kernel by kernel."""
    copies: MoverKind = MoverKind.AUTO
    """What moves pages between a CUDA device and the host."""
    page_size: int = 16
    device_bytes: int
    """For the pages of the device tier, all ranks together."""
    measure_device: bool = False
    """`device_bytes` is a guess: where a trial of the model can say how much there is, it does."""
    host_bytes: int = 0
    """For the host tier, all ranks together; 0 switches host and store off."""
    store: str | None = None
    """URL; attached at start."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold: int = 64
    """Tokens; shorter hits in the store are recomputed."""
    tp: int = 1
    max_context: int | None = None
    """Tokens of prompt and answer together; None: what the model was made for."""
    max_running: int = 32
    """Requests computed together."""
    max_waiting: int = 256
    """Requests queued; more are turned away."""
    tenant_share: int = 100
    """Per cent of each tier that one tenant may have cached."""
    chunk_tokens: int = 512
    """Prompt tokens computed in one step, over all requests."""
    typical_tokens: int = 0
    """Length of a typical sequence: for models with windows or recurrent layers it decides how
    memory is divided between full pages, windows and states. 0: as measured when the model was
    served here before."""
    audit: int = 0
    """Per cent of idle time in which cached pages are computed again and compared; 0: none is."""
    snapshot_every: int = 0
    """Tokens between two snapshots of recurrent state, beside those at the ends of prompts and
    turns and where prompts branch; 0: no others."""
    snapshots_per_path: int = 8
    """Snapshots kept along one prefix; 0: none are taken, and nothing is reused."""
    speculate: str = DraftKind.OFF.value
    """Who proposes tokens ahead, for the model to check several in one step: see draft/kinds.py."""
    draft_tokens: int = 4
    """Proposed together for one request, at most."""
    threads: int = 0
    """CPU threads for the model of each rank; 0: the cores there are, shared among ranks."""
    role: Role = Role.UNIFIED
    peer_host: str = "127.0.0.1"
    """Where the page server listens."""
    peer_port: int | None = None
    """None: no page server. 0: any free port. Else: this one for leaders, and one after it for
    each rank."""
    peer_secret: str = ""
    """Known to all engines that exchange pages."""
    peer_transport: TransportKind = TransportKind.AUTO
    """How pages come from them."""
    prefill: list[str] = []
    """Decode: page servers of prefill engines, as `tcp://host:port`, tried in turn."""
    peers: list[str] = []
    """Page servers of engines whose pages may be used."""
    decode_cache: bool = True
    """Decode: look for prefixes in the own tiers at all."""
    decode_restore: bool = True
    """Decode: also in host and store, not only on the device."""
    decode_computes: int = 0
    """Decode: prompt tokens that are computed here, if no more are missing."""
    kv_events: Publishing | None = None
    """Where cache events are published, for routers of others."""
    handover_timeout_s: float = 30.0
    """Without progress for so long, a hand-over is given up and tried elsewhere."""
    debug: bool = False
    """Check every invariant of the cache after each step (slow)."""

    def __post_init__(self) -> None:
        for option in (
            "page_size",
            "device_bytes",
            "tp",
            "max_running",
            "chunk_tokens",
            "draft_tokens",
        ):
            if getattr(self, option) < 1:
                raise ConfigError(f"{option} is {getattr(self, option)}: it must be at least 1")
        if not 1 <= self.tenant_share <= 100:
            raise ConfigError(f"tenant_share is {self.tenant_share}: it must be from 1 to 100")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}: it must not be negative")
        for option in (
            "typical_tokens",
            "snapshot_every",
            "snapshots_per_path",
            "decode_computes",
        ):
            if getattr(self, option) < 0:
                raise ConfigError(f"{option} is {getattr(self, option)}: it must not be negative")
        self._check_draft()
        self._check_audit()
        if self.host_bytes < 0:
            raise ConfigError(f"host_bytes is {self.host_bytes}: it must not be negative")
        if self.peer_port is not None or self.peers:
            self._check_exchange()
        if self.role is not Role.UNIFIED and self.peer_port is None:
            raise ConfigError(f"role {self.role.value} needs a page server: set peer_port")
        if self.handover_timeout_s <= 0:
            raise ConfigError(
                f"handover_timeout_s is {self.handover_timeout_s:g}: make it positive"
            )
        if self.store is not None and not self.host_bytes:
            raise ConfigError(
                "store: it is reached through host memory, and host memory is 0: "
                "give host_memory a size or set store to none"
            )

    @property
    def draft(self) -> DraftChoice:
        return parse_draft(self.speculate)

    @property
    def max_rows(self) -> int:
        """Tokens drawn for one request in one step, at most."""
        draft = self.draft
        return 1 if draft.kind is DraftKind.OFF else 1 + self.draft_tokens * (1 + draft.branches)

    def _check_draft(self) -> None:
        try:
            self.draft  # noqa: B018
        except ConfigError as error:
            raise ConfigError(f"speculate is {self.speculate}: {error}") from None
        most = MAX_DRAFT_TOKENS // (1 + self.draft.branches)
        if self.draft_tokens > most:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens}: it must be at most {most} if speculate is "
                f"{self.speculate}"
            )

    def _check_audit(self) -> None:
        if not 0 <= self.audit <= 100:
            raise ConfigError(f"audit is {self.audit}: it must be from 0 to 100")
        if self.audit and self.tp > 1:
            raise ConfigError(
                f"audit is {self.audit} and tp is {self.tp}: pages are compared on one rank only "
                "so far; set audit to 0 or tp to 1"
            )

    def _check_exchange(self) -> None:
        if not self.host_bytes:
            raise ConfigError(
                "pages are exchanged through host memory, and host memory is 0: give "
                "host_memory a size, or do without peers"
            )
        if not self.peer_secret:
            raise ConfigError("peer_secret is not set: engines that exchange pages must share one")
        if len(self.peer_secret) < MIN_SECRET_CHARS:
            raise ConfigError(weak_secret(self.peer_secret))
