"""C32 between two sides, with everything at once, by seed. `QUIRE_CHAOS_S=600`: so long with fresh
seeds."""

import time
from pathlib import Path
from typing import Any

import pytest

from e2e.disagg.pair import pair
from e2e.exactness.chaos import FRESH_S, Chaos
from quire.peer.kinds import TransportKind


def check(seed: int, folder: Path) -> None:
    chaos = Chaos(seed)
    choose = chaos.random.choice
    store, pools = chaos.store(str(folder / f"store-{seed}")), chaos.pools()
    both: dict[str, Any] = {
        "peer_transport": choose([TransportKind.SHM, TransportKind.TCP]),
        "handover_timeout_s": choose([2.0, 30.0]),
    }
    prefill = chaos.options() | both | {"speculate": "off", "max_waiting": choose([2, 256])}
    decode = chaos.options() | both
    decode |= {"decode_computes": choose([0, 0, 40]), "decode_restore": choose([True, True, False])}
    print(f"seed {seed}: {chaos.subject}, {store}, {pools}, {prefill}, {decode}")
    with pair(
        chaos.subject,
        store,
        num_prefills=choose([1, 1, 2]),
        prefill_options=prefill,
        decode_options=decode,
        **pools,
    ) as engines:
        chaos.run(engines, rounds=chaos.random.randint(4, 8))


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_the_answer_is_the_same_c32(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.long
def test_whatever_happens_with_seeds_that_nobody_has_run_c32(tmp_path: Path) -> None:
    seed, until = time.time_ns() // 1_000_000, time.monotonic() + FRESH_S
    while time.monotonic() < until:
        seed += 1
        check(seed, tmp_path)
