"""A scheduler and a model as vLLM has them, small: blocks, steps, chunks, preemption. No vLLM.

What the model computes for a token is a number that depends on all tokens before it, so that a
block which holds anything else than it should is seen.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

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
    blocks: list[int] = field(default_factory=list)
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

    def compute(self, request: MiniRequest, first: int, last: int) -> None:
        """The model writes what these tokens are to it."""

    def check(self, request: MiniRequest, num_tokens: int) -> None:
        """Do its blocks hold what the model computes for its first tokens?"""

    def overwrite(self, blocks: list[int]) -> None:
        """Whoever reads them from here on is seen."""


class Tensors:
    """Real ones, of one rank."""

    def __init__(self, num_blocks: int) -> None:
        self.by_layer = {
            f"layers.{layer}": torch.zeros(num_blocks, HEADS, BLOCK, 2 * DIM)
            for layer in range(LAYERS)
        }
        self.described = describe(self.by_layer, BlockShape(num_blocks, BLOCK, HEADS, DIM))

    def compute(self, request: MiniRequest, first: int, last: int) -> None:
        numbers = request.computed(first, last)
        blocks, at = _places(request, first, last)
        for layer, tensor in enumerate(self.by_layer.values()):
            tensor[blocks, :, at] = (numbers + layer)[:, None, None].expand(-1, HEADS, 2 * DIM)

    def check(self, request: MiniRequest, num_tokens: int) -> None:
        numbers = request.computed(0, num_tokens)
        blocks, at = _places(request, 0, num_tokens)
        for layer, tensor in enumerate(self.by_layer.values()):
            held = tensor[blocks, :, at] - layer
            assert torch.equal(held, numbers[:, None, None].expand_as(held)), request.request_id

    def overwrite(self, blocks: list[int]) -> None:
        for tensor in self.by_layer.values():
            tensor[blocks] = -1.0


def _places(request: MiniRequest, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(first, last)
    return torch.tensor(request.blocks, dtype=torch.int64)[at // BLOCK], at % BLOCK


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
    ) -> None:
        """`hands`: Hands, or what does as they do."""
        self.now = now if now is not None else [0.0]
        self.memory, self.hands = memory, hands
        prefetch = PrefetchConfig(threshold_tokens=1)
        self.manager = CacheManager(
            CacheConfig(BLOCK, num_blocks, host_pages, prefetch=prefetch, num_ranks=num_ranks),
            clock=lambda: self.now[0],
        )
        names = iter(f"generation {n}" for n in range(10_000))
        self.leader = Leader(
            VllmOptions(host_bytes=1, store=store),
            self.manager,
            Naming(Namespace("weights", "float32", BLOCK), lambda adapter: adapter.lora_path),
            Setup("weights", host_pages, BLOCK),
            clock=lambda: self.now[0],
            new_name=lambda: next(names),
            save_tokens=save_tokens,
        )
        self.chunk = chunk
        self.rng = random.Random(0)
        self.free = list(range(1, num_blocks))
        self.waiting: list[MiniRequest] = []
        self.running: list[MiniRequest] = []
        self.finishing: dict[str, MiniRequest] = {}
        self.by_name: dict[str, MiniRequest] = {}
        self.num_loaded = 0
        self.num_recoveries = 0
        self.preempted = False
        self.taken_away: list[int] = []
        self.bad_blocks: set[int] = set()
        """Told by one rank, maybe while others still load."""

    # ---- steps ----------------------------------------------------------------------------------

    def add(self, request: MiniRequest) -> None:
        self.by_name[request.request_id] = request
        self.waiting.append(request)

    def step(self) -> None:
        """Schedule, compute, tell the connector, hear from it."""
        self.now[0] += 0.001
        self._admit()
        work: dict[str, int] = {}
        for request in self.running:
            left = len(request.all_token_ids) - request.num_computed_tokens
            work[request.request_id] = min(self.chunk, left)
        orders = self.leader.orders(
            work,
            lambda name: self.by_name[name].blocks,
            preempted=self.preempted,
            idle=not work,
        )
        if self.preempted:
            self.hands.finish_copies()
            self.memory.overwrite(self.taken_away)
            self.preempted, self.taken_away = False, []
        for name, count in work.items():
            self._compute(self.by_name[name], count)
        self.hands.obey(orders)
        self.hands.look(idle=not work)
        accounts = self.hands.accounts
        sent, received = accounts.take_sent(), accounts.take_received()
        bad, reports = accounts.take_bad_blocks(), accounts.take_reports()
        self.leader.hear(unpack_reports(reports) if reports else [])
        self._received(received, bad)
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
        self.taken_away += request.blocks
        self.free += request.blocks
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
            if not self._give_blocks(request):
                continue
            self.leader.allocated(request, request.blocks, found)
            if found:
                request.is_loading, request.num_loaded = True, found
                continue
            self.waiting.remove(request)
            self.running.append(request)

    def _give_blocks(self, request: MiniRequest) -> bool:
        """For all that it will ever hold, so that nobody waits for somebody who waits."""
        missing = -(-request.end // BLOCK) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop(self.rng.randrange(len(self.free))))
        return True

    def _compute(self, request: MiniRequest, count: int) -> None:
        """Reads all that lies before, and writes."""
        first = request.num_computed_tokens
        self.memory.check(request, first)
        self.memory.compute(request, first, first + count)

    def _advance(self, request: MiniRequest) -> None:
        left = len(request.all_token_ids) - request.num_computed_tokens
        request.num_computed_tokens += min(self.chunk, left)
        if request.num_computed_tokens == len(request.all_token_ids):
            request.all_token_ids.append(len(request.all_token_ids) * 7 % 1000)
        if len(request.all_token_ids) >= request.end:
            self.running.remove(request)
            self._finish(request)

    def _finish(self, request: MiniRequest) -> None:
        full = request.blocks[: -(-request.num_computed_tokens // BLOCK)]
        if self.leader.finished(request, full):
            self.finishing[request.request_id] = request
        else:
            self._free(request)

    def _received(self, names: set[str], bad: set[int]) -> None:
        self.bad_blocks |= bad
        for name in names:
            request = self.by_name[name]
            request.is_loading = False
            if request.aborted:
                self.bad_blocks.difference_update(request.blocks)
                self._free(self.finishing.pop(name))
                continue
            blocks = request.blocks[: request.num_loaded // BLOCK]
            found = (i for i, block in enumerate(blocks) if block in self.bad_blocks)
            good = next(found, len(blocks))
            self.bad_blocks.difference_update(blocks)
            self.num_recoveries += good < len(blocks)
            self.num_loaded += good
            # One token at least is computed, as the next one is drawn from it.
            request.num_computed_tokens = min(good * BLOCK, len(request.all_token_ids) - 1)
            if not good:
                self._free(request)

    def _free(self, request: MiniRequest) -> None:
        self.memory.overwrite(request.blocks)
        self.free += request.blocks
        request.blocks = []

    def close(self) -> None:
        self.hands.close()


def over_tensors(*, num_blocks: int = 32, host_pages: int = 64, **how: Any) -> MiniVllm:
    """With the real hands of one rank."""
    tensors = Tensors(num_blocks)
    hands = Hands(0, 1, tensors.described, host_pages)
    return MiniVllm(tensors, hands, num_blocks=num_blocks, host_pages=host_pages, **how)
