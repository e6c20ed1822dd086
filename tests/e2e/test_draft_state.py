"""The head that comes with Quire, on the model it was made for: what it is worth after a hit.

Its acceptance is the same wherever its state came from; without its state it is visibly lower.
"""

import pytest

from eagle_models import Watching
from quire.models import EMBEDDED_NAME, embedded_model, load_tokenizer
from quire.types import DEVICE, HOST
from small_engine import SmallEngine

PAGE, AHEAD = 16, 3
TEXT = "".join(f"Row {i}: value {3 * i}, total {6 * i}.\n" for i in range(1, 16))


class Drafting(SmallEngine):
    def __init__(self, **options) -> None:
        given = {"name": EMBEDDED_NAME, "speculate": "eagle", "draft_tokens": AHEAD}
        given |= {"page_size": PAGE, "device_bytes": 128 << 20, "host_bytes": 128 << 20}
        given |= {"chunk_tokens": 256, "prefetch_threshold": PAGE, "debug": False}
        super().__init__(embedded_model(), **given | options)

    def ask_and_count(self, prompt: list[int], tier: str = "") -> tuple[list[int], float]:
        """The answer, and tokens per step of those with proposals."""
        watching = self.engine.scheduler.drafting.speculation = Watching(AHEAD)
        request = self.ask(prompt, max_tokens=32, temperature=0.0)
        self.run()
        if tier:
            assert getattr(self.cached(request), tier) == (len(prompt) - 1) // PAGE * PAGE
        counters = watching.counters
        return self.tokens(request), 1 + sum(counters.accepted) / counters.num_drafts


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer(embedded_model())(TEXT)["input_ids"]


def test_acceptance_is_the_same_from_every_tier_and_lower_without_its_state(
    prompt, tmp_path
) -> None:
    store = f"file://{tmp_path}/store?max=256MiB"
    with Drafting(store=store) as engine:
        answer, cold = engine.ask_and_count(prompt)
        assert cold > 1.3, "a head that is never right shows nothing"
        assert engine.ask_and_count(prompt, "device") == (answer, cold)
        engine.engine.manager.flush(DEVICE)
        assert engine.ask_and_count(prompt, "host") == (answer, cold)
        engine.engine.manager.flush(DEVICE)
        engine.engine.manager.flush(HOST)
        assert engine.ask_and_count(prompt, "store") == (answer, cold)
        pool = engine.engine._executor._rank.worker.components["full"].device
        for plane in pool.planes(pool.layout.num_layers - 1):
            plane.zero_()
        again, without = engine.ask_and_count(prompt, "device")
        assert again == answer, "a wrong draft changes nothing"
        assert without < 0.9 * cold
        print(f"tokens per step: {cold:.2f} from everywhere, {without:.2f} without its state")
    with Drafting(store=store) as engine:
        assert engine.ask_and_count(prompt, "store") == (answer, cold)
