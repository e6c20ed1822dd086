"""A rank with a tiny hybrid model for tests, and sequences whose pages and slots lie scattered."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.batch import Batch, Segment
from quire.engine.config import ForwardKind
from quire.engine.executor.rank import Rank, RankConfig, build_rank
from quire.engine.layouts import layouts
from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row
from quire.models import describe
from quire.types import NO_SLOT, OperationId, RequestId, page_ids
from quire.worker import ComponentConfig, WorkerConfig

PAGE = 4
NUM_PAGES = 128
NUM_SLOTS = 16
ROW = Row(params=SamplingParams(max_tokens=1, temperature=0), position=0)


def build(
    directory: Path,
    *,
    num_pages: int = NUM_PAGES,
    num_slots: int = NUM_SLOTS,
    forward: ForwardKind = ForwardKind.AUTO,
    dtype: str = "float32",
    device: str = "cpu",
    graph_batch: int = 0,
) -> Rank:
    shape = describe(directory)
    found = layouts(shape, dtype=dtype, page_size=PAGE, kv_heads=shape.num_kv_heads)
    components = [
        ComponentConfig(
            layout,
            num_slots if layout.component == "recurrent" else num_pages,
            int(device != "cpu"),  # to be copied through, there must be some host memory
        )
        for layout in found
    ]
    return build_rank(
        RankConfig(str(directory), dtype, 1, forward=forward, graph_batch=graph_batch),
        WorkerConfig(0, 1, "test", components, device=device),
    )


def poison(rank: Rank) -> None:
    """Every byte of every pool such that using it by mistake gives no number."""
    for pools in rank.worker.components.values():
        for layer in range(pools.device.layout.num_layers):
            for words in pools.device.words(layer):
                words.fill_(-1)


def stock_model(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()  # type: ignore[no-untyped-call]
    return model


class Hybrid:
    """The rank under test beside transformers' own model."""

    def __init__(self, rank: Rank, stock: PreTrainedModel) -> None:
        self.rank = rank
        self.shape = rank.shape
        self._stock = stock
        scattered = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5))
        self.pages: Iterator[int] = iter(scattered.tolist())
        self.window_pages: Iterator[int] = iter(scattered.flip(0).tolist())

    def tokens(self, count: int, seed: int = 1) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.shape.vocab_size, (count,), generator=generator).tolist()

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Logits after every token, [tokens, vocabulary]."""
        logits: torch.Tensor = self._stock(input_ids=torch.tensor([tokens])).logits[0]
        return logits

    def run(self, *segments: Segment) -> torch.Tensor:
        return self.rank.runner.logits(Batch(1, list(segments)))

    def slot(self, slot: int) -> list[torch.Tensor]:
        """A copy of what it holds, by layer."""
        pool = self.rank.worker.components["recurrent"].device
        return [pool.words(layer)[0][slot].clone() for layer in range(pool.layout.num_layers)]


class Sequence:
    """Tokens computed piece by piece. Pages that left the window are given away: poisoned."""

    def __init__(self, hybrid: Hybrid, tokens: list[int], *, slot: int = 0) -> None:
        self._hybrid = hybrid
        self.tokens = tokens
        self.slot = slot
        self.done = 0
        self.pages: list[int] = []
        self.window: list[int] = []
        self.window_first = 0

    def branch(self, tokens: list[int], *, slot: int) -> "Sequence":
        """Another that shares all full pages computed so far; `tokens` follow them."""
        assert self.done % PAGE == 0
        other = Sequence(self._hybrid, self.tokens[: self.done] + tokens, slot=slot)
        other.done = self.done
        other.pages = self.pages[: self.done // PAGE]
        other.window = self.window[: self.done // PAGE - self.window_first]
        other.window_first = self.window_first
        return other

    def segment(
        self,
        count: int,
        *,
        restore: int = NO_SLOT,
        save: int = NO_SLOT,
        loads: tuple[int, ...] = (),
    ) -> Segment:
        start, end = self.done, self.done + count
        needed = -(-end // PAGE)
        window = self._hybrid.shape.window
        self.pages += [next(self._hybrid.pages) for _ in range(needed - len(self.pages))]
        if window:
            have = self.window_first + len(self.window)
            self.window += [next(self._hybrid.window_pages) for _ in range(needed - have)]
            self._leave(max(0, start - window + 1) // PAGE)
        self.done = end
        ids = torch.tensor(self.tokens[start:end], dtype=torch.int32).numpy().tobytes()
        return Segment(
            RequestId(f"r{self.slot}"),
            ids,
            start,
            page_ids(self.pages),
            [OperationId(op) for op in loads],
            ROW,
            window=page_ids(self.window),
            window_first=self.window_first,
            state=self.slot if self._hybrid.shape.recurrent_layers else NO_SLOT,
            restore=restore,
            save=save,
        )

    def _leave(self, first: int) -> None:
        gone = self.window[: first - self.window_first]
        pool = self._hybrid.rank.worker.components["window"].device
        for layer in range(pool.layout.num_layers):
            for words in pool.words(layer):
                words[gone] = -1
        self.window = self.window[len(gone) :]
        self.window_first = first
