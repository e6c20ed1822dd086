"""An answer that was broken off goes on elsewhere as it would have gone on here."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from dense_models import DENSE
from quire.engine.messages import Finish
from small_engine import PAGE, SmallEngine

PROMPT = list(range(3, 3 + 3 * PAGE + 5))
NUM_TOKENS = 24
DRAWN = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DENSE["llama"](tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_the_rest_is_the_same_wherever_it_was_broken_off(model: Path, speculate: str) -> None:
    with SmallEngine(model) as here:
        whole = here.answer(PROMPT, **DRAWN)
    assert len(whole) == NUM_TOKENS
    with SmallEngine(model, speculate=speculate) as there:
        for count in (1, 7, NUM_TOKENS - 1):
            request = there.ask(PROMPT, said=whole[:count], **DRAWN)
            there.run()
            assert there.tokens(request) == whole[count:]
            assert there.outputs[request][-1].finish is Finish.LENGTH
            assert there.cached(request).total <= len(PROMPT)


def test_what_cannot_go_on_is_refused(model: Path) -> None:
    with SmallEngine(model) as engine:
        for said in ([1] * NUM_TOKENS, [10**9], [-1]):
            request = engine.ask(PROMPT, said=said, **DRAWN)
            engine.run()
            engine.step()
            assert engine.outputs[request][-1].finish is Finish.ERROR
