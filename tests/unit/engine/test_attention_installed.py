"""Attention of others' packages, by stand-ins for them: none of the real ones can be had here."""

import sys
from types import ModuleType

import pytest
import torch

from quire.engine.attention import installed, prefixed
from quire.engine.attention.base import Heads
from quire.engine.attention.prefixed import AttentionWays, by_definition

CPU, FP32, DIM = torch.device("cpu"), torch.float32, 16


def defined(q, k, v, causal, softmax_scale):
    """What such a package gives: rows first, and a batch of one."""
    heads = Heads(*(x[0].transpose(0, 1) for x in (q, k, v)))
    out, lse = by_definition(heads, causal, softmax_scale)
    return out.transpose(0, 1)[None], lse[None]


def third(q, k, v, *, softmax_scale=None, causal=False, return_attn_probs=False):
    return defined(q, k, v, causal, softmax_scale)


def fourth(q, k, v, *, qv=None, softmax_scale=None, causal=False, return_lse=False):
    assert return_lse
    return defined(q, k, v, causal, softmax_scale)


def second(q, k, v, *, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    assert return_attn_probs
    return *defined(q, k, v, causal, softmax_scale), None


def forgets_the_scale(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    return defined(q, k, v, causal, 1.0)


def looks_ahead(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    return defined(q, k, v, False, softmax_scale)


def raises(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    raise AssertionError("not on this device")


def says_nothing(q, k, v, *, softmax_scale=None, causal=False):
    return q


@pytest.fixture
def install(monkeypatch):
    def one(name, function):
        for part in ("flash_attn", name):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        sys.modules[name].flash_attn_func = function

    return one


@pytest.mark.parametrize("name", installed.MODULES)
@pytest.mark.parametrize("function", [second, third, fourth])
def test_what_is_right_is_found_whatever_its_version(install, name, function):
    install(name, function)
    (way,) = installed.installed_ways(CPU, FP32, DIM)
    heads = Heads(torch.randn(4, 3, DIM), torch.randn(2, 7, DIM), torch.randn(2, 7, DIM))
    for mine, true in zip(way(heads, False, 0.3), by_definition(heads, False, 0.3), strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("function", [forgets_the_scale, looks_ahead, raises, says_nothing])
def test_what_is_wrong_is_not_used_and_the_log_says_why(install, function, caplog):
    install("flash_attn", function)
    assert installed.installed_ways(CPU, FP32, DIM) == []
    assert "flash_attn" in caplog.text


def test_nothing_is_installed_and_nothing_said(caplog):
    assert installed.installed_ways(CPU, FP32, DIM) == []
    assert caplog.text == ""


@pytest.mark.parametrize("better_for", [set(), {2048}, {512}, {512, 2048}])
def test_it_is_used_where_it_is_faster(better_for):
    used = []

    def way(heads, is_causal, scaling):
        used.append(heads.query.shape[1])
        return by_definition(heads, is_causal, scaling)

    ways = AttentionWays(CPU, FP32)
    ways._fast = [by_definition]
    ways.consider(way, lambda it, count: 1.0 if (it is way) != (count in better_for) else 0.5)
    for count in (512, 2048):
        keys = torch.randn(1, count, 4)
        ways(Heads(torch.randn(1, count, 4), keys, keys), True, 0.5)
    assert set(used) == better_for
    assert prefixed._MIN_PIECE == 2048


def test_what_fails_later_is_given_up_for_good(install):
    calls = []

    def fails_after_the_check(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
        calls.append(q.shape[1])
        if len(calls) > 2:
            raise ValueError("out of luck")
        return defined(q, k, v, causal, softmax_scale)

    install("flash_attn", fails_after_the_check)
    (way,) = installed.installed_ways(CPU, FP32, DIM)
    ways = AttentionWays(CPU, FP32)
    ways.consider(way, lambda it, count: 0.0 if it is way else 1.0)
    heads = Heads(*(torch.randn(1, 3, DIM) for _ in range(3)))
    for _ in range(2):
        found = ways(heads, True, 0.5)
        torch.testing.assert_close(found.out, by_definition(heads, True, 0.5).out)
    assert len(calls) == 3
