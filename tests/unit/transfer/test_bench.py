"""The transfer bench tells a right copy from a wrong one."""

from quire.bench.transfer import run
from quire.transfer import cpu as cpu_module


def tiny_run():
    seen = []
    result = run(
        "cpu",
        ["smollm2-135m"],
        [16],
        pages=2,
        repeats=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    return result


def test_every_case_is_measured_beside_the_plain_copy():
    result = tiny_run()
    assert result["ok"]
    assert {(case["inner"], case["direction"]) for case in result["cases"]} == {
        (inner, direction) for inner in ("nhd", "hnd") for direction in ("load", "backup")
    }
    assert all(case["gb_per_s"] > 0 and case["plain_gb_per_s"] > 0 for case in result["cases"])


def test_a_copy_to_the_wrong_page_is_noticed(monkeypatch):
    real = cpu_module.copy_rows

    def wrong(source, from_index, target, to_index, staging):
        real(source, from_index, target, to_index.flip(0), staging)

    monkeypatch.setattr(cpu_module, "copy_rows", wrong)
    result = tiny_run()
    assert not result["ok"]
    assert not any(case["correct"] for case in result["cases"])


def test_a_copy_that_touches_a_page_it_was_not_given_is_noticed(monkeypatch):
    real = cpu_module.copy_rows

    def one_more(source, from_index, target, to_index, staging):
        real(source, from_index, target, to_index, staging)
        target[min(set(range(len(target))) - set(to_index.tolist()))].zero_()

    monkeypatch.setattr(cpu_module, "copy_rows", one_more)
    assert not any(case["correct"] for case in tiny_run()["cases"])


def test_a_layer_announced_too_early_is_noticed(monkeypatch):
    """All bytes arrive, but only after the layers have been reported and looked at."""
    late = []
    copy_rows, wait = cpu_module.copy_rows, cpu_module.Copy.wait

    def wait_then_copy(copy):
        wait(copy)
        while late:
            copy_rows(*late.pop())

    monkeypatch.setattr(cpu_module, "copy_rows", lambda *args: late.append(args))
    monkeypatch.setattr(cpu_module.Copy, "wait", wait_then_copy)
    right = {(case["direction"], case["correct"]) for case in tiny_run()["cases"]}
    assert right == {("load", False), ("backup", True)}
