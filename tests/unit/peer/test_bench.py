"""The benchmark of pages between engines runs, and gives a ratio for each way."""

import transports


def test_it_compares_with_a_plain_socket_and_a_plain_copy():
    result = transports.run(total_bytes=2 << 20, rounds=1)
    assert result.keys() == {"2 MiB", "360 KiB"}
    for found in result.values():
        ratios = found["ratio_to_plain"]
        # And by NIXL, where that is installed.
        assert ratios.keys() >= {f"{way} {n}" for way in ("tcp", "shm") for n in (1, 2, 4)}
        assert all(ratio > 0 for ratio in found["ratio_to_plain"].values())
