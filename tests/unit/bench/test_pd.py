"""`quire bench pd`: conversations of the right lengths, pairs that belong together, true ratios."""

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evidence.disagg.turns import Asked
from evidence.pd import bytes as bytes_moved
from evidence.pd import figures, rounds, run
from evidence.pd.command import _write
from evidence.pd.fleet import Fleet
from evidence.pd.plan import UNIFIED, Plan, Side
from evidence.random_weights import write_model
from quire.engine.forward.dense import load_dense
from quire.engine.messages import CachedTokens, HandoverStatus, Output
from quire.errors import ConfigError, EngineError
from quire.memory.page_layout import PageLayout
from quire.models import describe
from quire.peer.kinds import TransportKind
from quire.peer.region import Region
from unit.cli_support import command

PLAN = Plan(
    model=Path("model"),
    device="cpu",
    added=(20, 60),
    later_turns=8,
    sessions=2,
    shortest=100,
    longest=400,
    answer=4,
    at_once=2,
    page_size=16,
    vocabulary=50,
    bytes_repeats=2,
)


@pytest.fixture
def quire(capsys, monkeypatch):
    return command(capsys, monkeypatch)


@pytest.fixture(autouse=True)
def few_drawn(monkeypatch):
    monkeypatch.setattr(figures, "_DRAWN", 100)


# ---- what is asked -------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [500, 2000])
def test_conversations_stay_between_shortest_and_longest_and_there_are_enough_turns(added):
    plan = Plan(model=Path("model"))
    waves = list(plan.waves(added))
    later = sum(wave.sessions * (wave.turns - 1) for wave in waves)
    assert later >= 200
    for wave in waves:
        last = wave.longest + (wave.turns - 1) * (added + wave.answer)
        assert wave.shortest >= 8_000
        assert 28_000 < last <= 32_000
    assert len({wave.seed for wave in waves}) == len(waves)


def test_a_turn_that_does_not_fit_is_refused_with_the_option_to_change():
    with pytest.raises(ConfigError, match="--longest 1000"):
        Plan(model=Path("model"), shortest=900, longest=1000)


def test_every_transport_has_a_side_with_a_cache_and_one_without_and_one_engine_does_all():
    assert [side.name for side in PLAN.sides()] == [
        "tcp on",
        "tcp off",
        "shm on",
        "shm off",
        UNIFIED,
    ]


# ---- asking --------------------------------------------------------------------------------------


class FakeEngine:
    """Answers at once, and remembers what it was asked."""

    info = SimpleNamespace(peer="tcp://127.0.0.1:1")

    def __init__(self) -> None:
        self.asked = []

    @contextlib.asynccontextmanager
    async def generate(self, tokens, params, *, salt, prefill):
        self.asked.append((salt, len(tokens) // 4, list(prefill)))

        async def outputs():
            for number in range(params.max_tokens):
                yield Output("r", [number], cached=None if number else CachedTokens())

        yield outputs()

    async def ask(self, _question, _kind):
        return SimpleNamespace(
            operations={}, waiting_writes=0, running=0, waiting=0, handover=HandoverStatus()
        )


@pytest.fixture
def fleet():
    return Fleet(FakeEngine(), {side: FakeEngine() for side in PLAN.sides()})


def converse(fleet, plan, **options):
    found = {}
    told = []
    complete = asyncio.run(
        rounds.converse(
            fleet,
            plan,
            found,
            tell=lambda: told.append(1),
            progress=lambda *_: None,
            **options,
        )
    )
    return found, told, complete


def test_all_sides_get_the_same_turns_with_salts_of_their_own(fleet):
    found, told, complete = converse(fleet, PLAN)
    assert complete
    assert len(told) == sum(wave.turns for added in PLAN.added for wave in PLAN.waves(added))
    lengths = [[length for _, length, _ in engine.asked] for engine in fleet.sides.values()]
    assert all(one == lengths[0] for one in lengths)
    salts = [{salt for salt, _, _ in engine.asked} for engine in fleet.sides.values()]
    assert not set.intersection(*salts)
    for added, sides in found.items():
        later = {len(figures.later_of(heard.asked)) for heard in sides.values()}
        assert later == {PLAN.sessions * sum(w.turns - 1 for w in PLAN.waves(added))}


def test_only_decode_engines_are_told_of_the_prefill_engine(fleet):
    converse(fleet, PLAN)
    for side, engine in fleet.sides.items():
        told = {tuple(prefill) for _, _, prefill in engine.asked}
        assert told == {("tcp://127.0.0.1:1",) if side.transport else ()}


def test_when_time_is_up_every_side_has_had_the_same_rounds_and_each_comparison_its_share(fleet):
    plan = dataclasses.replace(PLAN, limit_s=8.0)
    ticks = iter(range(10_000))
    found, _, complete = converse(fleet, plan, clock=lambda: float(next(ticks)))
    assert not complete
    for sides in found.values():
        counts = {len(heard.asked) for heard in sides.values()}
        assert len(counts) == 1
        assert counts != {0}


# ---- figures -------------------------------------------------------------------------------------


def asked(ttft_s, turn=1, tpot_s=0.01):
    return Asked(ttft_s, tpot_s, 100, CachedTokens(), [1], turn)


def test_an_interval_holds_the_ratio_and_is_narrow_when_all_pairs_agree():
    found = figures.with_interval([(1.0 + i, 2.0 + 2 * i) for i in range(50)], max)
    assert found["ratio"] == pytest.approx(0.5)
    assert found["low"] == pytest.approx(0.5) == found["high"]


def found_with(on, off, unified):
    sides = {Side("tcp on", TransportKind.TCP): on, Side("tcp off", TransportKind.TCP, False): off}
    sides[Side(UNIFIED)] = unified
    return {500: {s: rounds.Heard([asked(t) for t in times]) for s, times in sides.items()}}


def verdicts(on, off, unified):
    plan = dataclasses.replace(PLAN, added=(500,), longest=2000, transports=(TransportKind.TCP,))
    compared = figures.compared(plan, found_with(on, off, unified))
    rows = figures.asked_of(plan, {"compared": compared, "bytes": {}})
    return {row["what"].removeprefix("500 new, tcp on / "): row["met"] for row in rows}


def test_what_is_asked_is_met_only_when_the_whole_interval_says_so():
    met = verdicts([0.1] * 30, [0.3] * 30, [0.09] * 30)
    assert all(met.values())
    missed = verdicts([0.3] * 30, [0.3] * 30, [0.09] * 30)
    assert missed["tcp off, later turns: ttft_mean"] is False
    assert missed["unified, later turns: ttft_mean"] is False
    unclear = verdicts([0.1, 0.5] * 3, [0.5] * 6, [0.4] * 6)
    assert unclear["tcp off, later turns: ttft_mean"] is None


def test_a_rate_stands_beside_a_plain_copy():
    rates = figures.beside_copy({"shm": {"bytes_s": 40e9}}, 50e9)
    assert rates["shm"]["of_copy"] == pytest.approx(0.8)


@pytest.mark.parametrize("kind", [TransportKind.TCP, TransportKind.SHM])
def test_bytes_come_to_the_device_as_they_were(kind):
    layout = PageLayout("full", 2, 2, 8, "float32", 4)
    plan = bytes_moved.Plan(layout, 21, rounds=2, offer_pages=5)
    (found,) = bytes_moved.measure(plan, [kind]).values()
    assert found["bytes"] == 21 * layout.page_bytes
    assert len(found["seconds"]) == 2


def test_pages_that_arrive_wrong_are_noticed(monkeypatch):
    monkeypatch.setattr(Region, "copy_from", lambda *_: None)
    plan = bytes_moved.Plan(PageLayout("full", 2, 2, 8, "float32", 4), 4, rounds=2)
    with pytest.raises(EngineError, match="wrong"):
        bytes_moved.measure(plan, [TransportKind.SHM])


def test_what_came_by_another_way_is_wrong_and_so_is_a_side_without_a_cache_that_had_some():
    def result(by, cached):
        sides = {name: {"cached_tokens": cached if "off" in name else {}} for name in names}
        moved = {name: {"received_by": {by if "tcp" in name else "shm": 1}} for name in names}
        return {"sides": {"20": sides}, "handovers": moved}

    names = [side.name for side in PLAN.sides() if side.transport]
    assert run._is_right(PLAN, result("tcp", {"prefill_host": 5}))
    assert not run._is_right(PLAN, result("shm", {}))
    assert not run._is_right(PLAN, result("tcp", {"host": 5}))


# ---- the command ---------------------------------------------------------------------------------


def test_what_there_is_so_far_is_written_whole(tmp_path):
    out = tmp_path / "pd.json"
    _write(out, {"a": 1})
    _write(out, {"a": 2})
    assert json.loads(out.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [out]
    _write(None, {"a": 3})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--transport", "pigeon"], "tcp or shm"),
        (["--transport", "auto"], "no way of its own"),
        (["--device", "abacus"], "use cpu, cuda or cuda:N"),
        (["--shape", "nobody-has-this", "--layers", "3"], "--layers is for random weights"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(quire, options, said):
    done = quire("bench", "pd", "--device", "cpu", *options)
    assert done.code == 2
    assert said in done.err


def test_random_weights_are_files_that_a_server_can_load(tmp_path) -> None:
    directory = tmp_path / "model"
    write_model(directory, "tiny", device=torch.device("cpu"), layers=3)
    assert describe(directory).num_layers == 3
    loaded = load_dense(directory, dtype=torch.float32, device=torch.device("cpu"))
    assert len(loaded.weights.layers) == 3
