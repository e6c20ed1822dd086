"""The answer is the same with prompts computed elsewhere: every kind of model, every tier (C32)."""

import pytest

from e2e.disagg.pair import pair
from e2e.disagg.transports import skip_unless_installed
from e2e.exactness.scenarios import WAIT
from e2e.exactness.subjects import (
    GEMMA,
    PAGE,
    SMOLLM2,
    TINY_LLAMA,
    TINY_SUBJECTS,
    Prompt,
    Subject,
)
from quire.peer.kinds import TransportKind
from quire.types import Tier

SHM, TCP, NIXL = TransportKind.SHM, TransportKind.TCP, TransportKind.NIXL

QUICK = [s for s in TINY_SUBJECTS if s.name in ("falcon_h1", "qwen3_next", "gemma3", "gpt_oss")]


@pytest.fixture
def store(tmp_path: object) -> str:
    return f"file://{tmp_path}/store?max=2GiB"


def _next_turn(subject: Subject, prompt: Prompt, answer: list[int], number: int) -> Prompt:
    """The conversation goes on: what was said, and as much again as three pages."""
    return [*prompt, *answer, *subject.cut(300 + 60 * number, 3 * PAGE + 5)]


# Real weights: one model in test_servers.py every time; here in `make test-long`.
@pytest.mark.parametrize(
    ("subject", "transport"),
    [
        *(pytest.param(real, SHM, marks=pytest.mark.long) for real in (SMOLLM2, GEMMA)),
        *(pytest.param(kind, TCP, marks=pytest.mark.long) for kind in QUICK),
        (TINY_LLAMA, TCP),
        *((kind, SHM) for kind in (TINY_LLAMA, *QUICK)),
        *((kind, NIXL) for kind in (TINY_LLAMA, *QUICK)),
    ],
    ids=str,
)
def test_every_tier_and_side_gives_the_same_answer_c25_c30_c31_c32(
    subject: Subject, transport: TransportKind, store: str
) -> None:
    skip_unless_installed(transport)
    prompts = subject.ask()[:3]
    by = {"peer_transport": transport}
    with pair(subject, store, prefill_options=by, decode_options=WAIT | by) as both:
        # Cold: decode has nothing, and all comes from prefill.
        answers = both.ask(subject, prompts, "cold")
        assert both.total().total == 0 or len(prompts) > 1  # prompts may share a beginning
        sent = both.sent_pages()
        assert sent
        both.settle()
        status = both.decode.status().handover
        assert status is not None
        assert set(status.received_by) == set(status.transports.values()) == {transport.value}
        # Again, at once: decode has it all, and not a page is sent.
        both.ask(subject, prompts, "device")
        assert both.sent_pages() == sent
        assert both.total().device > 0
        # From decode's host.
        both.settle()
        both.decode.manager.flush(Tier.DEVICE)
        both.ask(subject, prompts, "host")
        assert both.sent_pages() == sent
        assert both.total().host > 0
        # The next turn, after both have lost everything but the store: what decode generated is
        # there too.
        both.flush(Tier.HOST, Tier.DEVICE)
        turn = [
            _next_turn(subject, prompt, answer.tokens, i)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        for prompt, before, answer in zip(turn, prompts, answers, strict=True):
            both.ask(subject, [prompt], "store")
            total = both.total()
            spoken = len(before) + len(answer.tokens) - 1
            # Or more: prefill computes meanwhile, and has put it there before the store is asked.
            assert total.device + total.host + total.store >= spoken // PAGE * PAGE
            assert total.store
            assert total.total <= len(prompt)
        both.settle()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)], ids=["1to2", "2to1"])
@pytest.mark.parametrize("subject", [s for s in QUICK if s.name == "gemma3"], ids=str)
def test_pages_are_cut_and_joined_between_ranks_c32(
    subject: Subject, prefill_tp: int, decode_tp: int
) -> None:
    """By heads: full pages and windows."""
    prompts = subject.ask()[:3]
    with pair(
        subject, prefill_options={"tp": prefill_tp}, decode_options={"tp": decode_tp}
    ) as both:
        both.ask(subject, prompts, f"{prefill_tp} ranks to {decode_tp}")
        assert both.sent_pages()
        both.ask(subject, prompts, "again")
        both.settle()
