"""`quire train-eagle` on a tiny model: a head comes out, a stopped run goes on, faults are said."""

import json

import pytest

pytest.importorskip("transformers")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quire.engine.draft.headweights import DraftTarget, read_spec, read_tensors
from unit.cli_support import command

quire = pytest.fixture(command)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TARGET = DraftTarget(hidden_size=16, vocab_size=258, num_layers=4, num_kv_heads=1, head_dim=8)
LITTLE = (
    "--answers", 10, "--invented", 3, "--answer-tokens", 8, "--prompt-tokens", 40, "--measured", 2,
    "--draft-vocab", 100, "--batch-tokens", 256, "--unroll", 2, "--device", "cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
        tie_word_embeddings=True, initializer_range=0.2, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    (path / "book.txt").write_text("All happy families are alike. " * 200)
    rows = [{"turns": ["What is a page?", "And a node?"]}, {"input": "ls -l\n" * 40}]
    (path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows * 5)) + "\n")
    return path


def train(quire, model, texts, out, steps, *more):
    return quire("train-eagle", model, texts, "--out", out, "--steps", steps, *LITTLE, *more)


def test_a_head_a_report_and_pictures_come_out(quire, model, texts, tmp_path):
    out, plots = tmp_path / "head", tmp_path / "plots"
    ran = train(quire, model, texts, out, 4, "--json", "--plots", plots)
    assert ran.code == 0
    spec = read_spec(out, TARGET)
    assert spec.draft_vocab_size == 100
    assert read_tensors(out, spec)["d2t"].shape == (100,)
    report = json.loads((out / "report.json").read_text())
    assert ran.json == report | {"plots": [str(plots / "training.png"),
                                           str(plots / "acceptance.png")]}  # fmt: skip
    assert report["steps"] == 4
    assert [entry["step"] for entry in report["history"]] == [1, 2, 3, 4]
    assert {"all", "book", "asked"} == report["accepted"].keys()
    assert all(1 <= length <= 6 for length in report["accepted"]["all"]["length"])
    assert (plots / "training.png").stat().st_size > 1000


def test_a_stopped_run_goes_on_to_the_same_head(quire, model, texts, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(quire, model, texts, whole, 6, "--checkpoint-every", 2).code == 0

    from quire.engine.draft.training.trainer import Trainer

    learn = Trainer._learn

    def tired(self, batch):
        if self.step == 5:
            raise KeyboardInterrupt
        return learn(self, batch)

    monkeypatch.setattr(Trainer, "_learn", tired)
    assert train(quire, model, texts, stopped, 6, "--checkpoint-every", 2).code != 0
    monkeypatch.setattr(Trainer, "_learn", learn)
    assert not (stopped / "config.json").exists()
    ran = train(quire, model, texts, stopped, 6, "--checkpoint-every", 2)
    assert "going on after step 4" in ran.err
    heads = [(path / "model.safetensors").read_bytes() for path in (whole, stopped)]
    assert heads[0] == heads[1]


def test_another_training_is_not_gone_on_with(quire, model, texts, tmp_path):
    assert train(quire, model, texts, tmp_path, 1).code == 0
    ran = train(quire, model, texts, tmp_path, 2)
    assert ran.code == 2
    assert "other options (course)" in ran.sentence


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--layers=1,2", "three numbers"),
        ("--layers=1,2,9", "0 to 3"),
        ("--device=tpu", "auto, cpu or cuda"),
        ("--dtype=int8", "bfloat16"),
        ("--held-out=/nowhere.txt", "does not exist"),
    ],
)
def test_what_is_asked_wrongly_is_said(quire, model, tmp_path, argument, reason):
    (tmp_path / "book.txt").write_text("All happy families are alike. " * 50)
    ran = train(quire, model, tmp_path / "book.txt", tmp_path / "out", 1, argument)
    assert ran.code == 2
    assert reason in ran.err.splitlines()[-1]


@pytest.mark.parametrize("line", ["no json", '{"other": 1}', '["list"]'])
def test_a_file_that_is_not_understood_is_named(quire, model, tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    ran = quire("train-eagle", model, tmp_path / "rows.jsonl", "--out", tmp_path / "out", *LITTLE)
    assert ran.code == 2
    assert "rows.jsonl, line 1" in ran.sentence
