"""`quire bench speculate`: every way on a tiny model, an imposed acceptance, and refusals."""

import json

import numpy as np
import pytest
from rich.console import Console

from dense_models import DENSE
from eagle_models import teacher_of, write_head
from quire.bench.speculate import report, run
from quire.bench.speculate.imposed import Imposed
from quire.bench.speculate.prompt_lines import PromptSet, read_workload
from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult
from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row, Sampled
from quire.errors import ConfigError
from quire.types import NO_PAGES, RequestId
from unit.cli_support import command


def plan(**given) -> run.SpeculatePlan:
    common = {"name": "tiny", "num_tokens": 12, "draft_tokens": 3, "threads": 1}
    return run.SpeculatePlan(**common | {"device_bytes": 8 << 20} | given)


def test_every_way_answers_alike_and_is_measured(tmp_path) -> None:
    model = DENSE["llama"](tmp_path / "model")
    head = write_head(teacher_of(model), tmp_path / "head")
    prompts = [np.arange(20, dtype=np.int32) % 5, np.arange(9, dtype=np.int32)]
    ways = ["ngram", f"eagle:{head}"]
    result = run.run(plan(model=model, ways=ways), [PromptSet("some", prompts)])
    assert result["ok"]
    (row,) = result["workloads"]
    assert list(row["ways"]) == ["off", *ways]
    assert row["ways"]["off"]["ratio"] == 1.0
    assert row["ways"]["off"]["proposed"] == []
    for way in ways:
        assert row["ways"][way]["same_answers"]
        assert len(row["ways"][way]["proposed"]) == 3
    assert json.dumps(result)
    console = Console(record=True, width=120)
    console.print(*report.tables(result))
    assert "some: 2 prompts" in console.export_text()


def test_an_imposed_acceptance_is_said(tmp_path) -> None:
    result = run.run(plan(model=None, shape="tiny", ways=["eagle"], impose=1.0), [])
    (row,) = result["workloads"]
    assert row["name"] == "random"
    console = Console(record=True, width=120)
    console.print(*report.tables(result))
    assert "IMPOSED: 100% of" in console.export_text()


class _Ranks:
    """All that Imposed asks of an executor here."""

    def launch(self, batch: Batch) -> None:
        pass

    def collect(self, meanwhile) -> BatchResult:
        return BatchResult(1, [SegmentResult(Sampled(9), proposed=[1])])


@pytest.mark.parametrize(("rate", "tokens"), [(1.0, [4, 5, 6, 9]), (0.0, [9])])
def test_what_is_let_through_is_what_chance_says(rate: float, tokens: list[int]) -> None:
    row = Row(SamplingParams(max_tokens=9), 0)
    tokens_there = np.array([3, 4, 5, 6], "<i4").tobytes()
    segment = Segment(RequestId("r"), tokens_there, 7, NO_PAGES, [], row, drafts=3)
    imposed = Imposed(_Ranks(), rate)  # type: ignore[arg-type]
    imposed.launch(Batch(1, [segment]))
    (result,) = imposed.collect(lambda: None).results
    assert result.sampled is not None
    assert [s.token for s in (result.sampled, *result.further)] == tokens
    assert result.proposed == [1]


class _Letters:
    """A tokenizer."""

    def __call__(self, text: str, **_options) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages, **_options) -> list[int]:
        return [1, *self(messages[0]["content"])["input_ids"], 2]


def test_prompts_come_evenly_from_files_and_long_ones_lose_their_beginning(tmp_path) -> None:
    turns, sessions = tmp_path / "turns.jsonl", tmp_path / "sessions.jsonl"
    turns.write_text("\n".join(json.dumps({"turns": [f"q{i}", "x"]}) for i in range(5)))
    sessions.write_text(json.dumps({"input": "abcdefghij"}))
    files = [turns, sessions]
    found = read_workload("both", files, _Letters(), count=4, max_tokens=6)
    texts = ["".join(map(chr, prompt[1:-1])) for prompt in found.prompts]
    assert texts == ["q0", "q4", "ghij"]
    with pytest.raises(ConfigError, match="a JSON object on each line"):
        read_workload("bad", [tmp_path / "none"], _Letters(), count=1, max_tokens=6)


quire = pytest.fixture(command)


def test_nothing_to_ask_is_refused(quire) -> None:
    ran = quire("bench", "speculate")
    assert ran.code == 2
    assert "give --agent or --chat a file" in ran.sentence
