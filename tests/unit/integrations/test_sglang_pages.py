"""SGLang's pages in Quire's stores: found by whom they mean the same for, verified, bounded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.integrations.sglang.sglang_pages import (
    OPEN_AGAIN_S,
    SglangOptions,
    SglangPages,
    Shard,
    read_options,
)

SIZES = [4096, 5000]


def shard(page_bytes: int = 4096, *meaning: str) -> Shard:
    return Shard(0, 1, meaning or ("weights", "bfloat16"), page_bytes)


def values(count: int, page_bytes: int) -> list[torch.Tensor]:
    return [torch.full((page_bytes // 2,), 1.5 + at, dtype=torch.bfloat16) for at in range(count)]


def empty(count: int, page_bytes: int) -> list[torch.Tensor]:
    return [torch.zeros(page_bytes // 2, dtype=torch.bfloat16) for _ in range(count)]


@pytest.fixture
def opened() -> Iterator[list[SglangPages]]:
    opened: list[SglangPages] = []
    yield opened
    for pages in opened:
        pages.close()


@pytest.mark.parametrize("page_bytes", SIZES)
def test_pages_come_back_as_they_were_for_another_process(
    tmp_path: Path, opened: list[SglangPages], page_bytes: int
) -> None:
    options = SglangOptions(f"file://{tmp_path}")
    opened += [SglangPages(options, shard(page_bytes)) for _ in range(2)]
    one, other = opened
    keys = ["a", "b", "c"]
    assert one.put(keys, values(3, page_bytes)) == [True] * 3
    assert other.num_present([*keys, "d"]) == 3
    assert other.num_present(["d", *keys]) == 0, "one after the other"
    targets = empty(4, page_bytes)
    assert other.get([*keys, "d"], targets) == [True, True, True, False]
    for target, value in zip(targets, values(3, page_bytes), strict=False):
        assert torch.equal(target, value)


@pytest.mark.parametrize(
    "other",
    [shard(4096, "weights", "float16"), shard(4096, "other", "bfloat16"), shard(8192)],
    ids=["type", "weights", "size"],
)
def test_pages_that_mean_something_else_are_not_found(
    tmp_path: Path, opened: list[SglangPages], other: Shard
) -> None:
    options = SglangOptions(f"file://{tmp_path}")
    opened += [SglangPages(options, shard()), SglangPages(options, other)]
    assert opened[0].put(["a"], values(1, 4096)) == [True]
    assert opened[1].get(["a"], empty(1, other.page_bytes)) == [False]


def test_ranks_keep_their_own_pages(tmp_path: Path, opened: list[SglangPages]) -> None:
    options = SglangOptions(f"file://{tmp_path}")
    opened += [SglangPages(options, Shard(rank, 2, ("w",), 4096)) for rank in range(2)]
    for rank, pages in enumerate(opened):
        assert pages.put(["a"], [values(2, 4096)[rank]]) == [True]
    for rank, pages in enumerate(opened):
        target = empty(1, 4096)
        assert pages.get(["a"], target) == [True]
        assert torch.equal(target[0], values(2, 4096)[rank])


def test_a_page_is_not_kept_without_the_one_before_it(
    tmp_path: Path, opened: list[SglangPages]
) -> None:
    opened.append(SglangPages(SglangOptions(f"file://{tmp_path}"), shard()))
    assert opened[0].put(["b"], values(1, 4096), before="a") == [False]
    assert opened[0].put(["a"], values(1, 4096)) == [True]
    assert opened[0].put(["b"], values(1, 4096), before="a") == [True]


def test_a_damaged_page_is_a_miss(tmp_path: Path, opened: list[SglangPages]) -> None:
    opened.append(SglangPages(SglangOptions(f"file://{tmp_path}"), shard()))
    opened[0].put(["a"], values(1, 4096))
    (file,) = [path for path in tmp_path.rglob("*.full.*") if path.is_file()]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert opened[0].get(["a"], empty(1, 4096)) == [False]


def test_a_store_that_is_not_there_costs_misses_and_is_tried_again(
    opened: list[SglangPages],
) -> None:
    now = [0.0]
    pages = SglangPages(SglangOptions("redis://127.0.0.1:1"), shard(), clock=lambda: now[0])
    opened.append(pages)
    for _ in range(2):
        assert pages.num_present(["a"]) == 0
        assert pages.put(["a"], values(1, 4096)) == [False]
        assert pages.get(["a"], empty(1, 4096)) == [False]
        now[0] += OPEN_AGAIN_S


def test_a_page_of_another_length_is_an_error(tmp_path: Path, opened: list[SglangPages]) -> None:
    opened.append(SglangPages(SglangOptions(f"file://{tmp_path}"), shard()))
    with pytest.raises(ConfigError, match="5000 bytes, among pages of 4096"):
        opened[0].put(["a"], values(1, 5000))


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "needs a store"), ({"store": "file:///kv", "timeout_s": 0}, "timeout_s is 0")],
)
def test_options_are_checked_by_name(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(given)
