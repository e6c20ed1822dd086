"""`quire bench disagg`: each part on something tiny, what it finds wrong, and what it refuses."""

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace

import pytest
import torch
import transformers

from evidence.disagg import report, restore, stall, turns
from evidence.disagg.sessions import Plan as Sessions
from evidence.disagg.sessions import sessions
from evidence.disagg.stall import PLAIN, STALLED
from quire.engine.messages import CachedTokens, Output
from quire.memory.page_layout import PageLayout
from quire.store import open_store
from quire.store.base import ObjectName
from quire.transfer.cpu import CpuCopyEngine
from quire.types import PageKey
from unit.bench.shown import shown
from unit.cli_support import command

TINY = PageLayout("full", 2, 1, 8, "float32", 4)
SHORT = stall.Plan(stall_s=0.6, rounds=1, looking=3, pages=3, memory_bytes=8 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    directory = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def quire(capsys, monkeypatch):
    return command(capsys, monkeypatch)


def text_of(result) -> str:
    return shown(report.tables(result))


# ---- sessions and turns --------------------------------------------------------------------------


def test_sessions_are_the_same_for_every_side_and_grow_by_answers():
    plan = Sessions(sessions=2, shortest=10, longest=20, turns=2, added=3, vocabulary=50)
    ours, theirs = sessions(plan), sessions(plan)
    assert [len(one.tokens) for one in ours] == [10, 20]
    assert all((a.tokens == b.tokens).all() for a, b in zip(ours, theirs, strict=True))
    ours[0].grow([1, 2], 0)
    assert ours[0].tokens[10:12].tolist() == [1, 2]
    assert len(ours[0].tokens) == 15


def _side(pages, own, received):
    return {"pages": pages, "own_pages": own, "received_bytes": received}


def test_bytes_fall_by_the_share_of_reused_pages_and_a_single_page_more_is_noticed():
    off = _side(10, 0, 1000)
    found = turns.compared_bytes(_side(10, 4, 600), off)
    assert found["exact"]
    assert found["reused_share"] == pytest.approx(found["saved_share"]) == pytest.approx(0.4)
    assert not turns.compared_bytes(_side(10, 4, 700), off)["exact"]
    assert not turns.compared_bytes(_side(11, 4, 600), off)["exact"]


class FakeEngine:
    """Remembers prompts page by page, and counts the bytes that it would have received."""

    info = SimpleNamespace(page_size=4)
    page_bytes = 100

    def __init__(self, *, cached: bool) -> None:
        self._cached = cached
        self._known: set[bytes] = set()
        self._received = 0

    @contextlib.asynccontextmanager
    async def generate(self, tokens, params, *, salt, prefill=()):
        pages = [tokens[: 16 * i] for i in range(1, (len(tokens) // 4 - 1) // 4 + 1)]
        own = sum(salt.encode() + page in self._known for page in pages)
        self._received += (len(pages) - own) * self.page_bytes
        if self._cached:
            self._known |= {salt.encode() + page for page in pages}

        async def outputs():
            cached = CachedTokens(device=own * 4)
            for number in range(params.max_tokens):
                yield Output("r", [number], cached=cached if not number else None)

        yield outputs()

    async def ask(self, _question, _kind):
        moved = SimpleNamespace(received_bytes=self._received)
        return SimpleNamespace(
            operations={}, waiting_writes=0, running=0, waiting=0, handover=moved
        )

    async def close(self):
        pass


def test_turns_compare_the_sides_on_the_same_words(monkeypatch):
    monkeypatch.setattr(turns, "_NEWS_S", 0.0)
    sides = {side: FakeEngine(cached=side != turns.OFF) for side in turns.SIDES}
    fleet = turns.Fleet(FakeEngine(cached=True), sides)
    plan = Sessions(sessions=2, shortest=20, longest=40, turns=3, added=7, answer=3, vocabulary=100)
    result = asyncio.run(turns.run(fleet, plan))
    on, off = result["sides"][turns.ON], result["sides"][turns.OFF]
    assert on["pages"] == off["pages"] == off["received_bytes"] // FakeEngine.page_bytes
    assert 0 < on["own_pages"] < on["pages"]
    assert result["bytes"]["exact"]
    assert result["same_answers"] == 6
    assert len(result["compared"]) == 2


# ---- restores ------------------------------------------------------------------------------------


def test_restores_at_once_bring_every_page():
    result = restore.run("cpu", restore.Plan(TINY, sessions=8, tokens=24, rounds=2))
    assert result["ok"]
    assert result["pages"] == 48
    assert result["bytes"] == 48 * TINY.page_bytes
    assert len(result["samples"]) == 2
    assert result["ratio_min"] <= result["ratio_of_pairs"] <= result["ratio_max"]
    json.dumps(result)


def test_restores_notice_a_copy_that_goes_wrong(monkeypatch):
    backwards = CpuCopyEngine.load

    def load(self, host_pages, device_pages):
        return backwards(self, host_pages, bytes(memoryview(device_pages).cast("i")[::-1]))

    monkeypatch.setattr(CpuCopyEngine, "load", load)
    result = restore.run("cpu", restore.Plan(TINY, sessions=2, tokens=24, rounds=1))
    assert not result["ok"]


def test_on_cuda_it_is_an_8b_model_with_2000_tokens_each():
    plan = restore.plan_for("cuda")
    assert plan.layout.page_bytes == 64 * 147_456
    assert (plan.sessions, plan.pages_each) == (64, 31)


# ---- a store that stalls -------------------------------------------------------------------------


def test_no_step_waits_for_a_store_that_stalls(model, tmp_path):
    result = stall.run(model, tmp_path, SHORT)
    sides = result["sides"]
    assert sides[STALLED]["waited_s"] > SHORT.stall_s / 2, "nobody waited for the store"
    assert sides[PLAIN]["waited_s"] < sides[STALLED]["waited_s"]
    assert sides[STALLED]["longest_of_all_s"] < SHORT.stall_s


def test_a_step_that_asks_the_store_itself_is_found_out(model, tmp_path):
    asked = []

    def naive(engine, side):
        if side == STALLED and not asked:
            asked.append(side)
            store = open_store(engine.manager.store.url)
            nothing = ObjectName(PageKey(bytes(32)), "full", 0, 1)
            store.contains([nothing], deadline=time.monotonic() + 60)
            store.close()
        return engine.step()

    result = stall.run(model, tmp_path, SHORT, step=naive)
    assert asked
    assert result["ratio"] > 2
    assert result["sides"][STALLED]["longest_s"] >= SHORT.stall_s
    assert not result["ok"]


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_what_it_measured(quire, monkeypatch, model):
    small = restore.Plan(TINY, sessions=4, tokens=24, rounds=1)
    monkeypatch.setattr(restore, "plan_for", lambda _device: small)
    options = ("--sessions", "0", "--stall-rounds", "0", "--restore-rounds", "1")
    ran = quire("bench", "disagg", "--model", str(model), *options, "--json")
    assert ran.code == 0, ran
    result = json.loads(ran.out)
    assert result["ok"]
    assert set(result) >= {"restore", "load", "cores"}
    assert "Every page is right" in text_of(result)


def test_the_command_refuses_to_measure_nothing(quire):
    ran = quire(
        "bench", "disagg", "--sessions", "0", "--stall-rounds", "0", "--restore-rounds", "0"
    )
    assert ran.code == 2
    assert "nothing would be measured" in ran.err


def test_a_part_that_is_not_right_is_said_in_the_table(model):
    summary = {"mean": 1.0, "p50": 1.0}
    side = {
        "requests": 2,
        "ttft_s": summary,
        "tpot_s": summary,
        "received_bytes": 700,
        "pages": 10,
        "own_pages": 4,
    }
    result = {
        "model": "m",
        "cores": 2,
        "turns": {
            "plan": {"sessions": 1, "turns": 1, "shortest": 1, "longest": 2, "added": 1},
            "sides": {turns.ON: side, turns.OFF: side, turns.UNIFIED: side},
            "bytes": turns.compared_bytes(side, _side(10, 0, 1000)),
            "same_answers": 1,
        },
        "load": {"before": [0.0], "after": [0.0]},
    }
    text = text_of(result)
    assert "NOT exactly" in text
    assert "1 of 2" in text
