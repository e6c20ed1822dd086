"""Hybrid models in the runner against transformers' own: windows, sinks and recurrent states."""

import functools

import msgspec
import pytest
import torch

from forward_cases import LENGTH, PIECES, check_greedy, check_pieces
from hybrid_models import TINY, WINDOW
from quire.engine.batch import Batch, decode_batch, encode
from quire.engine.recurrent_states import RecurrentStates
from quire.engine.selfcheck import check_resume
from quire.errors import ModelError, WorkerError
from quire.types import NO_SLOT
from unit.engine.hybrid_rank import (
    PAGE,
    Hybrid,
    Sequence,
    build,
    poison,
    stock_model,
)

RECURRENT = ["falcon_h1", "nemotron_h", "qwen3_next", "granite_moe_hybrid", "lfm2"]
WINDOWED = ["gemma3", "gpt_oss"]
every_model = pytest.mark.parametrize("name", TINY)
recurrent_models = pytest.mark.parametrize("name", RECURRENT)
window_models = pytest.mark.parametrize("name", WINDOWED)

close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=2e-3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return functools.cache(lambda name: TINY[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def ranks(directories):
    @functools.cache
    def load(name):
        return build(directories(name)), stock_model(directories(name))

    return load


@pytest.fixture
def hybrid(name, ranks):
    rank, stock = ranks(name)
    poison(rank)
    return Hybrid(rank, stock)


@every_model
@pytest.mark.parametrize("sizes", PIECES, ids=str)
def test_in_one_go_or_in_pieces_it_is_what_transformers_computes(hybrid, sizes):
    check_pieces(hybrid, sizes, close)


@every_model
def test_greedy_tokens_are_those_of_transformers_and_vary(hybrid):
    check_greedy(hybrid, 30)


@every_model
def test_decodes_and_pieces_of_prompts_in_one_batch(hybrid):
    """Single tokens of several sequences, their slots apart and out of order, one that begins with
    a single token, and pieces of two prompts."""
    sequences = [
        Sequence(hybrid, hybrid.tokens(LENGTH, seed), slot=slot)
        for seed, slot in enumerate((9, 3, 4, 12, 6))
    ]
    for sequence, done in zip(sequences, (40, 31, 0, 17, 0), strict=True):
        if done:
            hybrid.run(sequence.segment(done))
    for sizes in [(1, 1, 1, 20, 50), (1, 9, 1, 1, 1), (5, 1, 1, 1, 3)]:
        segments = [s.segment(n) for s, n in zip(sequences, sizes, strict=True)]
        for sequence, logits in zip(sequences, hybrid.run(*segments), strict=True):
            close(logits, hybrid.expected(sequence.tokens[: sequence.done])[-1])


@recurrent_models
def test_neighbouring_slots_are_computed_in_place_and_others_stay_as_they_are(hybrid):
    sequences = [Sequence(hybrid, hybrid.tokens(20, slot), slot=slot) for slot in (5, 6, 7)]
    for sequence in sequences:
        hybrid.run(sequence.segment(19))
    before = [hybrid.slot(slot) for slot in (4, 8)]
    for sequence, logits in zip(
        sequences, hybrid.run(*(s.segment(1) for s in sequences)), strict=True
    ):
        close(logits, hybrid.expected(sequence.tokens)[-1])
    for old, slot in zip(before, (4, 8), strict=True):
        assert all(map(torch.equal, old, hybrid.slot(slot)))


@recurrent_models
@pytest.mark.parametrize("rest", [1, 5, 40])
def test_resumed_from_a_snapshot_in_another_slot(hybrid, rest):
    first = Sequence(hybrid, hybrid.tokens(40))
    hybrid.run(first.segment(40, save=11))
    hybrid.run(Sequence(hybrid, hybrid.tokens(30, 8)).segment(30))  # slot 0 is somebody else's now
    second = first.branch(hybrid.tokens(rest, 2), slot=2)
    (logits,) = hybrid.run(second.segment(rest, restore=11))
    close(logits, hybrid.expected(second.tokens)[-1])


@recurrent_models
def test_branches_of_one_snapshot_leave_it_as_it_is(hybrid):
    trunk = Sequence(hybrid, hybrid.tokens(36))
    hybrid.run(trunk.segment(36, save=10))
    snapshot = hybrid.slot(10)
    assert all(map(torch.equal, snapshot, hybrid.slot(0)))
    branches = [trunk.branch(hybrid.tokens(20, seed), slot=seed) for seed in (2, 5, 3)]
    sizes = (1, 1, 8)
    segments = [b.segment(n, restore=10) for b, n in zip(branches, sizes, strict=True)]
    for branch, logits in zip(branches, hybrid.run(*segments), strict=True):
        close(logits, hybrid.expected(branch.tokens[: branch.done])[-1])
    for branch, logits in zip(branches, hybrid.run(*(b.segment(7) for b in branches)), strict=True):
        close(logits, hybrid.expected(branch.tokens[: branch.done])[-1])
    assert all(map(torch.equal, snapshot, hybrid.slot(10)))


@recurrent_models
def test_a_snapshot_is_saved_after_each_kind_of_segment(hybrid):
    """Of a prompt, of a decode among others, and of one that was itself restored."""
    one, two = (Sequence(hybrid, hybrid.tokens(60, slot), slot=slot) for slot in (1, 4))
    hybrid.run(one.segment(39), two.segment(39, save=8))
    hybrid.run(one.segment(1, save=9), two.segment(1, restore=8, save=13))
    for old, slot, save in ((one, 2, 9), (two, 3, 13)):
        new = old.branch(hybrid.tokens(9, slot), slot=slot)
        (logits,) = hybrid.run(new.segment(9, restore=save))
        close(logits, hybrid.expected(new.tokens)[-1])


@recurrent_models
def test_without_its_state_it_answers_otherwise(hybrid):
    """Or the tests above would show nothing."""
    first = Sequence(hybrid, hybrid.tokens(40))
    hybrid.run(first.segment(40))
    hybrid.run(Sequence(hybrid, hybrid.tokens(8, 8), slot=7).segment(8, save=11))
    second = first.branch(hybrid.tokens(4, 2), slot=2)
    (logits,) = hybrid.run(second.segment(4, restore=11))
    assert (logits - hybrid.expected(second.tokens)[-1]).abs().max() > 0.05


@window_models
def test_a_window_one_token_too_short_or_too_long_would_be_seen(hybrid):
    tokens = hybrid.tokens(LENGTH)
    expected = hybrid.expected(tokens)[-1]
    stock = hybrid._stock.config
    for window in (WINDOW - 1, WINDOW + 1):
        stock.sliding_window = window
        assert (hybrid.expected(tokens)[-1] - expected).abs().max() > 0.05
    stock.sliding_window = WINDOW


@window_models
def test_a_window_that_begins_too_late_is_refused(hybrid):
    sequence = Sequence(hybrid, hybrid.tokens(LENGTH))
    hybrid.run(sequence.segment(60))
    segment = sequence.segment(1)
    late = msgspec.structs.replace(segment, window_first=segment.window_first + 1)
    with pytest.raises(ValueError, match="too late"):
        hybrid.run(late)


def test_a_segment_without_a_slot_is_refused(ranks):
    hybrid = Hybrid(*ranks("lfm2"))
    segment = Sequence(hybrid, hybrid.tokens(5), slot=NO_SLOT).segment(5)
    with pytest.raises(ValueError, match="no slot"):
        hybrid.run(segment)


def test_what_is_new_in_a_segment_survives_the_wire(ranks):
    hybrid = Hybrid(*ranks("gemma3"))
    sequence = Sequence(hybrid, hybrid.tokens(50))
    sequence.segment(49)
    batch = Batch(3, [sequence.segment(1, restore=4, save=5)])
    assert decode_batch(encode(batch)) == batch


# ---- loads ---------------------------------------------------------------------------------------


class Waiter:
    def __init__(self):
        self.lost = ""
        self.waited = []

    def wait_layer(self, op, layer, component="full"):
        self.waited.append((component, layer))
        if component == self.lost:
            raise WorkerError("it did not arrive")


@pytest.fixture
def waiter(hybrid, monkeypatch):
    waiter = Waiter()
    monkeypatch.setattr(hybrid.rank.runner._forward._bridge, "_waiter", waiter)
    return waiter


@every_model
def test_every_layer_of_every_component_is_waited_for_by_its_place_in_the_pool(hybrid, waiter):
    first = Sequence(hybrid, hybrid.tokens(40))
    restored = {"restore": 11} if hybrid.shape.recurrent_layers else {}
    hybrid.run(first.segment(40, **({"save": 11} if restored else {})))
    assert waiter.waited == []
    second = first.branch(hybrid.tokens(4, 2), slot=2)
    hybrid.run(second.segment(4, loads=(7,), **restored))
    shape = hybrid.shape
    counts = {
        "full": len(shape.full_layers),
        "window": len(shape.window_layers),
        "recurrent": len(shape.recurrent_layers),
    }
    assert sorted(waiter.waited) == sorted((c, i) for c, n in counts.items() for i in range(n))


@pytest.mark.parametrize(
    ("name", "lost"), [("gemma3", "window"), ("gemma3", "full"), ("lfm2", "recurrent")]
)
def test_a_lost_load_fails_its_segments_only(hybrid, waiter, lost):
    waiter.lost = lost
    first = Sequence(hybrid, hybrid.tokens(40))
    states = bool(hybrid.shape.recurrent_layers)
    hybrid.run(first.segment(40, save=11 if states else NO_SLOT))
    options = {"restore": 11 if states else NO_SLOT}
    for size in (1, 4):
        branches = [first.branch(hybrid.tokens(4, slot), slot=slot) for slot in (2, 3)]
        segments = [
            branches[0].segment(size, loads=(7,), **options),
            branches[1].segment(size, **options),
        ]
        failed, alone = hybrid.rank.runner.run(Batch(1, segments)).results
        assert failed.failed == "it did not arrive"
        assert failed.sampled is None
        assert not alone.failed
        assert alone.sampled is not None


# ---- the check when a model is loaded ------------------------------------------------------------


@every_model
def test_the_check_finds_nothing_wrong_and_leaves_zeros(hybrid):
    poison(hybrid.rank)
    assert check_resume(hybrid.rank) == ""
    pools = [pools.device for pools in hybrid.rank.worker.components.values()]
    used = [w[:3] for p in pools for i in range(p.layout.num_layers) for w in p.words(i)]
    assert not any(words.any() for words in used)


@pytest.mark.parametrize("name", ["falcon_h1", "gpt_oss"])
def test_the_check_copes_with_the_smallest_pools(directories, name):
    rank = build(directories(name), num_pages=4, num_slots=3)
    assert check_resume(rank) == ""
    rank.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [({"num_pages": 3}, "3 pages are too few"), ({"num_slots": 2}, "2 states are too few")],
)
def test_pools_too_small_to_check_are_said(directories, options, says):
    rank = build(directories("lfm2"), **options)
    assert says in check_resume(rank)
    rank.close()


@recurrent_models
def test_the_check_finds_a_state_that_is_not_restored(hybrid, monkeypatch):
    real = RecurrentStates._plan

    def plan(self, segments):
        return real(self, [msgspec.structs.replace(s, restore=NO_SLOT) for s in segments])

    monkeypatch.setattr(RecurrentStates, "_plan", plan)
    assert "resumes from a saved state" in check_resume(hybrid.rank)


@recurrent_models
def test_the_check_finds_a_model_that_forgets_between_two_parts(hybrid, monkeypatch):
    real = RecurrentStates.get_conv_state

    def forget(self, layer_idx, state_idx=0):
        return real(self, layer_idx, state_idx).zero_()

    monkeypatch.setattr(RecurrentStates, "get_conv_state", forget)
    assert "in parts" in check_resume(hybrid.rank)


@window_models
def test_the_check_finds_a_window_that_is_not_kept(hybrid, monkeypatch):
    bridge = hybrid.rank.runner._forward._bridge
    backend = bridge._backends["window"]
    real = backend.plan

    def plan(packing):
        made = real(packing)
        for prompt in made.prompts:
            if prompt.mask is not None:
                prompt.mask[:, :PAGE] = False
        return made

    monkeypatch.setattr(backend, "plan", plan)
    assert "in parts" in check_resume(hybrid.rank)


def test_the_check_says_what_a_model_could_not_do(ranks, monkeypatch):
    rank, _ = ranks("lfm2")

    def refuse(self):
        raise ModelError("no such state")

    monkeypatch.setattr(RecurrentStates, "finish", refuse)
    assert check_resume(rank) == "Lfm2ForCausalLM cannot be computed: no such state"


def test_a_state_of_another_shape_than_the_configuration_says_is_refused(ranks):
    rank, _ = ranks("lfm2")
    hybrid = Hybrid(rank, None)
    states = rank.runner._forward._states
    states.begin([Sequence(hybrid, hybrid.tokens(3)).segment(3)])
    with pytest.raises(ModelError, match=r"state is \[1, 3, 1\]"):
        states.update_conv_state(torch.zeros(1, 3, 9), 0)
    with pytest.raises(ModelError, match="denies"):
        states.update_recurrent_state(torch.zeros(1, 3, 9), 0)
    with pytest.raises(ModelError, match="layer 1 has a state"):
        states.get_conv_state(1)
    with pytest.raises(ModelError, match="1 of 3 recurrent layers"):
        states.finish()
