"""RouterConfig: contradictions, and addresses as people write them."""

import pytest

from quire.errors import ConfigError
from quire.router.config import RouterConfig, parse_urls
from quire.router.metrics import ROUTER_METRICS, RouterMetrics
from quire.web.metrics import COUNTER


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"prefill": ("http://a",)}, "--prefill is given without --decode"),
        ({"decode": ("http://a",)}, "--decode is given without --prefill"),
        ({"prefill": ("http://a",), "servers": ("http://b",)}, "without --decode"),
        ({"prefill": ("http://a",), "decode": ("http://a",)}, "http://a is given twice"),
        ({"servers": ("http://a",), "retries": -1}, "must not be negative"),
    ],
)
def test_a_contradiction_is_one_sentence(fields, wanted):
    with pytest.raises(ConfigError, match=wanted):
        RouterConfig(**fields)


def test_addresses_come_one_by_one_or_with_commas():
    assert parse_urls(["http://a:1/, https://B", "http://[::1]:80"]) == (
        "http://a:1",
        "https://b",
        "http://[::1]:80",
    )
    assert parse_urls([]) == ()


@pytest.mark.parametrize(
    "text", ["", "a:1", "tcp://a:1", "http://a/v1", "http://a?x", "http://u:p@a", "http://a:x"]
)
def test_what_is_no_address_is_said(text):
    with pytest.raises(ConfigError, match="write it as http://host:port"):
        parse_urls([text])


def test_the_metrics_are_those_of_the_table():
    assert all(spec.name.startswith("quire_router_") for spec in ROUTER_METRICS)
    assert all((s.kind is COUNTER) == s.name.endswith("_total") for s in ROUTER_METRICS)
    registered = {m.name for m in RouterMetrics()._instruments.registry.collect()}
    assert registered == {spec.name.removesuffix("_total") for spec in ROUTER_METRICS}
