"""The converted Gemma is the model that was trained: what it answers is worth comparing with."""

import json

import torch

from e2e.exactness.oracle import stock_model
from e2e.exactness.subjects import GEMMA
from gemma import BOS, WINDOW
from quire.models import load_tokenizer

TEXT = (
    "The history of the printing press begins in the fifteenth century, when Johannes Gutenberg, a "
    "goldsmith from Mainz, developed a system of movable metal type. Before that time, books in "
    "Europe were copied by hand, mostly by monks, and were so expensive that only churches, "
    "universities and wealthy families could own them. Within fifty years, printers had set up "
    "shops in more than two hundred cities, and millions of books had been produced."
)


@torch.inference_mode()
def perplexity(ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    logits = stock_model(GEMMA)(tokens).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).exp())


def test_english_is_likely_after_the_token_that_begins_a_text() -> None:
    tokenizer = load_tokenizer(GEMMA.find())
    ids: list[int] = tokenizer(TEXT)["input_ids"]
    assert BOS not in ids, "the caller puts it there"
    assert tokenizer.decode(ids) == TEXT
    assert perplexity([BOS, *ids]) < 12
    assert perplexity(ids) > 40


def test_its_layers_are_those_of_the_file() -> None:
    config = json.loads((GEMMA.find() / "config.json").read_text())
    kinds = config["layer_types"]
    assert (kinds.count("sliding_attention"), kinds.count("full_attention")) == (15, 3)
    assert config["sliding_window"] == WINDOW
    assert config["tie_word_embeddings"]
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
