"""Training a head on CUDA: as on the CPU in float32, and in half precision."""

import pytest
import torch

from quire.engine.draft.training.acceptance import measure
from quire.engine.draft.training.examples import in_batches, padded
from unit.engine.draft.support import make_examples, make_model, make_teacher, new_trainer, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_losses_are_those_of_the_cpu(tmp_path):
    make_model(tmp_path)
    teachers = [make_teacher(tmp_path, device=device) for device in ("cpu", "cuda")]
    examples = make_examples(teachers[0])
    batch = padded(examples[:8])
    figures = [
        new_trainer(one, examples, 1, draft_vocab_size=40).loss(batch)[0] for one in teachers
    ]
    torch.testing.assert_close(figures[1].losses.cpu(), figures[0].losses, rtol=1e-3, atol=1e-3)


def test_a_head_learns_in_half_precision_and_goes_on(tmp_path):
    make_model(tmp_path)
    teacher = make_teacher(tmp_path, torch.bfloat16, "cuda")
    examples = make_examples(teacher)
    trainer = new_trainer(teacher, examples, 100, learning_rate=1e-2)
    before = measure(trainer.head(), teacher, in_batches(examples, 512), 3)["all"].as_dict()
    train(trainer)
    after = measure(trainer.head(), teacher, in_batches(examples, 512), 3)["all"].as_dict()
    assert after["length"][2] > before["length"][2] + 0.4
    trainer.save(tmp_path / "checkpoint.safetensors")
    again = new_trainer(teacher, examples, 101, learning_rate=1e-2)
    again.load(tmp_path / "checkpoint.safetensors")
    train(again)
    assert again.step == 101
