"""Two stores in front of each other, of which the first is in trouble: what the second has still
comes, no token is wrong, and the first is used again when it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.exactness.rig import engine_rig
from e2e.exactness.subjects import TINY_LLAMA
from e2e.stores.places import Redis
from e2e.stores.test_faults import OPTIONS, ask, from_the_store, meanwhile, used_again
from quire.types import Tier

FAULTS = ["killed", "paused", "cut", "revoked", "full", "damaged", "forgotten"]


@pytest.mark.long
@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_second_has_comes_while_the_first_is_in_trouble_c18(
    fault: str, write: str, tmp_path: Path
) -> None:
    place = Redis(tmp_path)
    url = f"{place.url} file://{tmp_path}/store?max=1GiB&codec=zstd&write={write}"
    harm, undo, _ = place.faults[fault]
    pytest.importorskip("zstandard", reason="needs the codecs extra")
    try:
        with engine_rig(TINY_LLAMA, store=url, **OPTIONS) as rig:
            ask(rig, "before")
            assert from_the_store(rig)
            meanwhile(harm, lambda: ask(rig, f"while the first is {fault}"))
            for turn in range(3):
                rig.flush(Tier.DEVICE, Tier.HOST)
                ask(rig, f"while the first is {fault}, turn {turn}")
                assert rig.reused("store") > 0
            undo()
            used_again(rig)
            rig.settle()
    finally:
        place.close()
