"""A scheduler and a model as vLLM has them, small: blocks, steps, chunks, preemption, groups of
layers with windows. No vLLM.

What the model computes for a token is a number that depends on all tokens before it, so that a
block which holds anything else than it should is seen. Blocks of all groups come from one pool and
lie in one memory, in which each group's layers have their own number for the same token.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from quire.components import Component, FullAttention, PoolSize, SlidingWindow
from quire.config import CacheConfig, PrefetchConfig
from quire.integrations.vllm.hands import Hands
from quire.integrations.vllm.leader import Leader
from quire.integrations.vllm.naming import Naming
from quire.integrations.vllm.options import VllmOptions
from quire.integrations.vllm.orders import Setup, unpack_reports
from quire.integrations.vllm.tensors import BlockShape, describe
from quire.keys import Namespace
from quire.manager import CacheManager

BLOCK, HEADS, DIM, LAYERS = 4, 2, 4, 2
"""Layers of each group."""
NULL_BLOCK = 0


@dataclass(eq=False)
class MiniRequest:
    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 4
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    lora_request: Any = None
    mm_features: list[object] = field(default_factory=list)
    prompt_embeds: object | None = None
    skip_reading_prefix_cache: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    """By group."""
    is_loading: bool = False
    num_loaded: int = 0
    aborted: bool = False

    values: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = len(self.all_token_ids) + self.max_tokens
        self._digest = hashlib.sha256(f"{self.cache_salt}".encode())

    def computed(self, first: int, last: int) -> torch.Tensor:
        """What the model computes for these tokens: each depends on all before it."""
        for token in self.all_token_ids[len(self.values) : last]:
            self._digest.update(token.to_bytes(4, "little"))
            self.values.append(float(int.from_bytes(self._digest.digest()[:2], "little")))
        return torch.tensor(self.values[first:last])


class Memory(Protocol):
    """What the engine's blocks hold."""

    def compute(self, request: MiniRequest, group: int, first: int, last: int) -> None:
        """The model writes what these tokens are to the layers of a group."""

    def check(self, request: MiniRequest, group: int, first: int, last: int) -> None:
        """Do its blocks hold what the model computes for these tokens?"""

    def overwrite(self, blocks: list[int]) -> None:
        """Whoever reads them from here on is seen."""


class Tensors:
    """Real ones, of one rank: all groups' layers in the same memory."""

    def __init__(self, num_blocks: int, groups: Sequence[Sequence[int]] = ((0,),)) -> None:
        """`groups`: by component."""
        self.layers = [torch.zeros(num_blocks, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
        shape, names = BlockShape(num_blocks, BLOCK, HEADS, DIM), ("full", "window")
        self.kinds = [
            describe([self._by_name(group) for group in mine], shape, name)
            for name, mine in zip(names, groups, strict=False)
        ]
        self.overwrite([NULL_BLOCK])

    def _by_name(self, group: int) -> dict[str, torch.Tensor]:
        return {f"layers.{group + at}": layer for at, layer in enumerate(self.layers)}

    def compute(self, request: MiniRequest, group: int, first: int, last: int) -> None:
        numbers = request.computed(first, last) + 100_000 * group
        blocks, at = _places(request.blocks[group], first, last)
        for layer, tensor in enumerate(self.layers):
            tensor[blocks, :, at] = (numbers + layer)[:, None, None].expand(-1, HEADS, 2 * DIM)

    def check(self, request: MiniRequest, group: int, first: int, last: int) -> None:
        numbers = request.computed(0, last)[first:] + 100_000 * group
        blocks, at = _places(request.blocks[group], first, last)
        for layer, tensor in enumerate(self.layers):
            held = tensor[blocks, :, at] - layer
            assert torch.equal(held, numbers[:, None, None].expand_as(held)), request.request_id
            assert (tensor[NULL_BLOCK] == -1).all(), "the null block was written"

    def overwrite(self, blocks: list[int]) -> None:
        for tensor in self.layers:
            tensor[blocks] = -1.0


def _places(blocks: list[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(first, last)
    return torch.tensor(blocks, dtype=torch.int64)[at // BLOCK], at % BLOCK


class MiniVllm:
    def __init__(
        self,
        memory: Memory,
        hands: Any,
        *,
        num_blocks: int = 32,
        host_pages: int = 64,
        num_ranks: int = 1,
        store: str = "",
        chunk: int = 8,
        save_tokens: int = 8,
        now: list[float] | None = None,
        window: int = 0,
        groups: Sequence[Sequence[int]] = ((0,),),
    ) -> None:
        """`hands`: Hands, or what does as they do. `window`: tokens, of all groups that are not
        those of the first component."""
        self.now = now if now is not None else [0.0]
        self.memory, self.hands = memory, hands
        self.window, self.num_groups = window, sum(map(len, groups))
        self.window_groups = {group for mine in groups[1:] for group in mine}
        prefetch = PrefetchConfig(threshold_tokens=1)
        components: list[Component] = [FullAttention()]
        if window:
            pool = PoolSize(num_blocks, host_pages)
            components.append(SlidingWindow(1, window, BLOCK, pool))
        self.manager = CacheManager(
            CacheConfig(BLOCK, num_blocks, host_pages, prefetch=prefetch, num_ranks=num_ranks),
            clock=lambda: self.now[0],
            components=components,
        )
        names = iter(f"generation {n}" for n in range(10_000))
        self.leader = Leader(
            VllmOptions(host_bytes=1, store=store),
            self.manager,
            Naming(Namespace("weights", "float32", BLOCK), lambda adapter: adapter.lora_path),
            Setup("weights", [host_pages] * len(groups), BLOCK),
            groups,
            clock=lambda: self.now[0],
            new_name=lambda: next(names),
            save_tokens=save_tokens,
        )
        self.chunk = chunk
        self.rng = random.Random(0)
        self.free = list(range(1, num_blocks))
        self.num_blocks = num_blocks
        self.waiting: list[MiniRequest] = []
        self.running: list[MiniRequest] = []
        self.finishing: dict[str, MiniRequest] = {}
        self.by_name: dict[str, MiniRequest] = {}
        self.num_loaded = 0
        self.num_recoveries = 0
        self.preempted = False
        self.taken_away: list[int] = []
        self.stalled: set[str] = set()
        """Running requests that there are no blocks for in the next step: what lies before their
        windows has gone, and they compute nothing."""

    # ---- steps ----------------------------------------------------------------------------------

    def add(self, request: MiniRequest) -> None:
        self.by_name[request.request_id] = request
        self.waiting.append(request)

    def step(self) -> None:
        """Schedule, compute, tell the connector, hear from it."""
        self.now[0] += 0.001
        for request in self.running:
            self._slide(request)
        self._admit()
        work: dict[str, int] = {}
        for request in self.running:
            left = len(request.all_token_ids) - request.num_computed_tokens
            if request.request_id not in self.stalled:
                work[request.request_id] = min(self.chunk, left)
        self.stalled.clear()
        orders = self.leader.orders(
            work,
            lambda name: self.by_name[name].blocks or [[]] * self.num_groups,
            preempted=self.preempted,
            idle=not work,
        )
        self.hands.finish_copies(orders)
        self.memory.overwrite(self.taken_away)
        self.preempted, self.taken_away = False, []
        for name, count in work.items():
            self._compute(self.by_name[name], count)
        self.hands.obey(orders)
        self.hands.look(idle=not work)
        accounts = self.hands.accounts
        sent, (received, failed) = accounts.take_sent(), accounts.take_received()
        reports = accounts.take_reports()
        self.leader.hear(unpack_reports(reports) if reports else [])
        self._received(received, failed)
        for name in sent:
            self._free(self.finishing.pop(name))
        for name in work:
            self._advance(self.by_name[name])

    def run(self, limit: int = 5000) -> None:
        """Until nobody has anything to do."""
        for _ in range(limit):
            if not (self.waiting or self.running or self.finishing or self.leader.has_work):
                return
            self.step()
        raise AssertionError(f"no end after {limit} steps")

    def abort(self, request: MiniRequest) -> None:
        request.aborted = True
        if request.is_loading:  # its blocks come back when the load has ended
            assert not self.leader.finished(request, request.blocks)
            self.waiting.remove(request)
            self.finishing[request.request_id] = request
        else:
            (self.running if request in self.running else self.waiting).remove(request)
            self._finish(request)

    def preempt(self, request: MiniRequest) -> None:
        """Its blocks are others' now; the model overwrites them in the next step."""
        self.running.remove(request)
        self._take_away(request.blocks)
        request.blocks = []
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)
        self.preempted = True

    # ---- inside ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        for request in list(self.waiting):
            if request.is_loading:
                continue
            found: int | None = 0
            if request.num_computed_tokens == 0:
                found = self.leader.matched(request, 0)
            if found is None:
                continue
            if not self._give_blocks(request, found):
                continue
            self.leader.allocated(request, request.blocks, found)
            if found:
                request.is_loading, request.num_loaded = True, found
                continue
            self.waiting.remove(request)
            self.running.append(request)

    def _give_blocks(self, request: MiniRequest, num_found: int) -> bool:
        """For all that it will ever hold, so that nobody waits for somebody who waits; of windows,
        not for what lies before them when `num_found` tokens are loaded."""
        if request.blocks:
            return True
        count, seen = -(-request.end // BLOCK), self._num_unseen(num_found) // BLOCK
        unseen = [seen if group in self.window_groups else 0 for group in range(self.num_groups)]
        if self.num_groups * count - sum(unseen) > len(self.free):
            return False
        request.blocks = [
            [NULL_BLOCK] * skipped
            + [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count - skipped)]
            for skipped in unseen
        ]
        return True

    def _num_unseen(self, num_computed: int) -> int:
        """By the next token: those before its window."""
        return max(0, num_computed - self.window + 1) if self.window else 0

    def _slide(self, request: MiniRequest) -> None:
        """What lies before the window is somebody else's from now on."""
        last = self._num_unseen(request.num_computed_tokens) // BLOCK
        for group in self.window_groups:
            self._take_away([request.blocks[group][:last]])
            request.blocks[group][:last] = [NULL_BLOCK] * last

    def _take_away(self, blocks: list[list[int]]) -> None:
        """The model overwrites them in the next step."""
        taken = _real(blocks)
        self.taken_away += taken
        self.free += taken

    def _compute(self, request: MiniRequest, count: int) -> None:
        """Reads all that it sees, and writes."""
        first = request.num_computed_tokens
        for group in range(self.num_groups):
            seen = self._num_unseen(first) if group in self.window_groups else 0
            self.memory.check(request, group, seen, first)
            self.memory.compute(request, group, first, first + count)

    def _advance(self, request: MiniRequest) -> None:
        left = len(request.all_token_ids) - request.num_computed_tokens
        request.num_computed_tokens += min(self.chunk, left)
        if request.num_computed_tokens == len(request.all_token_ids):
            request.all_token_ids.append(len(request.all_token_ids) * 7 % 1000)
        if len(request.all_token_ids) >= request.end:
            self.running.remove(request)
            self._finish(request)

    def _finish(self, request: MiniRequest) -> None:
        if request.blocks:
            self._slide(request)
        full = [mine[: -(-request.num_computed_tokens // BLOCK)] for mine in request.blocks]
        full = full or [[]] * self.num_groups
        if self.leader.finished(request, full):
            self.finishing[request.request_id] = request
        else:
            self._free(request)

    def _received(self, names: set[str], failed: set[str]) -> None:
        for name in names:
            request = self.by_name[name]
            request.is_loading = False
            if request.aborted:
                self._free(self.finishing.pop(name))
                continue
            if name in failed:
                self.num_recoveries += 1
                self._free(request)
                continue
            self.num_loaded += request.num_loaded // BLOCK
            # One token at least is computed, as the next one is drawn from it.
            request.num_computed_tokens = min(request.num_loaded, len(request.all_token_ids) - 1)

    def _free(self, request: MiniRequest) -> None:
        mine = _real(request.blocks)
        self.memory.overwrite(mine)
        self.free += mine
        request.blocks = []

    def close(self) -> None:
        self.hands.close()


def _real(blocks: list[list[int]]) -> list[int]:
    return [block for mine in blocks for block in mine if block != NULL_BLOCK]


WINDOWS: dict[str, Any] = {"window": 12, "groups": ((0,), (1, 2)), "num_blocks": 96}
"""One group of full attention, and two with windows of three pages."""


def over_tensors(*, num_blocks: int = 32, host_pages: int = 64, **how: Any) -> MiniVllm:
    """With the real hands of one rank."""
    groups = how.get("groups", ((0,),))
    tensors = Tensors(num_blocks, groups)
    hands = Hands(0, 1, tensors.kinds, [host_pages] * len(groups))
    return MiniVllm(tensors, hands, num_blocks=num_blocks, host_pages=host_pages, **how)
