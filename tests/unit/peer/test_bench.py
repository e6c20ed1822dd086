"""The benchmark of pages between engines runs, and gives a ratio for each way."""

from quire.bench import peer


def test_it_compares_with_a_plain_socket():
    result = peer.run(total_bytes=2 << 20, rounds=1)
    assert result.keys() == {"2 MiB", "360 KiB"}
    for found in result.values():
        assert found["ratio_to_plain"].keys() == {"1 connections", "2 connections", "4 connections"}
        assert all(ratio > 0 for ratio in found["ratio_to_plain"].values())
