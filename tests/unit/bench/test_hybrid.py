"""`quire bench hybrid`: both parts on a tiny model, what it finds wrong, and what it refuses."""

import functools
import json
from types import SimpleNamespace

import pytest

from evidence.hybrid import hits as hybrid_hits
from evidence.hybrid import model as hybrid_model
from evidence.hybrid import overhead as hybrid_overhead
from evidence.hybrid import report as hybrid_report
from evidence.hybrid import run as bench
from evidence.hybrid.overhead import WITH, WITHOUT
from evidence.hybrid.run import Plan
from evidence.targets import verdict as verdict_of
from hybrid_models import TINY
from quire.bench.gpu.driving import Drive, Heard
from quire.engine.messages import CachedTokens, Finish, Output, Outputs
from quire.errors import EngineError
from quire.manager.costs import CostModel, Way
from unit.bench.shown import shown
from unit.cli_support import command

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
}
TOKENS, PAGE = 90, 16
REUSABLE = 80
"""The last token is always computed, and with it what is left of its page."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    write = functools.partial(hybrid_model.write_model, shape=SMALL)
    monkeypatch.setattr(bench, "write_model", write)
    # A tiny model computes faster than any store delivers.
    monkeypatch.setattr(CostModel, "choose", lambda *_, **__: Way.FETCH)


@pytest.fixture
def quire(capsys, monkeypatch):
    return command(capsys, monkeypatch)


def text_of(result) -> str:
    return shown(hybrid_report.tables(result))


def test_both_parts_of_a_model_with_recurrent_layers():
    seen = []
    plan = Plan(tokens=TOKENS, repeats=2, rounds=2, threads=1)
    result = bench.run(plan, lambda what, done, total: seen.append((what, done, total)))
    assert result["ok"]
    assert result["model"]["layers"] == {"full": 1, "window": 0, "recurrent": 3}
    assert result["model"]["snapshot_bytes"] > 0
    assert ("hits", 8, 8) in seen
    assert ("cost when nothing is reused", 6, 6) in seen  # a round more, which is not counted

    samples = result["hits"]["samples"]
    assert [sample["case"] for sample in samples] == ["cold", "L1", "L2", "L3"] * 2
    found = [max(sample["cached"], key=sample["cached"].get) for sample in samples[1:4]]
    assert found == ["device", "host", "store"]
    assert all(sum(sample["cached"].values()) == REUSABLE for sample in samples[1:4])
    assert result["hits"]["cases"]["L3"]["of"] == 2

    cost = result["overhead"]
    assert (cost["rounds"], cost["same_answer"], cost["reused_tokens"]) == (2, 2, 0)
    assert [one["first"] for one in cost["samples"]] == [WITHOUT, WITH]
    assert all("answer" not in one[WITH] for one in cost["samples"])
    assert cost["cpu_s"]["ratio"]["of_pairs"]["ratio"] > 0

    shown = text_of(result)
    assert "layers: 1 full, 3 recurrent; 1 threads" in shown
    assert "At most 3 % is undecided: that takes at least 6 --rounds" in shown
    assert json.loads(json.dumps(result)) == result


def test_only_one_engine_takes_snapshots(monkeypatch):
    engines = []

    def build(config):
        engines.append(build_engine(config))
        return engines[-1]

    build_engine = bench.build_engine
    monkeypatch.setattr(bench, "build_engine", build)
    bench.run(Plan(tokens=TOKENS, repeats=0, rounds=1, threads=1))
    on, off = (engine.manager.counters.snapshots for engine in engines)
    assert on > 0
    assert off == 0


def test_a_model_with_windows_has_no_snapshots_to_leave_out(tmp_path, quire):
    model = TINY["gemma3"](tmp_path / "gemma")
    options = ("--model", model, "--tokens", TOKENS, "--repeats", 1, "--threads", 1)
    result = quire("bench", "hybrid", *options, "--json").json
    assert result["ok"]
    assert result["model"]["name"] == "gemma"
    assert result["model"]["layers"] == {"full": 2, "window": 2, "recurrent": 0}
    assert "overhead" not in result
    assert "Nothing reused" not in text_of(result)
    refused = quire("bench", "hybrid", "--model", model, "--tokens", TOKENS, "--repeats", 0)
    assert refused.code == 2
    assert "the model has no snapshots to leave out: raise --repeats" in refused.sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "/nowhere/at/all"), "/nowhere/at/all does not exist"),
        (("--tokens", 31), "give at least 32, two pages"),
        (("--tokens", 241), "give at most 240"),
        (("--repeats", 0, "--rounds", 0), "nothing would be measured: raise --repeats"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(quire, options, sentence):
    ran = quire(
        "bench", "hybrid", *(options if "--tokens" in options else ("--tokens", 64, *options))
    )
    assert ran.code == 2
    assert sentence in ran.sentence


# ---- the parts -----------------------------------------------------------------------------------


class Scripted:
    """In place of a Drive: answers as told, at once."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def ask(self, _prompt, _num_tokens):
        tokens, cached, seconds = self.answers.pop(0)
        heard = Heard("told", 0.0, 0.0, tokens, [seconds], 2 * seconds, cached)
        heard.is_over = True
        return heard

    def begin(self, prompt, params):
        told, self.heard = self.ask(prompt, params), Heard("told", 0.0, 0.0)
        self.heard.cached = told.cached
        self.told = told.tokens
        return self.heard

    def step(self):
        self.heard.tokens, self.heard.is_over = self.told, True

    def settle(self):
        pass

    def forget(self, *_tiers):
        pass


COLD = ([1, 2], CachedTokens(), 10.0)
L1, L2, L3 = (([1, 2], CachedTokens(**{tier: 32}), 0.5) for tier in ("device", "host", "store"))


def hits_of(*answers):
    return hybrid_hits.measure(Scripted(*answers), [range(40)], 2, PAGE)


def test_speedups_are_those_of_the_rounds():
    rounds = [(10.0, 1.0), (30.0, 1.0), (20.0, 1.0)]
    samples = [
        {"case": case, "ttft_s": seconds, "ttft_cpu_s": seconds}
        | {"is_as_meant": True, "is_same_answer": True}
        for cold, hit in rounds
        for case, seconds in {"cold": cold, "L1": hit, "L2": 2 * hit, "L3": 4 * hit}.items()
    ]
    result = hybrid_hits.summed_up(samples)
    assert [case["speedup"] for case in result["cases"].values()] == [1, 20, 10, 5]
    assert result["cases"]["L2"]["speedup_min"] == 5
    assert result["slowest_hit_speedup"] == 5


def test_a_hit_must_come_whole_from_its_tier():
    assert hits_of(COLD, L1, L2, L3)["ok"]
    half = ([1, 2], CachedTokens(host=16, store=16), 0.5)
    result = hits_of(COLD, L1, L2, half)
    assert not result["ok"]
    assert [case["as_meant"] for case in result["cases"].values()] == [1, 1, 1, 0]


def test_another_answer_is_found():
    result = hits_of(COLD, L1, ([1, 3], *L2[1:]), L3)
    assert not result["ok"]
    assert [case["same_answer"] for case in result["cases"].values()] == [1, 1, 0, 1]


def test_prompts_that_are_reused_after_all_are_found():
    drivers = {WITH: Scripted(COLD, L1), WITHOUT: Scripted(COLD, COLD)}
    result = hybrid_overhead.measure(drivers, [range(40)] * 2, 2)
    assert not result["ok"]
    assert (result["same_answer"], result["reused_tokens"]) == (1, 32)


def test_a_request_that_fails_ends_the_run():
    failed = Outputs([Output("bench-1", [], finish=Finish.ERROR, error="no room")])
    engine = SimpleNamespace(handle=print, step=lambda: True, take_messages=lambda: [failed])
    with pytest.raises(EngineError, match="went wrong: no room"):
        Drive(engine).ask(bench.np.arange(4), 2)


UNDECIDED = "[yellow]undecided[/], as the noise is larger: give more --rounds on a quiet machine"


@pytest.mark.parametrize(
    ("low", "ratio", "high", "verdict"),
    [
        (0.99, 1.0, 1.01, "reached"),
        (1.03, 1.04, 1.05, "[bold red]missed[/]"),
        (0.9, 1.0, 1.1, UNDECIDED),
        (0.9, 1.05, 1.1, UNDECIDED),
    ],
)
def test_the_verdict_says_when_the_noise_is_larger_than_the_question(low, ratio, high, verdict):
    figures = {"low": low, "ratio": ratio, "high": high}
    assert verdict_of(figures, 0.02) == verdict
