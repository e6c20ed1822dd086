"""Training: what is unrolled is what an engine would compute, and a head learns."""

import json

import pytest
import torch

from quire.engine.draft.eagle import EagleHead
from quire.engine.draft.headweights import assemble, read_spec, read_tensors, save_head
from quire.engine.draft.training.acceptance import Acceptance, measure
from quire.engine.draft.training.examples import Order, in_batches, padded
from quire.engine.draft.training.start import likeliest_tokens, positions_of
from quire.engine.draft.training.trainer import rate
from quire.engine.draft.training.unroll import Unroll
from unit.engine.draft.support import (
    LAYERS,
    make_examples,
    make_model,
    make_teacher,
    new_trainer,
    train,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher(model):
    return make_teacher(model)


@pytest.fixture(scope="module")
def examples(teacher):
    return make_examples(teacher)


class Chain:
    """A draft as an engine makes it: token by token, keys and values kept in a list."""

    def __init__(self, head):
        self.head, self.keys, self.values = head, [], []

    def step(self, hidden, token, position):
        def attend(heads):
            self.keys.append(heads.key)
            self.values.append(heads.value)
            group = heads.query.shape[0] // heads.key.shape[0]
            keys = torch.cat(self.keys, 1).repeat_interleave(group, 0)
            values = torch.cat(self.values, 1).repeat_interleave(group, 0)
            scores = heads.query @ keys.transpose(1, 2) * self.head.spec.decoder.scaling
            return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)

        return self.head.step(hidden, torch.tensor([token]), torch.tensor([position]), attend)

    def drop(self, count):
        del self.keys[-count:], self.values[-count:]


@torch.no_grad()
def drafts(head, features, tokens, count):
    """At every position, the tokens that a chain proposes there."""
    chain, proposed = Chain(head), []
    for position in range(len(tokens) - 1):
        hidden = head.fused(features[position : position + 1])
        hidden, normed = chain.step(hidden, tokens[position + 1], position)
        own = [int(head.proposed(head.logits(normed).argmax(-1)))]
        for number in range(1, count):
            hidden, normed = chain.step(hidden, own[-1], position + number)
            own.append(int(head.proposed(head.logits(normed).argmax(-1))))
        if count > 1:
            chain.drop(count - 1)
        proposed.append(own)
    return proposed


@torch.no_grad()
def test_unrolled_steps_are_what_a_chain_computes_token_by_token(teacher, examples):
    head = new_trainer(teacher, examples, 1).head()
    tokens = examples[0].tokens[:12].long()
    features = teacher.see(tokens[None], LAYERS).features
    steps = [normed for _, normed in Unroll(head, features, tokens[None]).steps(3)]
    for row in range(8):
        chain = Chain(head)
        for before in range(row + 1):
            hidden = head.fused(features[0, before : before + 1])
            hidden, normed = chain.step(hidden, int(tokens[before + 1]), before)
        torch.testing.assert_close(normed[0], steps[0][0, row])
        for number in (1, 2):
            token = int(tokens[row + number + 1])
            hidden, normed = chain.step(hidden, token, row + number)
            torch.testing.assert_close(normed[0], steps[number][0, row])


def test_acceptance_is_that_of_drafting_along_the_answer(teacher, examples):
    trainer = new_trainer(teacher, examples, 40)
    train(trainer)
    head = trainer.head()
    result = measure(head, teacher, in_batches(examples, 512), 3)
    expected = {"all": Acceptance(3)}
    for example in examples:
        tokens = example.tokens.tolist()
        features = teacher.see(torch.tensor([tokens]), LAYERS).features[0]
        runs = []
        for position, own in enumerate(drafts(head, features, tokens, 3)):
            if example.start <= position + 2 < len(tokens):
                truth = tokens[position + 2 : position + 5]
                right = [a == b for a, b in zip(own, truth, strict=False)]
                runs.append(right.index(False) if False in right else len(right))
        for name in ("all", example.source):
            expected.setdefault(name, Acceptance(3)).add(runs)
    assert result["all"].num_drafted == sum(len(e.tokens) - max(e.start, 2) for e in examples)
    assert {name: one.as_dict() for name, one in result.items()} == {
        name: one.as_dict() for name, one in expected.items()
    }


def test_rounds_go_on_behind_what_was_accepted():
    acceptance = Acceptance(2)
    acceptance.add([2, 0, 0, 1, 0, 0])
    # k = 1: tokens 0-1, 2, 3-4, 5; k = 2: tokens 0-2, 3-4, 5.
    assert acceptance.num_rounds == [4, 3]
    assert acceptance.as_dict()["length"] == [1.5, 2.0]
    assert acceptance.as_dict()["first_k_right"] == [round(2 / 6, 4), round(1 / 6, 4)]
    assert acceptance.as_dict()["by_position"] == [round(2 / 6, 4), 0.5]


def test_a_head_learns_to_draft(teacher, examples):
    trainer = new_trainer(teacher, examples, 100, learning_rate=1e-2)
    before = measure(trainer.head(), teacher, in_batches(examples, 512), 3)["all"].as_dict()
    train(trainer)
    after = measure(trainer.head(), teacher, in_batches(examples, 512), 3)["all"].as_dict()
    assert after["length"][2] > before["length"][2] + 0.4
    assert trainer.history[-1]["loss"][0] < trainer.history[0]["loss"][0]


def test_it_learns_in_half_precision_too(model, examples):
    half = make_teacher(model, torch.bfloat16)
    trainer = new_trainer(half, examples, 20, draft_vocab_size=40, learning_rate=1e-2)
    train(trainer)
    assert trainer.history[-1]["loss"][0] < trainer.history[0]["loss"][0]
    assert all(t.dtype == torch.bfloat16 for n, t in trainer.tensors(torch.bfloat16).items()
               if n.endswith("weight"))  # fmt: skip


def test_training_goes_on_where_it_stopped(teacher, examples, tmp_path):
    whole = new_trainer(teacher, examples, 20, batch_tokens=256)
    train(whole)
    first = new_trainer(teacher, examples, 20, batch_tokens=256)

    class Stopped(Exception):
        pass

    def stop(step):
        if step == 7:
            first.save(tmp_path / "checkpoint.safetensors")
            raise Stopped

    with pytest.raises(Stopped):
        train(first, on_step=stop)
    second = new_trainer(teacher, examples, 20, batch_tokens=256)
    second.load(tmp_path / "checkpoint.safetensors")
    assert second.step == 7
    train(second)
    for name, tensor in whole.tensors(torch.float32).items():
        torch.testing.assert_close(second.tensors(torch.float32)[name], tensor)


def test_training_ends_with_its_time(teacher, examples):
    seconds = iter(range(1000))
    trainer = new_trainer(teacher, examples, 100, time_limit_s=5.0)
    train(trainer, clock=lambda: float(next(seconds)))
    assert 0 < trainer.step < 10


def test_tokens_that_cannot_be_proposed_teach_nothing(teacher, examples):
    """The head's loss does not depend on what the target says where it chooses such a token."""
    trainer = new_trainer(teacher, examples, 1, draft_vocab_size=12)
    batch = padded(examples[:4])
    tokens = likeliest_tokens(examples, trainer.head().spec)
    seen = teacher.see(batch.tokens, LAYERS)
    chosen = torch.isin(seen.logits.argmax(-1), tokens)
    figures, loss = trainer.loss(batch)
    is_learned = batch.is_learned.clone()
    is_learned[:, 1:] &= chosen[:, :-1]
    same, _ = trainer.loss(type(batch)(batch.tokens, is_learned, batch.sources))
    torch.testing.assert_close(figures.losses, same.losses)


def test_a_saved_head_is_read_back_and_proposes_the_same(teacher, examples, tmp_path):
    trainer = new_trainer(teacher, examples, 30, draft_vocab_size=40)
    train(trainer)
    tensors = trainer.tensors(torch.float32)
    save_head(tmp_path, trainer.head().spec, tensors, positions_of(teacher))
    spec = read_spec(tmp_path, teacher.shape)
    assert spec == trainer.head().spec
    read = read_tensors(tmp_path, spec)
    head = EagleHead(spec, assemble(spec, read, teacher.embedding, teacher.lm_head))
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 40
    result = [measure(h, teacher, in_batches(examples, 512), 2) for h in (head, trainer.head())]
    assert result[0]["all"].as_dict() == result[1]["all"].as_dict()


def test_batches_come_in_an_order_that_the_seed_decides(examples):
    def first(order, start, count):
        batches = order.batches(start)
        return [next(batches).tokens.tolist() for _ in range(count)]

    order = Order(examples, 128, 7)
    assert first(order, 0, 30)[11:] == first(Order(examples, 128, 7), 11, 19)
    assert first(order, 0, 30) != first(Order(examples, 128, 8), 0, 30)
    in_one_epoch = sum(len(tokens) for tokens in first(order, 0, 6))
    assert in_one_epoch == len(examples)


def test_the_learning_rate_rises_and_falls():
    values = [rate(share / 100) for share in range(101)]
    assert max(values) == pytest.approx(1.0, abs=0.01)
    assert values[0] < 0.1
    assert values[-1] == pytest.approx(0.03)
