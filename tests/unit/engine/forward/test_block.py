"""What graphs are told of a batch: how it is cut into pieces, and which kinds there are."""

import pytest

from quire.engine.batch import Segment
from quire.types import NO_PAGES, RequestId

pytest.importorskip("triton")


def segments(*sizes: int) -> list[Segment]:
    return [Segment(RequestId(str(n)), bytes(4 * n), 0, NO_PAGES, [], None) for n in sizes]


def test_a_segment_is_cut_into_pieces_in_order():
    from quire.engine.forward.block import cut

    pieces = cut(segments(1, 35, 16, 2), 16)
    assert pieces.segments.tolist() == [0, 1, 1, 1, 2, 3]
    assert pieces.rows.tolist() == [0, 1, 17, 33, 36, 52]
    assert pieces.counts.tolist() == [1, 16, 16, 3, 16, 2]
    assert pieces.ahead.tolist() == [0, 19, 3, 0, 0, 0]


@pytest.mark.parametrize("max_batch", [1, 4, 64, 300])
def test_whatever_fits_a_kind_by_tokens_and_sequences_fits_it_by_pieces(max_batch):
    from quire.engine.attention.triton import PIECE
    from quire.engine.forward.block import cut
    from quire.engine.forward.graphs import short_kinds

    for kind in short_kinds(max_batch):
        count = min(kind.num_sequences, kind.num_tokens)
        each, more = divmod(kind.num_tokens - count, PIECE)
        sizes = [1] * count  # the worst is one token more than whole pieces, as often as can be
        for i in range(each):
            sizes[i % count] += PIECE
        sizes[-1] += more
        assert len(cut(segments(*sizes), PIECE).rows) <= kind.num_pieces


def test_kinds_rise_and_never_have_more_sequences_than_logits():
    from quire.engine.forward.graphs import short_kinds

    assert short_kinds(2) == sorted(short_kinds(2))
    assert {kind.num_sequences for kind in short_kinds(2)} == {2}
    assert {kind.num_sequences for kind in short_kinds(64)} == {4, 64}
