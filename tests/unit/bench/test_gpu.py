"""`quire bench gpu` on a tiny model without a GPU: what it counts, and that it runs to its end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire.bench.gpu import report, sets
from quire.bench.gpu import run as bench
from quire.bench.gpu.floors import MachineSpeed, Needs
from quire.bench.gpu.plan import SMALL, GpuPart, GpuPlan, parse_shapes
from quire.bench.gpu.random_model import SHAPES, write_outline
from quire.cli.output import show
from quire.errors import ConfigError, EngineError
from unit.bench.shown import shown
from unit.cli_support import command


def spec(name: str) -> SimpleNamespace:
    shape = SHAPES[name]
    return SimpleNamespace(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        mlp_size=shape["intermediate_size"],
        num_q_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
    )


def test_floors_of_the_real_shape_are_those_counted_by_hand() -> None:
    """8.19 billion parameters, 0.62 of them in the embedding, which no step reads whole."""
    needs = Needs.of(spec("qwen3-8b"))  # type: ignore[arg-type]
    assert needs.weight_bytes == pytest.approx(2 * (8.19e9 - 0.62e9), rel=0.01)
    assert needs.kv_bytes == 36 * 2 * 8 * 128 * 2
    machine = MachineSpeed("", 4.3e12, 790e12, 55e9)
    assert needs.decode_s(machine, 1, 1000) == pytest.approx(3.55e-3, rel=0.02)
    assert needs.decode_s(machine, 64, 3500) == pytest.approx(11.2e-3, rel=0.02)
    assert needs.prompt_ops(32768) == pytest.approx(772e12, rel=0.03)


def test_an_unknown_shape_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        write_outline(tmp_path / "m", "huge")


OPTIONS = ["--shape", "tiny", "--device", "cpu", "--device-memory", "64MiB"]
OPTIONS += ["--host-memory", "64MiB", "--page-size", "16"]


def test_it_measures_tokens_beside_their_floors(capsys, monkeypatch) -> None:
    quire = command(capsys, monkeypatch)
    options = [*OPTIONS, "--only", "decode,prefill,mixed,hits,crossover"]
    (result,) = quire("bench", "gpu", *options, "--json").json["shapes"]
    assert [row["ratio"] for row in result["crossover"]["rows"]] == [1.0]
    assert [row["batch"] for row in result["decode"]] == [1, 4]
    for row in result["decode"] + result["prefill"]:
        assert row["floor_ms"] > 0
    hits = result["hits"][-1]
    assert (hits["device_tokens"], hits["host_tokens"]) == (511, 511)
    assert hits["more_ms"] > 0
    assert [row["chunk"] for row in result["mixed"]] == [512, 128]
    assert all(row["slowest_ms"] > 0 for row in result["mixed"])
    assert "sets" not in result
    show(*report.tables(result))
    shown = capsys.readouterr().out
    titles = ("Decoding", "Prompts", "beside others", "Hits", "in the store")
    assert all(title in shown for title in titles)


def test_it_measures_copies_and_sessions(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    quire = command(capsys, monkeypatch)
    options = [*OPTIONS, "--only", "copies,sets"]
    ran = quire("bench", "gpu", *options, "--json", "--plots", str(tmp_path / "plots"))
    (result,) = ran.json["shapes"]
    cases = {(row["way"], row["order"]) for row in result["copies"]["link"]}
    assert len(cases) == 6
    assert all(row["both_ms"] > 0 for row in result["copies"]["beside"])
    assert [row["tiers"] for row in result["copies"]["fresh"]] == ["host", "host and store"]
    reused = {
        (row["tiers"], row["times_device"]): [one["hit"] for one in row["rounds"]]
        for row in result["sets"]
    }
    assert all(first == 0 for first, _ in reused.values())
    assert reused["L1+L2", 4.0][1] > 0.8 > reused["L1", 4.0][1]
    assert reused["L1", 0.5][1] > 0.8
    assert {path.name for path in (tmp_path / "plots" / "tiny").iterdir()} == {
        "sets_ttft.png",
        "sets_hits.png",
    }
    shown = quire("bench", "gpu", *options).out
    assert "Nothing reused" in shown
    assert "beside the device alone" in shown


def test_without_time_parts_are_left_out_and_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_ON_ONE_ENGINE", [(GpuPart.DECODE, lambda rig, drive: [])])
    plan = GpuPlan(shape="tiny", device="cpu", page_size=16, budget_s=10, **SMALL)
    plan = replace(plan, device_bytes=64 << 20, host_bytes=0)
    times, told = itertools.chain([0.0, 5.0], itertools.repeat(11.0)), []
    result = bench.run(plan, tell=told.append, clock=lambda: next(times))
    assert result["decode"] == []
    assert result["failed"] == {"sets": bench.NO_TIME}
    assert [list(one["took_s"]) for one in told] == [["decode"], ["decode", "sets"]]
    assert "sets" not in told[-1]


def test_parts_that_nobody_knows_are_refused(capsys, monkeypatch) -> None:
    quire = command(capsys, monkeypatch)
    assert "prefill" in quire("bench", "gpu", *OPTIONS, "--only", "decode,speed").sentence


def test_folders_are_made_or_refused_before_anything_is_measured(
    tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench, "run", lambda *_: {"failed": {bench.INTERRUPTED: ""}})
    quire = command(capsys, monkeypatch)
    options = [*OPTIONS, "--json", "--store", str(tmp_path / "new" / "st")]
    assert "shapes" in quire("bench", "gpu", *options).json
    assert (tmp_path / "new" / "st").is_dir()
    for option in ("--store", "--save"):
        below = str(tmp_path / "file" / "st" / "r.json")
        assert "cannot be used" in quire("bench", "gpu", *OPTIONS, option, below).sentence


def test_shapes_that_nobody_knows_are_refused_before_anything_is_measured() -> None:
    assert parse_shapes("tiny, qwen3-8b,tiny") == ["tiny", "qwen3-8b"]
    for text in ("tiny,huge", "", ","):
        with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
            parse_shapes(text)


def test_a_part_that_fails_says_why_and_the_others_go_on(capsys, monkeypatch) -> None:
    def fail(rig, drive):
        raise EngineError("no tokens today [/mnt]")

    def interrupt(rig):
        raise KeyboardInterrupt

    parts = [
        (part, act if part is not GpuPart.HITS else fail) for part, act in bench._ON_ONE_ENGINE
    ]
    monkeypatch.setattr(bench, "_ON_ONE_ENGINE", parts)
    monkeypatch.setattr(sets, "measure", interrupt)
    quire = command(capsys, monkeypatch)
    options = [*OPTIONS, "--only", "hits,prefill,sets", "--json"]
    ran = quire("bench", "gpu", *options)
    assert ran.code == 1
    (result,) = ran.json["shapes"]
    assert [row["tokens"] for row in result["prefill"]] == [512, 512]
    assert result["failed"] == {
        "hits": "EngineError: no tokens today [/mnt]",
        "the rest": "interrupted",
    }
    assert "hits could not be measured: EngineError: no tokens today [/mnt]" in shown(
        report.tables(result)
    )
