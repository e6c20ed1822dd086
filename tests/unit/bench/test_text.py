"""Text for prompts: seeded, of the length asked for, and no passage beginning like another."""

import pytest

from quire.bench.prose import Prose
from quire.errors import ConfigError


@pytest.fixture(params=["made", "file"])
def source(request, tmp_path):
    if request.param == "made":
        return None
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be: that is the question. " * 20)
    return path


def test_the_same_seed_gives_the_same_passages(source):
    one, again, other = Prose(1, source), Prose(1, source), Prose(2, source)
    passages = [one.passage(300) for _ in range(3)]
    assert passages == [again.passage(300) for _ in range(3)]
    assert passages[0] != other.passage(300)


def test_no_passage_begins_like_another(source):
    prose, other = Prose(1, source), Prose(2, source)
    starts = {text[:16] for _ in range(50) for text in (prose.passage(200), other.passage(200))}
    assert len(starts) == 100


@pytest.mark.parametrize("length", [40, 1000, 5000])
def test_a_passage_is_as_long_as_asked_for(source, length):
    assert len(Prose(3, source).passage(length)) == length


def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("none", "empty", "binary"):
        with pytest.raises(ConfigError, match="give a file of plain UTF-8 text"):
            Prose(0, tmp_path / name)
