"""Leader: the scheduler's side. A CacheManager whose device is vLLM's, and a request's way.

    LOOKING ──store answered──▶ OFFERED ──blocks──▶ LOADING ──▶ RUNNING ──ended──▶ FINISHING
       ▲                            └──nothing to load────────────▶ │
       └────────────────────────── preempted ──────────────────────┘

    LOOKING     matched on the host; the store is asked for what comes after
    LOADING     blocks fill; vLLM is told by the workers when they have
    RUNNING     full pages are saved as they are computed, some at a time
    FINISHING   vLLM keeps the blocks until what is copied out of them has ended

What a step computes is saved in it, after it: later a window may have moved on, and its first block
be somebody else's. For the same reason a prompt with windows is saved up to a point when the step
that passes it has computed it (foreign.py), and not in between.

A load that failed is never offered to its request again: it computes. Knows requests by the fields
in naming.py, and blocks by number; neither vLLM nor bytes. One page is one block, and with several
groups of layers one of each.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.errors import QuireError
from quire.integrations.vllm.naming import Naming, VllmRequest
from quire.integrations.vllm.options import VllmOptions
from quire.integrations.vllm.orders import Orders, Setup, pack_orders
from quire.keys import PrefixKey
from quire.manager import (
    CacheEvent,
    CacheManager,
    EnginePages,
    ForeignCopy,
    ForeignState,
    Lease,
    StoreChange,
)
from quire.messages import Command, Completion
from quire.types import RequestId, Tier, page_ids

SAVED_TOKENS = 256
"""A running request's pages are saved when there are so many tokens of them."""
ATTACH_AGAIN_S = 30.0
"""After a store could not be attached."""
TELL_EVERY_S = 1.0
NULL_BLOCK = 0
"""What vLLM puts where a window has moved on: everybody's, and never read or written."""

Blocks = Sequence[Sequence[int]]
"""A request's, by vLLM's group."""

_logger = logging.getLogger(__name__)


class RequestStage(enum.Enum):
    LOOKING = enum.auto()
    OFFERED = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    FINISHING = enum.auto()


@dataclass(slots=True, eq=False)
class Tracked:
    """One request on its way."""

    request: VllmRequest
    lease: Lease
    key: PrefixKey
    num_named: int
    """Tokens in `key`."""
    num_prompt: int
    """Pages of what it has come with."""
    naming: Naming
    stage: RequestStage = RequestStage.LOOKING
    num_local: int = 0
    """Pages that vLLM has itself."""
    load: ForeignCopy | None = None
    saves: list[ForeignCopy] = field(default_factory=list)


class Leader:
    def __init__(
        self,
        options: VllmOptions,
        manager: CacheManager,
        naming: Naming,
        setup: Setup,
        groups: Sequence[Sequence[int]],
        *,
        clock: Callable[[], float],
        new_name: Callable[[], str],
        save_tokens: int = SAVED_TOKENS,
    ) -> None:
        """`groups`: vLLM's, by component. `new_name`: one that nobody has used, in any process."""
        self.manager = manager
        self._options = options
        self._naming = naming
        self._setup = setup
        self._groups = groups
        self._has_windows = len(groups) > 1
        self._clock = clock
        self._new_name = new_name
        self._page_size = naming.base.page_size
        self._save_pages = max(1, save_tokens // self._page_size)
        self._tracked: dict[str, Tracked] = {}
        self._finishing: dict[str, Tracked] = {}
        self._failed: set[str] = set()
        """Requests that a load has failed for."""
        self._orders = Orders(setup, b"")
        """Of the next step."""
        self._commands: list[Command] = []
        self._change: StoreChange | None = None
        self._attach_at_s = clock()
        """When to try next."""
        self._wait_until_s: float | None = None
        """None: nobody has waited for the store yet."""
        self._told: dict[str, int] = {}
        self._told_s = clock()

    # ---- what a request can have ----------------------------------------------------------------

    def matched(self, request: VllmRequest, num_computed: int) -> int | None:
        """Tokens beyond `num_computed` that can be loaded; None: ask again."""
        if request.skip_reading_prefix_cache:
            return 0
        if self._is_attaching() or self._is_coming_back(request):
            return None
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked is None or request.request_id in self._failed:
            return 0
        lease, page_size = tracked.lease, self._page_size
        tracked.num_local = num_computed // page_size
        if tracked.key.num_pages <= tracked.num_local:
            return 0
        self.manager.prefetch(lease)
        if not self.manager.ready(lease):
            return None
        tracked.stage = RequestStage.OFFERED
        beyond = self.manager.admit(lease) - tracked.num_local
        return max(0, beyond) * page_size

    def _is_coming_back(self, request: VllmRequest) -> bool:
        """Was it preempted, or its load in vain? It begins again, unless what it has computed is
        on its way to the host: then it waits for that."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.stage in (RequestStage.LOOKING, RequestStage.OFFERED):
            return False
        if self._has_failed(tracked):
            return False
        if self.manager.foreign.is_saving(tracked.lease):
            return True
        self._forget(request.request_id)
        return False

    def allocated(self, request: VllmRequest, blocks: Blocks, num_external: int) -> None:
        """The request has these blocks; so many tokens after its own hits are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not num_external:
            tracked.stage = RequestStage.RUNNING
            return
        first = tracked.num_local
        to = self._pages_of(blocks, first, first + num_external // self._page_size)
        load = self.manager.foreign.load_into(tracked.lease, to)
        tracked.load, tracked.stage = load, RequestStage.LOADING
        if load.state is ForeignState.FAILED:
            self._orders.refused.append(request.request_id)
        else:
            self._orders.loads[load.op] = request.request_id

    def from_store(self, request: VllmRequest, num_external: int) -> int:
        """Of the tokens that are loaded, those that came from the store."""
        tracked = self._tracked.get(request.request_id)
        prefetch = tracked.lease.prefetch if tracked is not None else None
        landed = prefetch.num_landed * self._page_size if prefetch is not None else 0
        return min(num_external, landed)

    # ---- what is kept ---------------------------------------------------------------------------

    def finished(self, request: VllmRequest, blocks: Blocks) -> bool:
        """It has ended. True: its blocks must stay until the workers say that they sent them."""
        name = request.request_id
        tracked = self._tracked.get(name)
        if tracked is None:
            self._failed.discard(name)
            return False
        self._see_taken(tracked, blocks)
        if tracked.stage is RequestStage.RUNNING:
            self._save(tracked, blocks, self._due(tracked, request.num_computed_tokens, least=1))
        self._failed.discard(name)
        under_way = [c.op for c in tracked.saves if c.state is ForeignState.COPYING]
        if not under_way:
            self._forget(name)
            return False
        del self._tracked[name]
        tracked.stage = RequestStage.FINISHING
        self._finishing[name] = tracked
        self._orders.sending[name] = under_way
        return True

    @property
    def will_free(self) -> bool:
        """Do finished requests hold blocks, which come back soon?"""
        return bool(self._finishing)

    @property
    def has_work(self) -> bool:
        """Is there anything to tell the workers, or to hear from them?"""
        is_new = bool(self._options.store) and self._change is None
        return is_new or bool(self._commands or self._finishing) or not self.manager.idle

    # ---- the step -------------------------------------------------------------------------------

    def orders(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Blocks],
        *,
        preempted: bool,
        idle: bool,
    ) -> Orders:
        """What the workers should do in this step. `scheduled`: who computes so many tokens in it,
        which are there when the workers come to copies. `blocks_of`: of anybody, as they are now.
        """
        for name, num_tokens in scheduled.items():
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            tracked.stage = RequestStage.RUNNING
            end = tracked.request.num_computed_tokens + num_tokens
            due = self._due(tracked, end, least=self._save_pages)
            if not due and not (self._has_windows and tracked.saves):
                continue  # vLLM makes a list of all blocks whenever it is asked for them
            blocks = blocks_of(name)
            self._see_taken(tracked, blocks)
            self._save(tracked, blocks, due)
        if self._has_windows:
            self._see_stalled(scheduled, blocks_of)
        self._attach()
        self._take_in(())
        orders, self._orders = self._orders, Orders(self._setup, b"")
        commands, self._commands = self._commands, []
        orders.commands = pack_orders(commands)
        orders.preempted, orders.idle = preempted, idle
        return orders

    def hear(self, reports: Iterable[Completion]) -> None:
        """What the workers have said, before vLLM acts on it."""
        self._take_in(reports)

    def reset(self) -> bool:
        """Nothing that was cached before is found again. False: something is being loaded."""
        if any(t.load and t.load.state is ForeignState.COPYING for t in self._tracked.values()):
            return False
        self._naming = self._naming.next_generation(self._new_name())
        for name in [n for n, t in self._tracked.items() if t.stage is not RequestStage.RUNNING]:
            self._forget(name)
        self.manager.flush(Tier.HOST)
        return True

    def take_counts(self) -> dict[str, int]:
        """What was counted since it was last told, by event; told once a second."""
        if self._clock() < self._told_s + TELL_EVERY_S:
            return {}
        before, self._told = self._told, self.manager.counters.snapshot()
        self._told_s = self._clock()
        counts = {name: count - before.get(name, 0) for name, count in self._told.items()}
        return {name: count for name, count in counts.items() if count}

    def take_events(self) -> list[CacheEvent]:
        """What came and went since they were last taken."""
        batch = self.manager.events.take()
        if batch.lost:
            _logger.warning("%d cache events were lost: who listens should begin anew", batch.lost)
        return batch.events

    # ---- inside ---------------------------------------------------------------------------------

    def _track(self, request: VllmRequest) -> Tracked | None:
        """None: the request has no name."""
        manager, naming = self.manager, self._naming
        # vLLM computes the last one in any case. What it sees begins, with windows, before what is
        # seen by the next, and that is all that is loaded.
        num_tokens = len(request.all_token_ids) - self._has_windows
        key = naming.key(request, num_tokens)
        if key is None:
            return None
        lease = manager.acquire(manager.match(key), RequestId(request.request_id))
        tracked = Tracked(request, lease, key, num_tokens, key.num_pages, naming)
        self._tracked[request.request_id] = tracked
        return tracked

    def _forget(self, name: str) -> None:
        self.manager.release(self._tracked.pop(name).lease)

    def _has_failed(self, tracked: Tracked) -> bool:
        load = tracked.load
        if load is not None and load.state is ForeignState.FAILED:
            self._failed.add(tracked.request.request_id)
            return True
        return any(copy.state is ForeignState.FAILED for copy in tracked.saves)

    def _due(self, tracked: Tracked, num_computed: int, *, least: int) -> range:
        """Its full pages that the host lacks and should have, if there are so many, or they reach a
        point. Of the newest token nothing is sure: what was computed for it may be a guess that was
        wrong."""
        tracked.saves = [c for c in tracked.saves if c.state is not ForeignState.DONE]
        if tracked.naming is not self._naming or self._has_failed(tracked):
            return range(0)  # or it was computed before all was to be forgotten
        num_known = len(tracked.request.all_token_ids) - 1
        last = min(num_computed, num_known) // self._page_size
        first = self.manager.foreign.saved_pages(tracked.lease)
        point = self.manager.foreign.point_before(tracked.lease, last)
        if self._has_windows and last < tracked.num_prompt:
            last = point
        return range(first, last) if last - first >= (1 if first < point else least) else range(0)

    def _save(self, tracked: Tracked, blocks: Blocks, due: range) -> None:
        first, last, request = due.start, min(due.stop, *map(len, blocks)), tracked.request
        if last <= first:
            return
        if tracked.key.num_pages < last:
            num_known = len(request.all_token_ids) - 1
            tracked.key = self._naming.longer(tracked.key, request, tracked.num_named, num_known)
            tracked.num_named = num_known
        pages, foreign = self._pages_of(blocks, first, last), self.manager.foreign
        tracked.saves += foreign.save_from(tracked.lease, tracked.key[:last], pages)

    def _pages_of(self, blocks: Blocks, first: int, last: int) -> list[EnginePages]:
        """Where it has pages [first, last), by component; of windows, those at the end that it has
        at all."""
        found = []
        for groups in self._groups:
            mine = np.array([blocks[group][first:last] for group in groups], dtype="<i4")
            gone = np.flatnonzero((mine == NULL_BLOCK).any(axis=0))
            begin = int(gone[-1]) + 1 if len(gone) else 0
            pages = page_ids(mine[:, begin:].T)
            found.append(EnginePages(first + begin, pages, len(groups)))
        return found

    def _see_taken(self, tracked: Tracked, blocks: Blocks) -> None:
        """Where a window has moved on past what is being copied out of it, that comes first."""
        for copy in tracked.saves:
            if copy.state is not ForeignState.COPYING:
                continue
            for groups, pages in zip(self._groups[1:], copy.device[1:], strict=True):
                at = pages.first
                if any(NULL_BLOCK in blocks[group][at : at + 1] for group in groups):
                    self._orders.taken.append(copy.op)

    def _see_stalled(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Blocks]
    ) -> None:
        """The same of those that are not in this step: vLLM lets go of what lies before a window,
        and only then may find no blocks for its request to compute on."""
        for name, tracked in self._tracked.items():
            if name not in scheduled and self._is_saving(tracked):
                self._see_taken(tracked, blocks_of(name))

    def _take_in(self, reports: Iterable[Completion]) -> None:
        self._commands += self.manager.step(reports)
        done = [n for n, t in self._finishing.items() if not self._is_saving(t)]
        for name in done:
            self.manager.release(self._finishing.pop(name).lease)

    def _is_saving(self, tracked: Tracked) -> bool:
        return any(copy.state is ForeignState.COPYING for copy in tracked.saves)

    def _attach(self) -> None:
        """Attach the store, in the first step and again some time after it could not be."""
        change, now = self._change, self._clock()
        if not self._options.store or now < self._attach_at_s:
            return
        if change is not None and not (change.done and change.error):
            return
        if change is not None:
            _logger.warning("the store cannot be used, and is tried again: %s", change.error)
        self._attach_at_s = now + ATTACH_AGAIN_S
        try:
            self._change = self.manager.store.attach(self._options.store)
        except QuireError as error:  # a worker is lost, and vLLM will end for it
            _logger.warning("the store cannot be attached: %s", error)

    def _is_attaching(self) -> bool:
        """Should requests wait for the store? Only the first ones, and not for long: before them
        there may have been no step, and its workers have not heard of the store."""
        change = self._change
        if not self._options.store or (change is not None and change.done):
            return False
        if self._wait_until_s is None:
            self._wait_until_s = self._clock() + self._options.wait_s
        return self._clock() < self._wait_until_s
