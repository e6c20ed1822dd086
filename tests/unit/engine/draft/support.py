"""A tiny model sure of itself, its greedy text, and a trainer for a head: for any device."""

import pytest

pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine.draft.training.examples import Example
from quire.engine.draft.training.start import (
    first_weights,
    likeliest_tokens,
    new_spec,
    vocabulary_of,
)
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.trainer import Course, Trainer

VOCAB, LAYERS = 96, (0, 1, 2)


def make_model(path):
    """Of random weights: its greedy text is worth predicting."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        tie_word_embeddings=True, initializer_range=0.25, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_teacher(path, dtype=torch.float32, device="cpu"):
    return TeacherModel(path, dtype=dtype, device=torch.device(device))


def greedy(teacher, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        row = torch.tensor([tokens], device=teacher.device)
        tokens.append(int(teacher.see(row, LAYERS).logits[0, -1].argmax()))
    return tokens


def make_examples(teacher):
    chance = torch.Generator().manual_seed(0)
    made = []
    for number in range(24):
        prompt = torch.randint(VOCAB, (4 + number % 3,), generator=chance).tolist()
        tokens = greedy(teacher, prompt, 20)
        made.append(Example(torch.tensor(tokens, dtype=torch.int32), len(prompt), f"{number % 2}"))
    return made


def new_trainer(teacher, examples, steps, draft_vocab_size=VOCAB, **course):
    spec = new_spec(teacher, LAYERS, 48, draft_vocab_size)
    tokens = likeliest_tokens(examples, spec)
    first = first_weights(teacher, spec, tokens, own_lm_head=False, seed=1)
    fields = {"batch_tokens": 1024, "learning_rate": 3e-3, "unroll": 3, "seed": 5} | course
    return Trainer(
        teacher, spec, first, examples, vocabulary=vocabulary_of(spec, tokens),
        course=Course(steps, **fields),
    )  # fmt: skip


def train(trainer, clock=lambda: 0.0, on_step=lambda step: None):
    trainer.train(clock, 10, lambda entry: None, on_step)
