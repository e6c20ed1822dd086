"""Products with packed matrices: the same numbers, and the same for a row whoever is beside it."""

import pytest
import torch

from quire.engine.forward.matrices import logits_of, packed, product

ROWS = (1, 2, 3, 4, 5, 8, 9, 64)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 24), (96, 64), (7, 130)])
def test_a_packed_matrix_gives_the_same_products(shape, has_bias) -> None:
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    own = packed(weight)
    assert own.shape == weight.shape
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(product(x, own, bias), expected, atol=1e-4, rtol=1e-4)


def test_views_are_multiplied_as_they_lie() -> None:
    weight = torch.randn(40, 24)
    x = torch.randn(24, 6).t()[::2]
    expected = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(product(x, packed(weight)), expected, atol=1e-4, rtol=1e-4)


def test_other_dtypes_are_left_alone() -> None:
    weight = torch.randn(40, 24, dtype=torch.bfloat16)
    assert packed(weight) is weight


@pytest.mark.parametrize("rows", ROWS)
def test_logits_of_a_few_rows_are_those_of_many(rows) -> None:
    head, x = torch.randn(130, 24), torch.randn(64, 24)
    found = logits_of(x[:rows], head, None)
    assert found.is_contiguous()
    torch.testing.assert_close(found, (x @ head.t())[:rows], atol=1e-4, rtol=1e-4)
    into = torch.empty(rows, 130)
    assert logits_of(x[:rows], head, into) is into
