"""`benchmarks/ui_cost.py` says whether its figure decides anything."""

import pytest

from ui_cost import verdict


@pytest.mark.parametrize(
    ("rounds", "low", "high", "decided"),
    [
        (40, 0.998, 1.009, "Less than 1% is shown."),
        (40, 0.998, 1.011, "Less than 1% is undecided"),
        (40, 1.012, 1.030, "Less than 1% is not so."),
        (40, 0.899, 0.943, "Less than 1% is undecided"),  # nobody works less for being watched
        (2, 0.998, 1.009, "Less than 1% is undecided"),
    ],
)
def test_less_than_one_per_cent_is_shown_by_the_whole_interval(rounds, low, high, decided):
    watched = {"ratio": (low + high) / 2, "low": low, "high": high}
    share = {"ratio": 0.0012, "low": 0.0005, "high": 0.0028}
    result = {"watched": {"engine_cpu_s": watched}, "share": share, "rounds_of_each": rounds}
    said = verdict(result | {"load": [0.1, 2.0]})
    assert decided in said
    assert f"(95 % interval {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %)" in said
    assert "+0.12 % (95 % interval +0.05 to +0.28 %)" in said
