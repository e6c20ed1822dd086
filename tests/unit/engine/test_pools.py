"""How memory is divided among components, and how long sequences are remembered to be."""

import json

import pytest

from quire.engine.config import EngineConfig
from quire.engine.layouts import layouts
from quire.engine.lengths import DEFAULT_TOKENS, MeasuredLengths
from quire.engine.pools import chunk_limit, components, plan_pools, running_limit
from quire.errors import MemoryBudgetError
from quire.models import ModelShape, describe

from hybrid_models import TINY  # isort: skip

MIB = 1 << 20


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, ModelShape]:
    names = ("gemma3", "falcon_h1")
    return {name: describe(TINY[name](tmp_path_factory.mktemp(name))) for name in names}


def config(**options) -> EngineConfig:
    given = {"model": "m", "name": "m", "device_bytes": 8 * MIB, "host_bytes": 16 * MIB}
    return EngineConfig(**(given | options))


def plan(shape: ModelShape, typical: int = 512, **options):
    engine = config(**options)
    ranks = [layouts(shape, dtype="float32", page_size=16, kv_heads=shape.num_kv_heads)]
    return engine, ranks[0], plan_pools(engine, shape, ranks, typical)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
@pytest.mark.parametrize("typical", [64, 512, 100_000])
def test_the_parts_fit_the_budget_and_none_is_forgotten(shapes, name, typical):
    engine, parts, sizes = plan(shapes[name], typical)
    device = sum(sizes[part.component].device * part.page_bytes for part in parts)
    host = sum(sizes[part.component].host * part.page_stride_bytes for part in parts)
    assert 0.9 * engine.device_bytes < device <= engine.device_bytes
    assert 0.9 * engine.host_bytes < host <= engine.host_bytes
    for part in parts[1:]:  # at least an eighth each, whatever is typical
        assert sizes[part.component].device * part.page_bytes > engine.device_bytes / 9


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_short_sequences_need_more_of_the_rest(shapes, name):
    _, parts, short = plan(shapes[name], typical=32)
    _, _, long = plan(shapes[name], typical=4096)
    other = parts[1].component
    assert short[other].device > long[other].device
    assert short["full"].device < long["full"].device


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_too_little_memory_is_refused_with_what_is_needed(shapes, name):
    with pytest.raises(MemoryBudgetError, match=r"device_memory of .*: give at least .* better"):
        plan(shapes[name], device_bytes=20_000)
    with pytest.raises(MemoryBudgetError, match=r"host_memory of .*or 0 for none"):
        plan(shapes[name], host_bytes=20_000)


def test_the_least_that_is_accepted_is_enough_for_one_request(shapes):
    shape = shapes["gemma3"]
    with pytest.raises(MemoryBudgetError):
        plan(shape, device_bytes=50_000)
    engine, _, sizes = plan(shape, device_bytes=120_000)
    assert chunk_limit(engine, shape, sizes) >= engine.page_size


def test_without_a_host_there_is_none_for_anybody(shapes):
    _, parts, sizes = plan(shapes["falcon_h1"], host_bytes=0)
    assert [sizes[part.component].host for part in parts] == [0, 0]


def test_what_runs_together_has_slots_for_it(shapes):
    engine, _, sizes = plan(shapes["falcon_h1"], device_bytes=MIB, max_running=10_000)
    assert 1 <= running_limit(engine, sizes) <= sizes["recurrent"].device // 2


@pytest.mark.parametrize(("name", "expected"), [("gemma3", "window"), ("falcon_h1", "recurrent")])
def test_the_manager_is_told_of_every_component(shapes, name, expected):
    engine, _, sizes = plan(shapes[name])
    found = components(engine, shapes[name], sizes)
    assert [c.name for c in found] == ["full", expected]
    assert found[1].pool == sizes[expected]


# ---- what was measured ---------------------------------------------------------------------------


def test_lengths_are_remembered_from_one_start_to_the_next(tmp_path):
    first = MeasuredLengths("abc", tmp_path)
    assert first.typical_tokens == DEFAULT_TOKENS
    for _ in range(3):
        first.observe(500)
    first.save()
    assert MeasuredLengths("abc", tmp_path).typical_tokens == 500
    assert MeasuredLengths("other", tmp_path).typical_tokens == DEFAULT_TOKENS


def test_one_long_sequence_changes_little(tmp_path):
    lengths = MeasuredLengths("abc", tmp_path)
    for _ in range(100):
        lengths.observe(500)
    lengths.observe(10_000)
    assert 500 < lengths.typical_tokens < 1000


@pytest.mark.parametrize("content", ["", "{", "[]", '{"typical_tokens": "x"}', '{"a": 1}', "NaN"])
def test_a_file_that_makes_no_sense_is_as_good_as_none(tmp_path, content):
    (tmp_path / "abc.json").write_text(content)
    assert MeasuredLengths("abc", tmp_path).typical_tokens == DEFAULT_TOKENS


@pytest.mark.parametrize("value", [-5, 0, "NaN", 1e300])
def test_a_value_that_cannot_be_is_kept_within_reason(tmp_path, value):
    (tmp_path / "abc.json").write_text(json.dumps({"typical_tokens": value}))
    assert 64 <= MeasuredLengths("abc", tmp_path).typical_tokens <= 1 << 20


def test_where_nothing_can_be_written_nothing_happens(tmp_path):
    (tmp_path / "file").write_text("")
    lengths = MeasuredLengths("abc", tmp_path / "file" / "below")
    lengths.observe(5)
    lengths.save()
