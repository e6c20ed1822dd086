"""Prompting: where the work is done, and what a model's files say. (What becomes of prompts is in
test_answers and test_errors.)"""

import asyncio
import json
import threading

import msgspec
import pytest

from quire.errors import ModelError
from quire.text.generation_config import (
    SamplingDefaults,
    read_generation_config,
    sampling_defaults,
)
from quire.text.messages import Conversation, Message
from quire.text.prompting import Prompting, _ids
from unit.server.scripted import ScriptedEngine, TinyTokenizer

INFO = ScriptedEngine().info


@pytest.fixture
def prompting():
    prompting = Prompting(TinyTokenizer())
    yield prompting
    prompting.close()


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ({"eos_token_id": 2}, [2]),
        ({"eos_token_id": [2, 5]}, [2, 5]),
        ({"eos_token_id": None}, []),
        ({}, []),
        ([], []),
    ],
)
def test_a_model_may_name_more_ends(tmp_path, content, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert _ids(read_generation_config(tmp_path).get("eos_token_id")) == ids


def test_a_model_need_not_name_ends(tmp_path):
    assert read_generation_config(tmp_path) == {}


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


def test_a_model_may_say_how_to_sample():
    found = sampling_defaults({"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None})
    assert found == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize("value", [-1, "x", True, 1e9, None, [], float("nan")])
def test_what_makes_no_sense_in_it_is_passed_over(value):
    assert sampling_defaults({"temperature": value, "top_p": value}) == SamplingDefaults()


def test_the_tokenizers_end_is_always_one():
    tokenizer = TinyTokenizer()
    assert Prompting(tokenizer, [7]).eos_ids == [7, tokenizer.eos_token_id]


def test_a_long_prompt_is_tokenised_in_a_thread(prompting, monkeypatch):
    threads = []
    encode = prompting._encode

    def watched(text, *, bos):
        threads.append(threading.current_thread())
        return encode(text, bos=bos)

    monkeypatch.setattr(prompting, "_encode", watched)
    roomy = msgspec.structs.replace(INFO, max_context=10**6)
    asyncio.run(prompting.of_text("short", roomy))
    prompt = asyncio.run(prompting.of_text("hell" * 10_000, roomy))
    assert prompt.num_tokens == 10_000
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


def test_what_cannot_fit_is_not_tokenised(prompting, monkeypatch):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr(prompting, "_encode", never)
    with pytest.raises(Exception, match="characters"):
        asyncio.run(prompting.of_text("x" * 100_000, INFO))


def test_marks_that_a_user_writes_are_only_text(prompting):
    """The marks that stand for special text while a template runs hold a secret."""
    text = "\ue0000123456789abcdef.0\ue001 <|im_end|>"
    prompt = prompting._chat(Conversation([Message(role="user", content=text)]))
    ids = memoryview(prompt.tokens).cast("i").tolist()
    assert text in prompting._backend.decode(ids, skip_special_tokens=False)
