"""Pictures: there, drawn on, and different when the figures are."""

import sys

import pytest

from quire.bench.serve import plots
from quire.bench.serve.figures import result
from quire.errors import ConfigError


def made_up(hits: bool = True, speed: float = 1.0) -> dict:
    from quire.bench.serve.chatting import ChatAnswer, Verdict
    from quire.bench.serve.figures import Sample

    samples = []
    for number in range(1, 6):
        for session in range(4):
            cached = {"device": 100 * (number - 1), "host": 30, "store": 10, "peer": 0}
            answer = ChatAnswer(
                Verdict.GOOD,
                ttft_s=speed * (0.5 + 0.1 * session),
                total_s=2.0,
                prompt_tokens=600 + session * 50,
                output_tokens=9,
                cached=cached if hits else None,
            )
            samples.append(Sample(f"s{session}", number, 0.0, answer))
    about = {"model": "m", "workload": "synthetic", "num_sessions": 4, "concurrency": 2}
    return result(about, samples, 10.0)


def ink(path) -> float:
    """Share of the picture that is not its background."""
    from PIL import Image

    with Image.open(path) as picture:
        assert picture.size == (1200, 750)
        histogram = picture.convert("L").histogram()
    return 1 - max(histogram) / sum(histogram)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Pictures of a run whose hits are known."""
    return plots.write(made_up(), tmp_path_factory.mktemp("plots") / "new")


def test_every_picture_has_something_on_it(known):
    assert [path.name for path in known] == [
        "ttft_by_round.png",
        "hits_by_round.png",
        "ttft_by_length.png",
    ]
    for path in known:
        assert ink(path) > 0.02, path.name
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == [], "drawing left something behind"


def test_pictures_show_the_figures(known, tmp_path):
    slow = plots.write(made_up(speed=3.0), tmp_path)
    assert known[0].read_bytes() != slow[0].read_bytes()
    assert known[1].read_bytes() == slow[1].read_bytes()


def test_what_it_would_take_without_the_cache_is_told_by_those_that_computed():
    good = {"verdict": "good", "round": 1}
    computed = [
        good | {"prompt_tokens": 1000, "cached": {"device": cached}, "ttft_s": (1000 - cached) * s}
        for cached, s in ((0, 0.002), (500, 0.003), (100, 0.002))
    ]
    reused = good | {"prompt_tokens": 1000, "cached": {"host": 999}, "ttft_s": 9.0}
    assert plots.seconds_per_token([*computed, reused]) == pytest.approx(0.002)
    assert plots.seconds_per_token([reused]) is None
    assert plots.seconds_per_token([reused | {"cached": None}]) is None


def test_the_cache_is_never_drawn_as_if_it_cost_what_a_queue_did():
    """A request that waited behind others would have waited without the cache too."""
    waited = {"prompt_tokens": 1000, "cached": {"device": 900}, "ttft_s": 5.0}
    assert plots.uncached_s(waited, 0.002) == pytest.approx(5.0 + 1.8)
    assert plots.uncached_s(waited | {"cached": None}, 0.002) == 5.0


def test_unknown_hits_are_said_not_drawn(known, tmp_path):
    unknown = plots.write(made_up(hits=False), tmp_path)
    assert ink(unknown[1]) < ink(known[1]) / 2
    assert ink(unknown[2]) > 0.01


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[bench\]'"):
        plots.write(made_up(), tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give --plots another directory"):
        plots.write(made_up(), tmp_path / "file" / "x")
