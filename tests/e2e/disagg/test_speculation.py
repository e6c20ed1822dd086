"""A draft head's state is handed over with the prompt, and comes from peers, stores and hosts.

Proposals are compared with what the head computes from the whole text: a page that came without
its draft, or with another's, would show.
"""

import pytest

from e2e.disagg.pair import Pair, engines, pair
from e2e.exactness.scenarios import WAIT
from e2e.exactness.subjects import DENSE_SUBJECTS, PAGE, SMOLLM2, Subject
from eagle_models import Watching, chain, read_head, teacher_of, write_head
from quire.engine.config import Role
from quire.engine.draft.heads import find_head
from quire.engine.draft.kinds import parse_draft
from quire.engine.engine import Engine
from quire.models import EMBEDDED_NAME, embedded_model, load_tokenizer
from quire.types import Tier

AHEAD = 3
SUBJECTS = [s for s in DENSE_SUBJECTS if s.name in ("dense_llama", "dense_gemma3")]


class Drafting:
    """A subject, and a head for it."""

    def __init__(self, subject: Subject, folder) -> None:
        self.subject = subject
        self._teacher = teacher_of(subject.find())
        path = write_head(self._teacher, folder / "head")
        self._head = read_head(self._teacher, path)
        self.options = {"speculate": f"eagle:{path}", "draft_tokens": AHEAD}

    def watch(self, engine: Engine) -> Watching:
        watching = engine.scheduler.drafting.speculation = Watching(AHEAD)
        return watching

    def check(self, watching: Watching) -> None:
        watching.check(lambda text, count: chain(self._teacher, self._head, text, count))


@pytest.fixture(params=SUBJECTS, ids=str)
def drafting(request, tmp_path) -> Drafting:
    return Drafting(request.param, tmp_path)


def test_a_handed_over_prompt_comes_with_its_draft_c25_c27_c31_c32(
    drafting: Drafting, tmp_path
) -> None:
    subject, store = drafting.subject, f"file://{tmp_path}/store?max=2GiB"
    prompts = subject.ask()[:2]
    options = drafting.options
    with pair(subject, store, prefill_options=options, decode_options=WAIT | options) as both:
        watching = drafting.watch(both.decode)
        answers = both.ask(subject, prompts, "cold")
        assert both.sent_pages()
        drafting.check(watching)
        both.settle()
        both.decode.manager.flush(Tier.DEVICE)
        sent = both.sent_pages()
        both.ask(subject, prompts, "host")
        assert both.sent_pages() == sent
        both.flush(Tier.HOST, Tier.DEVICE)
        turn = [*prompts[0], *answers[0].tokens, *subject.cut(300, 3 * PAGE + 5)]
        both.ask(subject, [turn], "store")
        assert both.total().store > 0
        drafting.check(watching)
        both.settle()


@pytest.mark.long
def test_a_real_head_is_worth_the_same_after_a_hand_over() -> None:
    """Tokens per step, of the head that comes with the embedded model."""
    text = "".join(f"Row {i}: value {3 * i}, total {6 * i}.\n" for i in range(1, 16))
    prompt = load_tokenizer(embedded_model())(text)["input_ids"]
    options = {
        "speculate": f"eagle:{find_head(parse_draft('eagle'), EMBEDDED_NAME)}",
        "draft_tokens": AHEAD,
    }
    with pair(SMOLLM2, prefill_options=options, decode_options=options) as both:
        handed, alone = both.decode, both.prefills[0]
        answers, worth = [], []
        for rig in (both, Pair([], alone)):
            watching = rig.decode.scheduler.drafting.speculation = Watching(AHEAD)
            (answer,) = rig.answer([prompt], 32)
            answers.append(answer.tokens)
            worth.append(1 + sum(watching.counters.accepted) / watching.counters.num_drafts)
        assert both.sent_pages()
        assert handed.scheduler.counters.computed_prompt_tokens < PAGE + 1
        assert answers[0] == answers[1]
        assert worth[1] > 1.3, "a head that is never right shows nothing"
        assert worth[0] == pytest.approx(worth[1], rel=0.02)
        both.settle()


def test_a_peer_gives_it_too(drafting: Drafting) -> None:
    subject = drafting.subject
    first = subject.ask()[0]
    with engines(subject) as make:
        holder = make(Role.UNIFIED, **drafting.options)
        asker = make(Role.UNIFIED, peers=[holder.info.peer], **drafting.options)
        watching = drafting.watch(asker)
        there, here = Pair([], holder), Pair([holder], asker)
        there.ask(subject, [first], "computed at the peer")
        there.settle()
        here.ask(subject, [first], "from the peer")
        assert here.total().peer == (len(first) - 1) // PAGE * PAGE
        drafting.check(watching)
        here.settle()


def test_engines_with_and_without_a_head_do_not_exchange_pages(drafting: Drafting) -> None:
    subject = drafting.subject
    first = subject.ask()[0]
    with engines(subject) as make:
        holder = make(Role.UNIFIED)
        asker = make(Role.UNIFIED, peers=[holder.info.peer], **drafting.options)
        there, here = Pair([], holder), Pair([holder], asker)
        there.ask(subject, [first], "computed at the peer")
        there.settle()
        here.ask(subject, [first], "computed here")
        assert here.total().total == 0
        here.settle()
