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
def test_whatever_a_kind_holds_has_entries_in_it(max_batch):
    from quire.engine.forward.block import cut
    from quire.engine.forward.graphs import short_kinds

    for kind in short_kinds(max_batch):
        single = min(kind.num_single, kind.num_tokens // 2)
        short = kind.num_short if kind.num_tokens - single >= 2 * kind.num_short else 1
        # The worst is one token more than whole pieces, as often as can be.
        sizes = [2] * (short if single else 0) or [1] * short
        whole, rest = divmod(kind.num_tokens - single - sum(sizes), kind.piece)
        for i in range(whole):
            sizes[i % len(sizes)] += kind.piece
        sizes[-1] += rest
        pieces = cut(segments(*[1] * single, *sizes), kind.piece)
        assert kind.holds(sum(pieces.counts), single, len(sizes))
        places = kind.places(pieces).tolist()
        assert len(set(places)) == len(places)
        assert max(places) < kind.num_entries


def test_single_tokens_have_a_table_of_their_own_beside_short_ones():
    from quire.engine.forward.block import cut
    from quire.engine.forward.graphs import GraphKind

    kind = GraphKind(128, 64, 4)
    pieces = cut(segments(1, 40, 1, 2, 1), kind.piece)
    assert kind.places(pieces).tolist() == [0, 64, 65, 1, 66, 2]


def test_kinds_rise_and_never_have_more_short_sequences_than_there_are():
    from quire.engine.forward.graphs import short_kinds

    assert short_kinds(2) == sorted(short_kinds(2))
    assert {kind.num_sequences for kind in short_kinds(2)} == {2}
    assert {(kind.num_single, kind.num_short) for kind in short_kinds(64)} == {(0, 4), (64, 4)}


def test_checks_of_proposals_are_one_piece_each_and_no_larger_than_they_are():
    from quire.engine.forward.graphs import GraphKind

    kind = GraphKind(8 * 4, 0, 8, verifies=True)
    assert (kind.piece, kind.num_pieces, kind.width) == (4, 8, 32)
