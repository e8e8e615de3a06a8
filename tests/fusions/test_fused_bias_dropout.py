"""bias + dropout + residual: one function in both backends, the drop-in names, N26, K04, K07, K09."""

from __future__ import annotations

import pytest
import torch

from fusions import fused_bias_dropout as bda
from fusions.random import random_mask_key
from tests.numerics import compare_with_fp64


@pytest.mark.parametrize("function", [bda.reference, bda.compiled])
def test_gradient_against_finite_differences(function) -> None:
    x, residual = torch.randn(3, 2, 5, dtype=torch.float64), torch.randn(3, 2, 5, dtype=torch.float64)
    bias, key = torch.randn(5, dtype=torch.float64), random_mask_key(x)
    inputs = [t.requires_grad_() for t in (x, bias, residual)]
    assert torch.autograd.gradcheck(lambda a, b, c: function(a, b, c, 0.4, True, key), inputs)


@pytest.mark.parametrize("function", [bda.reference, bda.compiled])
def test_the_output_has_the_residuals_dtype(function) -> None:
    x, bias = torch.randn(4, 2, 8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    assert function(x, bias, torch.randn(4, 2, 8), 0.1, True).dtype == torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_N26_K09_evaluation_is_clean_and_training_comes_back(fused: bool) -> None:
    x, residual, bias = torch.ones(8, 4, 64), torch.zeros(8, 4, 64), torch.zeros(64)
    for _ in range(5):
        out = bda.get_bias_dropout_add(False, fused)((x.clone(), bias), residual, 0.5)
        assert torch.equal(out, torch.ones_like(out))
        out = bda.get_bias_dropout_add(True, fused)((x, bias), residual, 0.5)
        assert set(out.unique().tolist()) == {0.0, 2.0} and 0.4 < (out == 0).float().mean() < 0.6


@pytest.mark.parametrize("fused", [True, False])
def test_inference_is_in_place_only_when_nothing_needs_a_gradient(fused: bool) -> None:
    function = bda.get_bias_dropout_add(False, fused)
    x, residual, bias = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(8)
    expected = x + bias + residual
    out = function((x, bias), residual, 0.1)
    assert out.data_ptr() == x.data_ptr() and torch.allclose(out, expected)
    x = torch.randn(4, 2, 8, requires_grad=True)
    before = x.detach().clone()
    out = function((x, bias), residual, 0.1)
    assert out.data_ptr() != x.data_ptr() and torch.equal(x, before)


def test_K07_manual_seed_makes_fused_and_unfused_equal() -> None:
    x, residual, bias = torch.randn(9, 2, 33), torch.randn(9, 2, 33), torch.randn(33)
    torch.manual_seed(3)
    plain = bda.get_bias_dropout_add(True, False)((x, bias), residual, 0.3)
    torch.manual_seed(3)
    fused = bda.get_bias_dropout_add(True, True)((x, bias), residual, 0.3)
    torch.testing.assert_close(fused, plain)
    assert torch.equal(fused == residual, plain == residual)  # the same elements were dropped


def test_broadcast_bias_and_expanded_shapes() -> None:
    x, residual = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    bias = torch.randn(16).expand(6, 2, 16)
    key = random_mask_key(x)
    compare_with_fp64(bda.reference, bda.compiled, [x, bias, residual, 0.2, True, key], torch.float32)


def test_K04_a_new_shape_costs_at_most_one_more_graph() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for rows in (8, 16, 24, 31, 40, 57):  # lengths that change every step
        x = torch.randn(rows, 2, 32)
        bda.compiled(x, torch.randn(32), torch.randn(rows, 2, 32), 0.1, True)
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


def test_in_place_never_touches_a_tensor_that_is_also_an_argument() -> None:
    z, b = torch.ones(2, 1, 3), torch.ones(3)
    assert torch.equal(bda.bias_dropout_add_unfused(False)((z, b), z, 0.0), torch.full((2, 1, 3), 3.0))
    expanded = torch.ones(1, 1, 3).expand(2, 1, 3)
    assert torch.equal(
        bda.bias_dropout_add_unfused(False)((expanded, b), torch.ones(2, 1, 3), 0.0), torch.full((2, 1, 3), 3.0)
    )
