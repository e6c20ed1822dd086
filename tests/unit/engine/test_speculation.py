"""Tokens proposed ahead: fewer steps, the same answer, and nothing left of what was rejected."""

from engine_support import PAGE, VOCABULARY, TinyEngine, oracle
from quire.engine.draft.adaptive import DraftPrice
from quire.engine.draft.speculation import Speculation
from quire.engine.messages import Finish
from speculating import FixedPrices, Oracle, speculation

PROMPT = [(7 + i * i * 3) % 50 for i in range(10)]


def always(right: int, max_tokens: int = 4) -> Speculation:
    """Of every proposal so many tokens are right."""
    return speculation(oracle, max_tokens, [right], VOCABULARY)


def test_what_is_accepted_takes_no_step_of_its_own() -> None:
    with TinyEngine(speculation=always(4)) as tiny:
        request = tiny.ask(PROMPT, 16)
        tiny.run()
        assert [len(output.tokens) for output in tiny.of(request)] == [1, 5, 5, 5]
        assert [output.accepted for output in tiny.of(request)] == [0, 4, 4, 4]
        assert tiny.tokens(request) == oracle(PROMPT, 16)


def test_every_proposal_is_counted_once_as_accepted_or_rejected() -> None:
    with TinyEngine(speculation=always(1, 3)) as tiny:
        request = tiny.ask(PROMPT, 9)
        tiny.run()
        assert [(o.accepted, o.rejected) for o in tiny.of(request)] == [
            (0, 0),
            (1, 2),
            (1, 2),
            (1, 2),
            (1, 0),  # there was room for one only
        ]
        status = tiny.engine.status().drafts
        assert status is not None
        assert (status.num_drafts, status.proposed, status.accepted) == (4, [4, 3, 3], [4, 0, 0])


def test_no_more_is_proposed_than_the_answer_may_have() -> None:
    with TinyEngine(speculation=always(4)) as tiny:
        request = tiny.ask(PROMPT, 4)
        tiny.run()
        assert [len(output.tokens) for output in tiny.of(request)] == [1, 3]
        assert tiny.last(request).finish is Finish.LENGTH
        assert tiny.model.num_computed == len(PROMPT) + 3


def test_an_answer_ends_with_its_stop_token_in_the_middle_of_what_was_accepted() -> None:
    free = oracle(PROMPT, 12)
    stop = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    with TinyEngine(speculation=always(4)) as tiny:
        request = tiny.ask(PROMPT, 12, stop_ids=[stop])
        tiny.run()
        assert tiny.tokens(request) == oracle(PROMPT, 12, [stop])
        assert tiny.last(request).finish is Finish.STOP
        assert not tiny.manager.leases


def test_only_tokens_that_were_kept_are_shared() -> None:
    with TinyEngine(speculation=always(0)) as tiny:
        request = tiny.ask(PROMPT, 12)
        for _ in range(8):
            tiny.step()
            held = tiny.scheduler.request(request)
            if held is not None and held.lease is not None:
                assert held.lease.num_device == held.computed // PAGE
                assert held.computed == held.length - 1
        tiny.run()
        everything = PROMPT + oracle(PROMPT, 12)
        assert tiny.answer(everything, 3) == oracle(everything, 3)


def test_requests_with_and_without_proposals_share_a_batch() -> None:
    def some(tokens):
        return Oracle(tokens, oracle, [4 if tokens[0] == PROMPT[0] else -1], VOCABULARY)

    drafts = always(4)
    drafts.new_proposer = some
    other = [1, *PROMPT]
    with TinyEngine(speculation=drafts) as tiny:
        requests = {tiny.ask(prompt, 11): prompt for prompt in (PROMPT, other)}
        tiny.run()
        for request, prompt in requests.items():
            assert tiny.tokens(request) == oracle(prompt, 11)
        first, second = requests
        assert len(tiny.of(first)) == 3
        assert len(tiny.of(second)) == 11


def test_proposals_never_exceed_the_budget_of_a_step() -> None:
    with TinyEngine(speculation=always(4), chunk_tokens=8) as tiny:
        requests = [tiny.ask([i, *PROMPT], 10) for i in range(5)]
        seen = []
        launch = tiny.model.launch
        tiny.model.launch = lambda batch: (seen.append(batch.num_tokens), launch(batch))[1]  # type: ignore[method-assign]
        tiny.run()
        assert max(seen) <= 8 + PAGE  # whatever decodes, a page of a prompt is always computed
        for i, request in enumerate(requests):
            assert tiny.tokens(request) == oracle([i, *PROMPT], 10)


def test_nobody_is_preempted_for_a_proposal() -> None:
    # Both fit exactly with all of their tokens.
    prompts = [[i, *PROMPT[:7]] for i in range(2)]
    options = {"device_pages": 6, "max_running": 2, "host_pages": 0}
    with TinyEngine(speculation=always(0, 6), **options) as tiny:
        requests = [tiny.ask(prompt, 4) for prompt in prompts]
        tiny.run()
        assert tiny.scheduler.counters.preempted == 0
        for prompt, request in zip(prompts, requests, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 4)


def test_a_cancelled_request_leaves_nothing_with_proposals_under_way() -> None:
    with TinyEngine(speculation=always(2), ahead=True) as tiny:
        request = tiny.ask(PROMPT, 20)
        tiny.step(4)
        tiny.scheduler.abort(request)
        tiny.run()
        assert not tiny.manager.leases
        assert tiny.answer(PROMPT, 6) == oracle(PROMPT, 6)


def test_where_no_proposal_is_right_they_end_by_themselves() -> None:
    price = FixedPrices(DraftPrice(per_token=0.2))
    wrong = Speculation(lambda t: Oracle(t, oracle, [0], VOCABULARY), 4, price)
    with TinyEngine(speculation=wrong) as tiny:
        assert tiny.answer(PROMPT, 200) == oracle(PROMPT, 200)
        assert sum(wrong.counters.proposed) < 60


def test_without_proposals_batches_are_chosen_ahead_as_ever() -> None:
    """An engine that speculates loses nothing for requests that do not."""
    price = FixedPrices(DraftPrice(per_token=100.0))
    never = Speculation(lambda t: Oracle(t, oracle, [4], VOCABULARY), 4, price)
    with TinyEngine(speculation=never, ahead=True) as tiny:
        request = tiny.ask(PROMPT, 4)
        tiny.step(2)
        assert tiny.model.num_computed == len(PROMPT) + 1
        assert len(tiny.tokens(request)) == 1
        tiny.run()
        assert tiny.tokens(request) == oracle(PROMPT, 4)


def test_where_nothing_is_found_the_device_is_not_made_to_wait() -> None:
    """Looking needs the last token: after a few times in vain, only some steps wait for it."""
    silent = speculation(oracle, 4, [-1], VOCABULARY)
    with TinyEngine(speculation=silent, ahead=True) as tiny:
        request = tiny.ask(PROMPT, 60)
        alone = 0
        while tiny.scheduler.request(request) is not None:
            tiny.step()
            alone += len(tiny.engine._flights) == 0
        assert tiny.tokens(request) == oracle(PROMPT, 60)
        assert alone < 30
