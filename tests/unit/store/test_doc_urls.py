"""URLs of stores in the documents: each is read by what would open it."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points

import pytest

from quire.errors import StoreURLError
from unit.test_doc_examples import PAGES, lines

SCHEMES = {entry.name for entry in entry_points(group="quire.stores")} - {"memory"}


def urls() -> list[str]:
    """Of commands, and of the variable that says the same."""
    words = [word for _, line in lines("quire") for word in shlex.split(line)]
    words += re.findall(r'QUIRE_STORE="([^"]+)"', "".join(page.read_text() for page in PAGES))
    return sorted({word for word in words if word.partition("://")[0] in SCHEMES})


def test_there_is_one_of_every_kind():
    assert {url.partition("://")[0] for url in urls()} >= {"file", "redis", "mooncake", "s3"}


@pytest.mark.parametrize("url", urls())
def test_a_url_is_understood_to_its_end(url, read_as_stores_do):
    read_as_stores_do(url)


@pytest.mark.parametrize("url", urls())
def test_one_with_an_option_more_is_not(url, read_as_stores_do):
    with pytest.raises(StoreURLError, match="bogus"):
        read_as_stores_do(f"{url}{'&' if '?' in url else '?'}bogus=1")
