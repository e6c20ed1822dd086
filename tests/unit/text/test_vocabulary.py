"""Vocabulary: every token's bytes, for both families of tokenizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from quire.text.vocabulary import Vocabulary
from unit.server.scripted import tiny_backend

BACKEND = tiny_backend()
VOCABULARY = Vocabulary(BACKEND)


def sentencepiece_backend():
    vocab = {"<unk>": 0, "▁": 1, "▁hi": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "a": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return tokenizer


@given(st.text())
def test_the_bytes_of_a_text_are_its_bytes(text):
    ids = BACKEND.encode(text, add_special_tokens=False).ids
    assert b"".join(map(VOCABULARY.name, ids)) == text.encode()


@given(st.lists(st.integers(0, BACKEND.get_vocab_size() - 1)))
def test_the_text_of_any_tokens_is_what_the_tokenizer_decodes(ids):
    text = b"".join(map(VOCABULARY.text, ids)).decode("utf-8", "replace")
    assert text == BACKEND.decode(ids, skip_special_tokens=True)


def test_special_tokens_have_a_name_and_no_text():
    end = BACKEND.token_to_id("<|im_end|>")
    assert VOCABULARY.name(end) == b"<|im_end|>"
    assert VOCABULARY.text(end) == b""


def test_added_tokens_that_are_not_special_are_text():
    assert VOCABULARY.text(BACKEND.token_to_id("<think>")) == b"<think>"


def test_ids_beyond_the_tokenizer_are_empty():
    assert VOCABULARY.text(BACKEND.get_vocab_size() + 5) == b""


def test_a_part_of_a_character_is_labelled_by_its_bytes():
    half = BACKEND.encode("é", add_special_tokens=False).ids
    assert [VOCABULARY.label(i) for i in half] == ["é"]
    half = BACKEND.encode("€", add_special_tokens=False).ids
    assert [VOCABULARY.label(i) for i in half] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


@pytest.mark.parametrize(
    ("token", "name"), [(1, b" "), (2, b" hi"), (3, b"\xe2"), (6, b"a"), (7, b"</s>")]
)
def test_sentencepiece_tokens(token, name):
    assert Vocabulary(sentencepiece_backend()).name(token) == name


def test_a_sentencepiece_character_in_bytes_is_put_together():
    vocabulary = Vocabulary(sentencepiece_backend())
    assert b"".join(map(vocabulary.text, [2, 3, 4, 5, 7])).decode() == " hi€"


def test_the_longest_token_bounds_how_few_tokens_a_text_can_be():
    assert VOCABULARY.longest == len("<|im_start|>")
