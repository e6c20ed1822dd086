"""What is computed once at start is computed on pages that there are, and in all sizes."""

import pytest

from quire.engine.executor.rehearsal import rehearsals
from quire.types import page_array


@pytest.mark.parametrize("num_pages", [4, 40, 4000])
@pytest.mark.parametrize("max_positions", [256, 40960])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("chunk_tokens", [0, 20, 512, 8192])
def test_rehearsals_fit(page_size, num_pages, max_positions, chunk_tokens):
    for batch in rehearsals(page_size, num_pages, max_positions, chunk_tokens):
        assert 0 < batch.num_tokens <= chunk_tokens
        written = []
        for segment in batch.segments:
            pages, end = page_array(segment.pages), segment.start + segment.num_tokens
            assert end <= max_positions
            assert len(pages) == -(-end // page_size)
            assert pages.max() < num_pages
            written += pages[segment.start // page_size :].tolist()
        assert len(set(written)) == len(written)
        assert 0 not in written


def test_there_is_one_for_every_way_to_split():
    sizes = {len(batch.segments) for batch in rehearsals(64, 4000, 40960, 512)}
    assert sizes == {1, 2, 4, 8, 16, 32}
